"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                        scaling, 8b and saves, on 1, 2, 4, ... of the GPUs that are there
    python bench.py gpus --measure=scaling      Llama 3.2 1B, 16 x 2048 tokens a GPU
    python bench.py gpus --measure=8b           Llama 3.1 8B, with and without checkpointing
    python bench.py gpus --measure=saves        1B, 8 x 2048 tokens a GPU: a checkpoint every 100 steps, then a resume
                                                ($TMPDIR holds 30 GB for a while)
    python bench.py gpus --measure=optimizers   config/linux_114m.py's step with AdamW, Muon and NorMuon
    python bench.py gpus --measure=memory       8B, --offload=all: the CPU memory of a save and of a resume (100 GB)
    python bench.py gpus --measure=8b --arms=nanocria-zero2,recipe-zero2 --shapes=2x4096 --checkpointing=none,full

Arms: nanocria, which is train.py itself, and recipe and torchtitan of benchmarks/peers.py; -zero2 says how they are
sharded where it is not ZeRO-3, -nccl that copy_engines.py is left out, -adamw, -muon and -normuon the optimizer. On one
GPU nanocria is not sharded at all, and its peers are on a mesh of one rank. Each point is a torchrun of its own,
measured as by bench.py step.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, runner
from runtime import run_folder

# settings
measure = "scaling,8b,saves"  # what to measure: memory, optimizers, too
ranks = "1,2,4,8"  # numbers of GPUs: scaling and optimizers take each that is there, the others the largest
arms = ""  # scaling, 8b, optimizers: the trainers; nothing: those of the table
shapes = ""  # 8b: sequences x tokens; nothing: those of the table
checkpointing = ""  # 8b: none, selective, full; nothing: those of the table
steps = 20  # scaling, 8b, optimizers: to measure
out = ""  # the record; nothing: benchmarks/records/gpus.json

SCALING_CONFIG, SCALING_AT = runner.CONFIG, (16, 2048, "none")  # sequences x tokens, checkpointing
BIG_CONFIG, BIG_ARMS = "config/llama31_8b.py", ["nanocria", "recipe"]
BIG_AT = [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full"),
          (4, 4096, "selective"), (2, 8192, "selective")]  # fmt: skip
OPTIMIZERS_CONFIG, OPTIMIZERS_AT = "config/linux_114m.py", (64, 1024, "none")  # 8 micro-batches a step
SAVES_AT = (8, 2048, "none")
SAVE_EVERY, SAVE_STEPS = 100, 200
MEMORY_AT, MEMORY_STEPS = (1, 1024, "full"), 3
FLAGS = {  # of the arms that are train.py on several ranks
    "nanocria": ["--sharding=zero3"],
    "nanocria-zero2": ["--sharding=zero2"],
    "nanocria-nccl": ["--copy_engines=false"],
}
OPTIMIZERS = {  # of the arms that are train.py on any number of GPUs
    f"nanocria-{name}": [f"--optimizer={name}", "--gradient_accumulation_steps=8", "--cooldown_iters=0"]
    for name in ("adamw", "muon", "normuon")
}
PEERS = ["recipe", "torchtitan"]
ARMS, SCALING_ARMS = [*FLAGS, *OPTIMIZERS, *PEERS, "recipe-zero2"], [*FLAGS, *PEERS]
KEYS = {  # what names a row
    "scaling": compare.GPUS_PLACE, "8b": compare.GPUS_PLACE, "optimizers": compare.GPUS_PLACE, "saves": ("ranks",),
    "memory": ("ranks",),
}  # fmt: skip


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    lists = {"measure": KEYS, "arms": ARMS, "checkpointing": runner.CHECKPOINTING}
    s = cli.read_settings(globals(), argv, lists, "benchmarks/records/gpus.json")
    s.kinds = [kind for kind in KEYS if kind in s.measure]
    s.ranks = sorted(n for n in set(cli.whole_numbers("ranks", s.ranks)) if n <= n_gpus)
    s.shapes = cli.shapes("shapes", s.shapes)
    return s


def measured(s: SimpleNamespace):
    for kind in s.kinds if s.ranks else []:
        yield from ((kind, row) for row in RUN[kind](s))


def scaling(s: SimpleNamespace):
    """Many GPUs first, so that one alone is as warm as they were: a cool card clocks higher than it can for long."""
    for n in reversed(s.ranks):
        yield from points(SCALING_CONFIG, [(arm, n, *SCALING_AT) for arm in s.arms or SCALING_ARMS], s)


