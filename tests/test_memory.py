"""The arithmetic of memory.py against what was measured, against live tensors counted here, and against itself.

pytest test_memory.py        a minute, without a GPU
"""

import gc
import json
import mmap
import runpy
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import Llama, LlamaConfig
from optimizers.adamw import AdamW
from optimizers.on_gpu import OnGPU
from optimizers.optimizer import Optimizer
from optimizers.place import local
from runtime import copy_engines, memory, memory_stats, pinned_memory
from runtime.memory import Plan

ROOT = Path(__file__).parents[1]
TINY = LlamaConfig(n_layer=4, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=192, vocab_size=512, block_size=32,
                   attention="sdpa", fused_kernels=False, fused_loss=False)  # fmt: skip


def published(name, **changes):
    settings = runpy.run_path(str(ROOT / "config" / f"{name}.py"))
    return LlamaConfig(**{k: v for k, v in settings.items() if k in LlamaConfig.__dataclass_fields__} | changes)


LLAMA_1B, LLAMA_8B = published("llama32_1b"), published("llama31_8b")
PARTS_OF_GPU = ("cuBLAS workspaces",)  # that only a GPU has


def bytes_of(moments, name):
    return sum(part.bytes for parts in moments.values() for part in parts if part.name == name) / len(moments)


# ----------------------------------------------------------------------------------------------------------------------
# Against measured peaks

RECORD = json.loads((ROOT / "benchmarks" / "records" / "step.json").read_text())["points"]
MEASURED = [point for point in RECORD if point["arm"] == "nanocria" and "peak_gib" in point]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['batch']}x{row['block']} {row['checkpointing']}")
def test_estimate_is_what_an_h200_measured(row):
    config = replace(LLAMA_1B, block_size=row["block"], activation_checkpointing=row["checkpointing"])
    estimated = memory.peak_gib(config, Plan(batch_size=row["batch"]))
    assert abs(estimated / row["peak_gib"] - 1) < 0.01, f"estimated {estimated:.2f}, measured {row['peak_gib']:.2f} GiB"


def test_the_record_holds_points_to_compare_with():
    assert {row["checkpointing"] for row in MEASURED} == {"none", "selective", "full"}


# ----------------------------------------------------------------------------------------------------------------------
# Against tensors that live


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators have seen and that still live, and the most there were."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def see(self, x):
        if isinstance(x, torch.Tensor) and not x.is_meta:
            storage = local(x).untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)

    def now(self):
        storages = [reference() for reference in self.storages.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            self.see(x)
        self.peak = max(self.peak, self.now())
        return out


def bytes_after_forward(config, dtype):
    """Bytes that forward leaves behind, beside the weights."""
    model = Llama(config).to(dtype)
    model.init_weights(seed=1)
    tokens = torch.zeros(1, config.block_size, dtype=torch.long)
    with Live() as live:
        loss = model(tokens, tokens)
        gc.collect()  # the interpreter's launches are cycles that hold their arguments
        kept = live.now()
    assert loss.isfinite()
    return kept - sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "plain"])
