"""What fits in a card, from the configuration alone: no GPU is needed, nothing is allocated (runtime/memory.py).

    python bench.py estimate                                        config/llama32_1b.py on an RTX 4090
    python bench.py estimate --card=a100-40 --block_size=8192       or --card=24, GiB
    python bench.py estimate --card=h100 --config=config/llama31_8b.py --ranks=8 --checkpointing=full --offload=none
    python bench.py estimate -- --gradient_accumulation_steps=1     any setting of train.py, behind --
    python bench.py estimate --check                                beside the peaks that the sweeps have measured

The largest batch for each activation checkpointing and offload; then, for one of them, the parts at the peak with their
arithmetic: for the one that is named, or the first that fits, and its largest batch, or --batch_size.
"""

import contextlib
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner
from benchmarks.run_shape import cpu_gib, resolve, run_of
from configurator import SettingError, did_you_mean
from runtime import memory, memory_advice
from runtime.memory import GIB

# settings
card = "4090"  # its name, or GiB
config = "config/llama32_1b.py"  # the model
ranks = 1  # GPUs, in hosts of 8
block_size: int | None = None  # tokens of a sequence; none: the config's
batch_size: int | None = None  # whose parts are shown; none: the largest that fits
checkpointing: Literal["any", "none", "selective", "full"] = "any"  # whose parts are shown; any: the first that fits
offload: Literal["any", "none", "optimizer", "all"] = "any"  # likewise
check = False  # instead: the estimates beside the peaks in records; ends with 1 where one is off by more than 5%
records = ",".join(str(record.RECORDS / f"{name}.json") for name in ("sweep", "study", "study_8b"))  # of check

CARDS = {  # GiB, as PyTorch reports them (total_memory): less than the makers' GB
    "3090": 23.7, "4090": 23.6, "5090": 31.3, "a10g": 22.0, "l4": 22.0, "l40s": 44.4, "a100-40": 39.4, "a100-80": 79.1,
    "h100": 79.1, "h200": 139.8, "b200": 178.3,
}  # fmt: skip
APART = ("3090", "4090", "5090", "a10g", "l4", "l40s")  # do not reach each other's memory: no copy engines
OUTSIDE_GIB = 1.5  # for the CUDA context, NCCL and what the allocator holds in reserve: see memory.py


def parse(argv: list[str]) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv, for_train_py=True)
    cli.at_least_one(s, "ranks", "block_size", "batch_size")
    cli.refuse_flags(s, ("batch_size", "block_size", "activation_checkpointing", "offload"))
    s.gib, s.config = card_gib(s.card), cli.config_path(s.config)
    return s


def card_gib(card: str) -> float:
    card_name = card.lower()
    if card_name in CARDS:
        return CARDS[card_name]
    number = re.fullmatch(r"(\d+(\.\d+)?) ?(gi?b)?", card_name)
    if number and 0 < float(number[1]) < 1000:
        return float(number[1])
    sizes = [name for name in CARDS if name.startswith(f"{card_name}-")]
    near = f". Did you mean {' or '.join(sizes)}?" if sizes else did_you_mean(card_name, {name: name for name in CARDS})
    raise SettingError(f"--card={card}: there are {', '.join(CARDS)}, or a number of GiB, as in --card=24{near}")


# ----------------------------------------------------------------------------------------------------------------------
# The answer


def largest(s: SimpleNamespace, named: dict, gib: float) -> dict[tuple[str, str], int]:
    """The largest batch_size for each (activation_checkpointing, offload); 0 where no sequence fits.

    What train.py would not take beside the other settings is left out: offload_activations is there for full alone.
    """
    found = {}
    for checkpointing, offload in itertools.product(runner.CHECKPOINTING, runner.OFFLOAD):
        with contextlib.suppress(SettingError):
            both = {"activation_checkpointing": checkpointing, "offload": offload}
            found[checkpointing, offload] = memory_advice.largest_batch(
                *resolve(s.config, s.ranks, named | both, s.flags), gib
            )
    return found


def chosen(s: SimpleNamespace, found: dict) -> tuple[str, str]:
    """The checkpointing and offload whose parts are shown: as named, the first that fits."""
    fitting = [at for at in found if s.checkpointing in ("any", at[0]) and s.offload in ("any", at[1])]
    by_cost = sorted(fitting, key=lambda at: (runner.OFFLOAD.index(at[1]), runner.CHECKPOINTING.index(at[0])))
    return next((at for at in by_cost if found[at]), by_cost[-1])


def grid(found: dict, of_cpu: dict) -> str:
    """Batches by checkpointing (down) and offload (across), and the CPU memory of each offload."""
    rows = [["largest batch, activation_checkpointing", *(f"offload={offload}" for offload in runner.OFFLOAD)]]
    for at in runner.CHECKPOINTING:
        rows.append([f"  {at}", *(str(found.get((at, offload), "n/a") or "-") for offload in runner.OFFLOAD)])
    rows.append(["CPU memory of all ranks", *(of_cpu.get(offload, "n/a") for offload in runner.OFFLOAD)])
    return "\n".join(f"{first:<42}" + "".join(f"{cell:>18}" for cell in cells) for first, *cells in rows)


