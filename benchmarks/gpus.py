"""Several GPUs of one host: what each adds, how fast 8B trains on them, what checkpoints cost.

    python bench.py gpus                        scaling, 8b and saves, on 1, 2, 4, ... of the available GPUs
    python bench.py gpus --measure=scaling      Llama 3.2 1B, 16 x 2048 tokens per GPU
    python bench.py gpus --measure=8b           Llama 3.1 8B, with and without checkpointing
    python bench.py gpus --measure=saves        1B, 8 x 2048 tokens per GPU: a checkpoint every 100 steps, then a resume
                                                (needs 30 GB in $TMPDIR for a while)
    python bench.py gpus --measure=optimizers   config/linux_114m.py's step with AdamW, Muon and its kin
    python bench.py gpus --measure=memory       8B, --offload=all: the CPU memory of a save and of a resume (100 GB)
    python bench.py gpus --measure=8b --trainers=nanocria-zero2,recipe-zero2

trainers.py and peers.py describe the trainers, sharded by ZeRO-3 unless their name says otherwise. On one GPU nanocria
is not sharded at all, and its peers use a mesh of one rank. Each point is a separate torchrun, measured as in step.
"""

import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import runner, settings
from benchmarks.records import Record
from benchmarks.trainers import TRAINERS
from configurator import SettingError
from runtime.checkpoint import newest
from runtime.loss_plot import read_metrics

# settings
measure = "scaling,8b,saves"  # what to measure; also: memory, optimizers
ranks = "1,2,4,8"  # numbers of GPUs: scaling and optimizers run on each that is available, the others on the largest
trainers = ""  # scaling, 8b, optimizers; nothing: those of the table
steps = 20  # scaling, 8b, optimizers: how many to measure
out = "out/gpus.json"  # the record

CONFIG_8B = "config/llama31_8b.py"
POINTS_OF_8B = [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full"), (4, 4096, "selective"),
                (2, 8192, "selective")]  # fmt: skip
POINTS = {  # what to measure -> config, (batch, block, checkpointing) of each, trainers
    "scaling": (runner.CONFIG, [(16, 2048, "none")],
                ["nanocria", "nanocria-zero2", "nanocria-nccl", "recipe", "torchtitan"]),
    "8b": (CONFIG_8B, POINTS_OF_8B, ["nanocria", "recipe"]),
    "optimizers": ("config/linux_114m.py", [(64, 1024, "none")],  # 8 micro-batches per step
                   ["nanocria-adamw", "nanocria-muon", "nanocria-normuon", "nanocria-soapmuon"]),
}  # fmt: skip
SAVE_EVERY = 100  # steps
CHECKPOINTS = {  # what to measure -> config, (batch, block, checkpointing), steps, settings
    "saves": (runner.CONFIG, (8, 2048, "none"), 2 * SAVE_EVERY, [f"--eval_interval={SAVE_EVERY}"]),
    "memory": (CONFIG_8B, (1, 1024, "full"), 3, ["--offload=all", "--async_save=false", "--warmup_iters=1"]),
}


def measure_points(kind: str, s: SimpleNamespace, record: Record) -> None:
    """Many GPUs first, so that the single one is as warm: a cool card clocks higher than it can sustain."""
    config, points, usual = POINTS[kind]
    ranks = s.ranks[-1:] if kind == "8b" else reversed(s.ranks)
    for n, (batch, block, checkpointing), trainer in product(ranks, points, s.trainers or usual):
        if n == 1 and trainer.endswith(("-zero2", "-nccl")):  # one GPU has no shards
            continue
        key = {"trainer": trainer, "ranks": n, "batch": batch, "block": block, "checkpointing": checkpointing}
        record.measure(kind, key, runner.train_steps, **key, steps=s.steps, config=config)


def measure_checkpoint(kind: str, n: int) -> dict:
    """Runs without and with checkpoints, and one that resumes from the last checkpoint for 10 steps.

    saves: the cost of a checkpoint in wall time. From the log line of step 100 to that of step 200 is one whole
    interval, after one to warm up, without the start and the last save. The resume may read files that are still in the
    page cache. save_seconds are the main thread's, including the last save.
    memory: rank 0's peak CPU memory: without a checkpoint, waiting while one is written, resumed.
    """
    config, (batch, block, checkpointing), steps, flags = CHECKPOINTS[kind]

    def train(out_dir: str, *more: str) -> dict:
        argv = runner.train_argv(config, batch, block, checkpointing, n)
        summary = runner.train([*argv, *flags, *more], out_dir, n)
        assert "steps" in summary, f"a run failed: {summary}"
        return summary

    with tempfile.TemporaryDirectory() as without, tempfile.TemporaryDirectory() as saving:
        plain = train(without, f"--max_iters={steps}")
        saved = train(saving, f"--max_iters={steps}", "--keep_last=1")
        row = {
            "ranks": n, "batch": batch, "block": block, "save_seconds": saved["save_seconds"],
            "checkpoint_bytes": sum(file.stat().st_size for file in newest(saving).iterdir()),
        }  # fmt: skip
        if kind == "saves":
            row["seconds_without"] = seconds_of_interval(Path(without), steps)
            row["seconds_with"] = seconds_of_interval(Path(saving), steps)
            row["cost"] = row["seconds_with"] / row["seconds_without"] - 1
        resumed = train(saving, f"--max_iters={steps + 10}")
    assert resumed["steps"] == 10, "the third run did not resume"
    row["resume_seconds"] = resumed["resume_seconds"]
    if kind == "memory":
        row |= {"cpu_gib": plain["cpu_gib"], "saved_cpu_gib": saved["cpu_gib"], "resumed_cpu_gib": resumed["cpu_gib"]}
    return row


def seconds_of_interval(out_dir: Path, steps: int) -> float:
    """Seconds between a run's log lines of step SAVE_EVERY and of the last step."""
    rows = read_metrics(out_dir / "metrics.jsonl")
    time_of = {row["step"]: row["time"] for row in rows if "loss" in row}
    return time_of[steps] - time_of[SAVE_EVERY]


def main(argv: list[str]) -> None:
    lists = {"measure": [*POINTS, *CHECKPOINTS], "ranks": int, "trainers": TRAINERS}
    s = settings.read_settings(globals(), argv, **lists)
    n_gpus = torch.cuda.device_count()
    record = runner.start("gpus", s, n_gpus)
    s.ranks = sorted(n for n in s.ranks if n <= n_gpus)
    if not s.ranks:
        raise SettingError(f"--ranks= has no number up to {n_gpus}, the GPUs that there are")
    for kind in s.measure:
        if kind in POINTS:
            measure_points(kind, s, record)
        else:
            record.measure(kind, {"ranks": s.ranks[-1]}, measure_checkpoint, kind, s.ranks[-1])
    runner.finish(record)
