"""A checkpoint is a Hugging Face folder: any number of ranks writes it, any other number reads it, and so do others.

    config.json, tokenizer files                 as Hugging Face has them
    model.safetensors                            the weights in the compute dtype, by Hugging Face's names
    model.safetensors.index.json                 which file holds which: above 5 GB there are several
    optimizer.safetensors, and its index         masters' lower halves, moments, whatever the rule names
    run.json                                     step, settings, ...; digests of all other files, and of itself

Nothing is pickled: reading a folder never executes what is in it. A published folder has no run.json, and is read by
the same functions; then nothing says what its bytes should be.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime.hf_names import Rows
from runtime.safetensors_file import (
    PIECE_BYTES,
    Damaged,
    Piece,
    TensorInfo,
    digest,
    digest_pieces,
    make_header,
    open_to_read,
    parse_json,
    read_bytes,
    read_header,
    read_rows,
    write_rows,
)

FILE_BYTES = 5 * 10**9  # of one .safetensors, as Hugging Face cuts them
DOCUMENT_BYTES = 256 * 2**20  # a JSON file may have: run.json has 76 bytes for 4 MiB of tensors
SEAL = ',\n  "digest": "'  # run.json's last line: the digest of all that stands before it


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def on_all_ranks(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """function() on every rank. If it fails on one, all ranks raise the same, so that no rank waits for another.

    That is Damaged, ValueError or, for all else, OSError, with the sentence of the first rank that failed.
    """
    value = failure = None
    try:
        value = function()
    except Exception as error:
        failure = error
    kind = next((kind for kind in (Damaged, ValueError) if isinstance(failure, kind)), OSError)
    found = [(kind, _reason(failure)) if failure else None]
    if dist.is_initialized():
        found = found * dist.get_world_size(group)
        dist.all_gather_object(found, found[0], group)
    for rank, failed in enumerate(found):
        if failed:
            raise failed[0](failed[1] if len(found) == 1 else f"rank {rank}: {failed[1]}") from failure
    return value


def from_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What function() returns on rank 0, on every rank."""
    values = [on_all_ranks(lambda: function() if _rank(group) == 0 else None, group)]
    if dist.is_initialized():
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _rank(group):
    return dist.get_rank(group) if dist.is_initialized() else 0


def _reason(error):
    """The error's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Write


def write_folder(
    folder: Path,
    tensors: dict[str, Iterable[Rows]],
    documents: dict[str, bytes],
    run: dict,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Write a folder and flush it to disk; every rank calls it, with its own rows. The caller renames it afterwards.

    tensors: by the name of their file, "model" or "optimizer". documents: other files by name; only rank 0's count, as
    for run, the content of run.json. Returns the names of tensors whose replicas differ: the first replica is written.
    Raises, on all ranks, OSError if one cannot write, ValueError if the ranks do not have all rows of the same tensors.
    """
    tensors = {stem: {rows.name: rows for rows in found} for stem, found in tensors.items()}
    files, indices = {}, {}
    for stem, by_name in tensors.items():
        layout = _layout(stem, by_name.values())
        indices[f"{stem}.safetensors.index.json"] = _index(layout)
        files |= {file: (*header_and_infos, by_name) for file, header_and_infos in layout.items()}
    headers = {file: digest(header) for file, (header, _, _) in files.items()}
    documents = documents | indices

    def begin():
        shutil.rmtree(folder, ignore_errors=True)  # a save that was killed
        folder.mkdir(parents=True)
        sizes = {
            file: max([len(header), *(info.end for info in infos.values())])
            for file, (header, infos, _) in files.items()
        }
        disk = os.statvfs(folder)
        if (
            disk.f_blocks and sum(sizes.values()) > disk.f_bavail * disk.f_frsize
        ):  # sooner than after writing most of it
            needed, free = sum(sizes.values()) / 2**30, disk.f_bavail * disk.f_frsize / 2**30
            raise OSError(f"the disk is full: {folder} needs {needed:.1f} GiB, and {free:.1f} GiB are free")
        for name, content in documents.items():
            _write_file(folder / name, content)
        for file, (header, _, _) in files.items():
            _write_file(folder / file, header, sizes[file])
        return headers, sizes

    headers_of_rank_0, sizes = from_rank_0(begin, group)

    def write():
        differing = [file for file in headers | headers_of_rank_0 if headers.get(file) != headers_of_rank_0.get(file)]
        if differing:
            raise ValueError(f"the ranks have different tensors for {', '.join(differing)}")
        found = []  # (file, piece, tensor's name, whether it was written)
        for file, (_, infos, by_name) in files.items():
            with open(folder / file, "r+b", buffering=0) as opened:
                for name, info in infos.items():
                    rows = by_name[name]
                    x = rows.tensor() if callable(rows.tensor) else rows.tensor
                    pieces = write_rows(opened, info, rows.first, x, rows.writes)
                    found += [(file, piece, name, rows.writes) for piece in pieces]
                os.fsync(opened.fileno())
        return found

    found = [on_all_ranks(write, group)]
    if dist.is_initialized():
        found_here, found = found[0], [None] * dist.get_world_size(group) if _rank(group) == 0 else None
        dist.gather_object(found_here, found, group=group, group_dst=0)

    def finish():
        written = {name: digest_pieces(content) for name, content in documents.items()}
        written |= {file: digest_pieces(header) for file, (header, _, _) in files.items()}
        for file, piece, _, writes in (item for of_rank in found for item in of_rank):
            if writes:
                written[file].append(piece)
        for file, size in sizes.items():
            written[file].sort()
            if [piece.begin for piece in written[file]] + [size] != [0, *(piece.end for piece in written[file])]:
                raise ValueError(f"{folder / file}: the rows of all ranks are not its {size} bytes, each once")
        whole = {(file, piece) for file, pieces in written.items() for piece in pieces}
        digests = {file: [f"{piece.end} {piece.sha256}" for piece in pieces] for file, pieces in written.items()}
        _write_file(folder / "run.json", _sealed(run | {"digests": digests}))
        sync_folder(folder)
        return sorted({name for of_rank in found for file, piece, name, _ in of_rank if (file, piece) not in whole})

    return from_rank_0(finish, group)


