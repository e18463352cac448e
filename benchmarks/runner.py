"""Start train.py, or a peer of peers.py, in a separate process on a clean card, and read its result."""

import contextlib
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from benchmarks import records, tables
from benchmarks.peers import PEERS
from benchmarks.records import Record
from benchmarks.settings import ROOT
from benchmarks.trainers import NANOCRIA, llama_config
from convert import all_rows
from data.loader import open_dataset
from model import Llama
from runtime.hf import write_config

CONFIG = "config/llama32_1b.py"  # the default model
TIMEOUT = 1200  # seconds per point: enough for 500,000 tokens per step, 8B's checkpoint, galore-torch's SVDs
SUMMARY = ("ms_per_step", "tok_per_s", "mfu", "peak_gib", "reserved_gib", "estimated_gib", "oom", "failed")


# --- A process ---


def run(argv: list[str], ranks: int = 1) -> tuple[int, str]:
    """Run a Python command, under torchrun if ranks > 1. Returns its exit status and all that it printed."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen([*launcher, *argv], cwd=ROOT, **pipes)
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return 1, f"took longer than {TIMEOUT} seconds"
    finally:  # Ctrl-C and SIGTERM pass here too
        end(process)
    return process.returncode, printed


def end(process: subprocess.Popen) -> None:
    """End a process and all that it started. torchrun passes SIGTERM on, and kills after 30 seconds what is left."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def call(function: str, ranks: int = 1, limit_gib: float | None = None, **arguments) -> dict:
    """Call a function of benchmarks/ in a separate process; return its result, or why there is none."""
    child = ["-m", "benchmarks.child", f"{limit_gib or 0:g}", function, json.dumps(arguments)]
    status, printed = run(child, ranks)
    results = [line for line in printed.splitlines() if line.startswith("{")]
    return failure(printed) if status or not results else json.loads(results[-1])


def failure(printed: str) -> dict:
    """Why a process has no result, from what it printed."""
    if "out of memory" in printed.lower():
        return {"oom": True}
    print(printed[-4000:], file=sys.stderr)
    own = re.split(r"\n[WE]\d{4} .*torch/distributed/elastic/", printed)[0]  # before torchrun's report
    lines = own.strip().splitlines() or ["it printed nothing"]
    return {"failed": lines[-1][:300]}


# --- train.py and its peers ---


def train_argv(config: str, batch: int, block: int, checkpointing: str, ranks: int = 1, **settings) -> list[str]:
    """train.py's command line, without evaluations and checkpoints. batch: per rank. The optimizer is the peers'.
    settings: others of train.py, or other values.
    """
    settings = {
        "dataset": "pystdlib", "gradient_accumulation_steps": ranks, "batch_size": batch, "block_size": block,
        "activation_checkpointing": checkpointing, "warmup_iters": 5, "log_interval": 1, "eval_interval": 100000,
        "eval_iters": 1, "keep_last": 0, "timeout": 200, "optimizer": "adamw",
    } | settings  # fmt: skip
    return [config, *(f"--{name}={value}" for name, value in settings.items())]


def train(argv: list[str], out_dir: str, ranks: int = 1, limit_gib: float | None = None) -> dict:
    """Run train.py. Returns the summary that it leaves in out_dir, or why it leaves none."""
    summary = Path(out_dir) / "summary.json"
    summary.unlink(missing_ok=True)  # of the run that this one resumes
    child = ["-m", "benchmarks.child", f"{limit_gib or 0:g}", "train.py", *argv, f"--out_dir={out_dir}"]
    _, printed = run(child, ranks)
    return json.loads(summary.read_text()) if summary.exists() else failure(printed)


def train_steps(
    trainer: str, config: str, batch: int, block: int, checkpointing: str, steps: int, warmup=5, flags=(), ranks=1,
    limit_gib=None, history="",
) -> dict:  # fmt: skip
    """A short run of a trainer. flags: further ones of train.py. history: a file for PyTorch's record of all
    allocations."""
    row = {"steps": steps}
    point = {"config": config, "batch": batch, "block": block, "checkpointing": checkpointing}
    if trainer in PEERS:
        options = point | {"trainer": trainer, "steps": steps, "warmup": warmup, "history": history}
        return row | call("trainers.measure", ranks, limit_gib, **options)
    argv = train_argv(**point, ranks=ranks, max_iters=steps + warmup, profile=bool(history))
    argv += [*NANOCRIA[trainer].flags.split(), *flags]
    if any(flag.startswith("--lora_rank") for flag in argv):
        argv.append(f"--init_from={random_base(config).name}")
    with tempfile.TemporaryDirectory() as out_dir:
        summary = train(argv, out_dir, ranks, limit_gib)
        if history and "peak_gib" in summary:
            shutil.copy(f"{out_dir}/profile/rank0.memory.pickle", history)
    row |= {key: summary[key] for key in SUMMARY if key in summary}
    return row


@functools.cache
def random_base(config: str) -> tempfile.TemporaryDirectory:
    """A folder with random weights of the model, like published ones, for the tokens of pystdlib: adapters need a base.

    The weights repeat the same 64 million numbers, which is enough to measure speed and memory.
    """
    c = llama_config(config)
    with torch.device("meta"):
        rows = all_rows(Llama(c))
    numbers = 0.02 * torch.randn(2**26, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = {}
    for row in rows:
        n = math.prod(row.whole_shape)
        repeated = numbers.repeat(math.ceil(n / len(numbers)))[:n].view(row.whole_shape)
        weights[row.name] = repeated if len(row.whole_shape) > 1 else torch.ones(row.whole_shape, dtype=torch.bfloat16)
    folder = tempfile.TemporaryDirectory()
    save_file(weights, f"{folder.name}/model.safetensors")
    train, _ = open_dataset("pystdlib", block_size=1, seed=0)
    content = write_config(c, train.meta["tokenizer"], "bfloat16", {}, {})
    Path(folder.name, "config.json").write_text(json.dumps(content))
    return folder


# --- A command ---


def start(name: str, s: SimpleNamespace, n_gpus: int = 1, on_cpu=False) -> Record:
    """The record that a command fills. on_cpu: a CPU is enough."""
    if not torch.cuda.is_available() and not on_cpu:
        sys.exit(f"python bench.py {name} needs a CUDA GPU, and torch finds none: bench.py estimate computes what fits")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # like Ctrl-C: end the running point
    card = call("timing.card")  # in another process, so that this one takes no GPU memory
    assert "device" in card, card
    print(tables.describe(card))
    if n_gpus > 1:
        card["device"] = f"{n_gpus} x {card['device']}"
    return Record(Path(s.out).expanduser(), card | records.origin(name, s.argv))


def finish(record: Record, plot="") -> None:
    """Print the tables of the record and where it is; draw it by this function of plots.py, if matplotlib is there."""
    texts = tables.of_record(record.data).values()
    for text in texts:
        print(f"\n{text}")
    print(f"\nrecord: {record.path}")
    if plot and texts:
        with contextlib.suppress(ModuleNotFoundError):
            from benchmarks import plots

            plots.draw_plot(getattr(plots, plot), record.data, record.path.with_suffix(".png"))
