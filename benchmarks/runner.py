"""Start train.py, or a peer from benchmarks/peers.py, in a separate process on a clean card, and read its result."""

import contextlib
import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch

from benchmarks import compare, peers, record, report
from benchmarks.arms import SWEEP_FLAGS, SWEEP_PEERS, packages_of
from benchmarks.record import ROOT
from model import Llama
from runtime.checkpoint_folder import write_folder
from runtime.hf_config import write_config
from runtime.hf_names import hf_rows

CONFIG = "config/llama32_1b.py"  # the default model
CHECKPOINTING = ["none", "selective", "full"]  # Hugging Face has no selective
OFFLOAD = ["none", "optimizer", "all"]
TIMEOUT = 1200  # seconds per point: enough for 500,000 tokens per step, 8B's checkpoint, galore-torch's SVDs
ENDS = (signal.SIGTERM, signal.SIGHUP)
KEPT = ("ms_per_step", "tok_per_s", "mfu", "peak_gib", "reserved_gib", "estimated_gib", "oom", "failed")  # of a summary
LINE = {  # the formats of a printed row
    "model": "{}", "ranks": "{} GPU", "batch": "batch {:>4}", "block": "{:>7,} tokens", "checkpointing": "{:<9}",
    "offload": "offload {:<9}", "flags": "{}", "ms": "{:9.2f} ms", "floor_ms": "at least {:9.2f}",
    "ms_per_step": "{:9.2f} ms", "tok_per_s": "{:11,.0f} tok/s", "mfu": "mfu {:5.1%}", "peak_gib": "{:6.1f} GiB",
    "reserved_gib": "reserved {:6.1f}", "estimated_gib": "estimated {:6.1f}", "cpu_gib": "CPU {:6.1f}",
    "step_ms": "a step {:.3f} ms", "of_copy": "{:.1%} of a copy's speed", "cost": "a checkpoint costs {:.1%}",
    "update_gb_per_s": "{:.2f} GB/s", "plain_gb_per_s": "plain {:.2f} GB/s", "targets_per_s": "{:,.0f} targets/s",
}  # fmt: skip


