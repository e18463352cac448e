"""The input of prepare scripts: text or JSON, compressed or not, from files or pipes, perhaps with broken rows.

    bad = Bad("skip")  # the value of --errors
    with open_input(path) as file:
        kind = kind_of(head_of(file, path), path)
        for where, row in read_rows(file, path, kind, bad):  # JSON, one object per line or an array
            text = field_of(row, "text", where, bad)  # None if the row is left out
    bad.report()

The first bytes of a file tell its format, so a pipe works like a file. Memory stays bounded, whatever the input: a
line, an element of an array and a document have at most ROW_BYTES, and a decompressor takes at most DECOMPRESSOR_BYTES.
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
from typing import Any, BinaryIO, TextIO

from data.files import refuse_lfs_pointer, say

HEAD = 8000  # bytes that tell a file's format
BUFFER = 2**16
# Ten times War and Peace. A row of JSON takes up to 30 times its bytes once it is parsed, and so do the ids of a text.
ROW_BYTES = 2**25
DECOMPRESSOR_BYTES = 2**27  # the default of the zstd command; xz -9 and zstd -19 need half of it
PIECE = 2**10  # zstd packs 32 KiB of zeros into a byte: this many grow to 32 MiB at most
JSON_LINES = (".jsonl", ".ndjson")
OBJECT = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')  # the start of a non-empty JSON object
ARRAY = re.compile(rb"\s*\[\s*\{")  # the start of a JSON array of objects
SPACE = re.compile(r"[ \t\r\n]*")
ARRAY_END = object()
DECODER = json.JSONDecoder()


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


class Frames(io.RawIOBase):
    """A file of compressed frames, such as zstd's or xz's, one after another.

    The libraries' own readers are not used: zstandard's takes a file that is cut off for a whole one, and lzma's takes
    as much memory as the file asks for, up to 4 GiB. new_frame() makes the library's decompressor of one frame.
    """

    def __init__(self, file: BinaryIO, new_frame: Callable, error: type[Exception]):
        self.file, self.new_frame, self.error = file, new_frame, error
        self.frame = new_frame()
        self.ready = memoryview(b"")  # decompressed, but not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready:
            compressed = self.frame.unused_data or self.file.read(PIECE)
            if not compressed and not self.frame.eof:
                raise EOFError("it ends in the middle of a frame")
            if not compressed:
                return 0
            if self.frame.eof:
                self.frame = self.new_frame()
            try:
                self.ready = memoryview(self.frame.decompress(compressed))
            except self.error as error:
                raise EOFError(f"{error}. At most {DECOMPRESSOR_BYTES >> 20} MiB of memory are used") from error
        n = min(len(buffer), len(self.ready))
        buffer[:n] = self.ready[:n]
        self.ready = self.ready[n:]
        return n


def open_zstd(file: BinaryIO) -> Frames:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=DECOMPRESSOR_BYTES)
    return Frames(file, decompressor.decompressobj, zstandard.ZstdError)


def open_xz(file: BinaryIO) -> Frames:
    return Frames(file, lambda: lzma.LZMADecompressor(memlimit=DECOMPRESSOR_BYTES), lzma.LZMAError)


def open_bz2(file: BinaryIO) -> Frames:
    return Frames(file, bz2.BZ2Decompressor, OSError)  # bz2.open takes damage after the first stream for its end


COMPRESSED = {
    b"\x1f\x8b": gzip.open,
    b"BZh": open_bz2,
    b"\xfd7zXZ\0": open_xz,
    b"\x28\xb5\x2f\xfd": open_zstd,
    **{bytes([i]) + b"\x2a\x4d\x18": open_zstd for i in range(0x50, 0x60)},  # a frame to skip, as pzstd writes first
}


def decompressor_of(head: bytes) -> Callable | None:
    """What opens a file with these first bytes; None if it is not compressed."""
    return next((opener for magic, opener in COMPRESSED.items() if head.startswith(magic)), None)


def open_input(path: Path) -> io.BufferedReader:
    """Open a file or pipe, decompressing it if needed. peek() shows its first bytes, up to BUFFER of them."""
    try:
        file = fully_buffered(open(path, "rb"))  # noqa: SIM115
        opener = decompressor_of(file.peek())
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from error
    return fully_buffered(opener(file)) if opener else file


def fully_buffered(file: BinaryIO) -> io.BufferedReader:
    """With one buffer peek() would show what has arrived, perhaps only the first line from a slow pipe. The outer
    buffer asks the inner one, which reads until the outer one is full or the file ends.
    """
    return io.BufferedReader(io.BufferedReader(file), BUFFER)


def whole_text(file: BinaryIO, path: Path) -> str:
    """The text of an open input, without a byte order mark. ValueError if it is not UTF-8, or too long."""
    content = read(lambda: file.read(ROW_BYTES + 1), path)
    if len(content) > ROW_BYTES:
        raise ValueError(f"{path} has more than {ROW_BYTES:,} bytes of text: cut it into several files or .jsonl rows")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def text_size(path: Path, most: int) -> int | None:
    """The size of a file's text in bytes; None if unknown: a pipe, damaged, or compressed from more than `most`."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        if not decompressor_of(file.read(HEAD)):
            return path.stat().st_size
    with contextlib.suppress(Unreadable), open_input(path) as file:
        size = len(read(lambda: file.read(most + 1), path))
        return size if size <= most else None
    return None


