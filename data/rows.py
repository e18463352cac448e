"""The input of prepare scripts: text or JSON, compressed or not, from files or pipes, perhaps with broken rows.

    bad = Bad("skip")  # the value of --errors
    with open_input(path) as file:
        kind = kind_of(head_of(file, path), path)
        for where, row in read_rows(file, path, kind, bad):  # JSON, one object per line or an array
            text = field_of(row, "text", where, bad)  # None if the row is left out
    bad.report()

The first bytes of a file tell its format, so a pipe works like a file.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from data.files import say

HEAD = 8000  # bytes that tell a file's format
JSON_LINES = (".jsonl", ".ndjson")
OBJECT = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')  # the start of a non-empty JSON object
ARRAY = re.compile(rb"\s*\[\s*\{")  # the start of a JSON array of objects


class Bad:
    """Handles unreadable rows and files as --errors says: "strict" raises ValueError, "skip" counts them."""

    def __init__(self, errors: str = "strict"):
        self.strict, self.n, self.first = errors == "strict", 0, None

    def __call__(self, sentence: str) -> None:
        if self.strict:
            raise ValueError(f"{sentence}. --errors skip leaves it out")
        self.n, self.first = self.n + 1, self.first or sentence

    def report(self) -> None:
        if self.n:
            say(f"left out by --errors skip: {self.n:,}, the first: {self.first}")


class Unreadable(ValueError):
    """A file is damaged or truncated."""


class Zstandard(io.RawIOBase):
    """A decompressed zstd file. zstandard's own reader accepts a truncated file as complete."""

    def __init__(self, file: BinaryIO):
        import zstandard

        self.file, self.error, self.ready = file, zstandard.ZstdError, b""
        self.new_frame = zstandard.ZstdDecompressor().decompressobj
        self.frame = self.new_frame()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready:
            compressed = self.frame.unused_data or self.file.read(2**17)
            if not compressed and not self.frame.eof:
                raise EOFError("it ends in the middle of a frame")
            if not compressed:
                return 0
            if self.frame.eof:
                self.frame = self.new_frame()
            try:
                self.ready = self.frame.decompress(compressed)
            except self.error as error:
                raise EOFError(str(error)) from error
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n


COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"\x28\xb5\x2f\xfd": Zstandard}


def open_input(path: Path) -> io.BufferedReader:
    """Open a file or pipe, decompressing it if needed. peek() shows its first bytes."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from error
    for magic, opener in COMPRESSED.items():
        if file.peek(HEAD).startswith(magic):
            return io.BufferedReader(opener(file), 2**16)
    return file


def whole_text(file: BinaryIO, path: Path) -> str:
    """The text of an open input, without a byte order mark. Raises ValueError if it is not UTF-8."""
    try:
        return read(file.read, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def text_size(path: Path, most: int) -> int | None:
    """The size of a file's text in bytes; None if unknown: a pipe, damaged, or compressed from more than `most`."""
    if not path.is_file():
        return None
    with contextlib.suppress(Unreadable), open_input(path) as file:
        if isinstance(file.raw, io.FileIO):
            return path.stat().st_size
        size = len(read(lambda: file.read(most + 1), path))
        return size if size <= most else None
    return None


def head_of(file: io.BufferedReader, path: Path) -> bytes:
    """The first bytes of an open input. Raises ValueError if it is not text."""
    head = read(lambda: file.peek(HEAD), path)[:HEAD]
    if head.startswith(b"PAR1"):
        texts = f"python data/fineweb_edu/prepare.py --input {quote(str(path))} reads texts from it"
        raise ValueError(f"{path} is parquet: {texts}; write conversations as .jsonl")
    if b"\0" in head:  # git's rule
        raise ValueError(f"{path} is binary or UTF-16, with zero bytes: text is read as UTF-8")
    return head.removeprefix(b"\xef\xbb\xbf")


def is_jsonl(path: Path) -> bool:
    """True if the name says so: corpus.jsonl, corpus.jsonl.gz."""
    return any(suffix.lower() in JSON_LINES for suffix in path.suffixes[-2:])


def kind_of(head: bytes, path: Path) -> str:
    """The format of a file, by its name and first bytes: JSON "lines", a JSON "array", or "text"."""
    if is_jsonl(path):
        return "lines"
    named = path.is_file() and not str(path).startswith("/dev/")  # stdin may be a file, but its name tells nothing
    if ARRAY.match(head) and (".json" in path.name.lower() or not named):
        return "array"
    line, end, _ = head.lstrip().partition(b"\n")
    if not OBJECT.match(line):
        return "text"
    try:
        return "lines" if not end or json.loads(line) else "text"  # a line that does not end in head cannot be parsed
    except ValueError:
        return "text"


def read_rows(file: BinaryIO, path: Path, kind: str, bad: Bad) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of each non-blank line, or of each element of an array."""
    if kind == "array":
        for rows in parse(read(file.read, path), str(path), bad):
            yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
        return
    for number, line in enumerate(iter(lambda: read(file.readline, path), b""), start=1):
        where = f"{path}:{number}"
        if line.strip():
            yield from ((where, row) for row in parse(line, where, bad))


def parse(line: bytes, where: str, bad: Bad) -> list:
    """[the value], or [] if the line is broken."""
    try:
        return [json.loads(line.decode("utf-8-sig"))]
    except UnicodeDecodeError as error:
        bad(f"{where} is not UTF-8 text ({error})")
    except json.JSONDecodeError as error:
        bad(f"{where} is not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
        bad(f"{where} is not JSON: {error}")
    return []


def field_of(row: Any, field: str, where: str, bad: Bad) -> str | None:
    """The text of a row, or None if the row is left out."""
    if not isinstance(row, dict) or field not in row:
        found = f"one with {', '.join(row) or 'none'}" if isinstance(row, dict) else type(row).__name__
        said = "set --field. For conversations use data/chat/prepare.py"
        bad(f"{where} is not an object with the field {field!r} but {found}: {said}")
    elif not isinstance(row[field], str):
        bad(f"{where} has {field!r} of type {type(row[field]).__name__}, expected a string")
    else:
        return row[field]
    return None


def read(call: Callable, path: Path) -> Any:
    """Return call(), which reads. Raises Unreadable if the file cannot be decompressed."""
    try:
        return call()
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise Unreadable(f"{path} is damaged, or cut off: {error}") from error
