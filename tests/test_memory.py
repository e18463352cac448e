"""The arithmetic of memory.py against recorded peaks, live tensors counted here, sums done by hand, and itself."""

import itertools
import shlex
from collections import Counter
from dataclasses import replace
from inspect import unwrap
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import kernels.launch
from benchmarks import estimate
from benchmarks.settings import load_record
from benchmarks.trainers import TRAINERS, llama_config
from lora import add_lora
from model import Execution, Llama, LlamaConfig
from optimizers.adamw8bit import AdamW8bit
from optimizers.on_device import OnDevice
from runtime import memory, memory_advice
from runtime.distributed import local
from runtime.memory import GIB, RunShape
from tests.watch import Watch

PLAIN = {"attention": "sdpa", "kernels": "none"}
TINY = LlamaConfig(n_layer=4, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=192, vocab_size=512, block_size=32)
LLAMA_1B = llama_config("config/llama32_1b.py")
LLAMA_8B = llama_config("config/llama31_8b.py")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU no kernel is interpreted on the CPU")


def sharded(ranks, batch_size=2, **changes):
    return RunShape(batch_size, **{"world_size": ranks, "shard_ranks": ranks} | changes)


def by_name(parts):
    return {part.name: part.bytes for part in parts}


# ----------------------------------------------------------------------------------------------------------------------
# Against measured peaks


def recorded():
    """(row, config, run) of each of our peaks in the records that the current code measured."""
    of_step = {"config": "config/llama32_1b.py", "ranks": 1, "offload": "none", "flags": ""}
    for record in ("step", "step_h100", "sweep", "study", "ladder", "finetune"):
        found = load_record(record)
        for row in (of_step | row for kind in ("points", "batch", "seq") for row in found.get(kind, [])):
            trainer = TRAINERS[row["trainer"]]
            if "peak_gib" in row and not trainer.build:
                settings = {
                    "block_size": row["block"], "batch_size": row["batch"], "offload": row["offload"],
                    "gradient_accumulation_steps": row["ranks"], "activation_checkpointing": row["checkpointing"],
                }  # fmt: skip
                flags = [*trainer.flags.split(), *shlex.split(row["flags"])]
                yield row | {"record": record}, *estimate.resolve(row["config"], row["ranks"], settings, flags)


def measured():
    """Peaks of runs on H200s that no record holds: (GiB, tokens of a sequence, checkpointing, run)."""
    offloaded = {"activation_checkpointing": "full", "offload": "all", "offload_activations": True}
    full = {"activation_checkpointing": "full", "offload": "all"}
    for gib, block_size, run in (
        (23.15, 1024, RunShape(4, 4)),
        (14.54, 1024, sharded(2, 4, micro_steps=2)),
        (16.24, 1024, sharded(2, 4, micro_steps=2, sharding="zero2")),
        (26.37, 1024, sharded(2, 4, micro_steps=2, shard_ranks=1, sharding="hybrid")),
        (16.84, 1024, sharded(2, 4, micro_steps=2, sync_every_micro_batch=False)),
        (7.03, 1024, RunShape(4, 4, offload="optimizer")),
        (6.48, 1024, sharded(2, 4, micro_steps=2, offload="optimizer")),
        (17.11, 2048, RunShape(8, offload="optimizer")),
        (15.46, 2048, RunShape(8, offload="all")),
        (1.59, 1024, RunShape(1, **full)),
        (10.13, 1024, RunShape(112, **full)),
        (2.43, 1024, RunShape(16, **offloaded)),
        (3.00, 1024, RunShape(64, **offloaded)),
        (3.56, 1024, RunShape(112, **offloaded)),
        (12.75, 1024, RunShape(896, **offloaded)),
        (20.64, 65_536, RunShape(4, **full)),
        (12.29, 131_072, RunShape(4, **offloaded)),
    ):
        row = {"block": block_size, "run": run, "peak_gib": gib, "checkpointing": run.activation_checkpointing}
        yield row, replace(LLAMA_1B, block_size=block_size), run


@pytest.mark.usefixtures("published_model")
def test_estimate_is_within_2_percent_of_every_measured_peak_and_the_reserve_within_what_it_adds():
    n_of_mode = Counter()
    for row, config, run in (*recorded(), *measured()):
        n_of_mode[row["checkpointing"]] += 1
        assert abs(memory.peak_gib(config, run) / row["peak_gib"] - 1) < 0.02, row
        if row.get("record") in ("ladder", "finetune", "study", "sweep"):  # near the limit, on one GPU
            assert (row["reserved_gib"] or 0) - row["peak_gib"] < estimate.outside_gib(run), row
    assert n_of_mode.total() > 80 and set(n_of_mode) == {"none", "selective", "full"}


