"""What fits on a card, from the configuration alone: needs no GPU, allocates nothing (runtime/memory.py).

    python bench.py estimate                                        config/llama32_1b.py on an RTX 4090
    python bench.py estimate --card=a100-40 --block_size=8192       or a number of GiB, --card=24
    python bench.py estimate --card=h100 --config=config/llama31_8b.py --ranks=8 --checkpointing=full --offload=none
    python bench.py estimate -- --gradient_accumulation_steps=1     any setting of train.py, after --

Prints the largest batch for each activation checkpointing and offload. Then, for the combination that is named, or the
first that fits, the parts at the peak with their arithmetic, at its largest batch or --batch_size.
"""

import contextlib
import functools
import json
import math
import re
import shlex
from types import SimpleNamespace
from typing import Literal

from benchmarks import cli, runner
from benchmarks.arms import SWEEP_FLAGS
from configurator import SettingError, preview
from model import LlamaConfig
from optimizers.rules import rule_of
from runtime import memory, memory_advice
from runtime.check_settings import find_problem
from runtime.memory import GIB, RunShape

# settings
card = "4090"  # its name, or GiB
config = "config/llama32_1b.py"  # the model
ranks = 1  # GPUs, in hosts of 8
block_size: int | None = None  # tokens of a sequence; none: the config's
batch_size: int | None = None  # to show the parts of; none: the largest that fits
checkpointing: Literal["any", "none", "selective", "full"] = "any"  # to show the parts of; any: the first that fits
offload: Literal["any", "none", "optimizer", "all"] = "any"  # likewise

CARDS = {  # GiB, as PyTorch reports them (total_memory): less than the makers' GB
    "3090": 23.7, "4090": 23.6, "5090": 31.3, "a10g": 22.0, "l4": 22.0, "l40s": 44.4, "a100-40": 39.4, "a100-80": 79.1,
    "h100": 79.1, "h200": 139.8, "b200": 178.3,
}  # fmt: skip
AMPERE = ("3090", "a10g", "a100-40", "a100-80")  # without float8
APART = ("3090", "4090", "5090", "a10g", "l4", "l40s")  # cannot reach each other's memory: no copy engines
preview_once = functools.cache(lambda *words: preview(cli.TRAIN, words))  # a table asks for the same many times


def outside_gib(run: RunShape) -> float:
    """For the CUDA context, NCCL and the allocator's reserve: see memory.py."""
    return 4.0 if run.cuda_graph else 1.5


def resolve(path: str, world_size: int, named: dict, flags=()) -> tuple[LlamaConfig, RunShape]:
    """The model of a config file and its RunShape on a rank of one host, under settings of train.py.

    named: settings by name; flags: as on a command line, which override them. SettingError if train.py would reject
    them together.
    """
    said = dict(preview_once(str(cli.ROOT / path), *(f"--{name}={value}" for name, value in named.items()), *flags))
    if said["vocab_size"] is None:
        raise SettingError(f"{path} leaves vocab_size to its dataset: add -- --vocab_size=257 (bytes), or name another")
    problem = find_problem(said, world_size)
    if problem:
        raise SettingError(problem)
    several_hosts = said["sharding"] == "hybrid" and world_size > 8  # of 8 GPUs
    said |= {
        "dtype": "bfloat16" if said["dtype"] == "auto" else said["dtype"],
        "copy_engines": said["copy_engines"] is not False,
        "world_size": world_size,
        "shard_ranks": math.gcd(world_size, 8) if several_hosts else world_size,
        "rule": rule_of(said),
        "micro_steps": said["gradient_accumulation_steps"] // world_size,
    }
    try:
        config, shape = (
            kind(**{n: said[n] for n in kind.__dataclass_fields__ if n in said}) for kind in (LlamaConfig, RunShape)
        )
        _ = shape.how  # refuses settings that do not work together
        memory.param_shapes(config, shape)  # fp8 and NF4 do not support every shape
    except ValueError as error:
        raise SettingError(str(error)) from None
    return config, shape


def run_of(row: dict) -> tuple[LlamaConfig, RunShape]:
    """The model and RunShape of a row of a sweep. For a peer only the model is right."""
    if row["arm"] not in SWEEP_FLAGS:
        return resolve(row["config"], 1, {"sharding": "zero3"})
    named = {"block_size": row["block"], "batch_size": row["batch"], "offload": row["offload"]}
    named |= {"gradient_accumulation_steps": row["ranks"], "activation_checkpointing": row["checkpointing"]}
    return resolve(row["config"], row["ranks"], named, [*SWEEP_FLAGS[row["arm"]], *shlex.split(row["flags"])])


def cpu_gib(config: LlamaConfig, shape: RunShape) -> float:
    """Pinned CPU memory of all ranks."""
    return shape.world_size * sum(part.bytes for part in memory_advice.cpu_parts(config, shape)) / GIB


def cpu_gib_of(row: dict) -> float:
    """What all ranks of a row hold in CPU memory: for a peer, FSDP2's float32 weights, gradients and two moments."""
    config, shape = run_of(row)
    if row["arm"] in SWEEP_FLAGS:
        return cpu_gib(config, shape)
    return 16 * memory.n_params(config) / GIB if row["offload"] == "all" else 0.0


def parse(argv: list[str]) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv, for_train_py=True)
    s.gib = card_gib(s.card)
    return s


