"""One safetensors file, written and read by many ranks at once: each handles its own rows, none the whole file.

    8 bytes     n, little-endian
    n bytes     header, JSON: {name: {"dtype": "BF16", "shape": [O, C], "data_offsets": [begin, end]}}, then spaces
    the rest    the tensors, without gaps; their offsets count from here

A tensor's rows are a contiguous range of bytes. Every rank computes the same header, so it knows where its rows go.

Digests. A file is cut into pieces of at most PIECE_BYTES: at each tensor's first byte, at multiples of PIECE_BYTES from
there, and where the rows of one rank end. Each piece has a SHA-256, and the list of pieces covers the file from its
first byte to its last. A digest belongs to a place, so it detects swapped rows, and damage that would cancel out in a
sum. Why pieces end where a rank's rows end: each piece then has one writer, which hashes it in memory, so no bytes are
exchanged or read back (on a network file system another machine may see them late). Any reader can check them: it reads
the pieces that overlap its rows whole. With as many ranks as saved no extra byte is read, with another number at most
two extra pieces per tensor. SHA-256 takes 0.6 s per GB on a core with instructions for it, BLAKE2b twice as long.

https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.files import LFS_ADVICE
from runtime.distributed import local_world_size

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 4 * 2**20  # with its SHA-256: 76 bytes of JSON for each 4 MiB
HEADER_BYTES = 10 * 2**20  # largest header accepted; the states of 8B take 0.2 MB
THREADS = max(1, min(4, (os.cpu_count() or 1) // local_world_size))  # to move and hash pieces


class Damaged(ValueError):
    """A file is not what was saved, or violates its format."""


class TensorInfo(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # its first byte in the file

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    begin: int
    end: int
    sha256: str


def cut(begin: int, end: int, origin: int) -> list[tuple[int, int]]:
    """Cut a range of bytes at multiples of PIECE_BYTES from origin."""
    inner = range(begin + PIECE_BYTES - (begin - origin) % PIECE_BYTES, end, PIECE_BYTES)
    return list(pairwise([begin, *inner, end])) if begin < end else []


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_pieces(content: bytes) -> list[Piece]:
    """The pieces of a file whose whole content one rank holds."""
    return [Piece(begin, end, digest(content[begin:end])) for begin, end in cut(0, len(content), 0)]


def as_bytes(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy())


# ----------------------------------------------------------------------------------------------------------------------
# Header


def make_header(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorInfo], int]:
    """The first bytes of a file with tensors of these dtypes and shapes, where each tensor lies, and the file's size.

    The widest dtype comes first, so that each tensor is aligned. ValueError for a dtype that is not in DTYPES.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0  # transformers requires the format
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {dtype}: safetensors files here hold {', '.join(DTYPES)}")
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    n_bytes = 8 + len(text) + offset
    return len(text).to_bytes(8, "little") + text, parse_header(text, n_bytes, "the file to write"), n_bytes


def parse_json(text: bytes, path: Path | str) -> dict[str, Any]:
    """Parse a JSON object; Damaged for anything else."""
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path} holds JSON of type {type(content).__name__}: expected an object")
    return content


def parse_header(text: bytes, file_bytes: int, path: Path | str) -> dict[str, TensorInfo]:
    """Where each tensor of a file lies, by name. Damaged unless they fill the file without gaps or overlaps."""
    header = parse_json(text, f"the header of {path}")
    header.pop("__metadata__", None)
    position = start = 8 + len(text)
    infos = sorted((_tensor_info(name, header[name], start, path) for name in header), key=lambda x: (x.begin, x.end))
    for info in infos:
        if info.begin != position:
            what = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
            raise Damaged(f"{path}: {info.name!r} {what}: it begins at byte {info.begin}, expected {position}")
        position = info.end
    if position != file_bytes:
        raise Damaged(f"{path} has {file_bytes} bytes, but its header describes {position}: copy or fetch it again")
    return {info.name: info for info in infos}


def _tensor_info(name, entry, start, path):
    """One entry of a header; its values may be of any type."""
    if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
        raise Damaged(f"{path}: {name!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise Damaged(f"{path}: {name!r} has dtype {dtype!r:.40}, expected one of {', '.join(DTYPES)}")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2
    if not (lists and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *offsets))):
        raise Damaged(f"{path}: {name!r} has a shape or data_offsets that are not valid numbers")
    info = TensorInfo(name, DTYPES[dtype], tuple(shape), start + offsets[0])
    if info.end != start + offsets[1]:
        needed, found = info.end - info.begin, offsets[1] - offsets[0]
        raise Damaged(f"{path}: {name!r}, {dtype} of {info.shape}, takes {needed} bytes, but data_offsets say {found}")
    return info


