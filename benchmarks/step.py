"""The whole training step, beside the trainers that one would use otherwise.

    python bench.py step                          Llama 3.2 1B on one GPU: every arm, shape and checkpointing
    python bench.py step --arms=nanocria,recipe --shapes=8x2048,2x8192 --checkpointing=none,full
    python bench.py step --measure=breakdown      where the milliseconds of nanocria's step go, and the floor of each
    python bench.py step --measure=baby           the model of config/baby_llama.py, where launches dominate

Arms: nanocria is train.py itself, nanocria-fp8 the same with --fp8=true; the others are in benchmarks/peers.py. Each
point is a process of its own that finds a clean card: 5 steps to warm up, then --steps, each a forward, a backward, a
clip to norm 1 and an AdamW update, of which the median is taken (nanocria's of all but the first). All points take half
an hour.
"""

import tempfile
from itertools import product
from types import SimpleNamespace
from typing import Literal

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner

# settings
measure: Literal["points", "breakdown", "baby"] = "points"  # they add to the same record
arms = ",".join(trainers.STEP)  # points, baby: the trainers
shapes = "8x2048,16x2048,2x8192,32x2048"  # sequences x tokens; breakdown takes the first
checkpointing = "none,selective,full"  # Hugging Face knows no selective; breakdown takes the first
steps: int | None = None  # to measure; none: 20, and 200 of the baby
keep = False  # whether rows stay although the code has changed since: for changes that cost neither time nor memory
out = ""  # the record; nothing: benchmarks/records/step.json

KEYS = {"points": compare.STEP_PLACE, "breakdown": ("part",), "baby": ("arm",)}  # what names a row
BABY = ("config/baby_llama.py", 64, 256, "none")
BABY_VOCAB = 257  # pystdlib's: bytes, and one token between files
BABY_FLAGS = ["--cuda_graph=false", "--cuda_graph=false --compile=true", "--cuda_graph=true"]


def parse(argv: list[str]) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv)
    cli.at_least_one(s, "steps")
    s.arms, s.shapes = cli.one_of("arms", s.arms, trainers.STEP), cli.shapes("shapes", s.shapes)
    s.checkpointing = cli.one_of("checkpointing", s.checkpointing, runner.CHECKPOINTING)
    s.steps = s.steps or (200 if s.measure == "baby" else 20)
    s.out = record.default_out(s.out, "step")
    return s


def points(s: SimpleNamespace):
    """Point after point: the arms in turn, so that a card that warms up is no arm's luck."""
    missing = set()
    for shape, checkpointing, arm in product(s.shapes, s.checkpointing, s.arms):
        unsupported = checkpointing == "selective" and arm.startswith("hf")
        if arm in missing or unsupported or arm == "hf-graphs":  # which is for the baby: here launches cost nothing
            continue
        result = runner.arm_point(arm, trainers.STEP_FLAGS, runner.CONFIG, *shape, checkpointing, s.steps)
        missing |= {arm} if "missing" in result else set()
        place = dict(zip(compare.STEP_PLACE, (arm, *shape, checkpointing), strict=True))
        yield place | {"steps": s.steps, "oom": False} | result


def breakdown(s: SimpleNamespace):
    """The parts of a step at the first shape and checkpointing."""
    at = dict(zip(("batch", "block", "checkpointing"), (*s.shapes[0], s.checkpointing[0]), strict=True))
    with tempfile.TemporaryDirectory() as out_dir:
        words = runner.train_words(runner.CONFIG, *at.values(), out_dir)
        result, printed = runner.run(["-m", "benchmarks.breakdown", *words])
    yield from (at | row for row in (result["rows"] if result else [{"part": "the step", **runner.failure(printed)}]))


def baby(s: SimpleNamespace):
    for flags in BABY_FLAGS if "nanocria" in s.arms else []:
        result = runner.train_point(*BABY, s.steps, flags=flags.split())
        yield {"arm": f"nanocria {flags}", "steps": s.steps} | result
    for arm in s.arms:
        if arm not in trainers.STEP_FLAGS:
            result = runner.peer_point(arm, *BABY, s.steps, vocab_size=BABY_VOCAB)
            yield {"arm": arm, "steps": s.steps} | result


def line(row: dict, _: dict | None = None) -> str:
    """A row of the record as one reads it while the run goes on."""
    if "part" in row and "ms" in row:
        floor = "" if row["floor_ms"] is None else f"floor {row['floor_ms']:7.2f} ms"
        return f"{row['part']:<26} {row['ms']:9.2f} ms  {floor}"
    where = f"{row['batch']:>3} x {row['block']:<5} {row['checkpointing']:<9}" if "batch" in row else ""
    name = row.get("arm") or row["part"]
    name = f"{trainers.STEP.get(name, name):<26} {where}"
    if "ms_per_step" not in row:
        return f"{name}  {runner.trouble(row)}"
    speed = f"{row['ms_per_step']:9.2f} ms {row['tok_per_s']:11,.0f} tok/s"
    return f"{name} {speed}  mfu {compare.mfu(row):>5}  {row['peak_gib']:6.1f} GiB"


def main(argv: list[str]) -> None:
    s = parse(argv)
    rows = ((s.measure, row) for row in {"points": points, "breakdown": breakdown, "baby": baby}[s.measure](s))
    runner.measure(s, runner.begin("step", s.command, KEYS), rows, KEYS, line, place=compare.STEP_PLACE)
