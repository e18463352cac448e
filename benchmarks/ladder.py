"""The ladder: each memory technique on top of the previous one: what it saves, what it costs, its effect on the loss.

    python bench.py ladder                                     Llama 3.2 1B, 3B and 3.1 8B, as if on a 24 GiB card
    python bench.py ladder --estimate=true                     the memory alone, by arithmetic: needs no GPU
    python bench.py ladder --models=1b --measure=losses        the losses after 300 steps of 8 x 1,024 tokens
    python bench.py ladder --rungs=bf16,adamw8bit,qlora --memory_limit_gib=16

A rung has the settings of the rung that it builds on, plus its own. Two steps are measured: with one sequence of 1,024
tokens, for the least memory that a rung needs, and with the largest batch that fits, for its best speed. Adapters train
on random weights, which are as fast as any. The rungs hf_... are Hugging Face's model with Liger-Kernel, in pure
bfloat16 with full checkpointing, for techniques that another package has.
"""

import shlex
from bisect import bisect_right
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

from benchmarks import cli, compare, losses, record, runner, sweep
from benchmarks.arms import RUNGS
from benchmarks.estimate import cpu_gib, cpu_gib_of, outside_gib, resolve
from configurator import SettingError
from runtime import memory, memory_advice

# settings
models = "1b,3b,8b"  # one or several
rungs = ""  # by name; nothing: all
measure = "fits,losses"  # what to measure: losses only of the first model
memory_limit_gib = 24.0  # as if the card had only so many GiB
offload_dir = ""  # a folder on an NVMe drive, for the rung that needs one; nothing: that rung is left out
steps: int | None = None  # to measure; none: 10, fewer if they are long
estimate = False  # by arithmetic: nothing is run
keep = False  # keep rows measured with older code: for changes that affect neither time nor memory
out = ""  # the record; default: benchmarks/records/ladder.json

CONFIGS = {"1b": "config/llama32_1b.py", "3b": "config/llama32_3b.py", "8b": "config/llama31_8b.py"}
BLOCK, LOSS_STEPS = 1024, 300  # tokens of a sequence; steps of training, for the losses
BATCHES = sorted(m * 2**k for m in (2, 3) for k in range(11))  # to search for the largest that fits
KEYS = {"points": ("model", "rung", "batch"), "losses": ("model", "rung")}  # what identifies a row


def parse(argv: list[str]) -> SimpleNamespace:
    lists = {"models": CONFIGS, "measure": ("fits", "losses"), "rungs": RUNGS}
    s = cli.read_settings(globals(), argv, lists, "benchmarks/records/ladder.json")
    s.rungs = s.rungs or [rung for rung in RUNGS if rung != "nvme" or s.offload_dir]
    if "nvme" in s.rungs and not s.offload_dir:
        raise SettingError("--rungs=nvme needs a folder on an NVMe drive, as in --offload_dir=/mnt/nvme")
    return s


def flags_of(rung: str, s: SimpleNamespace) -> dict:
    """Settings of train.py: those of the rungs below, then the rung's own. A peer has only checkpointing."""
    if RUNGS[rung].peer:
        return {"activation_checkpointing": "full"}
    below = flags_of(RUNGS[rung].on, s) if RUNGS[rung].on else {}
    return below | RUNGS[rung].flags | ({"offload_dir": s.offload_dir} if rung == "nvme" else {})


def words(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def estimated(model: str, rung: str, s: SimpleNamespace) -> dict:
    """A rung by arithmetic: memory of one sequence, largest batch, its CPU memory. For a peer, only where to start."""
    row = {"model": model, "rung": rung}
    if RUNGS[rung].peer:
        return row | {"cpu_gib": 0.0, "largest": estimated(model, RUNGS[rung].on, s)["largest"]}
    named = flags_of(rung, s) | {"batch_size": 1, "block_size": BLOCK, "gradient_accumulation_steps": 1}
    config, shape = resolve(CONFIGS[model], 1, named)
    largest = memory_advice.largest_batch(config, shape, s.memory_limit_gib - outside_gib(shape))
    of_cpu = cpu_gib(config, replace(shape, batch_size=max(largest, 1)))
    return row | {"estimated_gib": memory.peak_gib(config, shape), "cpu_gib": of_cpu, "largest": largest}


def fits(model: str, rung: str, s: SimpleNamespace):
    """A row for one sequence, and one for each batch tried until the largest that fits is known."""
    yield (row := point(model, rung, 1, s))
    at, goes_up = max(bisect_right(BATCHES, row["largest"]) - 1, 0), None
    while "tok_per_s" in row and 0 <= at < len(BATCHES):
        yield (tried := point(model, rung, BATCHES[at], s))
        if "failed" in tried or goes_up not in (None, "tok_per_s" in tried):
            return
        goes_up = "tok_per_s" in tried
        at += 1 if goes_up else -1


def point(model: str, rung: str, batch: int, s: SimpleNamespace) -> dict:
    name = (model, rung, batch)
    if name not in s.known:
        flags = flags_of(rung, s)
        place = {
            "config": CONFIGS[model], "arm": RUNGS[rung].peer or "all", "ranks": 1, "batch": batch, "block": BLOCK,
            "checkpointing": flags.pop("activation_checkpointing"), "offload": flags.pop("offload", "none"),
            "limit_gib": s.memory_limit_gib, "flags": shlex.join(words(flags)),
        }  # fmt: skip
        # sweep.point estimates this batch's peak
        s.known[name] = estimated(model, rung, s) | {"cpu_gib": cpu_gib_of(place)} | sweep.point(place, s.steps)
    return s.known[name]


def measured(s: SimpleNamespace):
    s.known = record.kept_rows(s.new, s.out, KEYS, s.keep)
    for model, rung in product(s.models, s.rungs if "fits" in s.measure else []):
        yield from (("points", row) for row in fits(model, rung, s))
    model = s.models[0]
    for rung in s.rungs if "losses" in s.measure else []:
        flags = flags_of(rung, s)
        if not RUNGS[rung].peer and "lora_rank" not in flags:  # adapters of a random model learn nothing
            at = ("nanocria", LOSS_STEPS, 8, BLOCK, CONFIGS[model], words(flags))  # on the whole card
            yield "losses", s.known.get((model, rung)) or {"model": model, "rung": rung} | losses.train_losses(*at)


def estimate_table(s: SimpleNamespace) -> str:
    ours = [rung for rung in s.rungs if not RUNGS[rung].peer]
    rows = [estimated(model, rung, s) | {"title": RUNGS[rung].title} for model, rung in product(s.models, ours)]
    header = f"model | rung | GPU GiB at 1 x 1,024 | largest batch in {s.memory_limit_gib:g} GiB | its CPU GiB"
    return compare.table(header, "{model} | {title} | {estimated_gib:.1f} | {largest} | {cpu_gib:.1f}", rows)


def main(argv: list[str]) -> None:
    s = parse(argv)
    if s.estimate:
        print(estimate_table(s))
        return
    titles = {name: rung.title for name, rung in RUNGS.items()}
    runner.measure("ladder", s, KEYS, measured, titles, plot="draw_ladder")
