"""The whole training step, beside the trainers that one would use otherwise.

    python bench.py step                         Llama 3.2 1B on one GPU: every arm, shape and checkpointing
    python bench.py step arms=nanocria,recipe shapes=8x2048,2x8192 checkpointing=none,full steps=20
    python bench.py step at_once=4               four points at a time, each on a GPU of its own
    python bench.py step breakdown               where the milliseconds of nanocria's step go, beside the floor of each
    python bench.py step baby                    the small model of config/baby_llama.py, where launches dominate

Arms: nanocria, which is train.py itself, nanocria-fp8, the same with --fp8=true, and recipe, recipe-fp8,
torchtitan, hf, hf-compiled, hf-liger of benchmarks/peers.py.
Each point is a process of its own that finds a clean card: 5 steps to warm up, then 20 or steps=..., each a forward, a
backward, a clip to norm 1 and an AdamW update, of which the median is taken (nanocria's of all 25 but the first). All
points take half an hour. They are kept in benchmarks/records/step.json, or out=...; the same code on the same card adds to that
record, any other begins it anew. With keep=COMMIT it goes on though the code has changed since then: for changes that
cost neither time nor memory, and the record names both commits.
"""

import contextlib
import difflib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path

import torch

from benchmarks import report, timing
from data.files import lock

CONFIG = "config/llama32_1b.py"
ARMS = {
    "nanocria": "nanocria",
    "nanocria-fp8": "nanocria, fp8",
    "recipe": "torchtitan's recipe",
    "recipe-fp8": "torchtitan's recipe, fp8",
    "torchtitan": "torchtitan",
    "hf": "Hugging Face",
    "hf-compiled": "Hugging Face compiled",
    "hf-liger": "Hugging Face + Liger",
}
FLAGS = {"nanocria": "", "nanocria-fp8": "--fp8=true"}  # of the arms that are train.py
CHECKPOINTING = ["none", "selective", "full"]  # Hugging Face knows no selective
PACKAGES = ("transformers", "liger_kernel", "torchtitan", "torchao")  # whose versions the record keeps
TITAN, HF, LIGER = "'torchtitan<0.3'", "'transformers>=5.17,<6'", "liger-kernel==0.8.5"  # that peers.py knows
PIP = {
    "torchtitan": TITAN,
    "recipe-fp8": "'torchao>=0.17,<0.18'",
    "hf": HF,
    "hf-compiled": HF,
    "hf-liger": f"{LIGER} {HF}",
    "liger": f"{LIGER} {HF}",
}
SHAPES = ["8x2048", "16x2048", "2x8192", "32x2048"]  # sequences x tokens
TIMEOUT = 400  # seconds a point may take; compiling all of Hugging Face's model is a minute of it
KEPT = ("ms_per_step", "tok_per_s", "mfu", "peak_gib", "reserved_gib", "estimated_gib", "oom", "failed")  # of a summary
READ = {
    "points": ("arms", "shapes", "checkpointing", "steps", "at_once", "keep", "out"),
    "breakdown": ("shapes", "checkpointing", "at_once", "keep", "out"),
    "baby": ("arms", "steps", "at_once", "keep", "out"),
}
BABY, BABY_BATCH, BABY_BLOCK = "config/baby_llama.py", 64, 256
BABY_VOCAB = 257  # pystdlib's: bytes, and one token between files
BABY_FLAGS = ["--cuda_graph=false", "--cuda_graph=false --compile=true", "--cuda_graph=true"]


# ----------------------------------------------------------------------------------------------------------------------
# Words


def parse(words: list[str]) -> tuple[str, dict]:
    """What to measure, 'points', 'breakdown' or 'baby', and the options; ValueError with a sentence for a slip."""
    options = {"arms": list(ARMS), "shapes": SHAPES, "checkpointing": CHECKPOINTING, "steps": [], "keep": [], "out": []}
    options["at_once"] = ["1"]
    choices = {"arms": ARMS, "checkpointing": CHECKPOINTING}
    said, options = read_words(words, options, ["breakdown", "baby"], choices)
    if len(said) > 1:
        raise ValueError(f"{' and '.join(said)}: one at a time, they add to the same record")
    what = said[0] if said else "points"
    refuse_unread(words, [what], READ)
    options["shapes"] = [shape(text) for text in options["shapes"]]
    at_once = n_gpus_of("at_once", ",".join(options["at_once"]), torch.cuda.device_count())
    if at_once > 1 and what != "points":
        raise ValueError(f"at_once={at_once}: {what} is measured alone")
    steps = whole("steps", ",".join(options["steps"]) or ("200" if what == "baby" else "20"))
    out = Path(",".join(options["out"]) or report.ASSETS / "step.json")
    return what, options | {"steps": steps, "out": out, "at_once": at_once}


