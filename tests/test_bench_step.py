"""The whole-step benchmark: its peers train the very model that nanocria trains, and its records add up.

    pytest test_bench_step.py        seconds, without a GPU

What needs a GPU, the measuring itself, is in the records that it leaves.
"""

import copy
import errno
import json
import math
import re
import signal
import subprocess

import pytest
import torch

from benchmarks import arms, breakdown, compare, draw, peers, record, report, runner, step
from model import Llama, LlamaConfig
from runtime import run_log

SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
TINY = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=61, block_size=24,
                   rope_scaling=SCALING, tie_embeddings=True)  # fmt: skip
CPU = torch.device("cpu")

# ----------------------------------------------------------------------------------------------------------------------
# Peers

RECIPE_NAMES = {
    "attn_norm": ["attention_norm"],
    "attn.qkv_proj": ["attention.wq", "attention.wk", "attention.wv"],
    "attn.o_proj": ["attention.wo"],
    "mlp_norm": ["ffn_norm"],
    "mlp.gate_up_proj": ["feed_forward.w1", "feed_forward.w3"],
    "mlp.down_proj": ["feed_forward.w2"],
}
HF_NAMES = {
    "attn_norm": ["input_layernorm"],
    "attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.o_proj": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
    "tok_embeddings": ["embed_tokens"],
}


def build_recipe(checkpointing):
    """As peers.build_recipe, but not compiled and not sharded."""
    model = peers.PlainLlama(TINY).materialize(CPU)
    for i, block in enumerate(model.layers):
        model.layers[i] = peers.checkpointed(block, checkpointing)
    return model, lambda tokens, targets: peers.whole_loss(model(tokens), targets)


def build_hf(checkpointing):
    pytest.importorskip("transformers")
    return peers.build_hf(TINY, checkpointing, CPU, dtype=torch.float32)


def counterparts(name, names, peer):
    """The peer's parameters that nanocria's parameter of that name stacks."""
    theirs = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in peer.named_parameters()}
    theirs = {n.removeprefix("model.").removesuffix(".weight"): p for n, p in theirs.items()}
    layer, module = re.fullmatch(r"(layers\.\d+\.|)(.*)\.weight", name).groups()
    return [theirs[layer + n] for n in names.get(module, [module])]


@pytest.mark.parametrize(
    "build, names, checkpointing",
    [(build_recipe, RECIPE_NAMES, c) for c in ("none", "selective", "full")]
    + [(build_hf, HF_NAMES, c) for c in ("none", "full")],
)
def test_a_peer_has_our_loss_and_our_gradients(build, names, checkpointing):
    torch.manual_seed(1)
    ours = Llama(TINY)
    ours.set_operations(fused_kernels=False, fused_loss=False)
    ours.init_weights(seed=1)
    peer, loss_of = build(checkpointing)
    pairs = [(name, p, counterparts(name, names, peer)) for name, p in ours.named_parameters()]
    with torch.no_grad():
        for _, parameter, parts in pairs:
            for part, value in zip(parts, parameter.split([len(part) for part in parts]), strict=True):
                part.copy_(value)
    assert sum(p.numel() for p in peer.parameters()) == ours.n_params()
    tokens, targets = torch.randint(TINY.vocab_size, (2, 3, TINY.block_size))
    expected, found = ours(tokens, targets), loss_of(tokens, targets)
    assert abs(expected - found) < 1e-6, f"{found} instead of {expected}"
    expected.backward()
    found.backward()
    for name, parameter, parts in pairs:
        grad = torch.cat([part.grad for part in parts])
        error = ((grad - parameter.grad).norm() / parameter.grad.norm()).item()
        assert error < 1e-5, f"{name}: the gradients differ by {error:.1e}"


