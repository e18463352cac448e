"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                        all of it, on 1, 2, 4, ... of the GPUs that are there
    python bench.py gpus --measure=scaling      Llama 3.2 1B, 16 x 2048 tokens a GPU
    python bench.py gpus --measure=8b           Llama 3.1 8B, with and without checkpointing
    python bench.py gpus --measure=saves        1B, 8 x 2048 tokens a GPU: a checkpoint every 100 steps, then a resume
    python bench.py gpus --measure=8b --arms=nanocria-zero2,recipe-zero2 --shapes=2x4096 --checkpointing=none,full

Arms: nanocria, which is train.py itself, and recipe and torchtitan of benchmarks/peers.py; -zero2 says how they are
sharded where it is not ZeRO-3, -nccl that copy_engines.py is left out, -each that each GPU has a run of its own, side
by side: what cards can reach that share a machine's power and air. On one GPU nanocria is not sharded at all, and its
peers are on a mesh of one rank. Each point is a torchrun of its own, measured as by bench.py step.
"""

import functools
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
SAVE_EVERY, SAVE_STEPS = 100, 300
FLAGS = {  # of the arms that are train.py on several ranks
    "nanocria": ["--sharding=zero3"],
    "nanocria-zero2": ["--sharding=zero2"],
    "nanocria-nccl": ["--copy_engines=false"],
}
ARMS = [*FLAGS, "nanocria-each", "recipe", "recipe-zero2", "torchtitan"]
SCALING_ARMS = [arm for arm in ARMS if arm != "recipe-zero2"]
KEYS = {"scaling": compare.GPUS_PLACE, "8b": compare.GPUS_PLACE, "saves": ("ranks",)}  # what names a row
READ = {
    "scaling": ("measure", "ranks", "arms", "steps", "out"),
    "8b": ("measure", "ranks", "arms", "shapes", "checkpointing", "steps", "out"),
    "saves": ("measure", "ranks", "folder", "out"),
}


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv)
    kinds = cli.one_of("measure", s.measure, KEYS)
    s.kinds = [kind for kind in KEYS if kind in kinds]
    cli.refuse_unread(s, f"--measure={','.join(s.kinds)}", tuple(name for kind in s.kinds for name in READ[kind]))
    cli.at_least_one(s, "steps")
    wanted = sorted(set(cli.whole_numbers("ranks", s.ranks)))
    s.ranks = [r for r in wanted if r <= n_gpus]
    if "ranks" in s.given:
        for left_out in (r for r in wanted if r > n_gpus):
            print(f"--ranks={left_out}: left out, torch sees {n_gpus} GPU{'s' * (n_gpus != 1)}")
    s.arms = cli.one_of("arms", s.arms, ARMS) if s.arms else []
    if s.arms and s.ranks and not any(differs(*at) for at in product(s.arms, s.ranks)):
        arm, _, _ = s.arms[0].partition("-")
        raise SettingError(f"--arms={','.join(s.arms)}: nothing else than {arm} on so few GPUs")
    s.shapes = cli.shapes("shapes", s.shapes)
    s.checkpointing = cli.one_of("checkpointing", s.checkpointing, runner.CHECKPOINTING) if s.checkpointing else []
    if s.folder and not Path(s.folder).is_dir():
        raise SettingError(f"--folder={s.folder} does not exist")
    s.out = record.default_out(s.out, "gpus")
    return s


def measured(s: SimpleNamespace):
    """Kind and row after row."""
    for kind in s.kinds if s.ranks else []:
        for row in {"scaling": scaling, "8b": big, "saves": saves}[kind](s):
            yield kind, row


# ----------------------------------------------------------------------------------------------------------------------
# Points


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
    for place in places:
        for arm in s.arms or usual_arms:
            asked_for = s.arms or place[-1] != "selective" or arm == "nanocria"
            if arm in missing or not asked_for or not differs(arm, n):
                continue
            row = point(arm, config, n, *place, s.steps)
            missing |= {arm} if "missing" in row else set()
            yield row


def differs(arm: str, n: int) -> bool:
    """Whether the arm's sharding makes it another one than ZeRO-3 on so many ranks."""
    return n > 1 or "-" not in arm


def point(arm: str, config: str, n: int, batch: int, block: int, checkpointing: str, steps: int) -> dict:
    at = (config, batch, block, checkpointing, steps)
    if arm == "nanocria-each":
        result = side_by_side(n, *at)
    elif arm in FLAGS:
        result = runner.train_point(*at, flags=FLAGS[arm], ranks=n)
    else:
        result = runner.peer_point(arm, *at, ranks=n)
    place = dict(zip(compare.GPUS_PLACE, (arm, n, batch, block, checkpointing), strict=True))
    return place | {"steps": steps, "oom": False} | result


