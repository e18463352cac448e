"""Records: JSON files in benchmarks/records/, each with the command that wrote it, device, versions and commit.

A record has a list of rows for each kind of measurement, and each row names its commit (the oldest do not). A command
on the same card, with the same packages, continues its record: it skips the rows that the same commit measured, and
replaces older ones. On another card it starts the record anew.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from benchmarks.settings import RECORDS, ROOT
from benchmarks.tables import describe
from benchmarks.trainers import TRAINERS
from data.files import atomic_write
from runtime import run_log
from runtime.loss_plot import read_json, read_losses

WRITTEN = ["*.md", "benchmarks/records", "benchmarks/plots"]  # by bench.py itself

IN_A_RUN = {"command", "device", "versions", "settings", "steps", "val_loss", "bits_per_byte"}


def load(name: str) -> dict:
    """A record of benchmarks/records/, with its name."""
    return json.loads((RECORDS / f"{name}.json").read_text()) | {"name": name}


def write(path: Path, record: dict) -> None:
    """Write the record atomically: if that fails, the previous one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


class Record:
    """A record that a command fills: every row is written at once, because a later one may crash."""

    def __init__(self, path: Path, head: dict):
        """head: what start() in runner.py found out. Ends the program if path is something else."""
        self.path = path
        self.head = head
        self.commit = head["versions"]["nanocria"]
        self.data = self.continued()

    def continued(self) -> dict:
        """The record in the file with this command added to it, or a new one."""
        if not self.path.exists():
            return dict(self.head)
        try:
            old = read_json(self.path)
        except ValueError:
            old = {}
        if not {"command", "device", "versions"} <= old.keys():
            sys.exit(f"--out={self.path} exists and is not a benchmark record: name another file")
        packages = old["versions"].keys() & self.head["versions"].keys() - {"nanocria"}
        same_packages = all(old["versions"][package] == self.head["versions"][package] for package in packages)
        if old["device"] != self.head["device"] or not same_packages:
            print(f"{self.path} was measured on another device or with other packages: starting anew")
            return dict(self.head)
        commits = joined(", ", old["versions"]["nanocria"], self.commit)
        versions = old["versions"] | self.head["versions"] | {"nanocria": commits}
        return old | {"command": joined(" && ", old["command"], self.head["command"]), "versions": versions}

    def find(self, kind: str, key: dict) -> dict | None:
        rows = self.data.get(kind, [])
        return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)

    def measure(self, kind: str, key: dict, function: Callable[..., dict], /, *args, **arguments) -> dict:
        """The row with this key: the known one if this commit measured it, else the key and what the function returns.
        Uncommitted code is measured again."""
        known = self.find(kind, key)
        if known and known.get("commit") == self.commit and not self.commit.endswith(("-dirty", "unknown")):
            print(f"{describe(known)}  (measured before: delete {self.path} to repeat it)")
            return known
        return self.add(kind, key, key | function(*args, **arguments))

    def add(self, kind: str, key: dict, row: dict) -> dict:
        """Print the row, and write it unless it failed. It replaces one with the same key."""
        print(describe(row), flush=True)
        if "failed" not in row:
            row = row | {"commit": self.commit}
            self.data = self.continued()  # another process, on another card, may fill the same file
            rows = self.data.setdefault(kind, [])
            old = self.find(kind, key)
            if old:
                rows[rows.index(old)] = row
            else:
                rows.append(row)
            write(self.path, self.data)
        return row


def joined(separator: str, *texts: str) -> str:
    """The texts, each part once."""
    return separator.join(dict.fromkeys(separator.join(texts).split(separator)))


def origin(name: str, argv: list[str], device: str) -> dict:
    """The head of a command's record."""
    versions = run_log.versions("cuda") | {"nanocria": commit()}
    required = " ".join(trainer.requires for trainer in TRAINERS.values()) + " cut-cross-entropy"
    for package in sorted(set(re.findall(r"[a-z][\w-]+", required))):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    command = shlex.join(["python", "bench.py", name, *argv])
    return {"command": command, "device": device, "versions": versions}


def commit() -> str:
    """run_log.git_commit(), but rewritten records and pages do not make the code dirty."""
    name = run_log.git_commit()
    changed = [*run_log.git(ROOT), "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in WRITTEN)]
    if name.endswith("-dirty") and subprocess.run(changed, cwd=ROOT, capture_output=True).returncode == 0:
        return name.removesuffix("-dirty")
    return name


def keep_summary(run_folder: str, name: str) -> None:
    """Write the summary that a run of train.py left, and its validation losses, as the record of that name."""
    if not name or name != Path(name).name:
        sys.exit(f"{name!r} is not a valid name: the record becomes benchmarks/records/NAME.json")
    try:
        run = read_json(Path(run_folder) / "summary.json")
        losses = read_losses(Path(run_folder))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    is_whole = run.keys() >= IN_A_RUN and isinstance(run["settings"], dict)
    if not is_whole or run["steps"] != run["settings"].get("max_iters"):
        sys.exit(f"{run_folder} makes no record: it is not whole, was resumed, or eval_iters left out validation data")
    val_curve = [(step, 3600 * hours, loss) for step, _, hours, loss in losses.val]
    write(RECORDS / f"{name}.json", run | {"val_curve": val_curve})
    print(f"record: {RECORDS / name}.json")
