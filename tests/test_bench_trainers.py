"""The peers of the benchmarks train the same model as nanocria, and where the milliseconds go. No GPU."""

import json
import math

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmarks import breakdown, losses, peers, trainers
from benchmarks.operations import OPERATIONS
from benchmarks.settings import ROOT
from model import Execution, Llama, LlamaConfig, rope_tables
from runtime.hf import hf_names
from tests.runs import finish, write_config
from tests.test_model import apart, assert_close, plain_names
from tests.watch import Watch

SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
TINY = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=61, block_size=24,
                   rope_scaling=SCALING, tie_embeddings=True)  # fmt: skip
CPU = torch.device("cpu")

# --- Peers ---


def build_recipe(checkpointing):
    """peers.recipe(), but not compiled and not sharded."""
    model = peers.materialize(peers.recipe_model(TINY), CPU)
    for i, block in enumerate(model.layers):
        model.layers[i] = peers.checkpointed(block, checkpointing)
    return model, lambda tokens, targets: peers.whole_loss(model(tokens), targets)


def build_hf(checkpointing):
    return peers.hf_model(TINY, checkpointing, CPU, dtype=torch.float32)


def build_hf_cudnn(checkpointing):
    return peers.hf_model(TINY, checkpointing, CPU, cudnn=True, dtype=torch.float32)


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize(
    "build, checkpointing",
    [*((build_recipe, c) for c in ("none", "selective", "full")), (build_hf, "none"), (build_hf_cudnn, "full")],
)
def test_a_peer_has_our_loss_and_our_gradients(build, checkpointing):
    torch.manual_seed(1)
    ours = Llama(TINY, Execution(kernels="none", attention="sdpa"))
    ours.init_weights(seed=1)
    peer, loss_of = build(checkpointing)
    names_of = plain_names if build is build_recipe else hf_names
    theirs = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in peer.named_parameters()}
    with torch.no_grad():
        for name, weight in apart(TINY, dict(ours.named_parameters()), names_of).items():
            theirs[name].copy_(weight)
    assert sum(p.numel() for p in peer.parameters()) == ours.n_params()
    tokens, targets = torch.randint(TINY.vocab_size, (2, 3, TINY.block_size))
    expected = ours(tokens, targets)
    found = loss_of(tokens, targets)
    assert abs(expected - found) < 1e-6, f"{found} instead of {expected}"
    expected.backward()
    found.backward()
    gradients = apart(TINY, {name: p.grad for name, p in ours.named_parameters()}, names_of)
    assert_close({name: theirs[name].grad for name in gradients}, gradients, 1e-5)


def test_the_adapters_of_the_peer_are_float32_and_read_bfloat16(monkeypatch):
    hf_model = peers.hf_model
    monkeypatch.setattr(peers, "hf_model", lambda *args, liger: hf_model(*args))  # Liger-Kernel needs a GPU
    model, loss_of, _ = peers.hf_liger_lora(TINY, "full", CPU)
    adapters = [module for name, module in model.named_modules() if name.endswith(("lora_A.default", "lora_B.default"))]
    read = []
    for module in adapters:
        module.register_forward_hook(lambda module, inputs, y: read.append(inputs[0].dtype))
    loss_of(*torch.randint(TINY.vocab_size, (2, 3, TINY.block_size))).backward()
    assert len(adapters) == 2 * 7 * TINY.n_layer and {module.weight.dtype for module in adapters} == {torch.float32}
    assert set(read) == {torch.bfloat16} and len(read) > len(adapters), "backward recomputes too"