def command(s: SimpleNamespace, named: dict) -> str:
    """What one types to train so."""
    named |= {"block_size": s.block_size} if s.block_size else {}
    try:
        resolve(s.config, s.ranks, named, s.flags)
    except SettingError:  # the config has the one setting that was counted as off
        named["cuda_graph"] = "false"
    start = "python" if s.ranks == 1 else f"torchrun --standalone --nproc_per_node={s.ranks}"
    flags = (f"--{name}={value}" for name, value in named.items())
    return shlex.join([*start.split(), "train.py", s.config, *flags, *s.flags])


def estimate(s: SimpleNamespace) -> tuple[str, dict]:
    """What one reads, and the same as numbers."""
    # full and none: no other setting is at odds with them; the table has them all
    either = {"checkpointing": "full", "offload": "none"}
    both = {name: default if getattr(s, name) == "any" else getattr(s, name) for name, default in either.items()}
    named = {"activation_checkpointing": both["checkpointing"], "offload": both["offload"]}
    named["cuda_graph"] = False  # one that the config has would bar offload from the table
    named |= {"block_size": s.block_size} if s.block_size else {}
    _, shape = resolve(s.config, s.ranks, named, s.flags)
    if s.card.lower() in APART or shape.shard_ranks > 8:  # a host has 8
        named["copy_engines"] = False
    gib = s.gib - OUTSIDE_GIB
    found = largest(s, named, gib)
    checkpointing, offload = chosen(s, found)
    batch = s.batch_size or max(found[checkpointing, offload], 1)
    named |= {"activation_checkpointing": checkpointing, "offload": offload, "batch_size": batch}
    config, shape = resolve(s.config, s.ranks, named, s.flags)
    of_cpu = {}
    for name in runner.OFFLOAD:
        with contextlib.suppress(SettingError):
            gib_of_cpu = cpu_gib(*resolve(s.config, s.ranks, named | {"offload": name}, s.flags))
            of_cpu[name] = f"{gib_of_cpu:.1f} GiB"
    block, root = memory.n_params(config)
    n_params, peak = root + config.n_layer * block, memory.peak_gib(config, shape)
    each = f"{s.ranks} ranks, each with " if s.ranks > 1 else ""
    micro_batches = f", {shape.micro_steps} micro-batches a step" if shape.micro_steps > 1 else ""
    typed = command(s, {"activation_checkpointing": checkpointing, "offload": offload, "batch_size": batch})
    fits = peak <= gib
    lines = [
        f"{s.config}: {n_params:,} parameters, sequences of {config.block_size:,} tokens{micro_batches}, {shape.dtype}",
        f"{each}card={s.card}: {s.gib:.1f} GiB - {OUTSIDE_GIB} for the CUDA context and the allocator's reserve = "
        f"{gib:.1f} GiB",
        "", grid(found, of_cpu), "",
        f"{typed}: {peak:.1f} GiB, it {'fits' if fits else 'does not fit'}",
        memory.table(config, shape),
    ]  # fmt: skip
    parts = memory_advice.cpu_parts(config, shape)
    if parts:
        lines += ["", "in the CPU's memory, of each rank:"]
        lines += [f"{part.name:<28} {part.bytes / GIB:6.2f} GiB  {part.how}" for part in parts]
    result = {
        "config": s.config, "card_gib": s.gib, "usable_gib": gib, "ranks": s.ranks, "block_size": config.block_size,
        "largest_batch": {" ".join(at): n for at, n in found.items()}, "cpu_gib": cpu_gib(config, shape),
        "activation_checkpointing": checkpointing, "offload": offload, "batch_size": batch, "peak_gib": peak,
        "fits": fits,
    }  # fmt: skip
    return "\n".join(lines), result


# ----------------------------------------------------------------------------------------------------------------------
# The check


def check_records(names: list[str]) -> None:
    """runtime/memory.py's estimates, as they are now, beside the peaks of the sweeps' records."""
    points = []
    for path in map(Path, names):
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            sys.exit(f"{path} does not exist")
        except (OSError, ValueError):  # a folder, no JSON
            found = None
        if not isinstance(found, dict) or not set(compare.KINDS) <= found.keys():
            sys.exit(f"{path} is no record of a sweep")
        points += compare.deviations(estimated_anew(found))
    if not points:
        sys.exit(f"nothing to check: there is no point of nanocria in {', '.join(names)}")
    for row, deviation in points:
        place = " ".join(str(value) for value in compare.values(row, compare.SWEEP_PLACE) if value)
        print(f"{row['peak_gib']:7.2f} GiB, estimated {row['estimated_gib']:7.2f}, {deviation:+.1%}: {place}")
    worst = max(abs(deviation) for _, deviation in points)
    print(json.dumps({"points": len(points), "worst": worst, "within_5_percent": worst <= 0.05}))
    sys.exit(0 if worst <= 0.05 else 1)


def estimated_anew(found: dict) -> dict:
    """The record of a sweep with today's estimate for each measured point of ours."""
    return {
        kind: [
            row | ({"estimated_gib": memory.peak_gib(*run_of(row))} if row["arm"] in trainers.SWEEP_FLAGS else {})
            for row in compare.done(found[kind])
        ]
        for kind in compare.KINDS
    }


def main(argv: list[str]) -> None:
    s = parse(argv)
    if s.check:
        check_records(s.records.split(","))
    text, result = estimate(s)
    print(text)
    print(json.dumps(result))
