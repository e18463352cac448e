"""Records: JSON files in benchmarks/records/, each with the command that wrote it, device, versions and commit.

A record has a list of rows for each kind of measurement. Only the same commit on the same card, with the same packages,
adds rows to it; anything else starts it anew. --keep=true adds rows of another commit and lists both, for changes that
affect neither time nor memory. Each row names the commit that measured it (older rows do not).
"""

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from benchmarks.arms import PACKAGES
from benchmarks.compare import values
from data.files import atomic_write
from runtime import run_log
from runtime.loss_plot import read_json, read_losses

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PAGES = ["*.md", "benchmarks/records", "benchmarks/plots"]  # written by bench.py itself


def load(name: str) -> dict | list[dict]:
    """A record, with its name; for NAME* all records of training runs whose names begin with NAME."""
    if name.endswith("*"):
        return [load(path.stem) for path in sorted(RECORDS.glob(f"{name}.json"))]
    return json.loads((RECORDS / f"{name}.json").read_text()) | {"name": name}


def keep_summary(run_folder: str, name: str) -> None:
    """Write the summary that a run of train.py left, and its validation losses, as the record of that name."""
    summary = Path(run_folder) / "summary.json"
    if not summary.exists():
        sys.exit(f"{summary} does not exist: a training run leaves it when it reaches max_iters")
    if not name or name != Path(name).name:
        sys.exit(f"{name!r} is not a valid name: the record becomes benchmarks/records/NAME.json")
    try:
        found, losses = read_json(summary), read_losses(Path(run_folder))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if found["steps"] != found["settings"]["max_iters"]:
        sys.exit(f"{summary} covers the last {found['steps']:,} steps alone: a resumed run makes no record")
    if "bits_per_byte" not in found:
        sys.exit(f"{summary} has no bits per byte, because not all validation data was read: raise eval_iters")
    val = [(step, 3600 * hours, loss) for step, _, hours, loss in losses.val]
    write(RECORDS / f"{name}.json", found | {"val_curve": val})
    print(f"record: {RECORDS / name}.json")


def commit() -> str:
    """run_log.git_commit(), but rewritten records and pages do not make the code dirty."""
    name = run_log.git_commit()
    changed = [*run_log.git(ROOT), "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in PAGES)]
    clean = name.endswith("-dirty") and not subprocess.run(changed, cwd=ROOT, capture_output=True).returncode
    return name.removesuffix("-dirty") if clean else name


def origin(name: str, words: list[str], device: str) -> dict:
    """The head of a command's record."""
    versions = run_log.versions("cuda") | {"nanocria": commit()}
    for package in PACKAGES:  # those that are installed
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    command = shlex.join(["python", "bench.py", *name.split(), *words])
    return {"command": command, "device": device, "versions": versions}


def read_record(out: Path) -> dict | None:
    """The record in a file, None if there is none yet; sys.exit with a message if the file is something else."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        return None
    with contextlib.suppress(ValueError):
        record = json.loads(out.read_text())
        if {"device", "versions", "command"} <= set(record):
            return record
    sys.exit(f"--out={out} exists and is not a benchmark record: name another file")


def write(out: Path, record: dict) -> None:
    """Write the record atomically: if that fails, the previous one stays."""
    with atomic_write(out) as file:
        file.write((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def continued(old: dict | None, new: dict, kinds: Iterable[str], keep: bool = False) -> dict:
    """The new record, with the rows, commands and commits of the old one if they are comparable: the same device, no
    package in two versions, and the same commit or --keep.
    """
    if old is None or old["device"] != new["device"]:
        return new
    before, now = (dict(record["versions"]) for record in (old, new))
    commits, commit = before.pop("nanocria"), now.pop("nanocria")
    same = commit == commits.split(", ")[-1] and commit != "unknown" and not commit.endswith("-dirty")  # edited: never
    if not (keep or same) or any(before[package] != now[package] for package in before.keys() & now.keys()):
        return new
    versions = old["versions"] | new["versions"] | {"nanocria": each_once(", ", commits, commit)}
    rows = {kind: old.get(kind, []) for kind in kinds}  # an older record lacks some kinds
    return new | {"command": each_once(" && ", old["command"], new["command"]), "versions": versions} | rows


def each_once(separator: str, *texts: str) -> str:
    return separator.join(dict.fromkeys(separator.join(texts).split(separator)))


def kept_rows(new: dict, out: Path, keys: dict, keep: bool) -> dict[tuple, dict]:
    """The rows that the file already has, by name, if the new record continues it: they are not measured again."""
    found = continued(read_record(out), new, keys, keep)
    return {values(row, keys[kind]): row for kind in keys for row in found[kind]}


def fill(new: dict, rows: Iterable[tuple[str, dict]], out: Path, keys: dict, line: Callable, keep=False):
    """Put rows, each with its kind, into the record and its file as they come, and print line(row).

    keys: kind -> the keys that identify a row; a later row with the same values replaces the earlier one. Returns the
    record, without rows that failed or whose trainer is missing.
    """
    old = read_record(out)
    record = continued(old, new, keys, keep)
    if old and record is new:
        print(f"{out} was measured with other code or on another device: starting anew")
    for kind, row in rows:
        if not {"missing", "failed"} & row.keys():
            # reread each time: another process, on another card, may add to the same file
            record = continued(read_record(out), record, keys, keep)
            row = row if row in record[kind] else row | {"commit": new["versions"]["nanocria"]}
            record[kind] = list({str(values(r, keys[kind])): r for r in [*record[kind], row]}.values())
            write(out, record)  # at once: a later point may crash
        print(line(row), flush=True)
    return record
