"""The input of prepare scripts: text or JSON, from files and pipes, compressed or not, perhaps with broken rows.

    with Bad("skip") as bad:  # the value of --errors; at the end, print what was left out
        for where, row in json_rows(path, bad):
            text = field_of(row, "text", where, bad)  # None if the row is left out

A file's name tells its format and compression: corpus.jsonl.zst. JSON has an object a line, or is one array of objects.
Lines are read one by one, an array whole.
"""

import bz2
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from data.files import refuse_lfs_pointer

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")  # of a file's name; all else is text
BOM = b"\xef\xbb\xbf"


class BadInput(ValueError):
    """A row or file that ends a strict preparation."""


class Bad:
    """Handles unreadable rows and files as --errors says: "strict" raises BadInput, "skip" counts them for a report."""

    def __init__(self, errors: str):
        self.strict = errors == "strict"
        self.n = 0
        self.first = []  # of the sentences, ten

    def __call__(self, sentence: str) -> None:
        if self.strict:
            raise BadInput(f"{sentence}. --errors skip leaves it out")
        self.n += 1
        if len(self.first) < 10:
            self.first.append(sentence)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.n:
            print(f"left out by --errors skip: {self.n:,}, the first: " + "\n".join(self.first))


@contextmanager
def reading(path: Path, bad: Callable[[str], None]):
    """Tell `bad` of a file that is damaged, cut off or not UTF-8 when reading gets there."""
    try:
        yield
    except (BadInput, FileNotFoundError, ImportError):
        raise
    except Exception as error:  # each library has its own
        bad(f"{path} cannot be read, or not to its end: {error}")


def files_below(folder: Path, bad: Callable[[str], None]) -> list[Path]:
    """What a folder and the folders in it hold, sorted: all but folders and hidden files, not following links. Tells
    `bad` of a folder that cannot be listed: Path.rglob would leave out what is in it without a word.
    """
    files = []
    for path, folders, names in os.walk(folder, onerror=lambda error: bad(str(error))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(path, name) for name in names if not name.startswith(".")]
    return sorted(files)


def open_zstd(file: BinaryIO) -> BinaryIO:
    try:
        zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise ImportError("reading .zst files needs the package backports.zstd: pip install backports.zstd") from error
    return zstd.open(file)


# Each notices a file that is cut off, and reads several in one to the end. (The package zstandard does not.)
DECOMPRESSORS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}


def open_input(path: Path) -> BinaryIO:
    """Open a file or pipe, decompressing it if its name says so."""
    file = open(path, "rb")  # noqa: SIM115
    refuse_lfs_pointer(file.peek(), path)
    decompress = DECOMPRESSORS.get(path.suffix.lower())
    return decompress(file) if decompress else file


def is_json(path: Path) -> bool:
    """Whether a file's name says that it holds JSON. ValueError for a pipe, whose name does not tell it."""
    if path.is_relative_to("/dev") and not path.suffix:  # not a file in /dev/shm
        raise ValueError(f"{path} is a pipe, whose name does not tell its format: data/text needs --format")
    name = path.name.lower()
    for suffix in DECOMPRESSORS:
        name = name.removesuffix(suffix)
    return name.endswith(JSON_SUFFIXES)


def json_rows(path: Path, bad: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of each line of JSON, or of each element of an array."""
    with reading(path, bad), open_input(path) as file:
        if file.peek(1).removeprefix(BOM).lstrip().startswith(b"["):
            content = file.read()
            try:
                rows = json.loads(content)
            except ValueError as error:
                raise ValueError(f"it begins with [, and so has to be one array of objects: {error}") from error
            for i, row in enumerate(rows):
                yield f"{path}[{i}]", row
            return
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.removeprefix(BOM).strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig").strip())
            except ValueError as error:
                bad(f"{where} is not a line of JSON: {error}")
            else:
                yield where, row


def field_of(row: Any, field: str, where: str, bad: Bad) -> str | None:
    """The text of a row, or None if the row is left out."""
    if not isinstance(row, dict):
        bad(f"{where} is of type {type(row).__name__}, expected an object with the field {field!r}")
    elif field not in row:
        names = ", ".join(map(repr, row))
        bad(f"{where} has no field {field!r} but {names:.200}: set --field, or --format text for files of other JSON")
    elif not isinstance(row[field], str):
        bad(f"{where} has {field!r} of type {type(row[field]).__name__}, expected a string")
    else:
        return row[field].encode("utf-8", "replace").decode()  # JSON can hold lone surrogates, which UTF-8 cannot
    return None
