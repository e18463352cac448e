"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                        all of it, on 1, 2, 4, ... of the GPUs that are there
    python bench.py gpus --measure=scaling      Llama 3.2 1B, 16 x 2048 tokens a GPU
    python bench.py gpus --measure=8b           Llama 3.1 8B, with and without checkpointing
    python bench.py gpus --measure=saves        1B, 8 x 2048 tokens a GPU: a checkpoint every 100 steps, then a resume
    python bench.py gpus --measure=8b --arms=nanocria-zero2,recipe-zero2 --shapes=2x4096 --checkpointing=none,full

Arms: nanocria, which is train.py itself, and recipe and torchtitan of benchmarks/peers.py; -zero2 says how they are
sharded where it is not ZeRO-3, -nccl that copy_engines.py is left out. On one GPU nanocria is not sharded at all, and
its peers are on a mesh of one rank. Each point is a torchrun of its own, measured as by bench.py step.
"""

import json
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner
from configurator import SettingError
from runtime import run_folder

# settings
measure = "scaling,8b,saves"  # what to measure
ranks = "1,2,4,8"  # numbers of GPUs: scaling takes each that is there, 8b and saves the largest
arms = ""  # scaling, 8b: the trainers; nothing: those of the table
shapes = ""  # 8b: sequences x tokens; nothing: those of the table
checkpointing = ""  # 8b: none, selective, full; nothing: those of the table
steps = 20  # scaling, 8b: to measure
folder = ""  # saves: where the checkpoints go, 30 GB of them for a while
out = ""  # the record; nothing: benchmarks/records/gpus.json

SCALING_CONFIG, SCALING_AT = runner.CONFIG, [(16, 2048, "none")]  # sequences x tokens, checkpointing
BIG_CONFIG, BIG_ARMS = "config/llama31_8b.py", ["nanocria", "recipe"]
BIG_AT = [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full"),
          (4, 4096, "selective"), (2, 8192, "selective")]  # fmt: skip
SAVES_AT = (8, 2048, "none")
SAVE_EVERY, SAVE_STEPS = 100, 200
FLAGS = {  # of the arms that are train.py on several ranks
    "nanocria": ["--sharding=zero3"],
    "nanocria-zero2": ["--sharding=zero2"],
    "nanocria-nccl": ["--copy_engines=false"],
}
ARMS = [*FLAGS, "recipe", "recipe-zero2", "torchtitan"]
SCALING_ARMS = [arm for arm in ARMS if arm != "recipe-zero2"]
KEYS = {"scaling": compare.GPUS_PLACE, "8b": compare.GPUS_PLACE, "saves": ("ranks",)}  # what names a row


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv)
    kinds = cli.one_of("measure", s.measure, KEYS)
    s.kinds = [kind for kind in KEYS if kind in kinds]
    cli.at_least_one(s, "steps")
    s.ranks = sorted(n for n in set(cli.whole_numbers("ranks", s.ranks)) if n <= n_gpus)
    s.arms = cli.one_of("arms", s.arms, ARMS) if s.arms else []
    s.shapes = cli.shapes("shapes", s.shapes)
    s.checkpointing = cli.one_of("checkpointing", s.checkpointing, runner.CHECKPOINTING) if s.checkpointing else []
    if s.folder and not Path(s.folder).is_dir():
        raise SettingError(f"--folder={s.folder} does not exist")
    s.out = record.default_out(s.out, "gpus")
    return s


def measured(s: SimpleNamespace):
    for kind in s.kinds if s.ranks else []:
        yield from ((kind, row) for row in {"scaling": scaling, "8b": big, "saves": saves}[kind](s))


def scaling(s: SimpleNamespace):
    """Many GPUs first, so that one alone is as warm as they were: a cool card clocks higher than it can for long."""
    for n in reversed(s.ranks):
        yield from points(SCALING_CONFIG, n, SCALING_AT, SCALING_ARMS, s)


def big(s: SimpleNamespace):
    places = [at for at in BIG_AT if at[:2] in (s.shapes or [at[:2]]) and at[2] in (s.checkpointing or [at[2]])]
    if s.shapes and s.checkpointing:  # asked for together, also where they are not in the table
        places = [(*shape, how) for how in s.checkpointing for shape in s.shapes]
    yield from points(BIG_CONFIG, s.ranks[-1], places, BIG_ARMS, s)


def points(config: str, n: int, places: list[tuple], usual_arms: list[str], s: SimpleNamespace):
    """The arms in turn at each place."""
    missing = set()
    for place, arm in product(places, s.arms or usual_arms):
        same_as_zero3 = n == 1 and "-" in arm
        asked_for = s.arms or place[-1] != "selective" or arm == "nanocria"
        if arm in missing or not asked_for or same_as_zero3:
            continue
        result = runner.arm_point(arm, FLAGS, config, *place, s.steps, ranks=n)
        missing |= {arm} if "missing" in result else set()
        yield dict(zip(compare.GPUS_PLACE, (arm, n, *place), strict=True)) | {"steps": s.steps, "oom": False} | result


def saves(s: SimpleNamespace):
    """Two runs of SAVE_STEPS, without and with checkpoints, and one that goes on with the last of them.

    What a checkpoint costs is read off the wall: from the log line of step 100 to that of step 200 there is one whole
    interval, behind one that warms up, but neither the start nor the last save. The resume reads what the system may
    still have in memory.
    """
    n = s.ranks[-1]
    row = {"ranks": n, "batch": SAVES_AT[0], "block": SAVES_AT[1], "every": SAVE_EVERY}
    row["intervals"] = SAVE_STEPS // SAVE_EVERY - 1
    with tempfile.TemporaryDirectory(dir=s.folder or None) as folder:
        without = timed_run(f"{folder}/without", n, "--keep_last=0", SAVE_STEPS)
        beside = timed_run(f"{folder}/with", n, "--keep_last=1", SAVE_STEPS) if "wall_seconds" in without else without
        path = run_folder.newest(f"{folder}/with")
        if "wall_seconds" not in beside or path is None:
            yield row | ({"oom": True} if beside.get("oom") else {"failed": beside.get("failed", "no checkpoint")})
            return
        n_bytes = sum(file.stat().st_size for file in path.iterdir())
        resumed = timed_run(f"{folder}/with", n, "--keep_last=0", SAVE_STEPS + 10)
    yield row | {
        "oom": False,
        "seconds_without": without["wall_seconds"],
        "seconds_with": beside["wall_seconds"],
        "cost": beside["wall_seconds"] / without["wall_seconds"] - 1,
        "save_seconds": beside.get("save_seconds"),  # of the main thread, the last save's too
        "checkpoint_bytes": n_bytes,
        "resume_seconds": resumed.get("resume_seconds") if resumed.get("steps") == 10 else None,
    }


def timed_run(out_dir: str, n: int, flag: str, max_iters: int) -> dict:
    """The summary of a run of train.py, with the wall_seconds between its log lines of SAVE_EVERY and SAVE_STEPS."""
    words = runner.train_words(SCALING_CONFIG, *SAVES_AT, out_dir, n)
    words += [f"--eval_interval={SAVE_EVERY}", f"--max_iters={max_iters}", flag]
    arrived, over = {}, threading.Event()
    clock = threading.Thread(target=note_arrivals, args=(Path(out_dir) / "metrics.jsonl", arrived, over))
    clock.start()
    try:
        summary = runner.train(words, out_dir, n)
    finally:
        over.set()
        clock.join()
    if SAVE_EVERY in arrived and SAVE_STEPS in arrived:
        summary["wall_seconds"] = arrived[SAVE_STEPS] - arrived[SAVE_EVERY]
    return summary


def note_arrivals(path: Path, arrived: dict[int, float], over: threading.Event) -> None:
    """When the log line of each step came to the file, to 20 ms."""
    while not over.wait(0.02):
        for line in path.read_text().splitlines() if path.exists() else []:
            if '"loss"' in line and line.endswith("}"):
                arrived.setdefault(json.loads(line)["step"], time.perf_counter())


def line(row: dict, found: dict) -> str:
    """A row of the record as one reads it while the run goes on."""
    gpus = f"{row['ranks']} GPU{'s' if row['ranks'] > 1 else ' '} {row['batch']:>2} x {row['block']}"
    if "every" in row:
        return f"{gpus}  {compare.saves_sentence(row) if 'cost' in row else runner.trouble(row)}"
    name = f"{trainers.GPUS[row['arm']]:<28} {gpus} {row['checkpointing']:<9}"
    if "tok_per_s" not in row:
        return f"{name}  {runner.trouble(row)}"
    rows = [*found["scaling"], *found["8b"]]
    text = f"{name} {row['tok_per_s']:9,.0f} tok/s  {row['tok_per_s'] / row['ranks']:8,.0f} a GPU  "
    text += f"mfu {compare.mfu(row):>5}  {row['peak_gib']:6.1f} GiB"
    if row["ranks"] > 1 and (share := compare.efficiency(row, rows)):
        text += f"  {share:.3f} of {row['ranks']} x one GPU"
    if ratios := compare.gpus_ratios(row, rows):
        text += "  {tok_per_s:.3f} x the speed, {peak_gib:.2f} x the memory of {peer}, {checkpointing}".format(**ratios)
    return text


def main(argv: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    s = parse(argv, n_gpus)
    runner.measure(s, runner.begin("gpus", s.command, KEYS, n_gpus), measured(s), KEYS, line)
