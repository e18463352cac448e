"""What fits on a card, what would lower the peak, and what CPU memory must hold: applications of memory.py.

largest_batch(config, run, gib=24)
advice(config, run)                        # [('--activation_checkpointing=selective', 20.5), ...], peaks in GiB
cpu_parts(config, run)                     # with offload
"""

import math
from bisect import bisect_right
from dataclasses import replace

from kernels.execution import MLP_CHUNK
from model import LlamaConfig
from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit
from optimizers.on_disk import BUFFERS, PIECE
from runtime.distributed import local_world_size, stop
from runtime.memory import GIB, Part, RunShape, Step, counted, parts, peak_gib, state_bytes
from runtime.memory_stats import card_gib, missing_cpu_bytes


def largest_batch(config: LlamaConfig, run: RunShape, gib: float) -> int:
    """The largest batch_size whose peak is at most gib; 0 if not even one sequence fits."""

    def peak_of(batch_size):
        return peak_gib(config, replace(run, batch_size=batch_size))

    high = 1
    while peak_of(high) <= gib:
        high *= 2
    half = high // 2
    low = half + bisect_right(range(half + 1, high), gib, key=peak_of)
    # A larger batch may run in smaller groups: 3 and 6 sequences of 3,000 tokens of 1B fit into 22 GiB, 4 do not.
    most = low + min(low // 4, MLP_CHUNK // config.block_size) + 8
    return next(n for n in range(most, -1, -1) if n <= low or peak_of(n) <= gib)


# ----------------------------------------------------------------------------------------------------------------------
# CPU memory


def disk_parts(config: LlamaConfig, run: RunShape) -> list[Part]:
    """What a rank keeps in offload_dir."""
    return Step(config, run).masters_and_states() if run.offload_dir else []


def disk_bytes(config: LlamaConfig, run: RunShape) -> float:
    return sum(part.bytes for part in disk_parts(config, run))


def cpu_parts(config: LlamaConfig, run: RunShape) -> list[Part]:
    """What a rank keeps in CPU memory."""
    step = Step(config, run)
    parts = []
    if run.offload_dir:  # the pieces of the state on the drive pass through buffers
        piece = max(min(PIECE / each[1].numel(), 1) * state_bytes(*each, run) for each in step.parameters)
        parts.append(Part("buffers of offload_dir", BUFFERS * piece, f"{BUFFERS} x {piece:,.0f} bytes"))
    elif run.offload != "none":
        parts += step.masters_and_states()
    if run.offload != "none" and run.micro_steps > 1:
        parts += counted("gradient accumulators", "wide", (1, step.all), ranks=run.shard_ranks)
    if run.offload != "none":
        parts += offloaded(step, "gradients", "gradients")
    if run.offload == "all":
        parts += offloaded(step, "compute weights", "weights")
    if run.offload_activations:
        parts += step.saved(config.n_layer - 1)
    return parts


def offloaded(step: Step, name: str, kind: str) -> list[Part]:
    """The weights or gradients in CPU memory. FSDP with offload='all' pins each tensor itself."""
    run = step.run
    (part,) = counted(name, kind, (1, step.all), ranks=run.shard_ranks)
    if run.offload == "optimizer" or not run.fsdp:
        return [part]
    sizes = [p.nbytes / run.shard_ranks for _, p, _ in step.parameters if p.requires_grad or kind == "weights"]
    return [Part(name, sum(map(pinned, sizes)), f"{part.how}, each tensor rounded up to a power of two")]


def require_memory(config: LlamaConfig, run: RunShape, device: str) -> None:
    """End a run that needs more CPU memory than is free: the system would kill it without a message. Every rank must
    call it.
    """
    if device == "cpu":
        n_bytes = GIB * peak_gib(config, replace(run, triton=False, offload="none"))
        what = "a step needs"
        fix = "use smaller batches, a smaller model (config/baby_llama.py) or a GPU"
    else:
        n_bytes = sum(part.bytes for part in cpu_parts(config, run))
        what = "what is offloaded needs"
        fix = "offload less, shard, or set offload_dir"
    missing = missing_cpu_bytes(n_bytes)
    if missing > 0:
        needed = n_bytes * local_world_size / GIB
        available = needed - missing / GIB
        stop(f"{what} {needed:.1f} GiB of CPU memory, but only {available:.1f} GiB are available: {fix}")


def cpu_bytes_to_come(config: LlamaConfig, run: RunShape) -> float:
    """The bytes of cpu_parts that are not yet allocated before the first step."""
    later = ("gradient accumulators", "saved activations")
    return sum(part.bytes for part in cpu_parts(config, run) if part.name in later)


def pinned(n_bytes: float) -> int:
    """Bytes of PyTorch's own pinned memory for n_bytes: the next power of two. pinned_memory.py does not round."""
    return 1 << (math.ceil(n_bytes) - 1).bit_length()


# ----------------------------------------------------------------------------------------------------------------------
# What to change if it does not fit


def choices(config: LlamaConfig, run: RunShape) -> list[list[tuple[str, RunShape]]]:
    """What may lower the peak: train.py's flags, and the run with them. Each setting has a list, from its cheapest to
    its strongest value.
    """
    offload = ["none", "optimizer", "all"]
    if run.cuda_graph or not run.rule.supports_offload:  # as check_settings requires
        offload = [run.offload]
    elif run.quantize_base == "nf4" or (run.lora_rank and run.fp8):
        offload.remove("all")
    values_of = {
        "activation_checkpointing": ["none", "selective", "full"],
        "offload": offload,
        "kernels": ["none", "blocks", "all"],
        "sync_every_micro_batch": [False, True],
    }
    if run.activation_checkpointing != "none" and not (run.compile or run.cuda_graph):
        values_of["offload_activations"] = [False, True]
    if run.lora_rank and run.offload != "all":
        values_of["quantize_base"] = ["none", "nf4"]
    alternatives = []
    for name, values in values_of.items():
        stronger = values[values.index(getattr(run, name)) + 1 :]
        alternatives.append([(f"--{name}={str(value).lower()}", replace(run, **{name: value})) for value in stronger])
    in_blocks = config.n_embd % 256 == config.ffn_dim % 256 == 0  # as check_settings requires
    if type(run.rule) is AdamW and not run.lora_rank and in_blocks:
        alternatives.append([("--optimizer_bits=8", replace(run, rule=AdamW8bit(**vars(run.rule))))])
    if run.activation_checkpointing != "none" and Step(config, run).chunks == 1:
        alternatives.append([("--mlp_chunks=16", replace(run, mlp_chunks=16))])
    if run.copy_engines_gather:
        alternatives.append([("--copy_engines=false", replace(run, copy_engines=False))])
    if run.world_size > 1 and run.sharding != "zero3":
        copy_engines = run.copy_engines and run.world_size <= 8  # within a host
        zero3 = replace(run, sharding="zero3", shard_ranks=run.world_size, copy_engines=copy_engines)
        alternatives.append([("--sharding=zero3", zero3)])
    if run.batch_size % 2 == 0:
        half = replace(run, batch_size=run.batch_size // 2, micro_steps=2 * run.micro_steps)
        accumulation = half.micro_steps * run.world_size
        flags = f"--batch_size={half.batch_size} --gradient_accumulation_steps={accumulation}"
        alternatives.append([(flags, half)])
    return alternatives


def advice(config: LlamaConfig, run: RunShape) -> list[tuple[str, float]]:
    """The three settings that would lower the peak most, each alone: as flags, with the resulting peak in GiB.

    Each gets the cheapest value that saves at least two thirds of what the setting's strongest value saves.
    """
    now = peak_gib(config, run)
    helpful = []
    for values in choices(config, run):
        peaks = [(flags, peak_gib(config, changed)) for flags, changed in values]
        saved = max((now - gib for _, gib in peaks), default=0)
        if saved > 0:
            helpful.append(next((flags, gib) for flags, gib in peaks if now - gib >= 2 / 3 * saved))
    return sorted(helpful, key=lambda flags_and_gib: flags_and_gib[1])[:3]


def out_of_memory_message(config: LlamaConfig, run: RunShape, device: str) -> str:
    """What takes most memory in a run that ran out of it, and which settings would lower it."""
    now = peak_gib(config, run)
    phase, at_peak = parts(config, run)
    largest = sorted(at_peak, key=lambda part: -part.bytes)[:3]
    lines = [
        f"out of memory: this run takes about {now:.1f} GiB, the card has {card_gib(device):.1f}",
        f"most of it ({phase}): " + ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in largest),
    ]
    helpful = advice(config, run)
    if helpful:
        lines.append("what would lower it most, each alone:")
        width = max(len(flags) for flags, _ in helpful)
        lines += [f"  {flags:<{width}}  about {then:.1f} GiB instead of {now:.1f}" for flags, then in helpful]
    else:
        lines.append("no setting would lower it: use more GPUs, a shorter block_size or a smaller model")
    return "\n".join(lines)