def read_words(words: list[str], options: dict, plain: list[str], choices: dict) -> tuple[list[str], dict]:
    """The plain words that were said, and the options, each a list: the default's, or of key=one,two.

    choices: what the values of some options may be. ValueError with a sentence for a slip.
    """
    said = []
    for word in words:
        key, equals, value = word.partition("=")
        if word in plain:
            said.append(word)
        elif not equals or key not in options:
            known = [*(f"{option}=" for option in options), *plain]
            raise ValueError(f"Unknown word {word}: there are {', '.join(known)}{did_you_mean(key + equals, known)}")
        elif not value:
            raise ValueError(f"{key}= is empty: say {key}=...")
        else:
            options = options | {key: value.split(",")}
    for key, known in choices.items():
        for value in options[key]:
            if value not in known:
                raise ValueError(f"{key}={value}: there are {', '.join(known)}{did_you_mean(value, known)}")
    return said, options


def refuse_unread(words: list[str], kinds: list[str], read: dict[str, tuple]) -> None:
    """ValueError for a key=... that none of the kinds reads."""
    for key in (word.partition("=")[0] for word in words if "=" in word):
        if not any(key in read[kind] for kind in kinds):
            raise ValueError(f"{key}=: not read by {' and '.join(kinds)}: leave it out")


def refuse_flags(flags: dict) -> None:
    """Settings of train.py that nanocria_point() sets for each of its runs."""
    for name in ("max_iters", "out_dir"):
        if name in flags:
            raise ValueError(f"--{name}: each measured run has its own, leave it out")


def whole(key: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"{key}={text}: a whole number, at least 1")
    return int(text)


def n_gpus_of(key: str, text: str, n_gpus: int) -> int:
    """Of the GPUs that torch sees so many, or all; one where it sees none."""
    n = max(n_gpus, 1) if text == "all" else whole(key, text)
    if n > max(n_gpus, 1):
        raise ValueError(f"{key}={text}: torch sees {n_gpus} GPU{'s' * (n_gpus != 1)}")
    return n


def shape(text: str, key: str = "shapes") -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise ValueError(f"{key}={text}: sequences x tokens, as in 8x2048")
    batch, block = text.split("x")
    return int(batch), int(block)