def test_a_compiled_peer_of_hugging_face_reads_no_mask(monkeypatch):
    modeling_llama = pytest.importorskip("transformers").models.llama.modeling_llama
    monkeypatch.setattr(modeling_llama, "create_causal_mask", modeling_llama.create_causal_mask)  # and back again
    attention, compile = [], torch.compile

    def note_attention(graph, inputs):
        calls = (node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        attention.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in calls)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=note_attention))
    _, loss_of = peers.build_hf(TINY, "none", CPU, compiled=True, dtype=torch.float32)
    tokens = torch.randint(TINY.vocab_size, (2, TINY.block_size))
    assert math.isfinite(loss_of(tokens, tokens).detach())
    assert attention == [(None, True)] * TINY.n_layer


def test_the_step_of_the_peers_trains():
    torch.manual_seed(1)
    model, loss_of = build_recipe("none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(TINY.vocab_size, (3, TINY.block_size))
    losses = [peers.train_step(model, loss_of, optimizer, tokens, tokens)[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True), losses


def test_selective_checkpointing_recomputes_every_second_matmul():
    ran = []

    class Matmuls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(op == torch.ops.aten.mm.default)
            return op(*args, **(kwargs or {}))

    def backward_matmuls(checkpointing):
        block = peers.checkpointed(peers.PlainBlock(TINY), checkpointing)
        y = block(torch.randn(2, 24, 32, requires_grad=True), *peers.rope_tables(TINY, 0, 24, CPU))
        ran.clear()
        with Matmuls():
            y.sum().backward()
        return sum(ran)

    none, selective, full = (backward_matmuls(c) for c in ("none", "selective", "full"))
    assert none == 14, "two gradients for each of wq, wk, wv, wo, w1, w3, w2"
    assert selective - none == 3, "wk, wo, w3"
    assert full - none == 6, "all but w2, whose output nobody needs again"


def test_the_shape_is_that_of_the_config_file():
    c = peers.llama_config("config/llama32_1b.py", block_size=8192)
    assert (c.n_layer, c.n_embd, c.vocab_size, c.block_size) == (16, 2048, 128256, 8192)
    assert c.rope_scaling["factor"] == 32.0 and c.tie_embeddings


# ----------------------------------------------------------------------------------------------------------------------
# Where the milliseconds go


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT", "matmuls"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "matmuls"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmuls"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmuls"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("_flash_fwd_kernel", "attention"),
        ("_loss_kernel", "loss kernel"),
        ("_rms_norm_bwd_kernel", "norms"),
        ("_sum_rows_kernel", "norms"),
        ("_glu_fwd_kernel", "SwiGLU"),
        ("_rope_bwd_kernel", "RoPE"),
        ("_adamw_kernel", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::LpNormFunctor<float, NormType>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::Copy<BFloat16, float>>", "casts and copies"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda(...)>", "casts and copies"),
        ("Memcpy DtoD (Device -> Device)", "casts and copies"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "casts and copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel, part):
    assert breakdown.part_of(kernel) == part


CHUNK = ["matmuls", "loss kernel", "matmuls", "matmuls"]
STEP = ["matmuls", *CHUNK, *CHUNK, "matmuls", "optimizer"]  # a block's forward, two chunks of the loss, its backward


def spans(parts):
    return [(float(i), i + 1.0, part) for i, part in enumerate(parts)]


def test_a_step_begins_with_its_first_loss_kernel():
    assert breakdown.step_starts(spans(STEP * 2)) == [2, 2 + len(STEP)]


def test_three_matmuls_a_chunk_are_the_losses():
    named = [part for _, _, part in breakdown.name_head_matmuls(spans(STEP * 2))]
    chunk = ["loss matmuls", "loss kernel", "loss matmuls", "loss matmuls"]
    assert named == ["matmuls", *chunk, *chunk, "matmuls", "optimizer"] * 2


def test_the_parts_add_up_to_the_busy_time():
    at_once = [(0.0, 4.0, "matmuls"), (3.0, 5.0, "norms"), (2.0, 7.0, breakdown.COPIES), (9.0, 10.0, "other")]
    busy = breakdown.share_out(at_once)
    assert {part: ms for part, ms in busy.items() if ms} == {
        "matmuls": 4.0, "norms": 1.0, breakdown.COPIES: 2.0, "other": 1.0
    }  # fmt: skip


def test_the_floors_count_the_flops_that_the_model_counts():
    c = peers.llama_config("config/llama32_1b.py", block_size=2048)
    floors = breakdown.floors_ms(c, batch=8, copy_tb_s=4.0, matmul_tflops=700.0)
    with torch.device("meta"):
        flops = 8 * 2048 * Llama(c).flops_per_token(2048)
    assert sum(floors[part] for part in ("matmuls", "loss matmuls", "attention")) == pytest.approx(flops / 700e9)
    assert set(floors) | {"other"} == set(breakdown.ORDER)


# ----------------------------------------------------------------------------------------------------------------------
# Words, records, tables


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "arm=hf",
            "Unknown word arm=hf: there are arms=, shapes=, checkpointing=, steps=, keep=, out=, at_once=, breakdown, ",
        ),
        ("breakdwn", "Did you mean breakdown?"),
        ("breakdown arms=recipe", "arms=: not read by breakdown: leave it out"),
        ("breakdown steps=7", "steps=: not read by breakdown"),
        ("baby shapes=1x1", "shapes=: not read by baby"),
        (
            "arms=hf-ligr",
            f"arms=hf-ligr: there are {', '.join(arms.STEP)}. Did you mean hf-liger?",
        ),
        ("checkpointing=some", "checkpointing=some: there are none, selective, full"),
        ("shapes=8*2048", "shapes=8*2048: sequences x tokens, as in 8x2048"),
        ("steps=many", "steps=many: a whole number, at least 1"),
        ("steps=0", "steps=0: a whole number, at least 1"),
    ],
)
def test_a_slip_is_answered_with_a_sentence(word, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        step.main(word.split())


def test_breakdown_and_baby_are_measured_one_at_a_time():
    with pytest.raises(SystemExit, match="breakdown and baby: one at a time"):
        step.main(["breakdown", "baby"])


def test_words_choose_arms_shapes_checkpointing_and_steps():
    what, options = step.parse(["arms=nanocria,hf", "shapes=8x2048,2x8192", "checkpointing=full", "steps=7", "out=a"])
    assert (what, options["arms"], options["shapes"]) == ("points", ["nanocria", "hf"], [(8, 2048), (2, 8192)])
    assert (options["checkpointing"], options["steps"], options["out"].name) == (["full"], 7, "a")
    assert step.parse(["baby"])[0] == "baby" and step.parse(["breakdown"])[0] == "breakdown"


def test_points_are_the_arms_in_turn_and_what_is_missing_is_asked_for_once(monkeypatch):
    ran = []

    def run(command, ranks=1, gpu=None, gpus=1):
        arm = "nanocria" if command[0] == "train.py" else json.loads(command[2])["arm"]
        ran.append((arm, gpu, gpus))
        found = {"missing": "No module named 'torchtitan'"} if arm == "torchtitan" else {"tok_per_s": 1.0}
        return found, "out of memory"

    monkeypatch.setattr(runner, "run", run)
    words = ["arms=nanocria,torchtitan,hf", "shapes=8x2048,2x8192", "checkpointing=none,selective"]
    alone = list(step.points(step.parse(words)[1]))
    assert [(p["arm"], p["batch"], p["checkpointing"], p["oom"]) for p in alone if p["arm"] != "torchtitan"] == [
        ("nanocria", 8, "none", True), ("hf", 8, "none", False), ("nanocria", 8, "selective", True),
        ("nanocria", 2, "none", True), ("hf", 2, "none", False), ("nanocria", 2, "selective", True),
    ]  # fmt: skip
    assert [arm for arm, _, _ in ran].count("torchtitan") == 1
    assert {(gpu, gpus) for _, gpu, gpus in ran} == {(None, 1)}
    ran.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    beside = list(step.points(step.parse([*words, "at_once=2"])[1]))
    expected = [point | {"at_once": 2} for point in alone if point["arm"] != "torchtitan"]
    assert [point for point in beside if point["arm"] != "torchtitan"] == expected
    assert {(gpu, gpus) for _, gpu, gpus in ran} == {(0, 2), (1, 2)}


def test_what_launches_dominate_is_measured_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(SystemExit, match="at_once=4: baby is measured alone"):
        step.main(["baby", "at_once=all"])
    with pytest.raises(SystemExit, match="at_once=8: torch sees 4 GPUs"):
        step.main(["at_once=8"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        step.main([])


def point(arm, checkpointing="none", tok_per_s=70_000.0, peak_gib=30.0, batch=8):
    measured = {"ms_per_step": 1000 * batch * 2048 / tok_per_s, "mfu": 0.5, "peak_gib": peak_gib}
    where = {"arm": arm, "batch": batch, "block": 2048, "checkpointing": checkpointing}
    return where | {"oom": False, "tok_per_s": tok_per_s} | measured


RECORD = {
    "command": "python bench.py step", "device": "GPU", "versions": {"nanocria": "abc"},
    "copy_tb_s": 4.2, "matmul_tflops": 700.0,
    "points": [point("nanocria"), point("recipe", tok_per_s=50_000.0, peak_gib=40.0),
               {"arm": "hf", "batch": 8, "block": 2048, "checkpointing": "none", "oom": True}],
    "breakdown": [
        {"batch": 8, "block": 2048, "checkpointing": "none", "part": part, "ms": ms, "floor_ms": floor}
        for part, ms, floor in [("matmuls", 190.0, 180.0), ("other", 1.0, None)]
    ],
    "baby": [{"arm": "nanocria --cuda_graph=true", "ms_per_step": 2.5, "tok_per_s": 6.5e6, "mfu": 0.1, "peak_gib": 1}],
}  # fmt: skip


def test_the_same_code_on_the_same_card_adds_to_its_record():
    new = RECORD | {"command": "python bench.py step arms=recipe", "breakdown": [], "baby": []}
    new["points"] = [point("recipe", tok_per_s=60_000.0), point("recipe", "full")]
    both = record.merged(RECORD, new, step.KEYS)
    assert both["command"] == "python bench.py step && python bench.py step arms=recipe"
    assert [(p["arm"], p["checkpointing"], p.get("tok_per_s")) for p in both["points"]] == [
        ("nanocria", "none", 70_000.0), ("recipe", "none", 60_000.0), ("hf", "none", None), ("recipe", "full", 70_000.0)
    ]  # fmt: skip
    assert both["breakdown"] == RECORD["breakdown"] and both["baby"] == RECORD["baby"]
    assert record.merged(both, new, step.KEYS) == both, "the same again changes nothing"


def test_other_code_or_another_card_begins_a_record_anew():
    for change in ({"device": "other GPU"}, {"versions": {"nanocria": "def"}}):
        new = RECORD | change | {"points": [point("recipe")]}
        assert record.merged(RECORD, new, step.KEYS) == new
    assert record.merged(None, RECORD, step.KEYS) == RECORD


def test_a_record_goes_on_where_only_words_have_changed_since(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def commit(name, content):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        git("add", ".")
        git("commit", "-qm", name)
        return git("describe", "--always").strip()

    monkeypatch.setattr(record, "ROOT", tmp_path)
    git("init", "-q")
    first = commit("train.py", "1")
    beside = ("README.md", "tests/test_train.py", "benchmarks/draw.py", "benchmarks/records/step.json", "sample.py", "bench.py",
              "benchmarks/README.md", "benchmarks/losses.py")  # fmt: skip
    words = [commit(name, "2") for name in beside]
    assert all(record.same_code(first, later) and record.same_code(later, first) for later in words)
    for name in ("model.py", "memory.py", "kernels/rope.py", "config/a.py", "benchmarks/swept.py", "train.py"):
        before, after = words[-1], commit(name, "3")
        assert not record.same_code(before, after), name
        words.append(after)
    monkeypatch.setattr(record.run_log, "git_commit", lambda: git("describe", "--always", "--dirty").strip())
    for name, dirty in {"README.md": "", "benchmarks/records/step.json": "", "train.py": "-dirty"}.items():
        (tmp_path / name).write_text("4")
        assert record.commit() == words[-1] + dirty, name
    assert not record.same_code(first, "0123456") and not record.same_code("unknown", first)


@pytest.mark.parametrize("commit", ["abc-dirty", "unknown"])
def test_edited_code_is_never_the_same_code(commit):
    assert not record.same_code(commit, commit) and not record.same_code("abc", commit)
    new = RECORD | {"versions": {"nanocria": commit}, "points": [point("recipe")]}
    assert record.merged(new | {"points": RECORD["points"]}, new, step.KEYS) == new


def filled(out):
    """The record after two rows, and what the folder held while they were measured."""
    beside = []

    def rows():
        for batch in (8, 16):
            yield "points", point("hf", batch=batch)
            beside.append(sorted(path.name for path in out.parent.iterdir()))

    new = RECORD | {"points": [], "breakdown": [], "baby": []}
    return record.fill(copy.deepcopy(new), rows(), out, step.KEYS, lambda *_: "")[0], beside


def test_a_record_is_written_where_files_cannot_be_locked(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    out = tmp_path / "step.json"
    record, _ = filled(out)
    assert json.loads(out.read_text()) == record
    assert "step.json.lock cannot be locked there" in capsys.readouterr().err


def test_a_record_is_written_after_each_row_by_one_command_at_a_time(tmp_path):
    out = tmp_path / "new" / "step.json"
    record, beside = filled(out)
    assert beside == [["step.json", "step.json.lock"]] * 2
    assert json.loads(out.read_text()) == record and list(out.parent.iterdir()) == [out]
    with record.locked(out), pytest.raises(SystemExit, match="another bench.py is writing to .*step.json: wait for it, or"):
        filled(out)
    assert filled(out)[0] == record, "again, once the other has ended"


def test_a_record_that_cannot_be_written_is_refused_before_a_row_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "list.json").write_text("[1]")
    messages = {tmp_path: "is no file", tmp_path / "file" / "step.json": "cannot be written"}
    messages |= dict.fromkeys([tmp_path / "file", tmp_path / "list.json"], "is there and no record of a benchmark")
    for out, message in messages.items():
        with pytest.raises(SystemExit, match=f"out={out} {message}"):
            record.fill(RECORD, iter(lambda: pytest.fail("measured"), 0), out, step.KEYS, lambda *_: "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "list.json"]


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that are not alike, and the handlers of signals put back afterwards."""
    card = {"device": "A", "copy_tb_s": 4.0, "matmul_tflops": 700.0, "unlike": ["A of 80 GiB", "B of 24 GiB"]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "run", lambda command: (copy.deepcopy(card), ""))
    monkeypatch.setattr(record, "origin", lambda command, device, packages: {"command": command, "device": device})
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_unlike_gpus_are_not_measured_at_once(two_gpus):
    with pytest.raises(SystemExit, match="at_once=all: these GPUs are not alike, A of 80 GiB, B of 24 GiB. CUDA_VIS"):
        runner.begin("step", ["at_once=all"], step.KEYS)
    assert set(runner.begin("step", ["at_once=1"], ["points"])) == {
        "command", "device", "copy_tb_s", "matmul_tflops", "points"
    }  # fmt: skip


def test_a_closed_terminal_ends_it_but_not_under_nohup(two_gpus):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    runner.begin("step", [], step.KEYS)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    runner.begin("step", [], step.KEYS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(number)
        assert stop.value.code == 128 + number


def test_rows_of_older_code_are_kept_where_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(record, "same_code", lambda a, b: a[0] == b[0])
    at = {kind: [] for kind in step.KEYS} | {"device": "GPU", "command": "python bench.py"}

    def at_commits(commits, n):
        return at | {"versions": {"nanocria": commits, "torch": "2"}, "points": [point("nanocria", batch=n)]}

    for old, new, expected in [
        ("a1", "a2", "a2"), ("a1", "b1", None), ("a1", "a1, b1", "a1, b1"), ("a1, b1", "b2", "a1, b2"),
        ("a1, b1", "c1", None), ("a1, b1", "a1, b1, c1", "a1, b1, c1"), ("a2", "a1, b1", None),
    ]:  # fmt: skip
        merged = record.merged(at_commits(old, 1), at_commits(new, 2), step.KEYS)
        assert merged["versions"]["nanocria"] == (expected or new), (old, new)
        assert [row["batch"] for row in merged["points"]] == ([1, 2] if expected else [2]), (old, new)


def test_ratios_are_ours_over_each_peers():
    (ratio,) = compare.step_ratios(RECORD["points"])
    assert ratio == {"at": [8, 2048, "none"], "peer": "recipe", "tok_per_s": 1.4, "peak_gib": 0.75}


def test_what_ends_without_numbers_says_why():
    assert "out of memory" in step.line(RECORD["points"][2])
    where = {key: RECORD["points"][2][key] for key in compare.STEP_PLACE}
    assert "pip install 'transformers>=5.17,<6'" in step.line(where | {"missing": "No module named 'transformers'"})
    assert "failed: Bang" in step.line(where | runner.failure("Traceback\nBang"))
    assert runner.failure("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB") == {"oom": True}


def test_a_package_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr(runner.metadata, "version", {"torchtitan": "0.3", "transformers": "5.20"}.__getitem__)
    said = runner.trouble({"arm": "torchtitan", "missing": "No module named 'torchtitan.models.llama3.model'"})
    assert said.endswith("model' (torchtitan 0.3 lacks it): pip install 'torchtitan<0.3'")
    monkeypatch.undo()
    said = runner.trouble({"arm": "torchtitan", "missing": "No module named 'numpi'"})
    assert said == "-  No module named 'numpi': pip install 'torchtitan<0.3'"


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_whole_name(name, tflops):
    peak = run_log.peak_flops(name)
    assert peak == (tflops and tflops * 1e12)


def test_a_process_hands_over_the_last_object_that_it_prints():
    prints = "print('{not json'); print('{\"a\": 1}'); print('bye')"
    assert runner.run(["-c", prints])[0] == {"a": 1}
    result, printed = runner.run(["-c", prints + "; raise SystemExit('Bang')"])
    assert result is None and "Bang" in printed


def test_the_pages_have_the_step_in_short_and_the_small_model(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    at = {"batch": 16, "peak_gib": 40.0}
    points = [*RECORD["points"], point("recipe", tok_per_s=60_000.0, **at), point("hf", tok_per_s=63_000.0, **at)]
    points += [point("nanocria", **at), point("nanocria", "full", **at)]
    (tmp_path / "step.json").write_text(json.dumps(RECORD | {"points": points}))
    assert report.steps_short().splitlines()[2:] == [
        "| nanocria | 70,000 | 40.0 | 1.00 |", "| Hugging Face (bf16) | 63,000 | 40.0 | 0.90 |",
        "| torchtitan's recipe | 60,000 | 40.0 | 0.86 |",
    ]  # fmt: skip
    assert report.small_model_table().splitlines() == [
        "| trainer | ms per step | tok/s |", "| --- | ---: | ---: |",
        "| `nanocria --cuda_graph=true` | 2.50 | 6,500,000 |",
    ]  # fmt: skip


def test_the_tables_show_every_row_and_the_plot_is_drawn(tmp_path):
    assert "| 8 x 2,048 | none | 70,000 · 30.0 | 50,000 · 40.0 | out of memory |" in steps_table
    assert step.breakdown_table(RECORD).endswith("| whole step | 191.0 | 180.0 |")
    assert "of our step go (8 x 2,048 tokens, checkpointing none), and" in step.breakdown_table(RECORD)
    several = copy.deepcopy(RECORD) | {"points": [*RECORD["points"], point("nanocria", "full"), point("hf", batch=16)]}
    json.dumps(several)
    draw.draw_steps(several, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000
