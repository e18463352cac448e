"""The whole-step benchmark: its peers train the same model as nanocria, and its records add up. No GPU."""

import itertools
import json
import math
import re
import signal
import subprocess
from functools import partial

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmarks import arms, breakdown, compare, peers, record, runner, step
from model import Execution, Llama, LlamaConfig
from runtime import meta_weights, run_log
from runtime.hf_names import hf_names

SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
TINY = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=61, block_size=24,
                   rope_scaling=SCALING, tie_embeddings=True)  # fmt: skip
CPU = torch.device("cpu")

# --- Peers ---


def build_recipe(checkpointing):
    """peers.build_recipe(), but not compiled and not sharded."""
    model = peers.PlainLlama(TINY).materialize(CPU)
    for i, block in enumerate(model.layers):
        model.layers[i] = peers.checkpointed(block, checkpointing)
    return model, lambda tokens, targets: peers.whole_loss(model(tokens), targets)


def build_hf(checkpointing):
    return peers.build_hf(TINY, checkpointing, CPU, dtype=torch.float32)


def counterparts(name, peer):
    """The peer's parameters, by Hugging Face's or Meta's names, that nanocria's parameter of this name stacks."""
    meta_names = {hf_name: meta_name for meta_name, hf_name in meta_weights.NAMES.items()}
    theirs = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in peer.named_parameters()}
    for hf_name in hf_names(name):
        layer, rest = re.fullmatch(r"(?:model\.(layers\.\d+\.))?(.*)", hf_name).groups("")
        yield theirs[hf_name if hf_name in theirs else layer + meta_names[rest]]


@pytest.mark.parametrize(
    "build, checkpointing",
    [*((build_recipe, c) for c in ("none", "selective", "full")), *((build_hf, c) for c in ("none", "full"))],
)
def test_a_peer_has_our_loss_and_our_gradients(build, checkpointing):
    torch.manual_seed(1)
    ours = Llama(TINY, Execution(kernels="none", attention="sdpa"))
    ours.init_weights(seed=1)
    peer, loss_of = build(checkpointing)
    pairs = [(name, p, list(counterparts(name, peer))) for name, p in ours.named_parameters()]
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


def test_the_adapters_of_the_peer_are_float32_and_read_bfloat16(monkeypatch):
    build_hf = peers.build_hf
    monkeypatch.setattr(peers, "build_hf", lambda *args, liger: build_hf(*args))  # Liger-Kernel needs a GPU
    model, loss_of = peers.build_hf_lora(TINY, "full", CPU)
    adapters = [module for name, module in model.named_modules() if name.endswith(("lora_A.default", "lora_B.default"))]
    read = []
    for module in adapters:
        module.register_forward_hook(lambda module, inputs, y: read.append(inputs[0].dtype))
    loss_of(*torch.randint(TINY.vocab_size, (2, 3, TINY.block_size))).backward()
    assert len(adapters) == 2 * 7 * TINY.n_layer and {module.weight.dtype for module in adapters} == {torch.float32}
    assert set(read) == {torch.bfloat16} and len(read) > len(adapters), "backward recomputes too"
    assert all(module.weight.grad.isfinite().all() for module in adapters)


def test_a_compiled_peer_of_hugging_face_reads_no_mask(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", modeling_llama.create_causal_mask)  # restored afterwards
    attention, compile = [], torch.compile

    def note_attention(graph, inputs):
        calls = (node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        attention.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in calls)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, mode: compile(model, backend=note_attention))
    _, loss_of = peers.build_hf(TINY, "none", CPU, compile_mode="default", dtype=torch.float32)
    tokens = torch.randint(TINY.vocab_size, (2, TINY.block_size))
    assert math.isfinite(loss_of(tokens, tokens).detach())
    assert attention == [(None, True)] * TINY.n_layer