# ----------------------------------------------------------------------------------------------------------------------
# Against live tensors


def build(config, run):
    """Build a model as train.py does."""
    with torch.device("meta"):
        model = Llama(config, run.how).to(run.compute_dtype)
    if run.lora_rank:
        add_lora(model, run.lora_rank, 32.0, run.quantize_base)
    if run.world_size > 1:
        shape = (run.world_size // run.shard_ranks, run.shard_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if run.sharding == "hybrid" else mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        options = {"mesh": mesh, "mp_policy": policy}
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=run.sharding != "zero2", **options)
        if not config.tie_embeddings:
            fully_shard(model.tok_embeddings, reshard_after_forward=True, **options)
            model.tok_embeddings.set_unshard_in_backward(False)
            fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
        fully_shard(model, reshard_after_forward=False, **options)
    model.to_empty(device="cpu")
    for p in model.parameters():
        if not p.requires_grad:  # frozen weights are read, not initialized
            local(p.detach()).fill_(0)
    model.init_weights(seed=1)
    return model


FULL = {"attention": "sdpa", "kernels": "blocks", "activation_checkpointing": "full"}


@no_gpu
@pytest.mark.parametrize("groups", [2, 4])
def test_step_in_groups_of_sequences_holds_what_the_estimate_says(monkeypatch, groups):
    monkeypatch.setattr(Execution, "groups_of_sequences", lambda *_: groups)
    check_step(replace(TINY, n_layer=1, vocab_size=16, block_size=8), RunShape(4, **FULL), update=False)


SMALL_HEAD = replace(TINY, vocab_size=16)
MODELS = {
    "large blocks": replace(SMALL_HEAD, n_embd=128, ffn_dim=1024),
    "large blocks, many tokens": replace(SMALL_HEAD, n_embd=128, ffn_dim=1024, block_size=256),
    "large head": replace(TINY, vocab_size=4096, block_size=8),
    "large tied head": replace(TINY, vocab_size=4096, block_size=8, tie_embeddings=True),
}
SHARDED = {
    "zero3": {},
    "zero3, accumulated": {"micro_steps": 3},
    "zero3, not synced": {"micro_steps": 3, "sync_every_micro_batch": False},
    "zero2": {"sharding": "zero2"},
    "hybrid": {"sharding": "hybrid", "shard_ranks": 2},
}
FOR_8_BIT, FOR_ADAPTERS = (replace(SMALL_HEAD, n_embd=n, ffn_dim=2 * n) for n in (256, 128))
STEPS = {f"8-bit states, {ranks} ranks": (FOR_8_BIT, ranks, {"rule": AdamW8bit()}) for ranks in (1, 4)}
for base in ("none", "nf4"):
    adapters = {"lora_rank": 2, "quantize_base": base}
    for mode in ("none", "full"):
        changes = adapters | {"activation_checkpointing": mode}
        STEPS[f"adapters, {base}, {mode}"] = replace(FOR_ADAPTERS, n_layer=2), 1, changes
    STEPS[f"adapters, {base}, zero3"] = MODELS["large blocks"], 4, adapters
STEPS |= {f"{model}, {how}": (MODELS[model], 4, SHARDED[how]) for model in MODELS for how in SHARDED}


@pytest.fixture
def four_ranks(monkeypatch):
    """This process is one of four ranks; the others answer at once, with nothing."""
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_plain_step_holds_what_the_estimate_says(checkpointing):
    run = RunShape(2, activation_checkpointing=checkpointing, **PLAIN)
    check_step(replace(SMALL_HEAD, block_size=128), run)


@pytest.mark.parametrize("case", STEPS)
def test_a_step_holds_what_the_estimate_says(four_ranks, case):
    config, ranks, changes = STEPS[case]
    if "hybrid" in case and torch.cuda.is_available():
        pytest.skip("with a GPU in the machine FSDP's hybrid sharding holds one more gradient on the CPU")
    if case == "8-bit states, 4 ranks" and "rs_state" in unwrap(FSDPParamGroup.post_backward).__code__.co_varnames:
        pytest.skip("PyTorch 2.12: a loop's variable keeps the last float32 gradients while the next are copied in")
    check_step(config, sharded(ranks, **PLAIN | changes), update=False)  # its reference is not in place


def check_step(config, run, update=True):
    phase, parts = memory.parts(config, run)
    estimated = sum(part.bytes for part in parts if part.name != "cuBLAS workspaces")
    measured = peak_of_step(config, run, update)
    assert abs(estimated / measured - 1) < 0.04, f"estimated {estimated:,.0f} ({phase}), measured {measured:,} bytes"


