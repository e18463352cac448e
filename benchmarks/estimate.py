"""What fits on a card, from the configuration alone: needs no GPU, allocates nothing (runtime/memory.py).

    python bench.py estimate                                        config/llama32_1b.py on an RTX 4090
    python bench.py estimate --card=4060ti-16                       or a number of GiB, --card=24
    python bench.py estimate --card=a100-40 --block_size=8192
    python bench.py estimate --card=h100 --config=config/llama31_8b.py --ranks=8 --checkpointing=full --offload=none
    python bench.py estimate -- --gradient_accumulation_steps=1     any setting of train.py, after --

Prints the largest batch for each activation checkpointing and offload. Then the recommended command, or the one for
the combination that is named, below the parts of its peak with their arithmetic. Its steps have as many sequences as
the config's.
"""

import contextlib
import math
import re
import shlex
from dataclasses import replace
from itertools import product
from json import dumps
from types import SimpleNamespace
from typing import Literal

from benchmarks.settings import CHECKPOINTING, ROOT, read_settings
from benchmarks.tables import table
from configurator import SettingError, preview
from model import LlamaConfig
from optimizers import rule_of
from optimizers.adamw import AdamW
from runtime import memory, memory_advice
from runtime.check_settings import find_problem, limit_problem
from runtime.memory import GIB, RunShape

# settings
card = "4090"  # its name, or GiB
config = "config/llama32_1b.py"  # the model
ranks = 1  # GPUs, in hosts of at most 8
block_size: int | None = None  # tokens of a sequence; none: the config's
batch_size: int | None = None  # of the command; none: the largest that fits and divides a step's sequences
checkpointing: Literal["any", "none", "selective", "full"] = "any"  # of the command; any: what is recommended
offload: Literal["any", "none", "optimizer", "all"] = "any"  # likewise
json = False  # print the table and the command as JSON instead

CARDS = {  # GiB, as PyTorch reports them (total_memory): less than the makers' GB
    "3060": 11.6, "3070": 7.7, "3080": 9.7, "3090": 23.7, "4060": 7.6, "4060ti": 7.6, "4060ti-16": 15.6, "4070": 11.6,
    "4080": 15.6, "4090": 23.6, "5070": 11.5, "5080": 15.4, "5090": 31.3, "t4": 14.5, "v100": 15.7, "a4000": 15.6,
    "a10g": 22.0, "l4": 22.0, "l40s": 44.4, "a100-40": 39.4, "a100-80": 79.1, "h100": 79.1, "h200": 139.8,
    "b200": 178.3,
}  # fmt: skip
# Tokens of a micro-batch that keeps an H200 busy, with 1B: it reaches 89% of its best speed (records/sweep.json); with
# offload, where each micro-batch moves all gradients or weights, 71% (records/study.json)
BUSY_TOKENS = {"none": 4096, "optimizer": 32768, "all": 32768}


def outside_gib(run: RunShape) -> float:
    """For the CUDA context, NCCL and the allocator's reserve: see memory.py."""
    return 4.0 if run.cuda_graph else 1.5


def resolve(path: str, world_size: int, named: dict, flags=()) -> tuple[LlamaConfig, RunShape]:
    """The model of a config file and its RunShape on a rank of one host, under settings of train.py.

    named: settings by name; flags: as on a command line, which override them. SettingError if train.py would reject
    them together.
    """
    argv = [str(ROOT / path), *(f"--{name}={value}" for name, value in named.items()), *flags]
    settings = preview(ROOT / "train.py", argv)
    if settings["vocab_size"] is None:
        raise SettingError(f"{path} leaves vocab_size to its dataset: add -- --vocab_size=2048 (pystdlib's)")
    problem = find_problem(settings, world_size)
    if problem:
        raise SettingError(problem)
    several_hosts = settings["sharding"] == "hybrid" and world_size > 8  # of 8 GPUs
    shard_ranks = math.gcd(world_size, 8) if several_hosts else world_size
    try:
        model = LlamaConfig(**{name: settings[name] for name in LlamaConfig.__dataclass_fields__})
        shape = RunShape.of(
            settings,
            dtype="bfloat16" if settings["dtype"] == "auto" else settings["dtype"],
            copy_engines=settings["copy_engines"] is not False and shard_ranks <= 8,  # within a host
            micro_steps=settings["gradient_accumulation_steps"] // world_size,
            world_size=world_size,
            shard_ranks=shard_ranks,
            rule=rule_of(settings),
        )
        _ = shape.how  # refuses settings that do not work together
        memory.param_shapes(model, shape)  # fp8 and NF4 do not support every shape
    except ValueError as error:
        raise SettingError(str(error)) from None
    return model, shape


def cpu_gib(model: LlamaConfig, shape: RunShape) -> float:
    """Pinned CPU memory of all ranks."""
    return shape.world_size * sum(part.bytes for part in memory_advice.cpu_parts(model, shape)) / GIB


def launcher(ranks: int) -> str:
    """What starts train.py on so many GPUs. Of several hosts, with at most 8 each, each runs this command."""
    if ranks == 1:
        return "python"
    if ranks <= 8:
        return f"torchrun --standalone --nproc_per_node={ranks}"
    per_host = math.gcd(ranks, 8)
    hosts = f"--nnodes={ranks // per_host} --nproc_per_node={per_host}"
    return f"torchrun {hosts} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"


