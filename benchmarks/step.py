"""The whole training step, against other trainers.

    python bench.py step                          Llama 3.2 1B on one GPU: every trainer, shape and checkpointing
    python bench.py step --trainers=nanocria,recipe --shapes=8x2048,2x8192 --checkpointing=none,full
    python bench.py step --measure=breakdown      where the milliseconds of nanocria's step go, and the floor of each
    python bench.py step --measure=baby           the model of config/baby_llama.py, where launches dominate

trainers.py and peers.py describe the trainers. Each point is a separate process on a clean card: 5 steps to warm up,
then --steps, each a forward, a backward, a clip to norm 1 and an AdamW update. The result is their median (for
nanocria, of all steps but the first). A point takes about 45 seconds.
"""

import tempfile
from itertools import product
from types import SimpleNamespace
from typing import Literal

from benchmarks import runner, settings
from benchmarks.records import Record
from benchmarks.trainers import TRAINERS

# settings
measure: Literal["points", "breakdown", "baby"] = "points"  # they add to the same record
trainers = "nanocria,nanocria-fp8,recipe,recipe-fp8,torchtitan,hf,hf-compiled,hf-graphs,hf-liger,hf-fastest"
shapes = "8x2048,16x2048,2x8192"  # sequences x tokens; breakdown takes the first
checkpointing = "none,selective,full"  # Hugging Face has no selective; breakdown takes the first
steps: int | None = None  # to measure; none: 20, for baby 200
out = "out/step.json"  # the record

BABY_FLAGS = ["--cuda_graph=false", "--cuda_graph=false --compile=true", "--cuda_graph=true"]


def points(s: SimpleNamespace, record: Record) -> None:
    for (batch, block), checkpointing, trainer in product(s.shapes, s.checkpointing, s.trainers):
        if trainer == "hf-graphs":  # for the baby
            continue
        if checkpointing == "selective" and trainer.startswith("hf"):  # it has none
            continue
        key = {"trainer": trainer, "batch": batch, "block": block, "checkpointing": checkpointing}
        record.measure("points", key, runner.train_steps, **key, steps=s.steps or 20, config=runner.CONFIG)


def measure_breakdown(s: SimpleNamespace, record: Record) -> None:
    """The parts of a step at the first shape and checkpointing."""
    batch, block = s.shapes[0]
    point = {"batch": batch, "block": block, "checkpointing": s.checkpointing[0]}
    with tempfile.TemporaryDirectory() as out_dir:
        argv = runner.train_argv(runner.CONFIG, **point, out_dir=out_dir)
        result = runner.call("breakdown.breakdown", argv=argv, batch=batch, block=block)
    for row in result.get("rows", [{"part": "the step", **result}]):
        record.add("breakdown", {"part": row["part"]}, point | row)


def baby(s: SimpleNamespace, record: Record) -> None:
    point = {"config": "config/baby_llama.py", "batch": 64, "block": 256, "checkpointing": "none"}
    for trainer in s.trainers:
        for flags in BABY_FLAGS if trainer == "nanocria" else [""]:
            key = {"trainer": f"{trainer} {flags}".strip()}
            flags = [*flags.split(), "--log_interval=10"]  # a line for each step would slow steps of 1.5 ms
            record.measure("baby", key, runner.train_steps, trainer, **point, steps=s.steps or 200, flags=flags)


def main(argv: list[str]) -> None:
    lists = {"trainers": TRAINERS, "shapes": settings.shape, "checkpointing": settings.CHECKPOINTING}
    s = settings.read_settings(globals(), argv, **lists)
    record = runner.start("step", s)
    {"points": points, "breakdown": measure_breakdown, "baby": baby}[s.measure](s, record)
    runner.finish(record)
