"""The input of prepare scripts: text or JSON, from files and pipes, compressed or not, perhaps with broken rows.

    bad = Bad("skip")  # the value of --errors
    for where, row in read_rows(path, "jsonl", bad):
        text = field_of(row, "text", where, bad)  # None if the row is left out
    bad.report()

A file's name tells its format and compression: corpus.jsonl.zst. Memory stays bounded, whatever the input: a row and a
document have at most ROW_BYTES, and a decompressor takes at most DECOMPRESSOR_BYTES.
"""

import bz2
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from data.files import Unreadable, refuse_lfs_pointer

BUFFER = 2**16
# Ten times War and Peace. A row of JSON takes up to 30 times its bytes once it is parsed, and so do the ids of a text.
ROW_BYTES = 2**25
DECOMPRESSOR_BYTES = 2**27  # the default of the zstd command; xz -9 and zstd -19 need half of it
PIECE = 2**10  # zstd packs 32 KiB of zeros into a byte: this many grow to 32 MiB at most
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}  # of a file's suffix; all else is "text"
COMMA = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
DECODER = json.JSONDecoder()


class Bad:
    """Handles unreadable rows and files as --errors says: "strict" raises ValueError, "skip" counts them."""

    def __init__(self, errors: str = "strict"):
        self.strict = errors == "strict"
        self.n = 0
        self.first = ""

    def __call__(self, sentence: str) -> None:
        if self.strict:
            raise ValueError(f"{sentence}. --errors skip leaves it out")
        self.n += 1
        self.first = self.first or sentence

    def report(self) -> None:
        if self.n:
            print(f"left out by --errors skip: {self.n:,}, the first: {self.first}")


# ----------------------------------------------------------------------------------------------------------------------
# Compressed files


def zstd_decompressor():
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=DECOMPRESSOR_BYTES).decompressobj()


DECOMPRESSORS = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECOMPRESSOR_BYTES),
    ".zst": zstd_decompressor,
}


class Decompressed(io.RawIOBase):
    """The content of a compressed file, of one frame or several (gzip calls them members, xz streams).

    The libraries' own readers are not used: zstandard's takes a file that is cut off for a whole one, bz2's damage
    after the first frame for its end, and lzma's takes as much memory as the file asks for, up to 4 GiB.
    """

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self.file = file
        self.new_decompressor = DECOMPRESSORS[path.suffix.lower()]  # it reads one frame
        self.decompressor = self.new_decompressor()
        self.next_frame = b""  # its first bytes, read with the end of the frame before it
        self.content = memoryview(b"")  # decompressed, but not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.content:
            compressed = self.next_frame or self.file.read(PIECE)
            if not compressed:
                if self.decompressor.eof:
                    return 0
                raise Unreadable(f"{self.path} is cut off")
            if self.decompressor.eof:
                compressed = compressed.lstrip(b"\0")  # zeros between frames and at the end are padding
                self.next_frame = b""
                if not compressed:
                    continue
                self.decompressor = self.new_decompressor()
            try:
                self.content = memoryview(self.decompressor.decompress(compressed))
            except Exception as error:  # each library has its own
                raise Unreadable(f"{self.path} is damaged, or needs too much memory: {error}") from error
            self.next_frame = self.decompressor.unused_data
        n = min(len(buffer), len(self.content))
        buffer[:n] = self.content[:n]
        self.content = self.content[n:]
        return n


def open_input(path: Path) -> io.BufferedReader:
    """Open a file or pipe, decompressing it if its name says so. Reading it raises Unreadable if it is damaged."""
    file = open(path, "rb")  # noqa: SIM115
    refuse_lfs_pointer(file.peek(), path)
    if path.suffix.lower() in DECOMPRESSORS:
        return io.BufferedReader(Decompressed(path, file), BUFFER)
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Text and rows


def format_of(path: Path) -> str:
    """A file's format by its name: "jsonl", "json" or "text". ValueError for a pipe, whose name does not tell it."""
    if path.is_relative_to("/dev"):
        raise ValueError(f"{path} is a pipe, whose name does not tell its format: state it with --format")
    name = path.name.lower()
    for suffix in DECOMPRESSORS:
        name = name.removesuffix(suffix)
    return FORMATS.get(Path(name).suffix, "text")


def whole_text(path: Path) -> str:
    """The text of a file, without a byte order mark. ValueError if it is not UTF-8, or too long."""
    with open_input(path) as file:
        content = file.read(ROW_BYTES + 1)
    if len(content) > ROW_BYTES:
        raise ValueError(f"{path} has more than {ROW_BYTES:,} bytes of text: cut it into several files or .jsonl rows")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def read_rows(path: Path, format: str, bad: Bad) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) of each line of JSON ("jsonl"), or of each element of an array ("json"). Only one is in
    memory.
    """
    try:
        with open_input(path) as file:
            if format == "jsonl":
                yield from read_lines(file, path, bad)
            else:
                yield from read_array(io.TextIOWrapper(file, encoding="utf-8-sig"), path, bad)
    except Unreadable as error:
        bad(str(error))
    except UnicodeDecodeError as error:
        bad(f"{path} is not UTF-8 text: {error}")


def read_lines(file: BinaryIO, path: Path, bad: Bad) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        where = f"{path}:{number}"
        if len(line) > ROW_BYTES:
            bad(f"{where} is a line of more than {ROW_BYTES:,} bytes")
            while line and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES)
        elif line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                bad(f"{where} is not JSON: {error}")
            else:
                yield where, row


def read_array(text: TextIO, path: Path, bad: Bad) -> Iterator[tuple[str, Any]]:
    """Yield each element of an array, or each of several objects one after another. What follows a broken one is left
    out: it may be a part of it. A comma too many is no error.
    """
    buffer = text.read(ROW_BYTES).lstrip()
    is_array = buffer.startswith("[")
    position = int(is_array)
    number = 0
    while True:
        position = COMMA.match(buffer, position).end()
        if len(buffer) - position < ROW_BYTES and (more := text.read(ROW_BYTES)):
            buffer = buffer[position:] + more
            position = 0
            continue
        if position == len(buffer) and not is_array:
            return
        if buffer.startswith("]", position) and is_array:
            break
        where = f"{path}[{number}]"
        try:
            value, position = DECODER.raw_decode(buffer, position)
        except (ValueError, RecursionError):
            bad(f"{where} is not JSON, ends early, or has more than {ROW_BYTES:,} characters")
            return
        yield where, value
        number += 1
    if buffer[position + 1 :].strip():
        bad(f"{path} goes on after the end of its array")


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
        return row[field]
    return None