def recommended(rows: list[dict], block_size: int) -> dict:
    """The cheapest row whose largest batch keeps a GPU busy; if there is none, the leanest with the largest batch."""
    for row in rows:
        if row["largest_batch"] * block_size >= BUSY_TOKENS[row["offload"]]:
            return row
    return max(reversed(rows), key=lambda row: row["largest_batch"])


def gib_of(card: str) -> float:
    """The memory of a card, by its name or as a number of GiB."""
    name = card.lower().replace(" ", "").removeprefix("rtx")
    if name not in CARDS and not re.fullmatch(r"\d{1,3}(\.\d+)?", name):
        raise SettingError(f"--card={card}: there are {', '.join(CARDS)}, or GiB, as in --card=24")
    return CARDS.get(name) or float(name)


def largest_batches(s: SimpleNamespace, named: dict, usable_gib: float) -> list[dict]:
    """A row for each combination that train.py accepts, the cheapest first."""
    rows = []
    for offload, checkpointing in product(("none", "optimizer", "all"), CHECKPOINTING):
        row = {"activation_checkpointing": checkpointing, "offload": offload}
        with contextlib.suppress(SettingError):
            model, shape = resolve(s.config, s.ranks, named | row, s.flags)
            row["largest_batch"] = memory_advice.largest_batch(model, shape, usable_gib)
            row["cpu_gib"] = cpu_gib(model, replace(shape, batch_size=max(row["largest_batch"], 1)))
            rows.append(row)
    return rows


def batch_settings(s: SimpleNamespace, largest_batch: int, sequences: int) -> dict:
    """batch_size, and the number of micro-batches with which a step has as many sequences on each rank."""
    if s.batch_size or any(flag.startswith("--gradient_accumulation_steps") for flag in s.flags):
        return {"batch_size": s.batch_size or max(largest_batch, 1)}
    batch = max(n for n in range(1, max(largest_batch, 1) + 1) if sequences % n == 0)
    return {"batch_size": batch, "gradient_accumulation_steps": s.ranks * sequences // batch}


def estimate(argv: list[str]) -> tuple[str, LlamaConfig, RunShape]:
    """The estimate as text, and the run that it recommends."""
    s = read_settings(globals(), argv, for_train_py=True)
    problem = limit_problem(vars(s))
    if problem:
        raise SettingError(problem)
    total = gib_of(s.card)
    named = {"block_size": s.block_size} if s.block_size is not None else {}
    safe = {  # full and none conflict with no other setting
        "activation_checkpointing": "full" if s.checkpointing == "any" else s.checkpointing,
        "offload": "none" if s.offload == "any" else s.offload,
    }
    model, shape = resolve(s.config, s.ranks, named | safe, s.flags)
    sequences = shape.batch_size * shape.micro_steps  # of a step, on each rank
    outside = outside_gib(shape)
    rows = largest_batches(s, named, total - outside)
    asked = [row for row in rows if s.checkpointing in ("any", row["activation_checkpointing"])]
    asked = [row for row in asked if s.offload in ("any", row["offload"])]
    chosen = recommended(asked, model.block_size)
    named |= {name: chosen[name] for name in ("activation_checkpointing", "offload")}
    named |= batch_settings(s, chosen["largest_batch"], sequences)
    model, shape = resolve(s.config, s.ranks, named, s.flags)
    command_line = ["train.py", s.config, *(f"--{name}={value}" for name, value in named.items()), *s.flags]
    command = f"{launcher(s.ranks)} {shlex.join(command_line)}"
    peak = memory.peak_gib(model, shape)
    fits = peak <= total - outside
    if s.json:
        result = {"card_gib": total, "rows": rows, "command": command, "peak_gib": peak, "fits": fits}
        return dumps(result), model, shape
    verdict = f"recommended, with a peak of {peak:.1f} GiB"
    if not fits:
        moments_on_gpu = type(shape.rule) is AdamW and not shape.lora_rank and shape.offload == "none"
        bits = "-- --optimizer_bits=8, " if moments_on_gpu else ""
        advice = f"{bits}a shorter --block_size or a smaller --config may"
        verdict = f"does not fit, with a peak of {peak:.1f} GiB; {advice}"
    head = f"""{s.config}: {memory.n_params(model):,} parameters, {shape.dtype}, {model.block_size:,} tokens each
card={s.card}: {total:.1f} GiB - {outside} for the CUDA context and the allocator's reserve"""
    batches = table(rows, "activation_checkpointing offload largest_batch cpu_gib")
    return "\n\n".join([head, batches, *where_bytes_go(model, shape), f"{verdict}:\n{command}"]), model, shape


def where_bytes_go(model: LlamaConfig, shape: RunShape) -> list[str]:
    """The parts of a run's peak, and what it keeps in the CPU's memory and on the drive."""
    texts = [memory.parts_table(model, shape)]
    for where, parts_of in (("the CPU's memory", memory_advice.cpu_parts), ("offload_dir", memory_advice.disk_parts)):
        parts = parts_of(model, shape)
        if parts:
            texts.append(f"in {where}, of each rank:\n{memory.lines_of(parts)}")
    return texts


def main(argv: list[str]) -> None:
    print(estimate(argv)[0])
