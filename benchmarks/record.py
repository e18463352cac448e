"""Records: the JSON in benchmarks/records/ that a named command wrote, with device, versions and commit.

A record has a list of rows for each kind of measurement. The same code on the same card adds to a record, any other
begins it anew. With --keep=COMMIT it continues although the code has changed since: for changes that cost neither time
nor memory. Then the record names both commits.
"""

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from data.files import lock
from runtime import run_log

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PAGES = ["*.md", "benchmarks/records", "benchmarks/plots"]  # written by bench.py itself
# What neither trains nor measures a step: changes here leave a record's rows as good as they were.
BESIDE = [*PAGES, ".ci", "*.toml", "*.txt", "tests", "test_kernels.py", "bench.py", "convert.py", "sample.py",
          "data/tokenizer.py", "data/write.py", "data/files.py",
          *(f"benchmarks/{name}.py" for name in ("report", "sweep_report", "draw", "compare", "losses", "estimate",
                                                 "kernels", "operations", "libraries"))]  # fmt: skip


def load(name: str) -> dict:
    path = RECORDS / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def exists(name: str) -> bool:
    return (RECORDS / f"{name}.json").exists()


def keep_summary(run_folder: str, name: str) -> None:
    """The summary that a run of train.py left, as the record of that name."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SystemExit(f"the record's name is {name!r}: letters, digits, _ and -")
    summary = Path(run_folder) / "summary.json"
    if not summary.exists():
        raise SystemExit(f"{summary} does not exist: a training run leaves it when it reaches max_iters")
    (RECORDS / f"{name}.json").write_text(summary.read_text())


# ----------------------------------------------------------------------------------------------------------------------
# Which code measured it


def git_says_equal(*commits: str, beside: list[str]) -> bool:
    command = ["git", "diff", "--quiet", *commits, "--", ".", *(f":!{path}" for path in beside)]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0  # 128: not in this history
    except OSError:  # no git
        return False


def commit() -> str:
    """As run_log.git_commit, but a record or a page that was written over does not make the code dirty."""
    name = run_log.git_commit()
    clean = name.endswith("-dirty") and git_says_equal("HEAD", beside=PAGES)
    return name.removesuffix("-dirty") if clean else name


def same_code(commit: str, other: str) -> bool:
    """Whether two commits train and measure alike; edited code has no name, so it is never the same."""
    if any(name == "unknown" or name.endswith("-dirty") for name in (commit, other)):
        return False
    return commit == other or git_says_equal(commit, other, beside=BESIDE)


def origin(command: str, device: str, packages: tuple[str, ...]) -> dict:
    """The head of a record; packages: those beside PyTorch and Triton that it ran, if they are installed."""
    versions = run_log.versions("cuda") | {"nanocria": commit()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"command": command, "device": device, "versions": versions}


def command(name: str, words: list[str]) -> str:
    return shlex.join(["python", "bench.py", *name.split(), *words])


def commits(record: dict) -> list[str]:
    """One, or with --keep several."""
    return record["versions"]["nanocria"].split(", ")


def continues(old: dict | None, new: dict) -> bool:
    if old is None or old["device"] != new["device"]:
        return False
    before, now = commits(old), commits(new)
    others, new_others = ({**record["versions"], "nanocria": ""} for record in (old, new))
    return (same_code(before[-1], now[-1]) or before == now[:-1]) and others == new_others


def keep_rows(names: str, new: dict, out: Path) -> None:
    """Let the new record continue the rows of these commits, one,two; sys.exit if the old record is not theirs."""
    before = [name for name in names.split(",") if name]
    new["versions"]["nanocria"] = ", ".join([*before, new["versions"]["nanocria"]])
    old = read_record(out)
    if not before or continues(old, new):
        return
    if old is None:
        sys.exit(f"--keep={names}: there is no {out} to continue")
    has = commits(old)
    reason = f", say --keep={','.join(has)}" if has != before else ": it is of another device or other packages"
    sys.exit(f"--keep={names}: {out} does not continue that{reason}")


# ----------------------------------------------------------------------------------------------------------------------
# Reading and writing


def read_record(out: Path) -> dict | None:
    """None if there is none yet; sys.exit with a sentence if the file is something else."""
    try:
        record = json.loads(out.read_text()) if out.exists() else None
    except ValueError:
        record = {}
    if record is not None and not {"device", "versions", "command"} <= set(record):
        sys.exit(f"--out={out} exists and is no record of a benchmark: name another file")
    return record


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the record's folder and lock the record; sys.exit with a sentence if it could not be written."""
    path = Path(f"{out}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
        lock(file)
    except BlockingIOError:
        sys.exit(f"another bench.py is writing to {out}: wait for it, or name another --out=")
    except OSError as error:
        sys.exit(f"--out={out} cannot be written: {error}")
    with file:
        try:
            if out.exists() and not out.is_file():
                sys.exit(f"--out={out} is no file")
            yield
        finally:
            path.unlink(missing_ok=True)


def write(out: Path, text: str) -> None:
    """The whole record or, if that fails, the one before."""
    unfinished = Path(f"{out}.partial")
    unfinished.write_text(text)
    unfinished.replace(out)


def merged(old: dict | None, new: dict, keys: dict) -> dict:
    """The old record with the new rows, or the new one alone if it does not continue the old one.

    keys: kind -> the keys that name a row; a later row of the same name replaces the earlier one.
    """
    if not continues(old, new):
        return new
    commands = dict.fromkeys([*old["command"].split(" && "), new["command"]])
    before, now = commits(old), commits(new)
    versions = new["versions"] | {"nanocria": ", ".join(now if before == now[:-1] else [*before[:-1], now[-1]])}
    rows = {}
    for kind, names in keys.items():
        rows[kind] = list({tuple(row[name] for name in names): row for row in old[kind] + new[kind]}.values())
    return new | {"command": " && ".join(commands), "versions": versions} | rows


def fill(new: dict, rows: Iterable[tuple[str, dict]], out: Path, keys: dict, line: Callable) -> tuple[dict, list]:
    """Put rows, each with its kind, into the record and its file as they come, and print line(row, record).

    Returns the record, and the rows that are not in it: what failed or was missing.
    """
    with locked(out):
        old = read_record(out)
        if old and not continues(old, new):
            print(f"{out} was measured with other code or on another device: it begins anew")
        failed = []
        for kind, row in rows:
            if "missing" in row or "failed" in row:
                failed.append(row)
            else:
                new[kind].append(row)
                write(out, json.dumps(merged(old, new, keys), indent=1) + "\n")  # now: a later point may crash
            print(line(row, merged(old, new, keys)), flush=True)
    return merged(old, new, keys), failed


def default_out(out: str, name: str, folder: str = "benchmarks/records") -> Path:
    return Path(out) if out else ROOT / folder / f"{name}.json"
