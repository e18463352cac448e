"""What fits in a card, from the configuration alone: no GPU is needed, nothing is allocated (memory.py).

    python bench.py estimate                                      config/llama32_1b.py on an RTX 4090
    python bench.py estimate card=a100-40 block_size=8192         or card=24, GiB
    python bench.py estimate config=config/llama31_8b.py card=h100 ranks=8 checkpointing=full offload=none batch_size=2
    python bench.py estimate --gradient_accumulation_steps=1      any setting of train.py
    python bench.py estimate check                                beside the peaks that the sweeps have measured

The largest batch for each activation checkpointing and offload; then, for one of them, the parts at the peak with their
arithmetic: for the one that the words name, or the first that fits, and its largest batch, or batch_size=...
"""

import contextlib
import itertools
import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import report, step
from configurator import SettingError, preview, read, spell
from model import LlamaConfig
from runtime import memory, memory_advice
from runtime.check_settings import find_problem
from runtime.memory import GIB, RunShape

CARDS = {  # GiB, as PyTorch reports them (total_memory): less than the makers' GB
    "3090": 23.7, "4090": 23.6, "5090": 31.3, "a10g": 22.0, "l4": 22.0, "l40s": 44.4, "a100-40": 39.4, "a100-80": 79.1,
    "h100": 79.1, "h200": 139.8, "b200": 178.3,
}  # fmt: skip
APART = ("3090", "4090", "5090", "a10g", "l4", "l40s")  # do not reach each other's memory: no copy engines
OUTSIDE_GIB = 1.5  # for the CUDA context, NCCL and what the allocator holds in reserve: see memory.py
OFFLOAD = ["none", "optimizer", "all"]


# ----------------------------------------------------------------------------------------------------------------------
# Words


def parse(words: list[str]) -> dict:
    """The options; ValueError with a sentence for a slip."""
    words = joined(words)
    flags = read_flags(word for word in words if word.startswith("--"))
    refuse_words(flags, "the table has several of them; to see one's parts")
    for name in ("card", "config", "ranks", "checkpointing"):
        if name in flags:
            raise ValueError(f"--{name}: it is no setting of train.py, say {name}=...")
    for word in words:
        if word.lower() in CARDS or word.endswith(".py") and "=" not in word:
            raise ValueError(f"Unknown word {word}: say {'config' if word.endswith('.py') else 'card'}={word}")
    options = {key: [] for key in ("block_size", "batch_size", "checkpointing", "offload")}
    options |= {"config": [step.CONFIG], "card": ["4090"], "ranks": ["1"]}
    choices = {"checkpointing": step.CHECKPOINTING, "offload": OFFLOAD}
    words = [word for word in words if not word.startswith("--")]
    _, options = step.read_words(words, options, [], choices)
    options = {key: ",".join(values) for key, values in options.items()}
    for key in ("block_size", "batch_size", "ranks"):
        options[key] = step.whole(key, options[key]) if options[key] else None
    return options | {"flags": flags, "gib": card_gib(options["card"]), "config": config_path(options["config"])}


def joined(words: list[str]) -> list[str]:
    """--name value as --name=value: no other word here is without a =."""
    found = []
    for word in words:
        if found and re.fullmatch(r"--\w+", found[-1]) and not word.startswith("--") and "=" not in word:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def read_flags(flags) -> dict:
    """--name=value, as train.py reads them."""
    pairs = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name: read(text) if equals else True for name, equals, text in pairs}


def config_path(path: str) -> str:
    """One that is in the user's folder alone is made absolute: what reads it runs in the repository."""
    elsewhere = Path(path).is_file() and not (report.ROOT / path).is_file()
    return str(Path(path).absolute()) if elsewhere else path


def refuse_words(flags: dict, why: str) -> None:
    """Settings of train.py that are words of these benchmarks: as flags they would contradict the words."""
    for name in ("batch_size", "block_size", "activation_checkpointing", "offload"):
        if name in flags:
            raise ValueError(f"--{name}: {why} say {name.removeprefix('activation_')}=...")


