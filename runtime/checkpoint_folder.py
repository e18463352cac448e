"""A checkpoint is a Hugging Face folder. Any number of ranks writes it; any other number, or another program, reads it.

    config.json, tokenizer files                 in Hugging Face's format
    model.safetensors                            the weights in the compute dtype, under Hugging Face's names
    model.safetensors.index.json                 which file holds which tensor: above 5 GB there are several files
    optimizer.safetensors, and its index         masters' lower halves, moments, whatever the update rule defines
    run.json                                     step, settings, ...; digests of all other files, and of itself

A run that trains adapters writes peft's adapter_model.safetensors and adapter_config.json instead of model.safetensors,
and base_config.json instead of config.json. The base weights stay where they are: adapter_config.json has their path,
base_config.json their fingerprint.

Nothing is pickled: reading a folder never executes code from it. The same functions read a published folder. That has
no run.json, so there are no digests to check its bytes against.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from data.files import LFS_ADVICE, is_lfs_pointer
from data.meta import check_meta
from data.tokenizer import FILES, MODEL_FILES, published_name
from runtime import meta_weights
from runtime.distributed import from_rank_0, group_rank, on_all_ranks
from runtime.hf_config import ADAPTED, add_missing
from runtime.hf_names import Rows, unwrapped_names
from runtime.safetensors_file import (
    PIECE_BYTES,
    Damaged,
    Piece,
    TensorInfo,
    as_bytes,
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

FILE_BYTES = 5 * 10**9  # maximum for one .safetensors, Hugging Face's
DOCUMENT_BYTES = 2**28  # maximum for any other file; the largest tokenizer.json have 4e7
FILE_NAME = re.compile(r"[\w.-]{1,80}\.safetensors")  # what an index may name: no file in another folder
KEPT = (*FILES, *MODEL_FILES)  # copied from the folder that a run began with
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OTHERS = {  # formats published in place of model.safetensors
    "pytorch_model*.bin": "pickled weights, which are not read: save them with transformers as .safetensors",
    "*.gguf": "GGUF files, which are not read: take the weights that they were made from",
    "adapter_model.safetensors": "an adapter alone: merge it into its base model with peft first",
    "*.safetensors": "a part of a model, without its config.json or its index: copy or fetch the whole folder",
}
SEAL = b',\n  "digest": "'


# ----------------------------------------------------------------------------------------------------------------------
# Write


def write_folder(
    folder: Path,
    tensors: dict[str, Iterable[Rows]],
    documents: dict[str, bytes],
    run: dict,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Write a folder and flush it to disk. Every rank must call it, with its own rows. The caller then renames it.

    tensors: keyed by their file, "model" or "optimizer". documents: other files by name. run: the content of run.json.
    Of the last two only rank 0's count. Returns the names of tensors whose replicas differ: the first one is written.
    Raises, on all ranks, OSError if one cannot write, ValueError if the ranks do not have all rows of the same tensors.
    """
    files, rows = {}, {}
    for stem, found in tensors.items():
        found = {each.name: each for each in found}
        layout = _layout(stem, found.values())
        documents = documents | {f"{stem}.safetensors.index.json": _index(layout)}
        files, rows = files | layout, rows | found
    agreed = from_rank_0(lambda: _create(folder, documents, files), group)
    on_all_ranks(lambda: _require_same_files(files, agreed), group)
    mine = []
    for file in files:  # one after another: a rank that still writes is waited for, one that hangs is not
        mine += on_all_ranks(lambda file=file: _write_rows(folder, file, files[file], rows), group)
    pieces = [mine]
    if dist.is_initialized():
        pieces = [None] * dist.get_world_size(group) if group_rank(group) == 0 else None
        dist.gather_object(mine, pieces, group=group, group_dst=0)
    return from_rank_0(lambda: _finish(folder, documents, files, run, pieces), group)


def _layout(stem, found):
    """The files for these tensors: {name: (header, where each tensor lies, number of bytes)}."""
    groups, n_bytes = [{}], 0
    for rows in found:
        size = TensorInfo(*rows[:3], begin=0).end
        if groups[-1] and n_bytes + size > FILE_BYTES:
            groups, n_bytes = [*groups, {}], 0
        groups[-1][rows.name], n_bytes = (rows.dtype, rows.shape), n_bytes + size
    names = [f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = names if len(groups) > 1 else [f"{stem}.safetensors"]
    return {name: make_header(group) for name, group in zip(names, groups, strict=True)}


def _index(layout):
    """Hugging Face's index. A single file gets one too: without it vLLM would read optimizer.safetensors as weights."""
    infos = {info.name: (file, info) for file, (_, infos, _) in layout.items() for info in infos.values()}
    total = sum(info.end - info.begin for _, info in infos.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in infos.items()}}
    return json.dumps(index, indent=2).encode()


