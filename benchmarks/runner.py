"""Starts train.py, or a peer of benchmarks/peers.py, in a process of its own on a clean card, and reads its result."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import record, timing
from benchmarks.arms import PIP
from benchmarks.record import ROOT

CONFIG = "config/llama32_1b.py"  # the model that is measured unless another is named
CHECKPOINTING = ["none", "selective", "full"]  # Hugging Face knows no selective
OFFLOAD = ["none", "optimizer", "all"]
PACKAGES = ("transformers", "liger_kernel", "torchtitan", "torchao")  # whose versions a record keeps
TIMEOUT = 400  # seconds a point may take; compiling all of Hugging Face's model is a minute of it
KEPT = ("ms_per_step", "tok_per_s", "mfu", "peak_gib", "reserved_gib", "estimated_gib", "oom", "failed")  # of a summary

working: set[subprocess.Popen] = set()


# ----------------------------------------------------------------------------------------------------------------------
# A process


def run(
    command: list[str], ranks=1, timeout: float = TIMEOUT, gpu: int | None = None, gpus=1
) -> tuple[dict | None, str]:
    """The JSON object on the last line that a Python command prints, or None, and all that it printed.

    ranks > 1: under torchrun. gpu: the only one of the visible GPUs that it sees; with `gpus` processes at once it gets
    its part of the CPU's cores.
    """
    environment = dict(os.environ)
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with part_of_the_cores(gpu, gpus):
        process = subprocess.Popen([sys.executable, *launcher(ranks), *command], cwd=ROOT, env=environment, **pipes)
    working.add(process)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        stdout, stderr = "", ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            stdout, stderr = process.communicate(timeout=10)
        return None, f"{own_words(stdout + stderr)}\ntook longer than {timeout} seconds"
    finally:  # Ctrl-C and SIGTERM pass here too
        end(process)
        working.discard(process)
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines and not process.returncode else None, stdout + stderr


@contextlib.contextmanager
def part_of_the_cores(i: int | None, n: int) -> Iterator[None]:
    """Keeps this thread, and what it starts, to the i-th of n parts of its cores."""
    cores = sorted(os.sched_getaffinity(0))
    part = len(cores) // n
    if n > 1:
        os.sched_setaffinity(0, cores[i * part : (i + 1) * part] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def launcher(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []


def end(process: subprocess.Popen) -> None:
    """End a process and what it started. Ask first: torchrun's ranks are in groups of their own, and it alone ends
    them, after 30 seconds by force.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(45)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def spread(function: Callable, items: Iterable, gpus: int) -> Iterator:
    """What function(item, gpu) returns for each item, in their order; one at a time on each of `gpus` GPUs."""
    if gpus == 1:
        yield from (function(item, 0) for item in items)
        return
    free = queue.SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)
    ending = threading.Event()

    def work(item):
        gpu = free.get()
        try:
            return None if ending.is_set() else function(item, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:  # Ctrl-C, SIGTERM: only the main thread hears of them
            ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while free.qsize() < gpus:  # again: one may just have been about to begin
                for process in list(working):
                    end(process)
                time.sleep(0.05)
            raise


# ----------------------------------------------------------------------------------------------------------------------
# train.py, and peers


def train_words(config: str, batch: int, block: int, checkpointing: str, out_dir: str, ranks: int = 1) -> list[str]:
    """train.py's command line, without evaluations and checkpoints; batch is a rank's."""
    flags = {
        "dataset": "pystdlib", "gradient_accumulation_steps": ranks, "batch_size": batch, "block_size": block,
        "activation_checkpointing": checkpointing, "warmup_iters": 5, "log_interval": 10, "eval_interval": 100000,
        "eval_iters": 1, "keep_last": 0, "timeout": 200, "out_dir": out_dir,
    }  # fmt: skip
    return [config, *(f"--{name}={value}" for name, value in flags.items())]


def train(words: list[str], out_dir: str, ranks: int = 1, launch: Callable | None = None) -> dict:
    """The summary that train.py leaves in out_dir, or why it leaves none. launch: run, or one like it."""
    summary = Path(out_dir) / "summary.json"
    summary.unlink(missing_ok=True)  # of the run that this one goes on with
    _, printed = (launch or run)(["train.py", *words], ranks)
    return json.loads(summary.read_text()) if summary.exists() else failure(printed)


def train_point(config, batch, block, checkpointing, steps, flags=(), ranks=1, warmup=5, launch=None) -> dict:
    """A short run of train.py: the numbers of its summary that a row keeps."""
    with tempfile.TemporaryDirectory() as out_dir:
        words = train_words(config, batch, block, checkpointing, out_dir, ranks)
        summary = train([*words, *flags, f"--max_iters={steps + warmup}"], out_dir, ranks, launch)
        return {key: summary[key] for key in KEPT if key in summary}


def peer_point(arm, config, batch, block, checkpointing, steps, ranks=1, launch=None, **changes) -> dict:
    spec = {"arm": arm, "config": config, "batch": batch, "block": block, "checkpointing": checkpointing}
    point, printed = (launch or run)(["-m", "benchmarks.peers", json.dumps(spec | {"steps": steps} | changes)], ranks)
    return point or failure(printed)


def own_words(printed: str) -> str:
    """Without what torchrun says after its ranks have ended."""
    return re.split(r"\n[WE]\d{4} .*torch/distributed/elastic/", printed)[0].strip()


def failure(printed: str) -> dict:
    if "out of memory" in printed.lower():
        return {"oom": True}
    print(printed[-4000:], file=sys.stderr)
    return {"failed": (own_words(printed).splitlines() or ["it said nothing"])[-1][:300]}


def trouble(row: dict) -> str:
    """Why a row has no numbers."""
    if row.get("oom"):
        return "out of memory"
    if "missing" not in row:
        return f"failed: {row['failed']}"
    pip, unfit = PIP.get(row["arm"], "torch"), ""
    for package in re.findall(r"[a-z][a-z-]+", pip):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if f"'{package.replace('-', '_')}" in row["missing"]:  # installed, in a version without what is imported
                unfit = f" ({package} {metadata.version(package)} lacks it)"
    return f"-  {row['missing']}{unfit}: pip install {pip}"


# ----------------------------------------------------------------------------------------------------------------------
# The card


def card() -> dict:
    timing.use_side_stream()
    limits = {"copy_tb_s": timing.copy_tb_s(), "matmul_tflops": timing.matmul_tflops()}
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    unlike = dict.fromkeys(f"{gpu.name} of {gpu.total_memory / 2**30:.0f} GiB" for gpu in found)
    return {"device": torch.cuda.get_device_name(), **limits, "unlike": list(unlike)}


def begin(name: str, words: list[str], kinds: Iterable[str], packages=PACKAGES, at_once: int = 1) -> dict:
    """The record of this command on this card, with no rows of any kind yet."""
    if not torch.cuda.is_available():
        sys.exit(f"python bench.py {name} needs a CUDA GPU, and torch finds none")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # as Ctrl-C: a point at work is ended first
    facts, printed = run(["-m", "benchmarks.runner"])  # elsewhere, so that this process takes none of the card
    if facts is None:
        sys.exit(printed)
    unlike = facts.pop("unlike")
    if at_once > 1 and len(unlike) > 1:
        sys.exit(f"--at_once={at_once}: these GPUs are not alike, {', '.join(unlike)}. CUDA_VISIBLE_DEVICES chooses")
    print(f"{facts['device']}: copies {facts['copy_tb_s']:.2f} TB/s, matmuls {facts['matmul_tflops']:.0f} TFLOP/s")
    head = record.origin(record.command(name, words), facts["device"], packages)
    return head | facts | {kind: [] for kind in kinds}


def limited(gib: float | None, timeout: float = TIMEOUT, **where) -> Callable:
    """run, held to so many GiB of the card, and to a GPU."""
    limit = ["-m", "benchmarks.limited", f"{gib:g}"] if gib else []
    return lambda command, ranks=1: run([*limit, *command], ranks, timeout, **where)


if __name__ == "__main__":
    print(json.dumps(card()))