def peak_of_step(config, run, update):
    """The peak of live bytes in the second step. update: include its update."""
    model = build(config, run)
    optimizer = OnDevice(model, run.rule, grad_clip=1.0)
    tokens = torch.zeros(run.batch_size, config.block_size, dtype=torch.long)

    def step(update=True):
        for micro_step in range(run.micro_steps):
            if not run.sync_every_micro_batch:
                model.set_requires_gradient_sync(micro_step + 1 == run.micro_steps)
            model(tokens, tokens).backward()
            if run.micro_steps > 1 and run.sync_every_micro_batch:
                optimizer.accumulate()
        if update:
            optimizer.step(1e-3)

    step()
    state = (optimizer.masters, optimizer.states, optimizer.parameters, optimizer.sums)
    if config.tie_embeddings and not run.sync_every_micro_batch:
        # Watch is a mode, and under a mode autograd does not add the float32 gradients of a tied weight in place.
        before = sum(local(tensor.detach()).nbytes for tensor in tree_leaves(state))
        return before + peak_of_allocations(lambda: step(update))
    with Watch() as live:
        for tensor in tree_leaves(state):
            live.see(tensor.detach())
        step(update)
    return live.peak


def peak_of_allocations(step):
    """The most bytes that the CPU's allocator gives out during step(), beyond what it had given out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


# ----------------------------------------------------------------------------------------------------------------------
# Against arithmetic done by hand

N_1B = 1_235_814_400


@pytest.mark.parametrize(
    "dtype, block_size, runs",
    [("bfloat16", 2048, "triton"), ("float16", 4096, "triton"), ("bfloat16", 8192, "sdpa"), ("float32", 2048, "sdpa")],
)
def test_attention_is_counted_as_the_one_that_auto_runs(monkeypatch, dtype, block_size, runs):
    monkeypatch.setattr(kernels.attention, "activate_flash_attention_4", lambda: False)
    config = replace(LLAMA_1B, block_size=block_size)
    run = RunShape(64, dtype=dtype, activation_checkpointing="full", mlp_chunks=64)
    each = {}
    for name in ("auto", "triton", "sdpa"):
        in_backward = memory.Step(config, replace(run, attention=name)).block_in_backward()
        each[name] = by_name(in_backward)["its attention"]
    assert each["auto"] == each[runs] and each["triton"] < each["sdpa"], each


@pytest.mark.usefixtures("published_model")
def test_offload_moves_bytes_to_the_cpu():
    there, of_optimizer = (memory.peak_gib(LLAMA_1B, RunShape(8, offload=offload)) for offload in ("none", "optimizer"))
    assert there - of_optimizer == pytest.approx(10 * N_1B / GIB)  # both peak before there are gradients
    parts = by_name(memory_advice.cpu_parts(LLAMA_1B, RunShape(8, 2, offload="all")))
    assert parts["masters and optimizer states"] == 12 * N_1B and parts["gradient accumulators"] == 4 * N_1B
    assert parts["gradients"] == parts["compute weights"] == 2 * N_1B
    # FSDP's: the embedding in 2^29 / 2 bytes; qkv in 2^23, o 2^22, gate and up 2^25, down 2^24, two norms 2^11 each
    parts = by_name(memory_advice.cpu_parts(LLAMA_1B, sharded(2, 8, offload="all")))
    assert parts["gradients"] == 2**28 + 2**11 + 16 * (2**23 + 2**22 + 2**25 + 2**24 + 2 * 2**11)
    assert [memory_advice.pinned(n) for n in (1, 2, 3, 2**20, 2**20 + 0.5)] == [1, 2, 4, 2**20, 2**21]
    assert memory_advice.cpu_parts(LLAMA_1B, RunShape(8)) == []
    assert memory_advice.cpu_bytes_to_come(LLAMA_1B, RunShape(8, 2, offload="all")) == 4 * N_1B  # the accumulators
    (states, _) = memory_advice.cpu_parts(LLAMA_1B, sharded(4, 8, offload="optimizer"))
    assert states.bytes == 12 * N_1B / 4
    (part,) = memory_advice.cpu_parts(LLAMA_1B, RunShape(64, activation_checkpointing="full", offload_activations=True))
    assert part.bytes == 15 * 4096 * 64 * LLAMA_1B.block_size, "the last layer's stay on the GPU"


# ----------------------------------------------------------------------------------------------------------------------
# Against itself


def test_largest_batch_is_the_largest_though_a_smaller_one_may_not_fit():
    for gib in (10, 24, 141):
        batch = memory_advice.largest_batch(LLAMA_1B, RunShape(1), gib)
        assert batch == 0 or memory.peak_gib(LLAMA_1B, RunShape(batch)) <= gib
        assert memory.peak_gib(LLAMA_1B, RunShape(batch + 1)) > gib and (batch > 0) == (gib > 10)
    config = replace(LLAMA_1B, block_size=3000)
    run = RunShape(1, micro_steps=32, activation_checkpointing="full")
    fitting = [n for n in range(1, 40) if memory.peak_gib(config, replace(run, batch_size=n)) <= 22.5]
    assert memory_advice.largest_batch(config, run, 22.5) == max(fitting) > len(fitting), fitting


def test_a_cpu_is_asked_for_logits_only_where_it_holds_them(monkeypatch, capsys):
    config = replace(TINY, vocab_size=128_256, block_size=1024)
    asked = []
    monkeypatch.setattr(memory_advice, "missing_cpu_bytes", lambda n_bytes: asked.append(n_bytes) or 1)
    for which in ("all", "blocks"):
        with pytest.raises(SystemExit):
            memory_advice.require_memory(config, RunShape(8, dtype="float32", kernels=which), "cpu")
    assert "a step needs" in capsys.readouterr().err
    logits = 4 * 8 * config.block_size * config.vocab_size
    assert asked[0] < logits < asked[1] / 2


ADVISED = {  # settings of train.py, and one of the three that lower its peak most
    "batch_size=8": "--optimizer_bits=8",
    "batch_size=8 optimizer_bits=8": "--batch_size=4 --gradient_accumulation_steps=2",
    "batch_size=8 gradient_accumulation_steps=2 kernels=none attention=sdpa": "--kernels=all",
    "ranks=16 sharding=hybrid gradient_accumulation_steps=16": "--sharding=zero3",
    "ranks=4 gradient_accumulation_steps=16 sync_every_micro_batch=false": "--sync_every_micro_batch=true",
    "batch_size=3 activation_checkpointing=full": "--offload=optimizer",
    "batch_size=3 activation_checkpointing=selective cuda_graph=true": "--activation_checkpointing=full",
    "batch_size=8 activation_checkpointing=full compile=true": "--offload=optimizer",
    "batch_size=8 activation_checkpointing=selective optimizer=galore": "--activation_checkpointing=full",
    "batch_size=8 activation_checkpointing=full offload=all lora_rank=16": "--offload_activations=true",
    "batch_size=8 activation_checkpointing=full lora_rank=16": "--quantize_base=nf4",
    "batch_size=8 activation_checkpointing=full lora_rank=16 quantize_base=nf4": "--offload_activations=true",
    "batch_size=8 activation_checkpointing=full lora_rank=16 fp8=true": "--offload_activations=true",
    "batch_size=8 n_embd=576 n_head=9 n_kv_head=3 ffn_dim=1536": "--activation_checkpointing=full",
}


@pytest.mark.parametrize("words", ADVISED)
def test_advice_is_accepted_by_train_py_and_lowers_the_peak_by_what_it_says(words):
    named = {"block_size": 2048, "gradient_accumulation_steps": 1} | dict(word.split("=") for word in words.split())
    ranks = int(named.pop("ranks", 1))
    path = "config/llama31_8b.py" if ranks > 1 else "config/llama32_1b.py"
    config, run = estimate.resolve(path, ranks, named)
    for flags, changed in itertools.chain(*memory_advice.choices(config, run)):
        assert estimate.resolve(path, ranks, named, flags.split()) == (config, changed)
    found = dict(memory_advice.advice(config, run))
    assert ADVISED[words] in found and len(found) <= 3 and list(found.values()) == sorted(found.values())
    for flags, gib in found.items():
        then = estimate.resolve(path, ranks, named, flags.split())
        assert memory.peak_gib(*then) == gib < memory.peak_gib(config, run), flags


def test_out_of_memory_message_names_what_is_large_and_what_lowers_it(monkeypatch):
    monkeypatch.setattr(memory_advice, "card_gib", lambda device: 24)
    said = memory_advice.out_of_memory_message(LLAMA_1B, RunShape(8), "cuda:0")
    assert "about 28.5 GiB, the card has 24.0" in said and "saved activations 12.5" in said
    assert "--activation_checkpointing=selective  about 20.5 GiB instead of 28.5" in said
    least = RunShape(1, offload="all", activation_checkpointing="full", offload_activations=True)
    assert "no setting would lower it" in memory_advice.out_of_memory_message(LLAMA_1B, least, "cuda:0")


@pytest.mark.usefixtures("published_model")
def test_table_adds_up():
    lines = memory.parts_table(LLAMA_8B, sharded(4, micro_steps=2)).splitlines()
    gibs = [float(line.split(" GiB")[0].split()[-1]) for line in lines]
    assert abs(sum(gibs[:-1]) - gibs[-1]) < 0.005 * len(gibs)
    assert any("10 bytes x 8,030,261,248 parameters / 4 ranks" in line for line in lines)
    assert len({line.index(" GiB") for line in lines}) == 1