def _create(folder, documents, files):
    """Write the documents, and create each tensor file at its full size with only its header. Returns `files`."""
    shutil.rmtree(folder, ignore_errors=True)  # left by a save that was killed
    folder.mkdir(parents=True)
    total, _, free = shutil.disk_usage(folder)
    needed = sum(n_bytes for _, _, n_bytes in files.values())
    if total and needed > free:  # a few file systems report 0 of 0
        raise OSError(f"the disk is full: {folder} needs {needed / 2**30:.3f} GiB, but {free / 2**30:.3f} GiB are free")
    for name, content in documents.items():
        _write_file(folder / name, content)
    for file, (header, _, n_bytes) in files.items():
        _write_file(folder / file, header, n_bytes)
    return files


def _write_file(path, content, n_bytes=0):
    try:
        path.parent.mkdir(exist_ok=True)  # original/
        with open(path, "xb") as file:
            file.write(content)
            file.truncate(max(n_bytes, len(content)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # only open() names the file in its error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _require_same_files(files, agreed):
    """agreed: rank 0's `files`."""
    differing = [file for file in files | agreed if files.get(file) != agreed.get(file)]
    if differing:
        raise ValueError(f"the ranks have different tensors for {', '.join(differing)}")


def _write_rows(folder, file, layout, rows):
    """Write this rank's rows of one file. Returns [(file, piece, tensor's name, written?)]."""
    _, infos, _ = layout
    found = []
    with open(folder / file, "r+b", buffering=0) as opened:
        for name, info in infos.items():
            _, _, _, first, tensor, writes = rows[name]
            pieces = write_rows(opened, info, first, tensor() if callable(tensor) else tensor, writes)
            found += [(file, piece, name, writes) for piece in pieces]
        os.fsync(opened.fileno())
    return found


def _finish(folder, documents, files, run, found):
    """Write run.json from all ranks' pieces; return the names of tensors whose replicas differ."""
    found = [each for of_rank in found for each in of_rank]
    pieces = {name: digest_pieces(content) for name, content in documents.items()}
    for file, (header, _, n_bytes) in files.items():
        pieces[file] = sorted(
            [*digest_pieces(header), *(piece for of, piece, _, writes in found if writes and of == file)]
        )
        if [piece.begin for piece in pieces[file]] + [n_bytes] != [0, *(piece.end for piece in pieces[file])]:
            raise ValueError(f"{folder / file}: the rows of all ranks are not its {n_bytes} bytes, each once")
    written = {(file, piece) for file in files for piece in pieces[file]}
    digests = {file: [f"{piece.end} {piece.sha256}" for piece in of_file] for file, of_file in pieces.items()}
    finite = json.loads(json.dumps(run | {"digests": digests}), parse_constant=lambda _: None)  # NaN is not JSON
    _write_file(folder / "run.json", _seal(json.dumps(finite, indent=2).encode()))
    return sorted({name for file, piece, name, _ in found if (file, piece) not in written})


def _seal(run: bytes) -> bytes:
    """run.json, with the digest of all that precedes it as its last line."""
    body = run.removesuffix(b"\n}")
    return body + SEAL + digest(body).encode() + b'"\n}\n'


# ----------------------------------------------------------------------------------------------------------------------
# Read


class Folder(NamedTuple):
    """The contents of a folder, the same on all ranks."""

    path: Path
    run: dict | None  # run.json; None in a published folder
    config: dict  # config.json, or for adapters base_config.json
    tensors: dict[str, tuple[str, TensorInfo]]  # by name: the file, and where in it
    pieces: dict[str, list[Piece]] | None  # of each file but run.json; None in a published folder
    adapter: dict | None = None  # adapter_config.json, if the tensors of "model" are adapters


def open_folder(path: Path, stems: tuple[str, ...] = ("model",)) -> Folder:
    """Read and check all but the tensors, on rank 0. Every rank must call it. To resume: stems ("model", "optimizer").
    In a checkpoint of adapters "model" stands for these.

    Raises, on all ranks, Damaged if a file is missing, truncated, not what was saved or malformed; OSError if one
    cannot be read.
    """
    return from_rank_0(lambda: _open_folder(Path(path), stems))


def _open_folder(path, stems):
    if meta_weights.is_meta(path):
        return Folder(path, None, *meta_weights.describe(path), None)
    run = read_run(path)
    pieces = run and _parse_digests(run, path / "run.json")
    for name in (pieces or {}).keys() & KEPT:  # check them before sample.py reads them
        read_document(path, name, pieces)
    adapted = ADAPTED in (pieces or {})

    def read(name, pieces=pieces):
        return parse_json(read_document(path, name, pieces), path / name)

    config = read(ADAPTED if adapted else "config.json")
    adapter = read("adapter_config.json", None) if adapted else None  # unchecked: the user may edit the base's path
    if adapted and "base_model_name_or_path" not in adapter:
        raise ValueError(f"{path / 'adapter_config.json'} has no base_model_name_or_path, the base's folder")
    add_missing(config, run or {})
    if run is None or "nanocria_tokenizer" not in config:  # others may have changed what nanocria wrote
        name = published_name(path, config.get("nanocria_tokenizer"))
        config |= {"nanocria_tokenizer": name} if name is not None else {}
    tensors = {}
    for stem in stems:
        stem = "adapter_model" if adapted and stem == "model" else stem
        tensors |= _find_tensors(path, f"{stem}.safetensors", pieces)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.get("tie_word_embeddings") and head in tensors and embedding not in tensors:  # some keep that name
        file, info = tensors.pop(head)
        tensors[embedding] = file, info._replace(name=embedding)
    return Folder(path, run, config, tensors, pieces, adapter)


def _find_tensors(path, single, pieces):
    """The tensors of one file or, without it, of all files that the index names."""
    index, where = path / f"{single}.index.json", {}
    whole = (path / single).exists() if pieces is None else single in pieces
    if not whole and not index.exists() and single == "model.safetensors" and (others := other_weights(path)):
        raise Damaged(f"{path / single} is missing: {path} holds {others}")
    if whole and pieces is None:
        _say_unread(path, single)
    elif index.exists() or index.name in (pieces or {}):
        where = parse_json(read_document(path, index.name, pieces), index).get("weight_map")
        if not isinstance(where, dict) or not all(map(FILE_NAME.fullmatch, map(str, where.values()))):
            raise Damaged(f"{index} has no weight_map from tensor names to file names")
    tensors = {}
    for file in sorted(set(where.values())) or [single]:
        with open_to_read(path / file) as opened:
            infos = read_header(opened, _pieces_of(opened, file, pieces))
        tensors |= {name: (file, info) for name, info in infos.items() if where.get(name, file) == file}
    lost = where.keys() - tensors.keys()
    if lost:
        raise Damaged(f"{index} says that {min(lost)!r:.200} is in {where[min(lost)]}, but it is not")
    if pieces is not None:
        return tensors
    found = {}
    for inner, name in unwrapped_names(tensors, path).items():
        file, info = tensors[name]
        found[inner] = file, info._replace(name=inner)
    return found


@functools.cache
def _say_unread(folder, single):
    """Say, once, which files beside a whole one are not read: like transformers we prefer it to those of an index."""
    index = folder / f"{single}.index.json"
    unread = sorted(file.name for file in folder.glob(single.replace(".", "-*.")))
    with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):  # missing or damaged
        weight_map = parse_json(read_document(folder, index.name), index).get("weight_map")
        unread += [index.name] if set(weight_map.values()) != {single} else []
    if unread:
        print(f"{folder / single} is read, but not {', '.join(unread):.200}", file=sys.stderr)


def read_run(path: Path) -> dict | None:
    """Read a folder's run.json, on this rank; None if there is none. Damaged if it is not what was saved."""
    if not (path / "run.json").exists():
        return None
    content = read_document(path, "run.json")
    run = content.rpartition(SEAL)[0] + b"\n}"
    if content != _seal(run):  # check before parsing
        raise Damaged(f"{path / 'run.json'} is not what was saved")
    run = parse_json(run, path / "run.json")
    if run.get("dataset"):
        run["dataset"] = check_meta(run["dataset"], path / "run.json")
    if "base_dtype" in run.get("settings", {}):  # of an older version
        run["settings"]["quantize_base"] = run["settings"].pop("base_dtype").replace("bfloat16", "none")
    return run


def other_weights(path: Path) -> str | None:
    """Name the unsupported weights that a folder holds, and what to do about them; None if none of them is known."""
    found = (what for pattern, what in OTHERS.items() if any(file.exists() for file in path.glob(pattern)))
    return next(found, None)


def read_document(folder: Path, name: str, pieces: dict[str, list[Piece]] | None = None) -> bytes:
    """Read a small file, on this rank. Damaged if it is missing or not what was saved. pieces: Folder.pieces."""
    with open_to_read(folder / name) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > DOCUMENT_BYTES:
            raise Damaged(f"{folder / name} has {n_bytes:,} bytes: no file of its kind is that large")
        content = bytearray(n_bytes)
        read_bytes(file, 0, memoryview(content), _pieces_of(file, name, pieces))
    if is_lfs_pointer(content):
        raise Damaged(f"{folder / name} {LFS_ADVICE}")
    return bytes(content)


def _pieces_of(file, name, pieces):
    """The pieces of an open file; None in a published folder."""
    if pieces is None:
        return None
    of_file, size = pieces.get(name, []), os.fstat(file.fileno()).st_size
    saved = of_file[-1].end if of_file else 0
    if size != saved:
        raise Damaged(f"{file.name} has {size} bytes, but {saved} were saved")
    return of_file


def _parse_digests(run, path):
    pieces = {}
    try:
        for file, lines in run["digests"].items():
            ends = [(int(end), sha256) for end, sha256 in map(str.split, lines)]
            begins = [0, *(end for end, _ in ends)]
            pieces[file] = [Piece(begin, *end) for begin, end in zip(begins, ends, strict=False)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} has no digests: expected a list of 'end sha256' for each file") from error
    if not all(0 < piece.end - piece.begin <= PIECE_BYTES for of_file in pieces.values() for piece in of_file):
        raise Damaged(f"{path} has digests of pieces that are not 1 to {PIECE_BYTES} bytes long")
    return pieces


def find_tensor(folder: Folder, name: str, shape: tuple[int, ...]) -> tuple[str, TensorInfo]:
    """The file with a tensor, and where in it. ValueError if the folder has none of this shape."""
    file, info = folder.tensors.get(name, (None, None))
    if not info or info.shape != tuple(shape):
        found = f"shape {tuple(info.shape)}" if info else "none"
        raise ValueError(f"expected {name} of shape {tuple(shape)}: {folder.path} has {found}")
    return file, info


def check_sizes(folder: Folder, settings: dict) -> None:
    """Raise ValueError if the weights of a folder are not of the sizes in its config.json. A model of these sizes could
    take any amount of memory: call it before building one. settings: read_config's.
    """
    n_embd, last_layer = settings["n_embd"], f"model.layers.{settings['n_layer'] - 1}"
    find_tensor(folder, "model.embed_tokens.weight", (settings["vocab_size"], n_embd))
    find_tensor(folder, f"{last_layer}.input_layernorm.weight", (n_embd,))
    find_tensor(folder, f"{last_layer}.mlp.gate_proj.weight", (settings["ffn_dim"], n_embd))


@torch.no_grad()
def read_into(folder: Folder, rows: Iterable[Rows]) -> None:
    """Fill this rank's rows, on any device, from a folder, rounding at most once. Every rank must call it.

    Raises, on all ranks, ValueError if the folder lacks a tensor, has it in another shape, or has integers where floats
    are expected (or vice versa); Damaged or OSError as open_folder does.
    """

    def read():
        for wanted in rows:
            file, info = find_tensor(folder, wanted.name, wanted.shape)
            x = wanted.tensor
            if folder.pieces is None and info.dtype not in WEIGHT_DTYPES:
                raise ValueError(f"{folder.path} has {info.name} in {info.dtype}: expected one of {WEIGHT_DTYPES}")
            if x.dtype != info.dtype and not (x.is_floating_point() and info.dtype.is_floating_point):
                raise ValueError(f"expected {wanted.name} in {x.dtype}: {folder.path} has it in {info.dtype}")
            direct = x.dtype == info.dtype and x.device.type == "cpu" and x.is_contiguous()
            buffer = x if direct else torch.empty(x.shape, dtype=info.dtype)
            if file == meta_weights.FILE:
                buffer.copy_(meta_weights.read_rows(folder.path, folder.config, info.name, wanted.first, len(x)))
            else:
                with open_to_read(folder.path / file) as opened:
                    read_rows(opened, info, wanted.first, buffer, folder.pieces and folder.pieces[file])
            # aminmax gives NaN if any element is NaN
            if folder.pieces is None and len(x) and not torch.stack(buffer.aminmax()).isfinite().all():
                raise ValueError(f"{folder.path} has numbers in {info.name} that are not finite")
            if not direct:
                x.copy_(buffer)

    on_all_ranks(read)


def fingerprint(folder: Folder) -> str:
    """A digest of each tensor's first row, shape and dtype, which tells one model from another.

    Reads a few megabytes. Every rank must call it. Raises what read_into raises.
    """
    infos = sorted(info for _, info in folder.tensors.values())
    first = [Rows(*info[:3], 0, torch.empty(1, *info.shape[1:], dtype=info.dtype)) for info in infos if info.shape]
    read_into(folder, first)
    return digest(b"".join(f"{x.name} {x.dtype} {x.shape} ".encode() + as_bytes(x.tensor) for x in first))
