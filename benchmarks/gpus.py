"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                        scaling, 8b and saves, on 1, 2, 4, ... of the available GPUs
    python bench.py gpus --measure=scaling      Llama 3.2 1B, 16 x 2048 tokens per GPU
    python bench.py gpus --measure=8b           Llama 3.1 8B, with and without checkpointing
    python bench.py gpus --measure=saves        1B, 8 x 2048 tokens per GPU: a checkpoint every 100 steps, then a resume
                                                (needs 30 GB in $TMPDIR for a while)
    python bench.py gpus --measure=optimizers   config/linux_114m.py's step with AdamW, Muon and NorMuon
    python bench.py gpus --measure=memory       8B, --offload=all: the CPU memory of a save and of a resume (100 GB)
    python bench.py gpus --measure=8b --arms=nanocria-zero2,recipe-zero2 --shapes=2x4096 --checkpointing=none,full

Arms: nanocria, which is train.py itself, and recipe and torchtitan from benchmarks/peers.py. -zero2: sharded by ZeRO-2
instead of ZeRO-3; -nccl: without copy_engines.py; -adamw, -muon, -normuon: the optimizer. On one GPU nanocria is not
sharded at all, and its peers use a mesh of one rank. Each point is a separate torchrun, measured as in bench.py step.
"""

import json
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, runner
from runtime import run_folder

# settings
measure = "scaling,8b,saves"  # what to measure; also: memory, optimizers
ranks = "1,2,4,8"  # numbers of GPUs: scaling and optimizers run on each that is available, the others on the largest
arms = ""  # scaling, 8b, optimizers: the trainers; nothing: those of the table
shapes = ""  # 8b: sequences x tokens; nothing: those of the table
checkpointing = ""  # 8b: none, selective, full; nothing: those of the table
steps = 20  # scaling, 8b, optimizers: how many to measure
out = ""  # the record; default: benchmarks/records/gpus.json

SAVE_EVERY = 100  # steps
CHECKPOINTS = {  # kind -> config, (batch, block, checkpointing), steps, settings
    "saves": (runner.CONFIG, (8, 2048, "none"), 2 * SAVE_EVERY, [f"--eval_interval={SAVE_EVERY}"]),
    "memory": ("config/llama31_8b.py", (1, 1024, "full"), 3,
               ["--offload=all", "--async_save=false", "--warmup_iters=1"]),
}  # fmt: skip
OPTIMIZERS = ["nanocria-adamw", "nanocria-muon", "nanocria-normuon"]
STEP_OF_8 = ["--gradient_accumulation_steps=8", "--cooldown_iters=0"]
FLAGS = {  # for the arms that are train.py
    "nanocria": ["--sharding=zero3"], "nanocria-zero2": ["--sharding=zero2"], "nanocria-nccl": ["--copy_engines=false"],
    **{arm: [f"--optimizer={arm.partition('-')[2]}", *STEP_OF_8] for arm in OPTIMIZERS},
}  # fmt: skip
POINTS = {  # kind of points -> config, (batch, block, checkpointing) of each, arms
    "scaling": (runner.CONFIG, [(16, 2048, "none")],
                ["nanocria", "nanocria-zero2", "nanocria-nccl", "recipe", "torchtitan"]),
    "8b": ("config/llama31_8b.py", [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full"),
                                    (4, 4096, "selective"), (2, 8192, "selective")], ["nanocria", "recipe"]),
    "optimizers": ("config/linux_114m.py", [(64, 1024, "none")], OPTIMIZERS),  # 8 micro-batches per step
}  # fmt: skip
KEYS = dict.fromkeys(POINTS, compare.GPUS_PLACE) | dict.fromkeys(CHECKPOINTS, ("ranks",))  # what identifies a row


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    known = [*FLAGS, "recipe", "torchtitan", "recipe-zero2"]
    lists = {"measure": KEYS, "ranks": cli.whole_numbers, "arms": known}
    lists |= {"shapes": cli.shapes, "checkpointing": runner.CHECKPOINTING}
    s = cli.read_settings(globals(), argv, lists, "benchmarks/records/gpus.json")
    s.kinds = [kind for kind in KEYS if kind in s.measure]
    s.ranks = sorted(n for n in set(s.ranks) if n <= n_gpus)
    return s


def measured(s: SimpleNamespace):
    for kind in s.kinds if s.ranks else []:
        yield from points(kind, s) if kind in POINTS else [(kind, checkpoint(kind, s))]


def points(kind: str, s: SimpleNamespace):
    """Many GPUs first, so that the single one is as warm: a cool card clocks higher than it can sustain."""
    config, at, usual = POINTS[kind]
    at, ranks = (places_of_8b(at, s), s.ranks[-1:]) if kind == "8b" else (at, reversed(s.ranks))
    places = [
        (arm, n, *where)
        for n, where, arm in product(ranks, at, s.arms or usual)
        if n > 1 or not arm.endswith(("-zero2", "-nccl"))  # one GPU has no shards
        if s.arms or "selective" not in where or arm == "nanocria"
    ]
    return runner.arm_points(kind, compare.GPUS_PLACE, places, FLAGS, steps=s.steps, config=config)


def places_of_8b(at: list[tuple], s: SimpleNamespace) -> list[tuple]:
    """The table's places that match --shapes and --checkpointing; with both set, all their combinations."""
    if s.shapes and s.checkpointing:
        return [(*shape, how) for how in s.checkpointing for shape in s.shapes]
    return [p for p in at if p[:2] in (s.shapes or [p[:2]]) and p[2] in (s.checkpointing or [p[2]])]