def head_of(file: io.BufferedReader, path: Path) -> bytes:
    """The first bytes of an open input. Raises ValueError if it is not text."""
    head = read(file.peek, path)[:HEAD]
    refuse_lfs_pointer(head, path)
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
    except (ValueError, RecursionError):
        return "text"


def read_rows(file: BinaryIO, path: Path, kind: str, bad: Bad) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of each non-blank line, or of each element of an array. Only one is in memory."""
    if kind == "array":
        try:
            yield from read_array(io.TextIOWrapper(file, encoding="utf-8-sig"), path, bad)
        except UnicodeDecodeError as error:
            bad(f"{path} is not UTF-8 text ({error})")
        return
    for where, line in read_lines(file, path, bad):
        if line.strip():
            yield from ((where, row) for row in parse(line, where, bad))


def read_lines(file: BinaryIO, path: Path, bad: Bad) -> Iterator[tuple[str, bytes]]:
    """Yield (location, line)."""
    number = 0
    while line := read(lambda: file.readline(ROW_BYTES), path):
        number += 1
        where = f"{path}:{number}"
        is_whole = line.endswith(b"\n") or len(line) < ROW_BYTES
        if is_whole:
            yield where, line
            continue
        bad(f"{where} is a line of more than {ROW_BYTES:,} bytes")
        while line and not line.endswith(b"\n"):
            line = read(lambda: file.readline(ROW_BYTES), path)


def read_array(text: TextIO, path: Path, bad: Bad) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of each element. What follows a broken one is left out: it may be a part of it."""
    buffer, position, number = "", 0, 0
    while True:
        where = f"{path}[{number}]"
        try:
            element, end = next_element(buffer, position, "," if number else "[")
        except json.JSONDecodeError as error:  # broken, or not read to its end yet
            n_left = len(buffer) - position
            more = read(lambda n=n_left: text.read(max(n, BUFFER)), path)  # twice as much: each try begins anew
            if not more:
                bad(f"{where} is not JSON: {error.msg}")
                return
            if n_left >= ROW_BYTES:
                bad(f"{where} has {ROW_BYTES:,} characters or more, or is not JSON: {error.msg}")
                return
            buffer = buffer[position:] + more
            position = 0
            continue
        except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
            bad(f"{where} is not JSON: {error}")
            return
        if element is ARRAY_END:
            break
        yield where, element
        position = end
        number += 1
    if buffer[end:].strip() or read(lambda: text.read(BUFFER), path).strip():
        bad(f"{path} goes on after the end of its array")


def next_element(buffer: str, position: int, before: str) -> tuple[Any, int]:
    """The value after `before`, [ or a comma, and where it ends. JSONDecodeError if the buffer does not hold it."""
    start = SPACE.match(buffer, position).end()
    first = buffer[start : start + 1]
    if before == "," and first == "]":
        return ARRAY_END, start + 1
    if first != before:
        raise json.JSONDecodeError(f"expected {before!r}", buffer, start)
    element, end = DECODER.raw_decode(buffer, SPACE.match(buffer, start + 1).end())
    if end == len(buffer):  # a number may go on
        raise json.JSONDecodeError("the array does not end", buffer, end)
    return element, end


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
        found = f"one with {', '.join(map(repr, row)) or 'none':.200}" if isinstance(row, dict) else type(row).__name__
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