def test_a_compiled_peer_of_hugging_face_reads_no_mask(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", modeling_llama.create_causal_mask)  # restored afterwards
    attention = []
    compile = torch.compile

    def note_attention(graph, inputs):
        calls = (node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        attention.extend((node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in calls)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, mode: compile(model, backend=note_attention))
    _, loss_of = peers.hf_model(TINY, "none", CPU, compile_mode="default", dtype=torch.float32)
    tokens = torch.randint(TINY.vocab_size, (2, TINY.block_size))
    assert math.isfinite(loss_of(tokens, tokens).detach())
    assert attention == [(None, True)] * TINY.n_layer


def test_selective_checkpointing_recomputes_every_second_matmul():
    def backward_matmuls(checkpointing):
        block = peers.checkpointed(peers.recipe_model(TINY).layers[0], checkpointing)
        y = block(torch.randn(2, 24, 32, requires_grad=True), *rope_tables(TINY, 0, 24, CPU))
        with Watch() as seen:
            y.sum().backward()
        return seen.ops["mm"]

    none, selective, full = (backward_matmuls(c) for c in ("none", "selective", "full"))
    assert none == 14, "two gradients for each of q, k, v, o, gate, up, down"
    assert selective - none == 3, "k, o, up"
    assert full - none == 6, "all but down, whose output nobody needs again"


# --- Peers on several ranks ---

# benchmarks/trainers.py as it runs without GPUs: gloo, nothing compiled, the same weights for any number of ranks.
# Steps take 9, 1 and 2 s; the peak is 2 GiB on rank 0, 3 on rank 1.
PEER_ON_CPU = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from unittest import mock
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from benchmarks import peers, trainers

torch.set_num_threads(1)
@torch.no_grad()
def randomize(model, device):
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))

class Mark:
    marks = 0

    def __init__(self):
        self.index = Mark.marks
        Mark.marks += 1

    def elapsed_time(self, later):
        return [9000, 1000, 2000][later.index % 3]

cuda = {name: mock.Mock() for name in ("synchronize", "reset_peak_memory_stats")}
cuda["max_memory_allocated"] = lambda: (2 + trainers.rank) * 2**30
cuda["get_device_name"] = lambda: "NVIDIA H200"
with (
    mock.patch.multiple(torch.cuda, **cuda),
    mock.patch.object(torch, "compile", lambda function, **_: function),
    mock.patch.object(trainers, "pick_device", lambda _: "cpu"),
    mock.patch.object(trainers, "mark", Mark),
    mock.patch.object(peers, "randomize", randomize),
):
    result = trainers.measure(**json.loads(sys.argv[1]))
if trainers.rank == 0:
    print(json.dumps(result), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads now and then abort the interpreter that tidies up around them
"""
SMALL = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=2048, rope_theta=10000.0)


@pytest.mark.parametrize("trainer, checkpointing, tied, warmup, steps", [
    ("recipe", "full", False, 2, 6), ("hf-offload", "full", True, 2, 6),
    ("recipe-zero2", "none", True, 1, 1),  # as the largest points
])  # fmt: skip
def test_two_ranks_of_a_peer_train_as_one_on_the_same_sequences(tmp_path, trainer, checkpointing, tied, warmup, steps):
    config = write_config(tmp_path / "small.py", **SMALL, tie_embeddings=tied)
    spec = {"trainer": trainer, "config": config, "block": 64, "checkpointing": checkpointing,
            "warmup": warmup, "steps": steps}  # fmt: skip
    (tmp_path / "peer.py").write_text(PEER_ON_CPU)

    def run(ranks):
        done = finish([json.dumps(spec | {"batch": 8 // ranks})], ranks, tmp_path / "peer.py")
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))

    one = run(1)
    two = run(2)
    for ranks, point in ((1, one), (2, two)):
        assert "failed" not in point, point
        assert point["ms_per_step"] == 2000, "the median"
        assert point["tok_per_s"] == pytest.approx(8 * 64 / 2), "of all ranks"
        assert point["peak_gib"] == 1 + ranks, "of the rank that needs most"
    assert two["mfu"] / two["tok_per_s"] == pytest.approx(one["mfu"] / one["tok_per_s"] / 2), "of one GPU"
    for loss in ("first_loss", "last_loss"):
        assert abs(one[loss] - two[loss]) < 1e-4, f"{loss} is {one[loss]} on one rank, {two[loss]} on two"


# --- Losses ---


@pytest.fixture
def point(monkeypatch, tmp_path):
    """Eight steps of 2 x 64 tokens on the CPU: train_losses() and peer_losses() take these."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # else the interpreter would run the whole training
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # for the peer
    config = tmp_path / "baby.py"
    changes = "n_layer, vocab_size, device, dtype, galore_rank = 2, 2048, 'cpu', 'float32', 32"
    config.write_text((ROOT / "config/baby_llama.py").read_text() + changes)
    return {"steps": 8, "batch": 2, "block": 64, "config": str(config)}


@pytest.mark.usefixtures("published_model")
def test_train_py_matches_hugging_faces_model_with_pytorchs_adamw(point):
    """Step by step: the same initial weights, tokens, losses, gradient clipping, learning rates and updates."""
    ours = losses.train_losses(**point)
    theirs = losses.peer_losses("float32", **point)
    assert len(ours["losses"]) == 8 and ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)