def test_a_peers_steps_are_timed_as_train_py_times_its_own(monkeypatch):
    """Steps of 10, 10, 1, 2, 6 and 9 s, launched in no time; each is read once the next has been launched."""
    events, seconds, now, slope = [], itertools.cycle([10, 10, 1, 2, 6, 9]), [0.0], -1.0

    def train_step(*_):
        step, takes = sum(what == "launch" for what, _ in events), next(seconds)
        events.append(("launch", step))

        def wait():
            events.append(("read", step))
            now[0] += takes
            return [9.0 + slope * step, 1.0]

        return wait

    parameter = torch.nn.Parameter(torch.ones(1))
    monkeypatch.setitem(peers.BUILDERS, "fake", lambda *_: (torch.nn.ParameterList([parameter]), None))
    for name, value in {"train_step": train_step, "own_device": lambda: CPU, "mfu": lambda *_: None}.items():
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(peers.memory_stats, "let_segments_grow", lambda: None)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(peers.gc, "disable", lambda: None)
    measure = partial(peers.measure, "fake", "config/baby_llama.py", 1, 8, steps=4, warmup=2, vocab_size=257)
    point = measure()
    assert point["ms_per_step"] == 4000, "the median of 1, 2, 6 and 9 s, not the upper one"
    assert (point["first_loss"], point["last_loss"]) == (9.0, 4.0)
    launches, reads = ([i for i, (what, _) in enumerate(events) if what == kind] for kind in ("launch", "read"))
    assert all(reads[step] > launches[step + 1] for step in (0, 2, 3, 4)), "the next step has been launched"
    assert reads[1] < launches[2], "the warm-up has ended when the clock starts"
    for slope in (0.0, 0.1, math.nan):
        events.clear()
        assert measure()["failed"].startswith("it does not train: its loss went from "), slope


# Trains transformers' tiny Llama three times from the same weights on the CPU: plainly in float32, under FSDP2 with
# float32 weights and bf16 compute, and offloaded. Prints the losses and how far apart the final weights are.
PEERS_ON_CPU = """
import json, os
import torch
from benchmarks import peers
from model import LlamaConfig

torch.set_num_threads(1)
c = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=96, vocab_size=61, block_size=24,
                tie_embeddings=True)
device, result = torch.device("cpu"), {}
for arm in ("hf", "hf-masters", "hf-offload"):
    options = {"dtype": torch.float32} if arm == "hf" else {}
    model, loss_of = peers.BUILDERS[arm](c, "full", device, **options)
    torch.manual_seed(1)
    peers.fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    tokens = torch.randint(c.vocab_size, (3, c.block_size), generator=torch.Generator().manual_seed(1))
    losses = [peers.train_step(model, loss_of, optimizer, tokens, tokens)() for _ in range(5)]
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    result[arm] = {"losses": losses, "dtypes": sorted({str(p.dtype) for p in full.values()}), "n": len(full),
                   "norm": sum(p.double().square().sum().item() for p in full.values()) ** 0.5}
    if peers.dist.is_initialized():
        peers.dist.destroy_process_group()
print(json.dumps(result), flush=True)
os._exit(0)  # gloo's threads now and then abort the interpreter that tidies up around them
"""


def test_offload_does_not_change_a_peers_losses():
    result, printed = runner.run(["-c", PEERS_ON_CPU])
    assert result is not None, printed
    plain, masters, offload = (result[arm] for arm in ("hf", "hf-masters", "hf-offload"))
    assert offload == masters, "the same numbers, wherever the weights are"
    assert masters["dtypes"] == ["torch.float32"], "the weights that learn"
    assert masters["n"] == plain["n"], "the head is still the embedding"
    for (loss, norm), (other_loss, other_norm) in zip(plain["losses"], masters["losses"], strict=True):
        assert abs(other_loss / loss - 1) < 0.02 and abs(other_norm / norm - 1) < 0.05, (plain, masters)
    assert plain["losses"][-1][0] < plain["losses"][0][0] - 0.2


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


# --- Where the milliseconds go ---


KERNELS = {
    "matmuls": ["nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT", "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
                "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>"],
    "attention": ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "_flash_fwd_kernel",
                  "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)"],
    "loss kernel": ["_loss_kernel"], "norms": ["_rms_norm_bwd_kernel", "_sum_rows_kernel"],
    "SwiGLU": ["_glu_fwd_kernel"], "RoPE": ["_rope_bwd_kernel"],
    "optimizer": ["_adamw_kernel", "multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor<float, 4>>",
                  "multi_tensor_apply_kernel<..., at::native::LpNormFunctor<float, NormType>>"],
    "casts and copies": ["multi_tensor_apply_kernel<..., at::native::Copy<BFloat16, float>>",
                         "void at::native::elementwise_kernel<direct_copy_kernel_cuda(...)>",
                         "Memcpy DtoD (Device -> Device)", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs<4ul>)"],
    "other": ["void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>"],
}  # fmt: skip


def test_a_kernel_is_known_by_its_name():
    found = {part: [breakdown.part_of(kernel) for kernel in kernels] for part, kernels in KERNELS.items()}
    assert found == {part: [part] * len(kernels) for part, kernels in KERNELS.items()}


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