def big(s: SimpleNamespace):
    """Selective checkpointing of ours alone unless arms are named."""
    places = [at for at in BIG_AT if at[:2] in (s.shapes or [at[:2]]) and at[2] in (s.checkpointing or [at[2]])]
    if s.shapes and s.checkpointing:  # asked for together, also where they are not in the table
        places = [(*shape, how) for how in s.checkpointing for shape in s.shapes]
    at = [(arm, s.ranks[-1], *place) for place, arm in product(places, s.arms or BIG_ARMS)]
    at = [p for p in at if s.arms or p[-1] != "selective" or p[0] == "nanocria"]
    return points(BIG_CONFIG, at, s)


def optimizers(s: SimpleNamespace):
    for n in reversed(s.ranks):
        yield from points(OPTIMIZERS_CONFIG, [(arm, n, *OPTIMIZERS_AT) for arm in s.arms or OPTIMIZERS], s)


def points(config: str, places: list[tuple], s: SimpleNamespace):
    def measure_at(arm, n, *at):
        flags = (FLAGS | OPTIMIZERS).get(arm)
        return {"steps": s.steps, "oom": False} | runner.arm_point(arm, flags, config, *at, s.steps, ranks=n)

    alone = {"nanocria", *OPTIMIZERS, *PEERS}  # what one GPU does too, without shards
    places = [(arm, n, *at) for arm, n, *at in places if n > 1 or arm in alone]
    return runner.in_turn(compare.GPUS_PLACE, places, measure_at)


def saves(s: SimpleNamespace):
    """Runs of SAVE_STEPS without and with checkpoints, and one that goes on with the last of them.

    What a checkpoint costs is read off the wall: from the log line of step 100 to that of step 200 there is one whole
    interval, behind one that warms up, but neither the start nor the last save. The resume reads what the system may
    still have in memory.
    """
    row = {"ranks": s.ranks[-1], "batch": SAVES_AT[0], "block": SAVES_AT[1], "every": SAVE_EVERY}

    def train(out_dir, keep_last, more=0):
        return timed_run(out_dir, s.ranks[-1], f"--keep_last={keep_last}", SAVE_STEPS + more)

    without, beside, resumed, n_bytes = around_a_checkpoint(train)
    if n_bytes is None:
        yield row | beside
        return
    yield row | {
        "intervals": SAVE_STEPS // SAVE_EVERY - 1,
        "oom": False,
        "seconds_without": without["wall_seconds"],
        "seconds_with": beside["wall_seconds"],
        "cost": beside["wall_seconds"] / without["wall_seconds"] - 1,
        "save_seconds": beside.get("save_seconds"),  # of the main thread, the last save's too
        "checkpoint_bytes": n_bytes,
        "resume_seconds": resumed.get("resume_seconds") if resumed.get("steps") == 10 else None,
    }


def save_memory(s: SimpleNamespace):
    """The most CPU memory that rank 0 takes: training without a checkpoint, waiting while one is written, resumed."""
    row = {"ranks": s.ranks[-1], "batch": MEMORY_AT[0], "block": MEMORY_AT[1]}

    def train(out_dir, keep_last, more=0):
        words = runner.train_words(BIG_CONFIG, *MEMORY_AT, out_dir, s.ranks[-1])
        words += ["--offload=all", "--async_save=false", "--warmup_iters=1"]
        words += [f"--max_iters={MEMORY_STEPS + more}", f"--keep_last={keep_last}"]
        return runner.train(words, out_dir, s.ranks[-1], runner.limited(None, timeout=900))

    without, beside, resumed, n_bytes = around_a_checkpoint(train)
    if n_bytes is None:
        yield row | beside
        return
    yield row | {
        "oom": False,
        "cpu_gib": without["cpu_gib"],
        "saved_cpu_gib": beside["cpu_gib"],
        "resumed_cpu_gib": resumed.get("cpu_gib"),
        "save_seconds": beside["save_seconds"],
        "checkpoint_bytes": n_bytes,
        "resume_seconds": resumed.get("resume_seconds"),
    }


def around_a_checkpoint(train: Callable) -> tuple[dict, dict, dict, int | None]:
    """The summaries of train(out_dir, keep_last, more=0) without checkpoints, with them, and 10 steps on from the last.

    And the bytes of that: None if there is none, and then the second says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        without = train(f"{folder}/without", 0)
        beside = train(f"{folder}/with", 1) if "steps" in without else without
        path = run_folder.newest(f"{folder}/with")
        if "steps" not in beside or path is None:
            why = {"oom": True} if beside.get("oom") else {"failed": beside.get("failed", "no checkpoint")}
            return without, why, {}, None
        n_bytes = sum(file.stat().st_size for file in path.iterdir())
        return without, beside, train(f"{folder}/with", 0, more=10), n_bytes


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


RUN = {"scaling": scaling, "8b": big, "optimizers": optimizers, "saves": saves, "memory": save_memory}


def main(argv: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    runner.measure("gpus", parse(argv, n_gpus), KEYS, measured, trainers.GPUS, n_gpus=n_gpus)
