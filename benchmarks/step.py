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

import json
import tempfile
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Literal

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner
from configurator import SettingError

# settings
measure: Literal["points", "breakdown", "baby"] = "points"  # they add to the same record
arms = ",".join(trainers.STEP)  # points, baby: the trainers
shapes = "8x2048,16x2048,2x8192,32x2048"  # sequences x tokens; breakdown takes the first
checkpointing = "none,selective,full"  # Hugging Face knows no selective; breakdown takes the first
steps: int | None = None  # to measure; none: 20, and 200 of the baby
at_once: int | Literal["all"] = 1  # points: so many at a time, each on a GPU of its own
keep = ""  # commits whose rows stay although the code has changed since: for changes that cost neither time nor memory
out = ""  # the record; nothing: benchmarks/records/step.json

READ = {
    "points": ("measure", "arms", "shapes", "checkpointing", "steps", "at_once", "keep", "out"),
    "breakdown": ("measure", "shapes", "checkpointing", "at_once", "keep", "out"),
    "baby": ("measure", "arms", "steps", "at_once", "keep", "out"),
}
KEYS = {"points": compare.STEP_PLACE, "breakdown": ("part",), "baby": ("arm",)}  # what names a row
BABY = ("config/baby_llama.py", 64, 256, "none")
BABY_VOCAB = 257  # pystdlib's: bytes, and one token between files
BABY_FLAGS = ["--cuda_graph=false", "--cuda_graph=false --compile=true", "--cuda_graph=true"]


def parse(argv: list[str]) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv)
    cli.refuse_unread(s, f"--measure={s.measure}", READ[s.measure])
    cli.at_least_one(s, "steps")
    s.arms, s.shapes = cli.one_of("arms", s.arms, trainers.STEP), cli.shapes("shapes", s.shapes)
    s.checkpointing = cli.one_of("checkpointing", s.checkpointing, runner.CHECKPOINTING)
    s.at_once = cli.n_gpus("at_once", s.at_once, torch.cuda.device_count())
    if s.at_once > 1 and s.measure != "points":
        raise SettingError(f"--at_once={s.at_once}: {s.measure} is measured alone")
    s.steps = s.steps or (200 if s.measure == "baby" else 20)
    s.out = record.default_out(s.out, "step")
    return s


def points(s: SimpleNamespace):
    """Point after point: the arms in turn, so that a card that warms up is no arm's luck."""
    missing = set()
    places = [
        (arm, *shape, checkpointing)
        for shape, checkpointing, arm in product(s.shapes, s.checkpointing, s.arms)
        if not (arm.startswith("hf") and checkpointing == "selective")
    ]

    def measure_at(place, gpu):
        arm, *at = place
        if arm in missing:
            return None
        launch = partial(runner.run, gpu=gpu, gpus=s.at_once) if s.at_once > 1 else None
        at = (runner.CONFIG, *at, s.steps)
        if arm in trainers.STEP_FLAGS:
            result = runner.train_point(*at, flags=trainers.STEP_FLAGS[arm], launch=launch)
        else:
            result = runner.peer_point(arm, *at, launch=launch)
        missing.update({arm} if "missing" in result else set())
        row = dict(zip(compare.STEP_PLACE, place, strict=True)) | {"steps": s.steps, "oom": False} | result
        return row | ({"at_once": s.at_once} if s.at_once > 1 else {})

    yield from filter(None, runner.spread(measure_at, places, s.at_once))


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
    new = runner.begin("step", s.command, KEYS, at_once=s.at_once)
    record.keep_rows(s.keep, new, s.out)
    found, failed = record.fill(new, rows, s.out, KEYS, line)
    ratios = compare.step_ratios(found["points"]) if s.measure == "points" else []
    for r in ratios:
        where = "{} x {}, checkpointing {}:".format(*r["at"])
        speed = f"{r['tok_per_s']:.3f} x the speed, {r['peak_gib']:.2f} x the memory"
        print(f"{where:<38} {speed} of {trainers.STEP[r['peer']]}")
    print(json.dumps({"record": str(s.out), "failed": failed, "ratios": ratios}))