def test_galore_matches_galore_torch(point):
    """It takes the leading singular vectors from an SVD; ours converge to them in some steps of subspace iteration."""
    pytest.importorskip("galore_torch")
    ours = losses.train_losses(**point, flags=["--optimizer=galore"])
    theirs = losses.peer_losses("hf-galore", **point)
    adamw = losses.train_losses(**point)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-3)
    assert ours["losses"] != pytest.approx(adamw["losses"], abs=1e-2)


# --- Where the milliseconds go ---


KERNELS = {
    "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT": "matmuls",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "matmuls",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)": "attention",
    "_loss_kernel": "loss kernel", "_sum_rows_kernel": "norms", "_glu_fwd_kernel": "SwiGLU", "_rope_bwd_kernel": "RoPE",
    "multi_tensor_apply_kernel<..., at::native::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "multi_tensor_apply_kernel<..., at::native::Copy<BFloat16, float>>": "casts and copies",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>": "other",
}  # fmt: skip


def test_a_kernel_is_known_by_its_name():
    assert {kernel: breakdown.part_of(kernel) for kernel in KERNELS} == KERNELS


CHUNK = ["matmuls", "loss kernel", "matmuls", "matmuls"]
STEP = ["matmuls", *CHUNK, *CHUNK, "matmuls", "optimizer"]  # a block's forward, two chunks of the loss, its backward


def spans(parts):
    return [(float(i), i + 1.0, part) for i, part in enumerate(parts)]


def test_a_step_begins_with_its_first_loss_kernel_and_three_matmuls_a_chunk_are_the_losses():
    assert breakdown.step_starts(spans(STEP * 2)) == [2, 2 + len(STEP)]
    named = [part for _, _, part in breakdown.name_head_matmuls(spans(STEP * 2))]
    chunk = ["loss matmuls", "loss kernel", "loss matmuls", "loss matmuls"]
    assert named == ["matmuls", *chunk, *chunk, "matmuls", "optimizer"] * 2


def test_the_floors_count_the_flops_that_the_model_counts():
    c = trainers.llama_config("config/llama32_1b.py", block_size=2048)
    floors = breakdown.floors_ms(c, batch=8, copy_tb_s=4.0, matmul_tflops=700.0)
    with torch.device("meta"):
        flops = 8 * 2048 * Llama(c).flops_per_token(2048)
    assert sum(floors[part] for part in ("matmuls", "loss matmuls", "attention")) == pytest.approx(flops / 700e9)
    assert set(floors) | {"other"} == {*breakdown.PARTS, "loss matmuls"}
    n = 8 * 2048
    work = {
        "norms": 33 * [OPERATIONS["add_rms_norm"].work((n, c.n_embd))],
        "SwiGLU": 16 * [OPERATIONS["swiglu"].work((n, c.ffn_dim))],
        "loss kernel": [{"both": OPERATIONS["cross_entropy"].work((n, c.vocab_size))["both"]}],
        "optimizer": [OPERATIONS["adamw"].work((1_235_814_400,)), {"norm": {"bytes": 2 * 1_235_814_400}}],
    }
    for part, works in work.items():
        assert floors[part] == pytest.approx(sum(x["bytes"] for each in works for x in each.values()) / 4e9)
