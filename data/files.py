"""Reading small files, writing that is atomic and follows no links, locks."""

import errno
import fcntl
import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 2**28  # of a small file: the largest published tokenizers have 35 MB


def lock(file, flags: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another process holds the lock.

    Some network file systems do not support locks: then print a warning and continue.
    """
    try:
        fcntl.flock(file, flags)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"{file.name} cannot be locked ({error.strerror}): let no other run write to its folder",
              file=sys.stderr)  # fmt: skip


def open_to_write(path: Path, mode: str, **options):
    """open(path, mode), but OSError for a link: in a folder from a stranger it may point to any file.

    The folders on the way may be links: users move their data to other disks.
    """
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)


@contextmanager
def atomic_write(path: Path):
    """Open a file for writing bytes. It is renamed to `path` only when all of it is on disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open_to_write(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # only still there after an error


def refuse_lfs_pointer(head: bytes, path: Path) -> None:
    """ValueError if a file begins as the three lines that stand for it in a clone made without git-lfs."""
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the file: fetch it with git lfs pull")


def read_small(path: Path) -> bytes:
    """The content of a regular file of at most MOST_BYTES. The file may come from a stranger: anything else is a
    ValueError. OSError if it is missing or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")  # a pipe without a writer would block, a device never end
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes, which is too large for a file of this kind")
    refuse_lfs_pointer(content, path)
    return content


def read_json(path: Path) -> dict:
    """The JSON object in a small file. ValueError, OSError as read_small's."""
    return parse_object(read_small(path), path)


def parse_object(content: bytes, path: Path) -> dict:
    """The JSON object that is the content of a file. ValueError if it is damaged or anything else."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def finite(content: dict) -> dict:
    """What JSON can hold of it: null for numbers that are not finite."""
    return json.loads(json.dumps(content), parse_constant=lambda _: None)


def write_json(path: Path, content: dict) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(finite(content), indent=2) + "\n").encode())


def display_path(path: Path) -> str:
    """The path relative to the current folder if it is inside, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def how_to_fetch(path: Path) -> str:
    """What to do about a path that holds no weights, or no tokenizer: it may be a name on the hub, or a GGUF file."""
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return "GGUF files are not read: fetch the model they were made from, hf download NAME --local-dir FOLDER"
    if (path / "adapter_config.json").exists():
        return "It holds adapters that peft wrote: merge them into their base by peft's merge_and_unload()"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return f"If that is a name on huggingface.co: hf download {path} --local-dir {path.name}, then name {path.name}"
    return "From huggingface.co: hf download NAME --local-dir FOLDER"
