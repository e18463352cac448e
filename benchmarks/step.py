"""The whole training step, against the alternative trainers.

    python bench.py step                          Llama 3.2 1B on one GPU: every arm, shape and checkpointing
    python bench.py step --arms=nanocria,recipe --shapes=8x2048,2x8192 --checkpointing=none,full
    python bench.py step --measure=breakdown      where the milliseconds of nanocria's step go, and the floor of each
    python bench.py step --measure=baby           the model of config/baby_llama.py, where launches dominate

Arms: nanocria is train.py itself, nanocria-fp8 the same with --fp8=true; the others are in benchmarks/peers.py. Each
point is a separate process on a clean card: 5 steps to warm up, then --steps, each a forward, a backward, a clip to
norm 1 and an AdamW update. The result is their median (for nanocria, of all steps but the first). All points take half
an hour.
"""

import tempfile
from itertools import product
from types import SimpleNamespace
from typing import Literal

from benchmarks import arms as trainers
from benchmarks import cli, compare, runner

# settings
measure: Literal["points", "breakdown", "baby"] = "points"  # they add to the same record
arms = ",".join(trainers.STEP)  # points, baby: the trainers
shapes = "8x2048,16x2048,2x8192,32x2048"  # sequences x tokens; breakdown takes the first
checkpointing = "none,selective,full"  # Hugging Face has no selective; breakdown takes the first
steps: int | None = None  # to measure; none: 20, for baby 200
keep = False  # keep rows measured with older code: for changes that affect neither time nor memory
out = ""  # the record; default: benchmarks/records/step.json

KEYS = {"points": compare.STEP_PLACE, "breakdown": ("part",), "baby": ("arm",)}  # what identifies a row
BABY = {"config": "config/baby_llama.py", "batch": 64, "block": 256, "checkpointing": "none"}
BABY_FLAGS = ["--cuda_graph=false", "--cuda_graph=false --compile=true", "--cuda_graph=true"]


def parse(argv: list[str]) -> SimpleNamespace:
    lists = {"arms": trainers.STEP, "shapes": cli.shapes, "checkpointing": runner.CHECKPOINTING}
    s = cli.read_settings(globals(), argv, lists, "benchmarks/records/step.json")
    s.steps = s.steps or (200 if s.measure == "baby" else 20)
    return s


def points(s: SimpleNamespace):
    places = [
        (arm, *shape, how)
        for shape, how, arm in product(s.shapes, s.checkpointing, s.arms)
        if not (how == "selective" and arm.startswith("hf")) and arm != "hf-graphs"  # it is for the baby
    ]
    how = {"steps": s.steps, "config": runner.CONFIG}
    return runner.arm_points("points", compare.STEP_PLACE, places, trainers.STEP_FLAGS, **how)


def breakdown(s: SimpleNamespace):
    """The parts of a step at the first shape and checkpointing."""
    at = dict(zip(("batch", "block", "checkpointing"), (*s.shapes[0], s.checkpointing[0]), strict=True))
    with tempfile.TemporaryDirectory() as out_dir:
        words = runner.train_words(runner.CONFIG, *at.values(), out_dir)
        found = runner.call("breakdown.breakdown", words=words, batch=at["batch"], block=at["block"])
    yield from (("breakdown", at | row) for row in found.get("rows", [{"part": "the step", **found}]))


def baby(s: SimpleNamespace):
    ours = {f"nanocria {flags}": flags.split() for flags in BABY_FLAGS}
    arms = [*(ours if "nanocria" in s.arms else ()), *(arm for arm in s.arms if arm not in trainers.STEP_FLAGS)]
    return runner.arm_points("baby", ("arm",), [(arm,) for arm in arms], ours, steps=s.steps, **BABY)


def measured(s: SimpleNamespace):
    return {"points": points, "breakdown": breakdown, "baby": baby}[s.measure](s)


def main(argv: list[str]) -> None:
    runner.measure("step", parse(argv), KEYS, measured, trainers.STEP)