def test_peers_use_train_pys_defaults_too():
    c = peers.llama_config("config/sft.py")
    assert (c.n_layer, c.tie_embeddings, c.vocab_size) == (16, True, 257)


def test_the_floors_count_the_flops_that_the_model_counts():
    c = peers.llama_config("config/llama32_1b.py", block_size=2048)
    floors = breakdown.floors_ms(c, batch=8, copy_tb_s=4.0, matmul_tflops=700.0)
    with torch.device("meta"):
        flops = 8 * 2048 * Llama(c).flops_per_token(2048)
    assert sum(floors[part] for part in ("matmuls", "loss matmuls", "attention")) == pytest.approx(flops / 700e9)
    assert set(floors) | {"other"} == set(breakdown.ORDER)


# --- Words, records, tables ---


def test_arms_run_in_turn_and_a_missing_package_is_reported_once(monkeypatch):
    ran = []

    def run(command, ranks=1):
        arm = "nanocria" if command[0] == "train.py" else json.loads(command[3])["arm"]
        ran.append(arm)
        found = {"missing": "No module named 'torchtitan'"} if arm == "torchtitan" else {"tok_per_s": 1.0}
        return found, "out of memory"

    monkeypatch.setattr(runner, "run", run)
    words = ["--arms=nanocria,torchtitan,hf,hf-graphs", "--shapes=8x2048,2x8192", "--checkpointing=none,selective"]
    alone = [row for _, row in step.points(step.parse(words))]
    assert [(p["arm"], p["batch"], p["checkpointing"], p["oom"]) for p in alone if p["arm"] != "torchtitan"] == [
        ("nanocria", 8, "none", True), ("hf", 8, "none", False), ("nanocria", 8, "selective", True),
        ("nanocria", 2, "none", True), ("hf", 2, "none", False), ("nanocria", 2, "selective", True),
    ]  # fmt: skip
    assert ran.count("torchtitan") == 1 and alone[0]["steps"] == 20


def point(arm, checkpointing="none", tok_per_s=70_000.0):
    where = {"arm": arm, "batch": 8, "block": 2048, "checkpointing": checkpointing}
    return where | {"oom": False, "tok_per_s": tok_per_s, "peak_gib": 30.0}


RECORD = {
    "command": "python bench.py step", "device": "GPU", "versions": {"nanocria": "abc"},
    "copy_tb_s": 4.2, "matmul_tflops": 700.0,
    "points": [point("nanocria"), point("recipe", tok_per_s=50_000.0),
               {"arm": "hf", "batch": 8, "block": 2048, "checkpointing": "none", "oom": True}],
    "breakdown": [{"part": "matmuls", "ms": 190.0, "floor_ms": 180.0}], "baby": [{"arm": "hf", "tok_per_s": 6.5e6}],
}  # fmt: skip


def test_a_record_is_continued_by_the_same_commit_on_the_same_card_or_with_keep(tmp_path):
    out, new = tmp_path / "new" / "step.json", RECORD | {"command": "python bench.py step --arms=recipe"}
    out.parent.mkdir()
    out.write_text(json.dumps(RECORD))
    rows = [point("recipe", tok_per_s=60_000.0), point("recipe", "full"), point("hf", "full") | {"failed": "Bang"}]

    def fill(new, keep=False, rows=rows):
        empty = new | {kind: [] for kind in step.KEYS}
        return record.fill(empty, (("points", row) for row in rows), out, step.KEYS, lambda *_: "", keep)

    both = fill(new)
    assert json.loads(out.read_text()) == both
    assert both["command"] == "python bench.py step && python bench.py step --arms=recipe"
    assert [(p["arm"], p["checkpointing"], p.get("tok_per_s")) for p in both["points"]] == [
        ("nanocria", "none", 70_000.0), ("recipe", "none", 60_000.0), ("hf", "none", None), ("recipe", "full", 70_000.0)
    ]  # fmt: skip
    assert both["breakdown"] == RECORD["breakdown"] and both["baby"] == RECORD["baby"]
    assert fill(new) == both, "the same again changes nothing"
    assert [p.get("commit") for p in both["points"]] == [None, "abc", None, "abc"], "which code measured it"
    kept = fill(new | {"versions": {"nanocria": "def"}}, keep=True)
    assert [p.get("commit") for p in kept["points"]] == [None, "def", None, "def"]
    assert kept["versions"] == {"nanocria": "abc, def"}
    known = fill(new | {"versions": {"nanocria": "ghi"}}, keep=True, rows=kept["points"])
    assert known["points"] == kept["points"], "a row that is not measured again keeps its commit"
    assert [path.name for path in out.parent.iterdir()] == ["step.json"]
    for commit, device in (("def", "other GPU"), ("abc", "GPU"), ("def-dirty", "GPU")):
        change = {"device": device, "versions": {"nanocria": commit}}
        out.write_text(json.dumps(kept))
        anew = fill(new | change)
        points = [row | {"commit": commit} for row in rows[:2]]
        assert anew == new | change | {"points": points, "breakdown": [], "baby": []}, change


