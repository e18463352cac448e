"""Records: JSON files in benchmarks/records/, each with the command that wrote it, device, versions and commit.

A record has a list of rows for each kind of measurement. The same commit on the same card, with the same packages, adds
rows to it and skips those that it has; anything else starts it anew. --keep=true keeps the rows of older commits until
they are measured again, for changes that affect neither time nor memory. Each row names its commit (the oldest do not).
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

PAGES = ["*.md", "benchmarks/records", "benchmarks/plots"]  # written by bench.py itself
OLD_KEYS = {"arm": "trainer", "rung": "technique"}  # older records have the names on the left
OLD_TRAINERS = {  # in sweeps
    "all": "nanocria", "long": "nanocria-long", "kernels": "nanocria-unfused", "torch": "nanocria-plain",
    "lora": "nanocria-lora", "lora-fp8": "nanocria-lora-fp8", "qlora": "nanocria-qlora",
    "qlora-fp8": "nanocria-qlora-fp8", "hf": "hf-masters", "liger": "hf-liger-masters", "peft": "hf-liger-lora",
    "peft-qlora": "hf-liger-qlora", "liger-8bit": "hf-liger-8bit", "liger-galore": "hf-liger-galore",
}  # fmt: skip


def load(name: str) -> dict:
    """A record of benchmarks/records/, with its name."""
    return read(RECORDS / f"{name}.json") | {"name": name}


def load_all(prefix: str) -> list[dict]:
    """The records whose names begin so."""
    return [load(path.stem) for path in sorted(RECORDS.glob(f"{prefix}*.json"))]


def read(path: Path) -> dict:
    return json.loads(path.read_text(), object_hook=with_new_names)


def with_new_names(row: dict) -> dict:
    row = {OLD_KEYS.get(key, key): value for key, value in row.items()}
    if "arms" in row:  # of a kernel, or of the snapshot
        arms = row.pop("arms")
        row["rows" if isinstance(arms, list) else "functions"] = arms
    if "offload" in row and row.get("trainer") in OLD_TRAINERS:
        row["trainer"] = OLD_TRAINERS[row["trainer"]]
        if row["offload"] == "all":
            row["trainer"] = row["trainer"].replace("masters", "offload")
    return row


def write(path: Path, record: dict) -> None:
    """Write the record atomically: if that fails, the previous one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


class Record:
    """A record that a command fills: every row is written at once, because a later one may crash."""

    def __init__(self, path: Path, head: dict, keep=False):
        """head: what start() in runner.py found out. keep: --keep. Ends the program if path is something else."""
        self.path = path
        self.head = head
        self.commit = head["versions"]["nanocria"]
        self.keep = keep
        self.missing = {}  # trainer -> the row that says what to install
        if path.exists() and not self.continued():
            print(f"{path} was measured with other code or on another device: starting anew")
        self.data = self.continued() or dict(head)

    def continued(self) -> dict | None:
        """The record in the file with this command added to it; None if it is of other code, card or packages."""
        if not self.path.exists():
            return None
        try:
            old = read(self.path)
            same_code = self.commit == old["versions"]["nanocria"].split(", ")[-1] and is_clean(self.commit)
        except (ValueError, TypeError, KeyError):
            sys.exit(f"--out={self.path} exists and is not a benchmark record: name another file")
        packages = (old["versions"].keys() & self.head["versions"].keys()) - {"nanocria"}
        same_packages = all(old["versions"][package] == self.head["versions"][package] for package in packages)
        if old["device"] != self.head["device"] or not same_packages or not (same_code or self.keep):
            return None
        commits = joined(", ", old["versions"]["nanocria"], self.commit)
        versions = old["versions"] | self.head["versions"] | {"nanocria": commits}
        return old | {"command": joined(" && ", old["command"], self.head["command"]), "versions": versions}

    def find(self, kind: str, key: dict) -> dict | None:
        rows = self.data.get(kind, [])
        return next((row for row in rows if all(row.get(name) == value for name, value in key.items())), None)

    def measure(self, kind: str, key: dict, function: Callable[..., dict], /, *args, **arguments) -> dict:
        """The row with this key: the known one if this commit measured it, else the key and what the function returns.
        A trainer that is not installed is tried only once."""
        known = self.find(kind, key)
        if known and known.get("commit") == self.commit:
            print(f"{describe(known)}  (measured before: delete {self.path} to repeat it)")
            return known
        trainer = key.get("trainer")
        if trainer in self.missing:
            return self.missing[trainer]
        row = self.add(kind, key, key | function(*args, **arguments))
        if "missing" in row:
            self.missing[trainer] = row
        return row

    def add(self, kind: str, key: dict, row: dict) -> dict:
        """Print the row, and write it unless it failed. It replaces one with the same key."""
        print(describe(row), flush=True)
        if not {"missing", "failed"} & row.keys():
            row = row | {"commit": self.commit}
            self.data = self.continued() or self.data  # another process, on another card, may fill the same file
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
    changed = [*run_log.git(ROOT), "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in PAGES)]
    if name.endswith("-dirty") and subprocess.run(changed, cwd=ROOT, capture_output=True).returncode == 0:
        return name.removesuffix("-dirty")
    return name


def is_clean(commit: str) -> bool:
    return commit != "unknown" and not commit.endswith("-dirty")


def keep_summary(run_folder: str, name: str) -> None:
    """Write the summary that a run of train.py left, and its validation losses, as the record of that name."""
    if not name or name != Path(name).name:
        sys.exit(f"{name!r} is not a valid name: the record becomes benchmarks/records/NAME.json")
    try:
        run = read_json(Path(run_folder) / "summary.json")
        losses = read_losses(Path(run_folder))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if "bits_per_byte" not in run or run["steps"] != run["settings"]["max_iters"]:
        sys.exit(f"{run_folder} makes no record: it is not whole, was resumed, or eval_iters left out validation data")
    val_curve = [(step, 3600 * hours, loss) for step, _, hours, loss in losses.val]
    write(RECORDS / f"{name}.json", run | {"val_curve": val_curve})
    print(f"record: {RECORDS / name}.json")