def did_you_mean(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {near[0]}?" if near else ""


# ----------------------------------------------------------------------------------------------------------------------
# Points, each in a process of its own


working: set[subprocess.Popen] = set()


def run(
    command: list[str], ranks: int = 1, timeout: float = TIMEOUT, gpu: int | None = None, gpus: int = 1
) -> tuple[dict | None, str]:
    """The object on the last line that the command prints, None where there is none, and all that it printed.

    Several ranks: torchrun starts as many of it. gpu: the only one of those that torch sees here; it comes with its
    part of the CPU's cores where several `gpus` work at once.
    """
    options = {"cwd": report.ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        options["env"] = os.environ | {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}
    with part_of_the_cores(gpu, gpus):
        process = subprocess.Popen([sys.executable, *launcher(ranks), *command], start_new_session=True, **options)
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
    if n == 1:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    part = len(cores) // n
    os.sched_setaffinity(0, cores[i * part : (i + 1) * part] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def spread(function: Callable, items: Iterable, gpus: int) -> Iterator:
    """What function(item, gpu) returns for each item, in their order; as many at a time as GPUs, on each one."""
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


def launcher(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []


def end(process: subprocess.Popen) -> None:
    """Ends a process and what it started. It is asked first: the ranks of torchrun are in groups of their own, and it
    alone ends them, after 30 seconds by force.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(45)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def own_words(printed: str) -> str:
    """Without what torchrun says after its ranks have ended."""
    return re.split(r"\n[WE]\d{4} .*torch/distributed/elastic/", printed)[0].strip()


def failure(printed: str) -> dict:
    if "out of memory" in printed.lower():
        return {"oom": True}
    print(printed[-4000:], file=sys.stderr)
    return {"failed": (own_words(printed).splitlines() or ["it said nothing"])[-1][:300]}


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


def nanocria_point(config, batch, block, checkpointing, steps, flag="", ranks=1, warmup=5, launch=None) -> dict:
    with tempfile.TemporaryDirectory() as out_dir:
        words = train_words(config, batch, block, checkpointing, out_dir, ranks)
        summary = train([*words, *shlex.split(flag), f"--max_iters={steps + warmup}"], out_dir, ranks, launch)
        return {key: summary[key] for key in KEPT if key in summary}


def peer_point(arm, config, batch, block, checkpointing, steps, ranks=1, launch=None, **changes) -> dict:
    spec = {"arm": arm, "config": config, "batch": batch, "block": block, "checkpointing": checkpointing}
    point, printed = (launch or run)(["-m", "benchmarks.peers", json.dumps(spec | {"steps": steps} | changes)], ranks)
    return point or failure(printed)


def points(options: dict):
    """Point after point: the arms in turn, so that a card that warms up is no arm's luck."""
    missing, gpus = set(), options["at_once"]
    places = [
        (arm, batch, block, checkpointing)
        for (batch, block), checkpointing, arm in product(*(options[k] for k in ("shapes", "checkpointing", "arms")))
        if not (arm.startswith("hf") and checkpointing == "selective")
    ]

    def measure(place, gpu):
        arm, *at = place
        if arm in missing:
            return None
        launch = partial(run, gpu=gpu, gpus=gpus) if gpus > 1 else None
        at = (CONFIG, *at, options["steps"])
        if arm in FLAGS:
            result = nanocria_point(*at, flag=FLAGS[arm], launch=launch)
        else:
            result = peer_point(arm, *at, launch=launch)
        missing.update({arm} if "missing" in result else set())
        row = dict(zip(PLACE, place, strict=True)) | {"steps": options["steps"], "oom": False} | result
        return row | ({"at_once": gpus} if gpus > 1 else {})

    yield from filter(None, spread(measure, places, gpus))


def breakdown(options: dict):
    """The parts of a step at the first shape and checkpointing asked for."""
    (batch, block), checkpointing = options["shapes"][0], options["checkpointing"][0]
    with tempfile.TemporaryDirectory() as out_dir:
        words = train_words(CONFIG, batch, block, checkpointing, out_dir)
        result, printed = run(["-m", "benchmarks.breakdown", *words])
    at = {"batch": batch, "block": block, "checkpointing": checkpointing}
    yield from (at | row for row in (result["rows"] if result else [{"part": "the step", **failure(printed)}]))


def baby(options: dict):
    at = (BABY, BABY_BATCH, BABY_BLOCK, "none", options["steps"])
    for flag in BABY_FLAGS if "nanocria" in options["arms"] else []:
        yield {"arm": f"nanocria {flag}".strip(), "steps": options["steps"]} | nanocria_point(*at, flag=flag)
    for arm in options["arms"]:
        if arm not in FLAGS:
            yield {"arm": arm, "steps": options["steps"]} | peer_point(arm, *at, vocab_size=BABY_VOCAB)


MEASURES = {"points": points, "breakdown": breakdown, "baby": baby}


# ----------------------------------------------------------------------------------------------------------------------
# The record

PLACE = ("arm", "batch", "block", "checkpointing")
ROWS = {"points": PLACE, "breakdown": ("part",), "baby": ("arm",)}  # what names a row: a later one replaces it


def card() -> dict:
    timing.use_side_stream()
    limits = {"copy_tb_s": timing.copy_tb_s(), "matmul_tflops": timing.matmul_tflops()}
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    unlike = dict.fromkeys(f"{gpu.name} of {gpu.total_memory / 2**30:.0f} GiB" for gpu in found)
    return {"device": torch.cuda.get_device_name(), **limits, "unlike": list(unlike)}


def begin(name: str, words: list[str], kinds: Iterable[str], packages: tuple[str, ...] = PACKAGES) -> dict:
    """The record of this command on this card, with no rows of any kind yet."""
    if not torch.cuda.is_available():
        sys.exit(f"python bench.py {name} needs a CUDA GPU, and torch finds none")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # as Ctrl-C: a point at work is ended first
    facts, printed = run(["-m", "benchmarks.step", "card"])  # elsewhere, so that this process takes none of the card
    if facts is None:
        sys.exit(printed)
    unlike, beside = facts.pop("unlike"), [w for w in words if w.startswith("at_once=") and w != "at_once=1"]
    if beside and len(unlike) > 1:
        sys.exit(f"{beside[-1]}: these GPUs are not alike, {', '.join(unlike)}. CUDA_VISIBLE_DEVICES chooses")
    print(f"{facts['device']}: copies {facts['copy_tb_s']:.2f} TB/s, matmuls {facts['matmul_tflops']:.0f} TFLOP/s")
    measured = [word for word in words if not word.startswith("out=")]  # not where it was kept
    command = shlex.join(["python", "bench.py", *name.split(), *measured])
    return report.origin(command, facts["device"], packages) | facts | {kind: [] for kind in kinds}


def fill(new: dict, rows: Iterable[tuple[str, dict]], out: Path, names: dict, line: Callable) -> tuple[dict, list]:
    """Puts rows, each with its kind, into the record and its file as they come, and prints line(row, record).

    names: for each kind the keys that name a row. Returns the record and what is no part of it: what failed or was
    missing.
    """
    with held(out):
        old = read_record(out)
        if old and not continues(old, new):
            print(f"{out} was measured with other code or on another device: it begins anew")
        failed = []
        for kind, row in rows:
            if "missing" in row or "failed" in row:
                failed.append(row)
            else:
                new[kind].append(row)
                text = json.dumps(merged(old, new, names), indent=1) + "\n"
                write(out, text)  # now: a later point may take us with it
            print(line(row, merged(old, new, names)), flush=True)
    return merged(old, new, names), failed


def read_record(out: Path) -> dict | None:
    """None where there is none yet; sys.exit with a sentence where the file is something else."""
    try:
        record = json.loads(out.read_text()) if out.exists() else None
    except ValueError:
        record = {}
    if record is not None and not {"device", "versions", "command"} <= set(record):
        sys.exit(f"out={out} is there and no record of a benchmark: name another file")
    return record


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Makes the record's folder and locks the record; sys.exit with a sentence where it could not be written."""
    path = Path(f"{out}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        lock(file)
    except BlockingIOError:
        sys.exit(f"another bench.py is writing to {out}: wait for it, or name another out=")
    except OSError as error:
        sys.exit(f"out={out} cannot be written: {error}")
    with file:
        try:
            if out.exists() and not out.is_file():
                sys.exit(f"out={out} is no file")
            yield
        finally:
            path.unlink(missing_ok=True)


def write(out: Path, text: str) -> None:
    """The whole record or, if that fails, the one before."""
    unfinished = Path(f"{out}.partial")
    unfinished.write_text(text)
    unfinished.replace(out)


def merged(old: dict | None, new: dict, names: dict = ROWS) -> dict:
    """The old record with what is new, if the same code measured it on the same device; otherwise the new one alone."""
    if not continues(old, new):
        return new
    commands = dict.fromkeys([*old["command"].split(" && "), new["command"]])
    before, now = commits(old), commits(new)
    versions = new["versions"] | {"nanocria": ", ".join(now if before == now[:-1] else [*before[:-1], now[-1]])}
    rows = {}
    for kind, keys in names.items():
        latest = {tuple(row[key] for key in keys): row for row in old[kind] + new[kind]}
        rows[kind] = list(latest.values())
    return new | {"command": " && ".join(commands), "versions": versions} | rows


def commits(record: dict) -> list[str]:
    """That measured it: one, or where it was told to keep the rows of older code, several."""
    return record["versions"]["nanocria"].split(", ")


def continues(old: dict | None, new: dict) -> bool:
    if old is None or old["device"] != new["device"]:
        return False
    before, now = commits(old), commits(new)
    others = ({**record["versions"], "nanocria": ""} for record in (old, new))
    return (report.same_code(before[-1], now[-1]) or before == now[:-1]) and next(others) == next(others)


def keep(commits_before: list[str], new: dict, out: Path) -> None:
    """Lets the new record go on with the rows that these commits measured; sys.exit where the old one does not fit."""
    new["versions"]["nanocria"] = ", ".join([*commits_before, new["versions"]["nanocria"]])
    old = read_record(out)
    if not commits_before or continues(old, new):
        return
    if old is None:
        sys.exit(f"keep={','.join(commits_before)}: there is no {out} to go on with")
    has = commits(old)
    sys.exit(
        f"keep={','.join(commits_before)}: {out} does not go on with that"
        + (f", say keep={','.join(has)}" if has != commits_before else ": it is of another device or other packages")
    )


def place(point: dict) -> tuple:
    return tuple(point[key] for key in PLACE)


def ratios(points: list[dict]) -> list[dict]:
    """nanocria's tokens a second and peak memory over those of each peer, at the same shape and checkpointing."""
    done = {place(point): point for point in points if "ms_per_step" in point}
    out = []
    for (arm, *where), peer in done.items():
        ours = done.get(("nanocria", *where))
        if arm not in FLAGS and ours:
            speed, memory = (ours[key] / peer[key] for key in ("tok_per_s", "peak_gib"))
            out.append({"at": where, "peer": arm, "tok_per_s": speed, "peak_gib": memory})
    return out


# ----------------------------------------------------------------------------------------------------------------------
# What one sees


def line(point: dict) -> str:
    """A row of the record as one reads it while the run goes on."""
    if "part" in point and "ms" in point:
        floor = "" if point["floor_ms"] is None else f"floor {point['floor_ms']:7.2f} ms"
        return f"{point['part']:<26} {point['ms']:9.2f} ms  {floor}"
    where = f"{point['batch']:>3} x {point['block']:<5} {point['checkpointing']:<9}" if "batch" in point else ""
    name = point.get("arm") or point["part"]
    name = f"{ARMS.get(name, name):<26} {where}"
    if "ms_per_step" not in point:
        return f"{name}  {trouble(point)}"
    speed = f"{point['ms_per_step']:9.2f} ms {point['tok_per_s']:11,.0f} tok/s"
    return f"{name} {speed}  mfu {share(point['mfu'])}  {point['peak_gib']:6.1f} GiB"


def trouble(point: dict) -> str:
    if point.get("oom"):
        return "out of memory"
    if "missing" in point:
        return f"-  {point['missing']}{too_old_or_new(point)}: pip install {PIP.get(point['arm'], 'torch')}"
    return f"failed: {point['failed']}"


def too_old_or_new(point: dict) -> str:
    """Which installed package has not what the arm imports; nothing where it is not installed at all."""
    for package in re.findall(r"[a-z][a-z-]+", PIP.get(point["arm"], "")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if f"'{package.replace('-', '_')}" in point["missing"]:
                return f" ({package} {metadata.version(package)} lacks it)"
    return ""


def share(value: float | None) -> str:
    return "  n/a" if value is None else f"{value:5.1%}"


def step_table(record: dict) -> str:
    """Tokens a second and peak GiB of each arm, a row for each shape and checkpointing."""
    found = {place(point): point for point in record["points"]}
    arms = [arm for arm in ARMS if any(point["arm"] == arm for point in record["points"])]
    rows = []
    for where in dict.fromkeys(place(point)[1:] for point in record["points"]):
        cells = [cell(found.get((arm, *where))) for arm in arms]
        rows.append([f"{where[0]} x {where[1]:,}", where[2], *cells])
    return report.table(["sequences x tokens", "checkpointing", *(ARMS[arm] for arm in arms)], rows)


def cell(point: dict | None) -> str:
    if point is None:
        return "-"
    return "out of memory" if point.get("oom") else f"{point['tok_per_s']:,.0f} · {point['peak_gib']:.1f}"


def breakdown_table(record: dict) -> str:
    """Milliseconds of each part of the step and the least that it could take."""
    rows = [[r["part"], f"{r['ms']:.1f}", "" if r["floor_ms"] is None else f"{r['floor_ms']:.1f}"]
            for r in record["breakdown"]]  # fmt: skip
    total = [sum(r[key] or 0.0 for r in record["breakdown"]) for key in ("ms", "floor_ms")]
    first = record["breakdown"][0]
    at = f"{first['batch']} x {first['block']:,} tokens, checkpointing {first['checkpointing']}"
    return f"Where the milliseconds of our step go ({at}), and the least each part could take:\n\n" + report.table(
        ["part", "ms", "floor, ms"], [*rows, ["whole step", *(f"{ms:.1f}" for ms in total)]]
    )


def main(words: list[str]) -> None:
    try:
        what, options = parse(words)
    except ValueError as error:
        sys.exit(str(error))
    rows = ((what, row) for row in MEASURES[what](options))
    new = begin("step", words, ROWS)
    keep(options["keep"], new, options["out"])
    record, failed = fill(new, rows, options["out"], ROWS, lambda row, _: line(row))
    compared = ratios(record["points"]) if what == "points" else []
    for r in compared:
        batch, block, checkpointing = r["at"]
        where = f"{batch} x {block}, checkpointing {checkpointing}:"
        print(f"{where:<38} {r['tok_per_s']:.3f} x the speed, {r['peak_gib']:.2f} x the memory of {ARMS[r['peer']]}")
    print(json.dumps({"record": str(options["out"]), "failed": failed, "ratios": compared}))


if __name__ == "__main__":
    if sys.argv[1:] == ["card"]:
        print(json.dumps(card()))
    else:
        main(sys.argv[1:])