def test_two_processes_on_two_cards_fill_one_record(tmp_path):
    empty = RECORD | {"command": "python bench.py step"} | {kind: [] for kind in step.KEYS}

    def fill(rows, **new):
        return record.fill(empty | new, rows, tmp_path / "step.json", step.KEYS, lambda *_: "", keep=True)

    def rows():
        yield "points", point("recipe")
        fill([("points", point("hf"))], command="python bench.py step --arms=hf", versions={"nanocria": "def"})
        yield "points", point("recipe", "full")

    both = fill(rows())
    assert [(p["arm"], p["checkpointing"]) for p in both["points"]] == [
        ("recipe", "none"), ("hf", "none"), ("recipe", "full")
    ]  # fmt: skip
    assert both["command"] == "python bench.py step && python bench.py step --arms=hf"
    assert both["versions"] == {"nanocria": "abc, def"} and json.loads((tmp_path / "step.json").read_text()) == both


def test_edited_code_is_never_the_same_code():
    for commit in ("abc-dirty", "unknown"):
        same = RECORD | {"versions": {"nanocria": commit}}
        new = same | {kind: [] for kind in step.KEYS}
        assert record.continued(same, new, step.KEYS) is new
        assert record.continued(same, new, step.KEYS, keep=True) == same


def test_another_package_version_starts_a_new_record_but_a_missing_package_does_not():
    with_peft, newer = ({"versions": RECORD["versions"] | {"peft": version}} for version in ("1", "2"))
    new = RECORD | newer
    assert record.continued(RECORD | with_peft, new, step.KEYS, keep=True) is new
    for old, new in ((RECORD | with_peft, RECORD), (RECORD, RECORD | with_peft)):
        assert record.continued(old, new, step.KEYS)["versions"] == with_peft["versions"]


def test_pages_and_records_do_not_make_the_code_dirty(tmp_path, monkeypatch):
    def git(*words):
        words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record.run_log, "git_commit", lambda: git("describe", "--always", "--dirty"))
    (tmp_path / "benchmarks" / "records").mkdir(parents=True)
    names = {"README.md": "", "benchmarks/records/step.json": "", "train.py": "-dirty"}
    for name in names:
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    commit = git("describe", "--always")
    for name, dirty in names.items():
        (tmp_path / name).write_text("2")
        assert record.commit() == commit + dirty, name


def test_a_file_that_is_not_a_record_is_not_overwritten(tmp_path):
    out = tmp_path / "list.json"
    for text in ("", "[1]"):
        out.write_text(text)
        with pytest.raises(SystemExit, match=f"--out={out} exists and is not a benchmark record"):
            record.fill(RECORD, iter(lambda: pytest.fail("measured"), 0), out, step.KEYS, lambda *_: "")
        assert out.read_text() == text


def test_a_closed_terminal_ends_bench_but_not_under_nohup(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "call", lambda _: {"device": "A", "copy_tb_s": 4.0, "matmul_tflops": 700.0})
    monkeypatch.setattr(record, "origin", lambda *_: {"device": "A"})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    runner.begin("step", [], step.KEYS)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number in runner.ENDS:
        for each in runner.ENDS:
            signal.signal(each, signal.SIG_DFL)
        runner.begin("step", [], step.KEYS)
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(number)
        assert stop.value.code == 128 + number
        for each in runner.ENDS:
            signal.raise_signal(each)  # while it ends the point at work


def test_a_process_without_results_reports_why():
    def line(row):
        return runner.line(arms.STEP, row)

    where = {key: RECORD["points"][2][key] for key in compare.STEP_PLACE}
    said = line(RECORD["points"][2])
    assert said.startswith("Hugging Face") and said.endswith("out of memory")
    assert "pip install 'transformers>=5.17,<6'" in line(where | {"missing": "No module named 'transformers'"})
    assert "failed: Bang" in line(where | runner.failure("Traceback\nBang"))
    assert runner.failure("Traceback\n[rank1]: ModuleNotFoundError: No x") == {"missing": "No x"}


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
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
