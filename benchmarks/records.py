"""The records that benchmarks fill, JSON: what was measured, by which command, on which device, with which versions.

A record has a list of rows for each kind of measurement, and each row names its commit (the oldest do not). A command
on the same card, with the same PyTorch, continues the record in its file: it skips the rows that the same commit
measured, and replaces older ones.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from benchmarks.settings import RECORDS
from benchmarks.tables import describe
from data.files import atomic_write
from runtime import run_log
from runtime.loss_plot import read_losses

PACKAGES = ("transformers", "liger-kernel", "cut-cross-entropy", "bitsandbytes", "peft", "torchtitan", "torchao",
            "galore-torch", "unsloth", "flash-attn-4")  # fmt: skip


def write_record(path: Path, record: dict) -> None:
    """Write the record atomically: if that fails, the previous one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


class Record:
    """A record that a command fills: every row is written at once, because a later one may crash."""

    def __init__(self, path: Path, head: dict):
        """head: what start() in runner.py found out."""
        self.path = path
        self.head = head
        self.commit = head["versions"]["nanocria"]
        self.data = self.read()

    def read(self) -> dict:
        """The record in the file with this command added to it, or a new one."""
        if not self.path.exists():
            return dict(self.head)
        old = json.loads(self.path.read_text())
        same_torch = old["versions"]["torch"] == self.head["versions"]["torch"]
        if old["device"] != self.head["device"] or not same_torch:
            sys.exit(f"{self.path} was measured on another device or with another PyTorch: name a new file by --out")
        commands = [*old["command"].split(" && "), self.head["command"]]
        return old | {"command": " && ".join(dict.fromkeys(commands)), "versions": self.head["versions"]}

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
            self.data = self.read()  # another process, on another card, may fill the same file
            rows = self.data.setdefault(kind, [])
            old = self.find(kind, key)
            if old:
                rows[rows.index(old)] = row
            else:
                rows.append(row)
            write_record(self.path, self.data)
        return row


def origin(name: str, argv: list[str]) -> dict:
    """The command of a record, and the versions of what it compares."""
    versions = run_log.versions("cuda")
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    argv = [word for word in argv if not word.startswith("--out=")]
    return {"command": shlex.join(["python", "bench.py", name, *argv]), "versions": versions}


def keep_summary(run_folder: str, name: str) -> None:
    """Write the summary that a run of train.py left, and its validation losses, as the record of that name."""
    try:
        run = json.loads((Path(run_folder) / "summary.json").read_text())
    except OSError as error:
        sys.exit(f"{run_folder} makes no record: {error}")
    if "bits_per_byte" not in run or run["steps"] != run["settings"]["max_iters"]:
        sys.exit(f"{run_folder} makes no record: it is not whole, was resumed, or eval_iters left out validation data")
    losses = read_losses(Path(run_folder))
    val_curve = [(step, 3600 * hours, loss) for step, _, hours, loss in losses.val]
    write_record(RECORDS / f"{name}.json", run | {"val_curve": val_curve})
    print(f"record: {RECORDS / name}.json")