def card_gib(card: str) -> float:
    card_name = card.lower()
    if card_name in CARDS:
        return CARDS[card_name]
    number = re.fullmatch(r"(\d+(\.\d+)?) ?(gi?b)?", card_name)
    if number and 0 < float(number[1]) < 1000:
        return float(number[1])
    sizes = [name for name in CARDS if name.startswith(f"{card_name}-")]
    hint = f". Did you mean {' or '.join(sizes)}?" if sizes else step.did_you_mean(card_name, CARDS)
    raise ValueError(f"card={card}: there are {', '.join(CARDS)}, or a number of GiB, as in card=24{hint}")


def situation(path: str, world_size: int, settings: dict) -> tuple[LlamaConfig, RunShape]:
    """The model of a config file and what a rank of one host does with it, under some of train.py's settings.

    ValueError where train.py would not take them.
    """
    there = report.ROOT / path if (report.ROOT / path).is_file() else path
    flags = [f"--{name}={value}" for name, value in settings.items()]
    try:
        said = preview(report.ROOT / "train.py", [str(there), *flags])
    except SettingError as error:
        raise ValueError(str(error)) from None
    if said["vocab_size"] is None:
        raise ValueError(f"{path} leaves vocab_size to its dataset: say --vocab_size=...")
    refuse(said, world_size)
    if said["shard_ranks"] is None:  # train.py's: all of them, or those of one host, which has 8
        one_host = world_size if world_size <= 8 else math.gcd(world_size, 8)
        said["shard_ranks"] = one_host if said["sharding"] == "hybrid" else world_size
    said["dtype"] = "bfloat16" if said["dtype"] == "auto" else said["dtype"]
    said["copy_engines"] = said["copy_engines"] is not False
    said |= {"world_size": world_size, "micro_steps": said["gradient_accumulation_steps"] // world_size}
    config, plan = ({name: said[name] for name in kind.__dataclass_fields__} for kind in (LlamaConfig, RunShape))
    return LlamaConfig(**config), RunShape(**plan)


def refuse(said: dict, world_size: int) -> None:
    """What train.py's setup would not take, of the settings that memory depends on."""
    problem = find_problem(said, world_size)
    if problem:
        raise ValueError(problem)
    if said["copy_engines"] and world_size > 1 and (said["shard_ranks"] == 1 or said["offload"] == "all"):
        raise ValueError("copy_engines needs a model's GPUs on one host, and no offload=all")


# ----------------------------------------------------------------------------------------------------------------------
# Answers


def largest(options: dict, settings: dict, gib: float) -> dict[tuple[str, str], int]:
    """The largest batch_size for each (activation_checkpointing, offload); 0 where no sequence fits.

    What train.py would not take beside the other settings is left out: offload_activations is there for full alone.
    """
    found = {}
    for checkpointing, offload in itertools.product(step.CHECKPOINTING, OFFLOAD):
        with contextlib.suppress(ValueError):
            named = {"activation_checkpointing": checkpointing, "offload": offload}
            at = situation(options["config"], options["ranks"], settings | named)
            found[checkpointing, offload] = memory_advice.largest_batch(*at, gib)
    return found


def chosen(options: dict, found: dict) -> tuple[str, str]:
    """The checkpointing and offload whose parts are shown: as the words say, the first that fits."""
    fitting = [at for at in found if options["checkpointing"] in ("", at[0]) and options["offload"] in ("", at[1])]
    by_cost = sorted(fitting, key=lambda at: (OFFLOAD.index(at[1]), step.CHECKPOINTING.index(at[0])))
    return next((at for at in by_cost if found[at]), by_cost[-1])


def grid(found: dict, cpu_gib: dict) -> str:
    """Batches by checkpointing (down) and offload (across), and the CPU memory of each offload."""
    rows = [["largest batch, activation_checkpointing", *(f"offload={offload}" for offload in OFFLOAD)]]
    for at in step.CHECKPOINTING:
        rows.append([f"  {at}", *(str(found.get((at, offload), "n/a") or "-") for offload in OFFLOAD)])
    rows.append(["CPU memory of all ranks", *(f"{cpu_gib[offload]:.1f} GiB" for offload in OFFLOAD)])
    return "\n".join(f"{first:<42}" + "".join(f"{cell:>18}" for cell in cells) for first, *cells in rows)


def cpu_gib(config: LlamaConfig, plan: RunShape) -> float:
    """Pinned CPU memory of all ranks."""
    return plan.world_size * sum(part.bytes for part in memory_advice.cpu_parts(config, plan)) / GIB


def command(options: dict, checkpointing: str, offload: str, batch: int) -> str:
    """What one types to train so."""
    settings = {"activation_checkpointing": checkpointing, "offload": offload, "batch_size": batch}
    settings |= ({"block_size": options["block_size"]} if options["block_size"] else {}) | options["flags"]
    n_ranks = options["ranks"]
    try:
        situation(options["config"], n_ranks, settings)
    except ValueError:  # the config has the one setting that was counted as off
        settings["cuda_graph"] = False
    start = "python" if n_ranks == 1 else f"torchrun --standalone --nproc_per_node={n_ranks}"
    flags = (f"--{name}={value if isinstance(value, str) else spell(value)}" for name, value in settings.items())
    return shlex.join([*start.split(), "train.py", options["config"], *flags])


def estimate(options: dict) -> tuple[str, dict]:
    """What one reads, and the same as numbers."""
    # full and none: no other setting is at odds with them; the table has them all
    flags = {"activation_checkpointing": options["checkpointing"] or "full", "offload": options["offload"] or "none"}
    flags |= {"cuda_graph": False} | options["flags"]  # one that the config has would bar offload from the table
    flags |= {"block_size": options["block_size"]} if options["block_size"] else {}
    config, plan = situation(options["config"], options["ranks"], flags)
    if options["card"].lower() in APART or plan.shard_ranks > 8:  # a host has 8
        flags = {"copy_engines": False} | flags
        config, plan = situation(options["config"], options["ranks"], flags)
    gib = options["gib"] - OUTSIDE_GIB
    found = largest(options, flags, gib)
    checkpointing, offload = chosen(options, found)
    batch = options["batch_size"] or max(found[checkpointing, offload], 1)
    plan = replace(plan, batch_size=batch, offload=offload, activation_checkpointing=checkpointing)
    on_cpu = {name: cpu_gib(config, replace(plan, offload=name)) for name in OFFLOAD}
    block, root = memory.n_params(config)
    n_params, peak = root + config.n_layer * block, memory.peak_gib(config, plan)
    each = f"{plan.world_size} ranks, each with " if plan.world_size > 1 else ""
    micro_batches = f", {plan.micro_steps} micro-batches a step" if plan.micro_steps > 1 else ""
    tokens = f"sequences of {config.block_size:,} tokens{micro_batches}"
    lines = [
        f"{options['config']}: {n_params:,} parameters, {tokens}, {plan.dtype}",
        f"{each}card={options['card']}: {options['gib']:.1f} GiB - {OUTSIDE_GIB} for the CUDA context and the "
        f"allocator's reserve = {gib:.1f} GiB",
        "",
        grid(found, on_cpu),
        "",
        f"{command(options, checkpointing, offload, batch)}: {peak:.1f} GiB, it "
        + ("fits" if peak <= gib else "does not fit"),
        memory.table(config, plan),
    ]
    parts = memory_advice.cpu_parts(config, plan)
    if parts:
        lines += ["", "in the CPU's memory, of each rank:"]
        lines += [f"{part.name:<28} {part.bytes / GIB:6.2f} GiB  {part.how}" for part in parts]
    result = {
        "config": options["config"], "card_gib": options["gib"], "usable_gib": gib, "ranks": plan.world_size,
        "block_size": config.block_size, "largest_batch": {" ".join(at): n for at, n in found.items()},
        "cpu_gib": on_cpu[offload], "activation_checkpointing": checkpointing, "offload": offload,
        "batch_size": batch, "peak_gib": peak, "fits": peak <= gib,
    }  # fmt: skip
    return "\n".join(lines), result


def main(words: list[str]) -> None:
    if words and words[0] == "check":
        from benchmarks import swept

        swept.check(words[1:])
        return
    try:
        text, result = estimate(parse(words))
    except ValueError as error:
        sys.exit(str(error))
    print(text)
    print(json.dumps(result))