def checkpoint(kind: str, s: SimpleNamespace) -> dict:
    """Runs without and with checkpoints, and one that resumes from the last checkpoint for 10 steps.

    saves: the cost of a checkpoint in wall time. From the log line of step 100 to that of step 200 is one whole
    interval, after one to warm up, without the start and the last save. The resume may read files that are still in the
    page cache. save_seconds are the main thread's, including the last save.
    memory: rank 0's peak CPU memory: without a checkpoint, waiting while one is written, resumed.
    """
    (config, at, steps, flags), n = CHECKPOINTS[kind], s.ranks[-1]
    row = {"ranks": n, "batch": at[0], "block": at[1]}
    with tempfile.TemporaryDirectory() as folder:

        def train(name, keep_last, more=0):
            words = runner.train_words(config, *at, f"{folder}/{name}", n)
            words += [*flags, f"--max_iters={steps + more}", f"--keep_last={keep_last}"]
            return runner.train(words, f"{folder}/{name}", n)

        without = train("without", 0)
        beside = train("with", 1) if "steps" in without else without
        path = run_folder.newest(f"{folder}/with")
        if "steps" not in beside or path is None:
            return row | ({"oom": True} if beside.get("oom") else {"failed": beside.get("failed", "no checkpoint")})
        row |= {"oom": False, "save_seconds": beside.get("save_seconds")}
        row["checkpoint_bytes"] = sum(file.stat().st_size for file in path.iterdir())
        walls = [wall_seconds(Path(folder, name)) for name in ("without", "with")] if kind == "saves" else []
        resumed = train("with", 0, more=10)
    row["resume_seconds"] = resumed.get("resume_seconds") if resumed.get("steps") == 10 else None
    if kind == "memory":
        runs = {"": without, "saved_": beside, "resumed_": resumed}
        return row | {f"{when}cpu_gib": run.get("cpu_gib") for when, run in runs.items()}
    row |= dict(zip(("seconds_without", "seconds_with"), walls, strict=True))
    return row | {"every": SAVE_EVERY, "intervals": steps // SAVE_EVERY - 1, "cost": walls[1] / walls[0] - 1}


def wall_seconds(out_dir: Path) -> float:
    """Seconds between a run's log line of step SAVE_EVERY and its last one."""
    rows = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    at = {row["step"]: row["time"] for row in rows if "loss" in row}
    return max(at.values()) - at[SAVE_EVERY]


def main(argv: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    runner.measure("gpus", parse(argv, n_gpus), KEYS, measured, trainers.GPUS, n_gpus=n_gpus)