def run(command: list[str], ranks: int = 1) -> tuple[dict | None, str]:
    """Run a Python command, under torchrun if ranks > 1. Returns the JSON object on the last line that begins with one,
    None if it fails, and all that it printed.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    process = subprocess.Popen([sys.executable, *launcher, *command], cwd=ROOT, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        end(process)
        stdout, stderr = "", ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            stdout, stderr = process.communicate(timeout=10)
        return None, f"{own_words(stdout + stderr)}\ntook longer than {TIMEOUT} seconds"
    finally:  # Ctrl-C and SIGTERM pass here too
        end(process)
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines and not process.returncode else None, stdout + stderr


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
    found = []
    with contextlib.suppress(OSError):  # it has just ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return [*found, *(each for child in found for each in children(child))]


def train_words(config: str, batch: int, block: int, checkpointing: str, out_dir: str, ranks: int = 1) -> list[str]:
    """train.py's command line, without evaluations and checkpoints. batch: per rank. The optimizer is the peers'."""
    flags = {
        "dataset": "pystdlib", "gradient_accumulation_steps": ranks, "batch_size": batch, "block_size": block,
        "activation_checkpointing": checkpointing, "warmup_iters": 5, "log_interval": 10, "eval_interval": 100000,
        "eval_iters": 1, "keep_last": 0, "timeout": 200, "optimizer": "adamw", "out_dir": out_dir,
    }  # fmt: skip
    return [config, *(f"--{name}={value}" for name, value in flags.items())]


def train(words: list[str], out_dir: str, ranks: int = 1, before: Iterable[str] = ()) -> dict:
    """The summary that train.py leaves in out_dir, or why it leaves none. before: the program that runs it."""
    summary = Path(out_dir) / "summary.json"
    summary.unlink(missing_ok=True)  # of the run that this one resumes
    _, printed = run([*before, "train.py", *words], ranks)
    return json.loads(summary.read_text()) if summary.exists() else failure(printed)


@functools.cache
def random_base(config: str) -> tempfile.TemporaryDirectory:
    """A folder with random weights of the model, like published ones: adapters need a base.

    The weights repeat the same 64 million numbers, which is enough to measure speed and memory.
    """
    c = peers.llama_config(config)
    with torch.device("meta"):
        named = list(Llama(c).bfloat16().named_parameters())
    numbers = 0.02 * torch.randn(2**26, generator=torch.Generator().manual_seed(0)).bfloat16()

    def weight(shape):
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return numbers.repeat(-(-math.prod(shape) // len(numbers)))[: math.prod(shape)].view(shape)

    rows = [row for name, p in named for row in hf_rows(name, p, c)]
    rows = [row._replace(tensor=functools.partial(weight, row.shape)) for row in rows]
    folder = tempfile.TemporaryDirectory()
    documents = {"config.json": json.dumps(write_config(c, "bytes", "bfloat16", {}, {})).encode()}
    write_folder(Path(folder.name), {"model": rows}, documents, {})
    return folder


def call(function: str, ranks: int = 1, before: Iterable[str] = (), **arguments) -> dict:
    """Call a function of benchmarks/ in a separate process; return its result, or why there is none."""
    result, printed = run([*before, "-m", "benchmarks.call", function, json.dumps(arguments)], ranks)
    return result or failure(printed)


def arm_point(arm: str, flags: list[str] | None, steps: int, ranks=1, warmup=5, before=(), **at) -> dict:
    """A short run of train.py with these flags or, if flags is None, of the peer `arm`. at: see train_words."""
    row = {"steps": steps, "oom": False}
    if flags is None:
        return row | call("peers.measure", ranks, before, arm=arm, steps=steps, warmup=warmup, **at)
    with tempfile.TemporaryDirectory() as out_dir:
        words = [*train_words(**at, out_dir=out_dir, ranks=ranks), *flags, f"--max_iters={steps + warmup}"]
        summary = train(words, out_dir, ranks, before)
        used = {"used_cpu_gib": summary["cpu_gib"]} if "cpu_gib" in summary else {}  # the process's peak
        return row | used | {key: summary[key] for key in KEPT if key in summary}


def sweep_point(arm: str, offload: str, flags: list[str], **at) -> dict:
    """arm_point() for an arm of the sweeps: train.py with its flags and more, or the peer that offloads as much."""
    if arm in SWEEP_FLAGS:
        return arm_point(arm, [f"--offload={offload}", *SWEEP_FLAGS[arm], *flags], **at)
    return arm_point(SWEEP_PEERS[arm][offload], None, **at)


def in_turn(kind: str, keys: tuple[str, ...], places: Iterable[tuple], measure_at: Callable):
    """Yield the kind and a row for each place (values of `keys`), in the order given: with the arms interleaved, a card
    that warms up favors none. measure_at(**row) measures a row. A trainer that is not installed is tried only once.
    """
    missing = set()
    for place in places:
        row = dict(zip(keys, place, strict=True))
        if row["arm"] not in missing:
            row |= measure_at(**row)
            missing |= {row["arm"]} if "missing" in row else set()
            yield kind, row


def arm_points(kind: str, keys: tuple[str, ...], places: Iterable[tuple], flags: dict[str, list[str]], **options):
    """An arm_point() for each place, in turn, with these options. flags: for the arms that are train.py."""
    return in_turn(kind, keys, places, lambda arm, **at: arm_point(arm, flags.get(arm), **options, **at))


def own_words(printed: str) -> str:
    """The output without what torchrun prints after its ranks have ended."""
    return re.split(r"\n[WE]\d{4} .*torch/distributed/elastic/", printed)[0].strip()


def failure(printed: str) -> dict:
    if "out of memory" in printed.lower():
        return {"oom": True}
    last = (own_words(printed).splitlines() or ["it printed nothing"])[-1][:300]
    if missing := re.search(r"\b(?:ModuleNotFound|Import)Error: (.*)", last):
        return {"missing": missing[1]}
    print(printed[-4000:], file=sys.stderr)
    return {"failed": last}


def trouble(row: dict) -> str:
    """Why a row has no numbers."""
    if row.get("oom"):
        return "out of memory"
    if "missing" in row:
        packages = [package + versions for package, versions in packages_of({row.get("arm")}).items()]
        return f"{row['missing']}: pip install {shlex.join(packages or ['torch'])}"
    return f"failed: {row['failed']}"


def begin(name: str, words: list[str], kinds: Iterable[str], n_gpus=None, on_cpu=False) -> dict:
    """A record without rows for this command, on this card or on n_gpus of them. on_cpu: a CPU is enough."""
    if not torch.cuda.is_available() and not on_cpu:
        instead = "python bench.py estimate, or ladder --estimate=true, computes what fits"
        sys.exit(f"python bench.py {name or 'sweep'} needs a CUDA GPU, and torch finds none: {instead}")
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it: keep that
            signal.signal(number, leave)
    facts = call("timing.card")  # in another process, so that this one takes no GPU memory
    if "device" not in facts:
        sys.exit(trouble(facts))
    print(f"{facts['device']}{report.limits(facts)}")
    facts["device"] = f"{n_gpus} x {facts['device']}" if n_gpus else facts["device"]
    return record.origin(name, words, facts["device"]) | facts | {kind: [] for kind in kinds}


def leave(number, frame) -> NoReturn:
    """Like Ctrl-C, kill the running point first. A closing terminal sends SIGHUP twice: ignore the second."""
    for other in ENDS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def line(titles: dict[str, str], row: dict) -> str:
    """A row as printed during the run: what was measured, and the numbers or why there are none."""
    if "op" in row:
        times = [f"{arm} {compare.duration(us)}" for arm, us in compare.times(row).items()]
        warning = "  INACCURATE" * compare.is_inaccurate(row["arms"])
        name, share = f"{row['op']} {compare.shape(row)} {row['pass']}", compare.percent(compare.of_limit(row))
        return f"{name:<44}{share:>5}  {', '.join(times)}{warning}"
    name = next((titles.get(row[key], row[key]) for key in ("rung", "arm", "part") if key in row), "")
    cells = [form.format(row[key]) for key, form in LINE.items() if row.get(key) is not None]
    if row.get("oom") or {"missing", "failed"} & row.keys():
        cells.append(trouble(row))
    elif "losses" in row:
        cells.append(f"loss {compare.last_third(row['losses']):.4f} over the last third")
    return "  ".join([f"{name:<33}", *cells])


def measure(name: str, s: SimpleNamespace, keys: dict, rows: Callable, titles=(), plot="", n_gpus=None, on_cpu=False):
    """Run a command: fill its record with rows(s) and print the tables of each kind of row.

    s.new is the record without rows. titles: of arms. plot: the function of draw.py that draws a plot next to the
    record. n_gpus: the number that the record states. on_cpu: as for begin().
    """
    s.new = begin(name, s.command, keys, n_gpus, on_cpu)
    found = record.fill(s.new, rows(s), s.out, keys, functools.partial(line, dict(titles)), getattr(s, "keep", False))
    if plot and any("peak_gib" in row for kind in keys for row in found[kind]):
        with contextlib.suppress(ImportError):  # without matplotlib, no plot
            from benchmarks import draw

            getattr(draw, plot)(found, s.out.with_suffix(".png"))
    if shown := report.tables(found):
        print(f"\n{shown}")
    print(f"\nrecord: {s.out}")