def test_a_layer_keeps_what_the_estimate_says(fused, checkpointing):
    if fused and torch.cuda.is_available():
        pytest.skip("beside a GPU no kernel is interpreted on the CPU")
    config = replace(TINY, block_size=8, fused_kernels=fused, activation_checkpointing=checkpointing)
    two, three = (bytes_after_forward(replace(config, n_layer=n), torch.bfloat16) for n in (2, 3))
    estimated = 8 * memory.token_bytes(config, memory.Plan(batch_size=1), chunks=1)[0]
    assert abs(estimated / (three - two) - 1) < 0.02, f"estimated {estimated}, found {three - two} bytes"


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_plain_step_holds_what_the_estimate_says(checkpointing):
    config = replace(TINY, vocab_size=16, block_size=128, activation_checkpointing=checkpointing)
    check_step(config, Plan(batch_size=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU no kernel is interpreted on the CPU")
def test_in_groups_of_sequences_a_step_holds_what_the_estimate_says(monkeypatch):
    config = replace(TINY, n_layer=2, block_size=16, vocab_size=16, activation_checkpointing="full", fused_kernels=True)
    monkeypatch.setattr(LlamaConfig, "groups_of_sequences", lambda *_: 4)
    check_step(config, Plan(batch_size=8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU no kernel is interpreted on the CPU")
def test_in_groups_of_sequences_an_evaluation_holds_little_more_than_a_block_s_input_and_output(monkeypatch):
    config = replace(TINY, n_layer=2, block_size=8, vocab_size=16, activation_checkpointing="full", fused_kernels=True)
    monkeypatch.setattr(LlamaConfig, "groups_of_sequences", lambda *_: 8)
    model, tokens = Llama(config), torch.zeros(32, 8, dtype=torch.long)
    model.init_weights(seed=1)
    with torch.no_grad(), Live() as live:
        model(tokens, tokens)
    held = live.peak - sum(p.numel() * p.element_size() for p in model.parameters())
    assert held / (tokens.numel() * config.n_embd * 4) < 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload_activations", [False, True])
def test_on_a_gpu_an_evaluation_holds_less_than_a_step(offload_activations):
    config = replace(TINY, n_embd=1024, n_head=16, n_kv_head=4, ffn_dim=4096, block_size=1024, fused_kernels=True)
    config = replace(config, fused_loss=True, activation_checkpointing="full", offload_activations=offload_activations)
    with torch.device("cuda"):
        model, tokens = Llama(config).to(torch.bfloat16), torch.zeros(64, 1024, dtype=torch.long)
    model.init_weights(seed=1)
    peaks = {}
    for gradients in (True, False):
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(gradients):
            loss = model(tokens, tokens)
        if gradients:
            loss.backward()
        peaks[gradients] = torch.cuda.max_memory_allocated() - sum(p.nbytes for p in model.parameters())
        model.zero_grad()
        del loss
    assert peaks[False] < peaks[True], peaks


SHARDED = {
    "zero3": {},
    "zero3, accumulated": {"micro_steps": 3},
    "zero3, not synced": {"micro_steps": 3, "sync_every_micro_batch": False},
    "zero2": {"sharding": "zero2"},
    "hybrid": {"sharding": "hybrid", "shard_ranks": 2},
}
MODELS = {
    "large blocks": replace(TINY, n_embd=128, ffn_dim=1024, vocab_size=16),
    "large blocks, many tokens": replace(TINY, n_embd=128, ffn_dim=1024, vocab_size=16, block_size=256),
    "large head": replace(TINY, vocab_size=4096, block_size=8),
    "large tied head": replace(TINY, vocab_size=4096, block_size=8, tie_embeddings=True),
}


@pytest.fixture
def four_ranks():
    """This process is one of four; the others answer at once, with nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("plan", SHARDED)
@pytest.mark.parametrize("model", MODELS)
def test_sharded_step_holds_what_the_estimate_says(four_ranks, model, plan):
    if plan == "hybrid" and torch.cuda.is_available():
        pytest.skip("with a GPU in the machine FSDP's hybrid sharding holds one more gradient on the CPU")
    check_step(MODELS[model], Plan(**{"batch_size": 2, "world_size": 4, "shard_ranks": 4} | SHARDED[plan]))


def check_step(config, plan):
    moment, parts = memory.parts(config, plan)
    estimated = sum(part.bytes for part in parts if part.name not in PARTS_OF_GPU)
    measured = peak_of_step(config, plan)
    assert abs(estimated / measured - 1) < 0.04, f"estimated {estimated:,.0f} ({moment}), measured {measured:,} bytes"


def peak_of_step(config, plan):
    """The most bytes that live in the second step of a bfloat16 model built as train.py builds it."""
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
    if plan.world_size > 1:
        shape = (plan.world_size // plan.shard_ranks, plan.shard_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if plan.sharding == "hybrid" else mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        copy_engines.shard(model, keep_blocks=plan.sharding == "zero2", mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.init_weights(seed=1)
    optimizer = Optimizer(model, AdamW(), OnGPU(), grad_clip=1.0)
    tokens = torch.zeros(plan.batch_size, config.block_size, dtype=torch.long)

    def step():
        for micro_step in range(plan.micro_steps):
            if not plan.sync_every_micro_batch:
                model.set_requires_gradient_sync(micro_step + 1 == plan.micro_steps)
            model(tokens, tokens).backward()
            if plan.micro_steps > 1 and plan.sync_every_micro_batch:
                optimizer.accumulate()
        optimizer.step(1e-3)

    step()
    with Live() as live:
        place = optimizer.place
        states = [x for of_parameter in place.states.values() for x in of_parameter.values()]
        for tensor in (*place.masters.values(), *states, *place.parameters.values(), *place.sums.values()):
            live.see(tensor.detach())
        step()
    return live.peak


# ----------------------------------------------------------------------------------------------------------------------
# Against arithmetic done by hand


@pytest.mark.parametrize("config", [LLAMA_1B, LLAMA_8B, TINY], ids=["1B", "8B", "tiny"])
def test_parameters_are_the_model_s(config):
    with torch.device("meta"):
        model = Llama(config)
    block, root = memory.n_params(config)
    assert root + config.n_layer * block == model.n_params()
    assert block == sum(p.numel() for p in model.layers[0].parameters())


def test_weights_and_moments_take_12_bytes_a_parameter_shared_by_the_ranks():
    for ranks in (1, 4):
        moments = memory.moments(LLAMA_1B, Plan(8, world_size=ranks, shard_ranks=ranks))
        assert bytes_of(moments, "compute weights") == 2 * 1_235_814_400 / ranks
        assert bytes_of(moments, "AdamW: weights and moments") == 10 * 1_235_814_400 / ranks


def test_logits_and_head_s_gradient_by_hand():
    tokens = 16_384 * 2_048 * 2  # bytes of a tensor like the residual stream
    forward, backward = memory.loss_bytes(LLAMA_1B, Plan(8), 16_384)
    assert forward.bytes == 4_096 * 128_256 * 2 + 4 * 128_256 * 2_048 + 2 * tokens
    assert backward.bytes == 6 * 128_256 * 2_048 + 2 * tokens
    _, plain = memory.loss_bytes(replace(LLAMA_1B, fused_loss=False), Plan(8), 16_384)
    assert plain.bytes == 12 * 16_384 * 128_256 + 2 * tokens


def test_what_is_gathered_by_hand():
    """8B's embedding and head are not there in the blocks' backward; 1B's, which is tied, is."""
    plan = Plan(1, world_size=8, shard_ranks=8)
    for config, here in ((LLAMA_8B, 0), (LLAMA_1B, memory.n_params(LLAMA_1B)[1])):
        block, _ = memory.n_params(config)
        last_but_one = config.n_layer - 1
        for sharding, blocks in {"zero3": 2, "zero2": last_but_one}.items():
            parts = memory.moments(config, replace(plan, sharding=sharding))[f"backward of block {last_but_one}"]
            assert {part.name: part.bytes for part in parts}["gathered weights"] == 2 * (here + blocks * block)
    head = 128_256 * 4_096 + 4_096  # with the norm
    for copy_engines, times in {False: 2, True: 1}.items():  # its buffer, or none of its own
        parts = memory.moments(LLAMA_8B, replace(plan, copy_engines=copy_engines))["end of forward, in the loss"]
        assert {part.name: part.bytes for part in parts}["gathered weights"] == times * 2 * head


MEASURED_SINCE = [  # GiB on H200s: block_size, activation_checkpointing, plan
    (23.15, 1024, "none", Plan(4, 4)),
    (14.54, 1024, "none", Plan(4, 2, world_size=2, shard_ranks=2)),
    (16.24, 1024, "none", Plan(4, 2, world_size=2, shard_ranks=2, sharding="zero2")),
    (26.37, 1024, "none", Plan(4, 2, world_size=2, shard_ranks=1, sharding="hybrid")),
    (16.84, 1024, "none", Plan(4, 2, world_size=2, shard_ranks=2, sync_every_micro_batch=False)),
    (7.03, 1024, "none", Plan(4, 4, offload="optimizer")),
    (6.48, 1024, "none", Plan(4, 2, world_size=2, shard_ranks=2, offload="optimizer")),
    (17.11, 2048, "none", Plan(8, offload="optimizer")),
    (15.46, 2048, "none", Plan(8, offload="all")),
    (1.59, 1024, "full", Plan(1, offload="all")),
    (10.13, 1024, "full", Plan(112, offload="all")),
    (2.43, 1024, "offloaded", Plan(16, offload="all")),
    (3.00, 1024, "offloaded", Plan(64, offload="all")),
    (3.56, 1024, "offloaded", Plan(112, offload="all")),
    (12.75, 1024, "offloaded", Plan(896, offload="all")),
    (20.64, 65_536, "full", Plan(4, offload="all")),
    (12.29, 131_072, "offloaded", Plan(4, offload="all")),
]


@pytest.mark.parametrize("gib, block_size, checkpointing, plan", MEASURED_SINCE)
def test_sharded_accumulated_and_offloaded_runs_take_what_was_measured(gib, block_size, checkpointing, plan):
    """offloaded: full, with offload_activations."""
    offloaded = checkpointing == "offloaded"
    config = replace(LLAMA_1B, block_size=block_size, offload_activations=offloaded,
                     activation_checkpointing="full" if offloaded else checkpointing)  # fmt: skip
    assert memory.peak_gib(config, plan) == pytest.approx(gib, rel=0.01)


def test_unsynced_micro_batches_keep_all_gradients_on_every_rank():
    plan = Plan(1, micro_steps=8, world_size=8, shard_ranks=8)
    synced, unsynced = (
        {part.name: part.bytes for part in memory.parts(LLAMA_8B, replace(plan, sync_every_micro_batch=sync))[1]}
        for sync in (True, False)
    )
    assert unsynced["gradient accumulators"] == 8 * synced["gradient accumulators"] == 4 * 8_030_261_248


def test_offloaded_activations_and_a_sliced_mlp_leave_a_slope_of_one_block():
    """Bytes for each token more: without them the checkpoints of 16 layers and the MLP's 6F are in it."""
    full = replace(LLAMA_1B, activation_checkpointing="full")
    slopes = []
    for config in (replace(full, mlp_chunks=1), replace(full, offload_activations=True)):
        gib = [memory.peak_gib(config, Plan(batch_size)) for batch_size in (64, 128)]
        slopes.append((gib[1] - gib[0]) * 2**30 / 64 / config.block_size)
    assert slopes[0] > 16 * 4096 + 6 * 2 * 8192 and slopes[1] < slopes[0] / 3, slopes
    (part,) = memory.cpu_parts(replace(full, offload_activations=True), Plan(64))
    assert part.bytes == 15 * 4096 * 64 * full.block_size


@pytest.mark.parametrize(
    "dtype, block_size, runs",
    [("bfloat16", 2048, "triton"), ("float16", 4096, "triton"), ("bfloat16", 8192, "sdpa"), ("float32", 2048, "sdpa")],
)
def test_attention_is_counted_as_the_one_that_auto_runs(dtype, block_size, runs):
    each = {
        attention: memory.attention_bytes(
            replace(LLAMA_1B, block_size=block_size, attention=attention), Plan(8, dtype=dtype)
        )
        for attention in ("auto", "triton", "sdpa")
    }
    assert each["auto"] == each[runs] and each["triton"] < each["sdpa"], each


def test_offload_moves_bytes_to_the_cpu():
    config, n = LLAMA_1B, 1_235_814_400  # peaks before there are gradients
    there, of_optimizer = memory.peak_gib(config, Plan(8)), memory.peak_gib(config, Plan(8, offload="optimizer"))
    assert there - of_optimizer == pytest.approx(10 * n / 2**30)
    parts = {part.name: part.bytes for part in memory.cpu_parts(config, Plan(8, 2, offload="all"))}
    assert parts["AdamW: weights and moments"] == 12 * n and parts["gradient accumulators"] == 4 * n
    assert parts["gradients"] == parts["compute weights"] == 2 * n
    # FSDP's: the embedding in 2^29 / 2 bytes; qkv in 2^23, o 2^22, gate and up 2^25, down 2^24, two norms 2^11 each.
    sharded = {
        part.name: part.bytes for part in memory.cpu_parts(config, Plan(8, 1, "bfloat16", 2, "zero3", 2, offload="all"))
    }
    assert sharded["gradients"] == 2**28 + 2**11 + 16 * (2**23 + 2**22 + 2**25 + 2**24 + 2 * 2**11)
    assert memory.cpu_parts(config, Plan(8)) == []
    assert memory.cpu_bytes_to_come(config, Plan(8, 2, offload="all")) == 4 * n
    (states, _) = memory.cpu_parts(config, Plan(8, world_size=4, shard_ranks=4, offload="optimizer"))
    assert states.bytes == 12 * n / 4


# ----------------------------------------------------------------------------------------------------------------------
# Pinned memory


def test_pytorchs_pinned_memory_is_a_power_of_two():
    assert [memory.pinned(n) for n in (1, 2, 3, 2**20, 2**20 + 0.5)] == [1, 2, 4, 2**20, 2**21]


SHAPES = [(), (3,), (0, 4), (5, 7), (2**20 + 1,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_our_pinned_memory_is_a_tensor_like_any_other(monkeypatch, shape, dtype):
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_memory._Pages, "pin", lambda *_: True)
    x = pinned_memory.pinned_empty(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu"
    assert x.data_ptr() % mmap.PAGESIZE == 0
    values = torch.randn(shape).to(dtype)
    assert torch.equal(x.copy_(values), values) and torch.equal(x.clone().sum(), values.sum())


class Cudart:
    """Notes what it is asked; answers with these codes."""

    def __init__(self, monkeypatch, register=0, unregister=0, wait=lambda device: None):
        self.calls, self.codes = [], {"register": register, "unregister": unregister}
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: self.calls.append(("wait", device)) or wait(device)
        )
        monkeypatch.setattr(pinned_memory, "NEVER_FREED", [])

    def cudaHostRegister(self, address, n_bytes, flags):
        self.calls.append(("register", address, n_bytes, flags))
        return self.codes["register"]

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return self.codes["unregister"]


def test_our_pinned_memory_goes_with_the_last_tensor_in_it(monkeypatch):
    cudart = Cudart(monkeypatch)
    x = pinned_memory.pinned_empty((3, 100), torch.float32)
    address = x.data_ptr()
    assert cudart.calls == [("register", address, 1200, 0)]
    part = x[1:, 50].view(-1)
    del x
    gc.collect()
    assert part.zero_().sum() == 0 and len(cudart.calls) == 1
    del part
    gc.collect()
    assert cudart.calls[1:] == [("wait", 3), ("unregister", address)] and not pinned_memory.NEVER_FREED


def lost(device):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("unregister", [0, 1])
def test_pinned_memory_that_cuda_does_not_give_back_stays(monkeypatch, unregister):
    cudart = Cudart(monkeypatch, unregister=unregister, wait=lost)
    x = pinned_memory.pinned_empty((3,), torch.float32)
    address = x.data_ptr()
    del x
    gc.collect()
    assert cudart.calls[-1] == ("unregister", address) and len(pinned_memory.NEVER_FREED) == unregister


def test_what_cannot_be_pinned_is_pinned_by_pytorch_or_said(monkeypatch):
    Cudart(monkeypatch, register=2)
    if torch.cuda.is_available():
        assert pinned_memory.pinned_empty((3,), torch.float32).is_pinned()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: lost(None))
    with pytest.raises(OSError, match=r"0.01 GiB of the CPU's memory cannot be pinned: CUDA error: an illegal"):
        pinned_memory.pinned_empty((2**21,), torch.float32)


def test_a_kernel_that_takes_no_advice_still_gives_memory(monkeypatch):
    Cudart(monkeypatch)

    class Pages(pinned_memory._Pages):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pinned_memory, "_Pages", Pages)
    assert pinned_memory.pinned_empty((5,), torch.float32).shape == (5,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_our_pinned_memory_is_known_to_the_gpu():
    for _ in range(3):
        x = pinned_memory.pinned_empty((1000, 1001), torch.float32)
        assert x.is_pinned() and x[1:].is_pinned()
        x.copy_(torch.randn(1000, 1001))
        on_gpu = x.to("cuda", non_blocking=True)
        back = pinned_memory.pinned_empty(x.shape, x.dtype).copy_(2 * on_gpu, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, 2 * x)
        assert torch.ones(3, device="cuda").sum() == 3
        del x, back  # else to register the same addresses again would fail
        gc.collect()


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_user_says_something_of_the_allocator(monkeypatch, name):
    said = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    memory_stats.let_segments_grow()
    assert said == ([] if name else ["expandable_segments:True"])


# ----------------------------------------------------------------------------------------------------------------------
# The CPU's memory


def group(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used, f"anon 5\n{names[2]} {cache}\nslab 7"), strict=True):
        (folder / name.replace("inactive_file", "memory.stat").replace("total_", "")).write_text(f"{value}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    "line, groups, expected",
    [
        ("", {}, 4096),
        ("0::/", {"": (V2, 4000, 1000, 50)}, 3050),  # in a container
        ("0::/", {}, 4096),  # the machine itself
        ("0::/slurm/job_7/step_0", {"slurm/job_7": (V2, 900, 100, 5), "slurm/job_7/step_0": (V2, "max", 1, 1)}, 805),
        ("0::/a/b", {"a": (V2, 900, 100, 5), "a/b": (V2, 500, 100, 5)}, 405),
        ("0::/a", {"a": (V2, 9000, 100, 5)}, 4096),
        ("4:memory:/job", {"memory/job": (V1, 700, 100, 3), "memory": (V1, 2**63 - 4096, 100, 3)}, 603),
        ("4:memory:/docker/abc", {"memory": (V1, 700, 100, 3)}, 603),  # a container that sees its group as the root
        ("5:cpu,cpuacct:/job", {"cpu/job": (V1, 7, 1, 3)}, 4096),
        ("0::/..", {"": (V2, 4000, 1000, 50)}, 3050),
    ],
)
def test_what_is_free_is_what_the_machine_and_every_group_leave(tmp_path, line, groups, expected):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n".strip() + "\n")
    for name, (names, *numbers) in groups.items():
        group(cgroups / name, names, *numbers)
    assert memory_stats.cpu_available(proc, cgroups) == expected


def test_without_proc_nobody_says_what_is_free(tmp_path):
    assert memory_stats.cpu_available(tmp_path, tmp_path) == float("inf")


# ----------------------------------------------------------------------------------------------------------------------
# Against itself


@pytest.mark.parametrize("config", [LLAMA_1B, LLAMA_8B], ids=["1B", "8B"])
@pytest.mark.parametrize("sharding", ["zero3", "zero2"])
def test_more_ranks_never_take_more_memory(config, sharding):
    gibs = [memory.peak_gib(config, Plan(4, world_size=n, shard_ranks=n, sharding=sharding)) for n in (2, 4, 8, 64)]
    assert gibs == sorted(gibs, reverse=True), gibs


@pytest.mark.parametrize("changes", [{}, {"fused_kernels": False}, {"fused_loss": False}], ids=str)
def test_memory_grows_with_the_batch_and_shrinks_with_checkpointing(changes):
    for batch in (1, 4, 16, 64):
        gibs = [
            memory.peak_gib(replace(LLAMA_1B, activation_checkpointing=checkpointing, **changes), Plan(batch))
            for checkpointing in ("full", "selective", "none")
        ]
        assert gibs == sorted(gibs), (batch, gibs)
        assert memory.peak_gib(replace(LLAMA_1B, **changes), Plan(2 * batch)) > gibs[-1]


def test_largest_batch_fits_and_one_more_does_not():
    for gib in (24, 48, 80, 141):
        batch = memory.largest_batch(LLAMA_1B, Plan(1), gib)
        assert batch == 0 or memory.peak_gib(LLAMA_1B, Plan(batch)) <= gib
        assert memory.peak_gib(LLAMA_1B, Plan(batch + 1)) > gib
    assert memory.largest_batch(LLAMA_1B, Plan(1), 10) == 0


def test_largest_batch_is_the_largest_though_a_smaller_one_may_not_fit():
    config = replace(LLAMA_1B, block_size=3000, activation_checkpointing="full")
    fitting = [n for n in range(1, 40) if memory.peak_gib(config, Plan(n, micro_steps=32)) <= 22]
    assert memory.largest_batch(config, Plan(1, micro_steps=32), 22) == max(fitting) > len(fitting), fitting


ADVISED = {
    "one GPU": (LLAMA_1B, Plan(8)),
    "plain": (replace(LLAMA_1B, fused_kernels=False, fused_loss=False), Plan(8, micro_steps=2)),
    "zero2": (LLAMA_8B, Plan(2, micro_steps=4, world_size=4, shard_ranks=4, sharding="zero2")),
    "hybrid": (LLAMA_8B, Plan(2, world_size=4, shard_ranks=2, sharding="hybrid")),
    "not synced": (LLAMA_8B, Plan(2, micro_steps=4, world_size=4, shard_ranks=4, sync_every_micro_batch=False)),
}


@pytest.mark.parametrize("case", ADVISED)
def test_advice_lowers_the_peak_by_what_it_says(case):
    config, plan = ADVISED[case]
    found = memory.advice(config, plan)
    assert 0 < len(found) <= 3 and [gib for _, gib in found] == sorted(gib for _, gib in found)
    for flags, gib in found:
        settings = {name: json.loads(value) if value[0] in "0123456789tf" and value != "full" else value
                    for name, value in (flag.removeprefix("--").split("=") for flag in flags.split())}  # fmt: skip
        then = memory.changed(config, plan, settings)
        assert then != (config, plan) and memory.peak_gib(*then) == gib < memory.peak_gib(config, plan), flags


def test_advice_names_the_setting_that_wastes_most():
    assert memory.advice(*ADVISED["not synced"])[0][0].startswith(("--sync_every_micro_batch=true", "--offload"))
    assert "--sharding=zero3" in dict(memory.advice(*ADVISED["hybrid"]))
    assert "--fused_kernels=true" in dict(memory.advice(*ADVISED["plain"]))
    halved = "--batch_size=4 --gradient_accumulation_steps=2"
    assert halved in dict(memory.advice(*ADVISED["one GPU"]))
    full = replace(LLAMA_1B, activation_checkpointing="full")
    for plan, refused in (
        (Plan(64, compile=True), {"offload_activations"}),
        (Plan(64, cuda_graph=True), {"offload_activations", "offload"}),
    ):
        names = {name for values in memory.choices(full, plan) for settings in values for name in settings}
        assert names and not names & refused, "train.py would not take it"
    odd = memory.choices(LLAMA_1B, Plan(3))
    assert not any("batch_size" in settings for values in odd for settings in values)


def test_out_of_memory_is_told_with_its_remedies():
    said = memory.say_out_of_memory(LLAMA_1B, Plan(8), gib=24)
    assert "about 28.5 GiB, the card has 24.0" in said and "saved activations 12.5" in said
    assert "--activation_checkpointing=selective            about 20.5 GiB instead of 28.5" in said
    least = replace(LLAMA_1B, activation_checkpointing="full", offload_activations=True), Plan(1, offload="all")
    assert "no setting is left" in memory.say_out_of_memory(*least)


def test_table_adds_up():
    lines = memory.table(LLAMA_8B, Plan(2, micro_steps=2, world_size=4, shard_ranks=4)).splitlines()
    gibs = [float(line.split(" GiB")[0].split()[-1]) for line in lines]
    assert abs(sum(gibs[:-1]) - gibs[-1]) < 0.005 * len(gibs)
    assert any("10 bytes x 8,030,261,248 parameters / 4 ranks" in line for line in lines)
    assert len({line.index(" GiB") for line in lines}) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
def test_without_a_gpu_nothing_is_recorded(tmp_path):
    memory_stats.record_history()
    memory_stats.dump(tmp_path / "snapshot.pickle")
    memory_stats.stop_history()
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshot_holds_the_allocations(tmp_path):
    memory_stats.record_history()
    torch.empty(3 * 2**20, device="cuda")
    memory_stats.dump(tmp_path / "snapshot.pickle")
    memory_stats.stop_history()
    assert (tmp_path / "snapshot.pickle").stat().st_size > 1000
