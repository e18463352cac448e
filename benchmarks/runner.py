"""Start train.py, or a peer of trainers.py, in a separate process on a clean card, and read its result."""

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from benchmarks import records, tables
from benchmarks.records import Record
from benchmarks.settings import ROOT
from benchmarks.trainers import TRAINERS, llama_config
from model import Llama
from runtime.hf_config import write_config
from runtime.hf_names import hf_rows

CONFIG = "config/llama32_1b.py"  # the default model
TIMEOUT = 1200  # seconds per point: enough for 500,000 tokens per step, 8B's checkpoint, galore-torch's SVDs
SUMMARY = ("ms_per_step", "tok_per_s", "mfu", "peak_gib", "reserved_gib", "estimated_gib", "oom", "failed")


# --- A process ---


def run(command: list[str], ranks: int = 1, limit_gib: float | None = None) -> tuple[dict | None, str]:
    """Run a Python command, under torchrun if ranks > 1, each rank in limit_gib of GPU memory. Returns the JSON object
    on the last line that begins with one, None if it fails, and all that it printed.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if limit_gib:
        launcher += ["-m", "benchmarks.child", "within", f"{limit_gib:g}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([*launcher, *command], cwd=ROOT, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        end(process)
        return None, f"took longer than {TIMEOUT} seconds"
    finally:  # Ctrl-C and SIGTERM pass here too
        end(process)
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines and process.returncode == 0 else None
    return result, stdout + stderr


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it started. SIGKILL, because a terminated torchrun forgets ranks still starting."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # so that it starts no more
        for pid in children(process.pid):  # torchrun's ranks are in separate process groups
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    pids = []
    with contextlib.suppress(OSError):  # it has just ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, file.read_text().split())
    return [*pids, *(descendant for child in pids for descendant in children(child))]


def call(function: str, ranks: int = 1, limit_gib: float | None = None, **arguments) -> dict:
    """Call a function of benchmarks/ in a separate process; return its result, or why there is none."""
    command = ["-m", "benchmarks.child", "call", function, json.dumps(arguments)]
    result, printed = run(command, ranks, limit_gib)
    return result or failure(printed)


def failure(printed: str) -> dict:
    """Why a process has no result, from what it printed."""
    if "out of memory" in printed.lower():
        return {"oom": True}
    own = re.split(r"\n[WE]\d{4} .*torch/distributed/elastic/", printed)[0]  # before torchrun's report
    last = (own.strip().splitlines() or ["it printed nothing"])[-1][:300]
    missing = re.search(r"(?:ModuleNotFound|Import)Error: No module named '(\w+)", last)
    if missing:
        packages = {text for trainer in TRAINERS.values() for text in trainer.requires.split()}
        wanted = [text for text in packages if text.replace("-", "_").startswith(missing[1])]
        return {"missing": f"{last}: pip install {shlex.join(wanted or [missing[1]])}"}
    print(printed[-4000:], file=sys.stderr)
    return {"failed": last}


# --- train.py and its peers ---


def train_argv(config: str, batch: int, block: int, checkpointing: str, out_dir: str, ranks: int = 1) -> list[str]:
    """train.py's command line, without evaluations and checkpoints. batch: per rank. The optimizer is the peers'."""
    flags = {
        "dataset": "pystdlib", "gradient_accumulation_steps": ranks, "batch_size": batch, "block_size": block,
        "activation_checkpointing": checkpointing, "warmup_iters": 5, "log_interval": 10, "eval_interval": 100000,
        "eval_iters": 1, "keep_last": 0, "timeout": 200, "optimizer": "adamw", "out_dir": out_dir,
    }  # fmt: skip
    return [config, *(f"--{name}={value}" for name, value in flags.items())]


def train(argv: list[str], out_dir: str, ranks: int = 1, limit_gib: float | None = None) -> dict:
    """The summary that train.py leaves in out_dir, or why it leaves none."""
    summary = Path(out_dir) / "summary.json"
    summary.unlink(missing_ok=True)  # of the run that this one resumes
    _, printed = run(["train.py", *argv], ranks, limit_gib)
    return json.loads(summary.read_text()) if summary.exists() else failure(printed)


def train_steps(trainer: str, steps: int, flags=(), warmup=5, ranks=1, limit_gib=None, **point) -> dict:
    """A short run of a trainer. flags: further settings of train.py. point: config, batch, block, checkpointing."""
    row = {"steps": steps, "oom": False}
    if TRAINERS[trainer].build:
        return row | call("trainers.measure", ranks, limit_gib, trainer=trainer, steps=steps, warmup=warmup, **point)
    with tempfile.TemporaryDirectory() as out_dir:
        argv = train_argv(**point, out_dir=out_dir, ranks=ranks)
        argv += [*TRAINERS[trainer].flags.split(), *flags, f"--max_iters={steps + warmup}"]
        summary = train(argv, out_dir, ranks, limit_gib)
    row |= {key: summary[key] for key in SUMMARY if key in summary}
    return row | ({"used_cpu_gib": summary["cpu_gib"]} if "cpu_gib" in summary else {})  # the process's peak


@functools.cache
def random_base(config: str) -> tempfile.TemporaryDirectory:
    """A folder with random weights of the model, like published ones: adapters need a base.

    The weights repeat the same 64 million numbers, which is enough to measure speed and memory.
    """
    c = llama_config(config)
    with torch.device("meta"):
        parameters = list(Llama(c).named_parameters())
    numbers = 0.02 * torch.randn(2**26, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = {}
    for row in (row for name, parameter in parameters for row in hf_rows(name, parameter, c)):
        weight = torch.ones(row.shape, dtype=torch.bfloat16)
        if weight.ndim > 1:
            for part in weight.flatten().split(len(numbers)):
                part.copy_(numbers[: len(part)])
        weights[row.name] = weight
    folder = tempfile.TemporaryDirectory()
    save_file(weights, f"{folder.name}/model.safetensors")
    Path(folder.name, "config.json").write_text(json.dumps(write_config(c, "bytes", "bfloat16", {}, {})))
    return folder


# --- A command ---


def start(name: str, s: SimpleNamespace, n_gpus: int | None = None, on_cpu=False) -> Record:
    """The record that a command fills. n_gpus: how many it states. on_cpu: a CPU is enough."""
    if not torch.cuda.is_available() and not on_cpu:
        instead = "python bench.py estimate, or ladder --estimate=true, computes what fits"
        sys.exit(f"python bench.py {name} needs a CUDA GPU, and torch finds none: {instead}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it: keep that
            signal.signal(number, leave)
    facts = call("timing.card")  # in another process, so that this one takes no GPU memory
    if "device" not in facts:
        sys.exit(tables.describe(facts))
    print(tables.describe(facts))
    device = f"{n_gpus} x {facts['device']}" if n_gpus else facts["device"]
    head = facts | records.origin(name, s.command, device)
    return Record(s.out, head, getattr(s, "keep", False))


def leave(number, frame) -> None:
    """Like Ctrl-C, kill the running point first. A closing terminal sends SIGHUP twice: ignore the second."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


def finish(record: Record, plot="") -> None:
    """Print the tables of the record and where it is; draw it as this plot of plots.py, if matplotlib is installed."""
    for text in tables.of_record(record.data).values():
        print(f"\n{text}")
    print(f"\nrecord: {record.path}")
    if plot:
        with contextlib.suppress(ModuleNotFoundError):
            from benchmarks import plots

            plots.draw(plot, record.data, record.path.with_suffix(".png"))