# ----------------------------------------------------------------------------------------------------------------------
# Bytes


def open_to_read(path: Path) -> FileIO:
    """Open a file unbuffered. Damaged if it does not exist; OSError if it cannot be opened."""
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing: copy or fetch the whole folder") from None


def transfer(system_call: Callable, file: FileIO, buffer: memoryview, offset: int) -> None:
    """Call os.preadv or os.pwritev until all of buffer is read or written."""
    while buffer:
        try:
            n = system_call(file.fileno(), [buffer], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from error
        if not n:
            raise Damaged(f"{file.name} ends at byte {offset}: it is cut off")
        buffer, offset = buffer[n:], offset + n


def _in_parallel(function, items):
    with ThreadPoolExecutor(THREADS) as threads:  # reads, writes and hashes all release the GIL
        return list(threads.map(function, items))


def read_bytes(file: FileIO, begin: int, target: memoryview, pieces: list[Piece] | None, what: str = "") -> None:
    """Fill target with a file's bytes from begin on. Damaged if a piece that overlaps them is not what was saved.

    pieces: all of the file's; None: unknown, check nothing. what: these bytes' name, for messages.
    """
    end = begin + len(target)

    def read(piece):
        first, last = max(begin, piece.begin), min(end, piece.end)
        part = target[first - begin : last - begin]
        whole = part if len(part) == piece.end - piece.begin else memoryview(bytearray(piece.end - piece.begin))
        transfer(os.preadv, file, whole, piece.begin)
        if piece.sha256 and digest(whole) != piece.sha256:
            found = f"its bytes {piece.begin} to {piece.end}{what and f' ({what})'} are not what was saved"
            raise Damaged(f"{file.name} is damaged: {found}")
        if whole is not part:
            part[:] = whole[first - piece.begin : last - piece.begin]

    if pieces is None:
        overlapping = [Piece(*ends, "") for ends in cut(begin, end, begin)]
    else:
        after = bisect_right(pieces, begin, key=lambda piece: piece.end)
        overlapping = pieces[after : bisect_left(pieces, end, key=lambda piece: piece.begin)]
    _in_parallel(read, overlapping)


def read_header(file: FileIO, pieces: list[Piece] | None = None) -> dict[str, TensorInfo]:
    """Where each tensor of a file lies, by name. Damaged if it is not safetensors; nothing large is read then."""
    size, start = os.fstat(file.fileno()).st_size, bytearray(8)
    read_bytes(file, 0, memoryview(start), None)
    n = int.from_bytes(start, "little")
    if start == b"version ":
        raise Damaged(f"{file.name} {LFS_ADVICE}")
    if n > min(HEADER_BYTES, size - 8):
        raise Damaged(
            f"{file.name}, of {size} bytes, is not a safetensors file, or a damaged one: its header has {n} bytes"
        )
    header = bytearray(8 + n)
    read_bytes(file, 0, memoryview(header), pieces, "its header")  # checked before it is parsed
    return parse_header(bytes(header[8:]), size, file.name)


def read_rows(file: FileIO, info: TensorInfo, first: int, out: torch.Tensor, pieces: list[Piece] | None = None) -> None:
    """Fill out, contiguous and on the CPU, with the rows of a tensor from `first` on."""
    read_bytes(file, info.begin + first * info.row_bytes, as_bytes(out), pieces, info.name)


def write_rows(file: FileIO, info: TensorInfo, first: int, rows: torch.Tensor, write: bool = True) -> list[Piece]:
    """Write the rows of a tensor from `first` on, and return their pieces. write=False: only return the pieces."""
    content, begin = as_bytes(rows.cpu().contiguous()), info.begin + first * info.row_bytes

    def piece(ends):
        part = content[ends[0] - begin : ends[1] - begin]
        if write:
            transfer(os.pwritev, file, part, ends[0])
        return Piece(*ends, digest(part))

    return _in_parallel(piece, cut(begin, begin + len(content), info.begin))