def side_by_side(n: int, *at) -> dict:
    """A run on each GPU by itself, all at the same time: the tokens of all, the milliseconds of the slowest."""

    def point(_, gpu):
        return runner.train_point(*at, launch=functools.partial(runner.run, gpu=gpu, gpus=n))

    found = list(runner.spread(point, range(n), n))
    if any("tok_per_s" not in point for point in found):
        return next(point for point in found if "tok_per_s" not in point)
    worst = {key: max(point[key] for point in found) for key in ("ms_per_step", "peak_gib", "estimated_gib")}
    mfu = None if found[0]["mfu"] is None else sum(point["mfu"] for point in found) / n
    return {"tok_per_s": sum(point["tok_per_s"] for point in found), "mfu": mfu} | worst


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def saves(s: SimpleNamespace):
    """Two runs of SAVE_STEPS, without and with checkpoints, and one that goes on with the last of them.

    What a checkpoint costs is read off the wall: the seconds from the log line of step 100 to that of step 300 hold two
    whole intervals, each with its evaluation, what the main thread does for a save, what the writing beside it takes
    from the steps, and the wait for a save that is not done when the next one is due. They hold neither the start nor
    the last save, after which no training is left to write beside. The resume reads what the system may still have in
    memory.
    """
    n = s.ranks[-1]
    row = {"ranks": n, "batch": SAVES_AT[0], "block": SAVES_AT[1], "every": SAVE_EVERY}
    with tempfile.TemporaryDirectory(dir=s.folder or None) as folder:
        without = timed_run(f"{folder}/without", n, "--keep_last=0", SAVE_STEPS)
        beside = without if trouble(without) else timed_run(f"{folder}/with", n, "--keep_last=1", SAVE_STEPS)
        if trouble(beside):
            yield row | trouble(beside)
            return
        path = run_folder.newest(f"{folder}/with")
        if path is None:
            yield row | {"failed": f"no checkpoint was written to {s.folder or tempfile.gettempdir()}"}
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


def trouble(result: dict) -> dict:
    return {key: result[key] for key in ("oom", "failed") if result.get(key)}


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


# ----------------------------------------------------------------------------------------------------------------------
# What is printed


def line(row: dict, found: dict) -> str:
    """A row of the record as one reads it while the run goes on."""
    gpus = f"{row['ranks']} GPU{'s' if row['ranks'] > 1 else ' '} {row['batch']:>2} x {row['block']}"
    if "every" in row:
        return f"{gpus}  {runner.trouble(row) if trouble(row) else compare.saves_sentence(row)}"
    name = f"{trainers.GPUS[row['arm']]:<28} {gpus} {row['checkpointing']:<9}"
    if "tok_per_s" not in row:
        return f"{name}  {runner.trouble(row)}"
    rows = [*found["scaling"], *found["8b"]]
    text = f"{name} {row['tok_per_s']:9,.0f} tok/s  {row['tok_per_s'] / row['ranks']:8,.0f} a GPU  "
    text += f"mfu {compare.mfu(row):>5}  {row['peak_gib']:6.1f} GiB"
    if row.get("estimated_gib"):
        text += f" ({row['estimated_gib'] / row['peak_gib']:.2f} x it estimated)"
    if row["ranks"] > 1 and (share := compare.efficiency(row, rows)):
        text += f"  {share:.3f} of {row['ranks']} x one GPU"
    if ratios := compare.gpus_ratios(row, rows):
        text += f"  {ratios['tok_per_s']:.3f} x the speed, {ratios['peak_gib']:.2f} x the memory of {ratios['peer']}, "
        text += f"checkpointing {ratios['checkpointing']}"
    return text


def main(argv: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    s = parse(argv, n_gpus)
    new = runner.begin("gpus", s.command, KEYS, ("torchtitan",))
    new["device"] = f"{n_gpus} x {new['device']}"
    found, failed = record.fill(new, measured(s), s.out, KEYS, line)
    rows, compared = compare.done([*found["scaling"], *found["8b"]]), []
    for row in rows:
        ratios, share = compare.gpus_ratios(row, rows), compare.efficiency(row, rows) if row["ranks"] > 1 else None
        if ratios or share:
            compared.append({"at": compare.values(row, compare.GPUS_PLACE), "of_linear": share, "ratios": ratios})
    costs = [{key: row.get(key) for key in ("ranks", "cost", "resume_seconds")} for row in found["saves"]]
    print(json.dumps({"record": str(s.out), "failed": failed, "compared": compared, "saves": costs}))