def _layout(stem: str, found: Iterable[Rows]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
    """The files for tensors: by name the header, and where each tensor lies."""
    groups, n_bytes = [{}], 0
    for rows in found:
        size = TensorInfo(*rows[:3], begin=0).end
        if groups[-1] and n_bytes + size > FILE_BYTES:
            groups, n_bytes = [*groups, {}], 0
        groups[-1][rows.name], n_bytes = (rows.dtype, rows.shape), n_bytes + size
    names = [f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else [f"{stem}.safetensors"]
    return {name: make_header(group) for name, group in zip(names, groups, strict=True)}


def _index(layout) -> bytes:
    """Hugging Face's index. A single file gets one too: without it vLLM would read optimizer.safetensors as weights."""
    infos = {info.name: (file, info) for file, (_, infos) in layout.items() for info in infos.values()}
    total = sum(info.end - info.begin for _, info in infos.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in infos.items()}}
    return json.dumps(index, indent=2).encode()


def _write_file(path, content, size=0):
    with open(path, "xb") as file:
        file.write(content)
        file.truncate(max(size, len(content)))
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder: names of new files, and renames, are on the disk only then."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _sealed(run: dict) -> bytes:
    """run.json: the JSON object with its digest as the last name. What is not finite becomes null."""
    finite = json.loads(json.dumps(run), parse_constant=lambda _: None)
    body = json.dumps(finite, indent=2).removesuffix("\n}")
    return f'{body}{SEAL}{digest(body.encode())}"\n}}\n'.encode()


# ----------------------------------------------------------------------------------------------------------------------
# Read


class Folder(NamedTuple):
    """What a folder holds, the same on all ranks."""

    path: Path
    run: dict | None  # run.json; None in a published folder
    config: dict  # config.json
    tensors: dict[str, tuple[str, TensorInfo]]  # by name: the file, and where in it
    pieces: dict[str, list[Piece]] | None  # of each file but run.json; None in a published folder


def open_folder(path: Path, stems: tuple[str, ...] = ("model",), group: dist.ProcessGroup | None = None) -> Folder:
    """Read and check all but the tensors, on rank 0; every rank calls this. To resume: stems ("model", "optimizer").

    Raises, on all ranks, Damaged if a file is missing, cut off, not what was saved or not what its format says; OSError
    if one cannot be read.
    """
    return from_rank_0(lambda: _open_folder(Path(path), stems), group)


def _open_folder(path, stems):
    run = read_run(path)
    pieces = run and _parse_digests(run["digests"], path / "run.json")
    config = parse_json(read_document(path / "config.json", pieces), path / "config.json")
    tensors = {}
    for stem in stems:
        tensors |= _find_tensors(path, f"{stem}.safetensors", pieces)
    return Folder(path, run, config, tensors, pieces)


def _find_tensors(path, single, pieces):
    """The tensors of a file, or of all files that its index names."""
    index, where = path / f"{single}.index.json", {}
    if index.exists():
        where = parse_json(read_document(index, pieces), index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(x, str) and Path(x).name == x for x in where.values()):
            raise Damaged(f"{index} has no weight_map, from names of tensors to names of files")
    tensors = {}
    for file in sorted(set(where.values())) or [single]:
        with open_to_read(path / file) as opened:
            infos = read_header(opened, _pieces_of(opened, pieces))
        tensors |= {name: (file, info) for name, info in infos.items() if where.get(name, file) == file}
    lost = where.keys() - tensors.keys()
    if lost:
        raise Damaged(f"{index} says that {min(lost)!r} is in {where[min(lost)]}, and it is not")
    return tensors


def read_run(path: Path) -> dict | None:
    """run.json of a folder, on this rank; None if there is none. Damaged if it is not what was saved."""
    file = path / "run.json"
    if not file.exists():
        return None
    body, seal, end = read_document(file).rpartition(SEAL.encode())
    if end != f'{digest(body)}"\n}}\n'.encode():  # before it is parsed
        raise Damaged(f"{file} is not what was saved")
    run = parse_json(body + b"}", file)
    if not isinstance(run.get("digests"), dict):
        raise Damaged(f"{file} has no digests")
    return run


def read_document(path: Path, pieces: dict[str, list[Piece]] | None = None) -> bytes:
    """A small file, on this rank. Damaged if it is missing or not what was saved. pieces: Folder.pieces."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > DOCUMENT_BYTES:
            raise Damaged(f"{path} has {size} bytes: expected at most {DOCUMENT_BYTES}")
        content = bytearray(size)
        read_bytes(file, 0, memoryview(content), _pieces_of(file, pieces))
    return bytes(content)


def _pieces_of(file, pieces):
    """The pieces of an open file."""
    if pieces is None:
        return None
    name, size = Path(file.name).name, os.fstat(file.fileno()).st_size
    if name not in pieces:
        raise Damaged(f"{file.name} is not in run.json's digests")
    saved = pieces[name][-1].end if pieces[name] else 0
    if size != saved:
        raise Damaged(f"{file.name} has {size} bytes, and {saved} were saved")
    return pieces[name]


def _parse_digests(digests, path):
    """The pieces of each file, from lists of "end sha256"."""
    pieces = {}
    for file, lines in digests.items():
        if not (isinstance(lines, list) and all(re.fullmatch(r"\d{1,18} [0-9a-f]{64}", str(line)) for line in lines)):
            raise Damaged(f"{path}: the digests of {file!r} are no list of ends and SHA-256")
        ends = [0, *(int(line.split()[0]) for line in lines)]
        if any(not 0 < end - begin <= PIECE_BYTES for begin, end in pairwise(ends)):
            raise Damaged(f"{path}: the digests of {file!r} are not of pieces of 1 to {PIECE_BYTES} bytes")
        pieces[file] = [Piece(*pair, line.split()[1]) for pair, line in zip(pairwise(ends), lines, strict=True)]
    return pieces


@torch.no_grad()
def read_into(folder: Folder, rows: Iterable[Rows], group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's rows, on any device, from a folder, rounding at most once. Every rank calls it.

    Raises, on all ranks, ValueError if the folder lacks a tensor, or has it in another shape, or integers for floating
    point; Damaged or OSError as open_folder does.
    """

    def read():
        for wanted in rows:
            file, info = folder.tensors.get(wanted.name, (None, None))
            if not info or info.shape != wanted.shape:
                found = f"it in shape {tuple(info.shape)}" if info else "none"
                raise ValueError(f"expected {wanted.name} of shape {tuple(wanted.shape)}: {folder.path} has {found}")
            x = wanted.tensor
            if x.dtype != info.dtype and not (x.is_floating_point() and info.dtype.is_floating_point):
                raise ValueError(f"expected {wanted.name} in {x.dtype}: {folder.path} has it in {info.dtype}")
            direct = x.dtype == info.dtype and x.device.type == "cpu" and x.is_contiguous()
            buffer = x if direct else torch.empty(x.shape, dtype=info.dtype)
            with open_to_read(folder.path / file) as opened:
                read_rows(opened, info, wanted.first, buffer, folder.pieces and folder.pieces[file])
            if not direct:
                x.copy_(buffer)

    on_all_ranks(read, group)