def card_gib(card: str) -> float:
    if card.lower() in CARDS:
        return CARDS[card.lower()]
    number = re.fullmatch(r"(\d+(\.\d+)?) ?(gi?b)?", card.lower())
    if number and 0 < float(number[1]) < 1000:
        return float(number[1])
    raise SettingError(f"--card={card}: there are {', '.join(CARDS)}, or a number of GiB, as in --card=24")


def of_each(s: SimpleNamespace, named: dict, choices: dict, function) -> dict:
    """function(config, shape) for each key of choices, settings by name; skips what train.py would reject."""
    found = {}
    for key, settings in choices.items():
        with contextlib.suppress(SettingError):
            found[key] = function(*resolve(s.config, s.ranks, named | settings, s.flags))
    return found


def grid(found: dict, of_cpu: dict) -> str:
    """Batches by checkpointing (down) and offload (across), and the CPU memory of each offload."""
    rows = [["largest batch, --checkpointing", *(f"offload={offload}" for offload in runner.OFFLOAD)]]
    for at in runner.CHECKPOINTING:
        rows.append([f"  {at}", *(str(found.get((at, offload), "n/a") or "-") for offload in runner.OFFLOAD)])
    cells = (f"{of_cpu[offload]:.1f} GiB" if offload in of_cpu else "n/a" for offload in runner.OFFLOAD)
    rows.append(["CPU memory of all ranks", *cells])
    return "\n".join(f"{first:<42}" + "".join(f"{cell:>18}" for cell in cells) for first, *cells in rows)


def command(s: SimpleNamespace, named: dict) -> str:
    """The command that trains with these settings."""
    start = "python" if s.ranks == 1 else f"torchrun --standalone --nproc_per_node={s.ranks}"
    flags = (f"--{name}={value}" for name, value in named.items() if name != "copy_engines")
    return shlex.join([*start.split(), "train.py", s.config, *flags, *s.flags])


def place(checkpointing: str, offload: str) -> dict:
    return {"activation_checkpointing": checkpointing, "offload": offload}


def estimate(s: SimpleNamespace) -> tuple[str, dict]:
    """The estimate as text, and as numbers."""
    # full and none conflict with no other setting; the table has all combinations
    named = place("full" if s.checkpointing == "any" else s.checkpointing, "none" if s.offload == "any" else s.offload)
    named |= {"block_size": s.block_size} if s.block_size else {}
    _, shape = resolve(s.config, s.ranks, named, s.flags)
    if shape.fp8 and s.card.lower() in AMPERE:
        raise SettingError(f"fp8 needs RTX 40, L4, H100 or newer, not --card={s.card}")
    if s.card.lower() in APART or shape.shard_ranks > 8:  # a host has 8
        named["copy_engines"] = False
    outside = outside_gib(shape)
    gib = s.gib - outside
    by_cost = {(how, offload): place(how, offload) for offload in runner.OFFLOAD for how in runner.CHECKPOINTING}
    found = of_each(s, named, by_cost, functools.partial(memory_advice.largest_batch, gib=gib))
    as_named = [at for at in found if s.checkpointing in ("any", at[0]) and s.offload in ("any", at[1])]
    at = next((at for at in as_named if found[at]), as_named[-1])  # the first that fits
    named |= place(*at) | {"batch_size": s.batch_size or max(found[at], 1)}
    config, shape = resolve(s.config, s.ranks, named, s.flags)
    of_cpu = of_each(s, named, {offload: {"offload": offload} for offload in runner.OFFLOAD}, cpu_gib)
    peak = memory.peak_gib(config, shape)
    each = f"{s.ranks} ranks, each with " if s.ranks > 1 else ""
    micro_batches = f", {shape.micro_steps} micro-batches per step" if shape.micro_steps > 1 else ""
    lines = [
        f"{s.config}: {memory.n_params(config):,} parameters, "
        f"sequences of {config.block_size:,} tokens{micro_batches}, {shape.dtype}",
        f"{each}card={s.card}: {s.gib:.1f} GiB - {outside} for the CUDA context and the allocator's reserve = "
        f"{gib:.1f} GiB",
        "", grid(found, of_cpu), "",
        f"{command(s, named)}: {peak:.1f} GiB, it {'fits' if peak <= gib else 'does not fit'}",
        memory.table(config, shape),
    ]  # fmt: skip
    for parts, where in ((memory_advice.cpu_parts, "the CPU's memory"), (memory_advice.disk_parts, "offload_dir")):
        if kept := parts(config, shape):
            lines += ["", f"in {where}, of each rank:"]
            lines += [f"{part.name:<28} {part.bytes / GIB:6.2f} GiB  {part.how}" for part in kept]
    result = {
        "config": s.config, "card_gib": s.gib, "usable_gib": gib, "ranks": s.ranks, "block_size": config.block_size,
        "largest_batch": {" ".join(at): n for at, n in found.items()}, "cpu_gib": cpu_gib(config, shape),
        "disk_gib": s.ranks * memory_advice.disk_bytes(config, shape) / GIB,
        **place(*at), "batch_size": shape.batch_size, "peak_gib": peak, "fits": peak <= gib,
    }  # fmt: skip
    return "\n".join(lines), result


def main(argv: list[str]) -> None:
    text, result = estimate(parse(argv))
    print(text)
    print(json.dumps(result))
