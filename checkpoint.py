"""Checkpoints: folders out/step_000250 that are whole or not there.

    .metadata, *.distcp   the tensors, by torch.distributed.checkpoint: any number of ranks writes, any other reads
    meta.json             for a person and for sample.py: step, settings, model, dataset, losses, versions, checksums

A folder is written as step_000250.partial, flushed and renamed, so its name alone says that it is whole. Old ones are
deleted only after that, and lose their name first. What the disk does to it later, the checksums tell: a damaged one
is renamed to step_000250.damaged, and the one before it is used.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from model import Llama, LlamaConfig
from optimizer import AdamW, local

# A lone process is not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

META = {"step", "updates", "dtype", "loss_scale", "model", "dataset", "settings", "checksums"}


def newest(out_dir: str) -> Path | None:
    """The whole checkpoint with the highest step in out_dir, or None."""
    return next(reversed(_steps(out_dir)), None)


def _steps(out_dir):
    """The whole checkpoints of out_dir, oldest first."""
    whole = [path.parent for path in Path(out_dir).glob("step_*/meta.json") if path.parent.name[5:].isdigit()]
    return sorted(whole, key=lambda path: int(path.name[5:]))


class Damaged(ValueError):
    """The disk holds something else than what was saved."""


def _rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# ----------------------------------------------------------------------------------------------------------------------
# Save


def save(out_dir: str, step: int, optimizer: AdamW, meta: dict, keep_last: int) -> Path:
    """Writes out_dir/step_<step>, on every rank its part, and deletes all but the keep_last newest. Returns its path.

    meta goes into meta.json beside the tensors. Where the disk fails on any rank, all raise OSError, and what was
    there before is untouched.
    """
    final = Path(out_dir) / f"step_{step:06d}"
    partial = final.with_name(final.name + ".partial")
    tensors = optimizer.tensors()
    meta = {"step": step, "updates": optimizer.updates, **meta, "checksums": checksums(tensors, optimizer.shard_group)}

    def begin():
        if _rank0():
            for left in Path(out_dir).glob("step_*.partial"):  # by a run that was killed while it saved or deleted
                shutil.rmtree(left)
            partial.mkdir(parents=True)

    def commit():
        if _rank0():
            with open(partial / "meta.json", "w") as file:
                json.dump(meta, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(partial)
            if final.exists():  # a run that went back and came here again
                _remove(final)
            partial.rename(final)
            _sync_folder(final.parent)
            for old in _steps(out_dir)[:-keep_last]:
                _remove(old)

    try:
        _together(begin)
        _together(lambda: dcp.save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized()))
        _together(commit)
    except OSError:
        if _rank0():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _together(function: Callable):
    """Calls it on all ranks. If it fails on any, all of them raise OSError: nobody is left waiting for the others."""
    error = None
    try:
        function()
    except (Exception, CheckpointException) as failed:
        error = _reason(failed)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    for rank, error in enumerate(errors):
        if error:
            raise OSError(error if len(errors) == 1 else f"rank {rank}: {error}")


def _reason(error) -> str:
    """One line; of what happened on several ranks the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _remove(path):
    """Half a folder must not keep the name of a whole one."""
    shutil.rmtree(path.rename(path.with_name(path.name + ".old.partial")))


def _sync_folder(path):
    """A rename is on the disk once its folder is."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def checksums(tensors: dict, group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """For each float32 tensor the sum of its bits, taken as integers: the same however the tensor is sharded.

    group: the ranks that hold the shards. One changed bit changes the sum, and so does a missing or a zeroed part.
    """
    flat = _flatten(tensors)
    sums = torch.stack([local(x).view(torch.int32).sum(dtype=torch.int64) for x in flat.values()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return dict(zip(flat, sums.tolist(), strict=True))


def _flatten(tensors, prefix=""):
    flat = {}
    for name, value in tensors.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# ----------------------------------------------------------------------------------------------------------------------
# Load


def read_meta(path: Path) -> dict:
    """The content of a checkpoint's meta.json. Raises Damaged where it is none, ValueError where another version's."""
    try:
        meta = json.loads((Path(path) / "meta.json").read_text())
        missing = META - meta.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} is damaged: meta.json: {_reason(error)}") from error
    if missing:
        raise ValueError(f"{path} is no checkpoint of this version: its meta.json lacks {', '.join(sorted(missing))}")
    return meta


def load_newest(out_dir: str, optimizer: AdamW, refuse: Callable) -> tuple[Path, dict, list[str]]:
    """Fills an optimizer and the weights of its model, sharded in any way, from the newest checkpoint that is whole.

    refuse(path, meta) is called before the tensors are read. Returns path, meta and what was wrong with newer ones,
    which are renamed. Raises ValueError where none is whole, OSError where one cannot be renamed.
    """
    damaged = []
    while path := newest(out_dir):
        try:
            meta = read_meta(path)
            refuse(path, meta)
            _read(optimizer.tensors(), path, meta, optimizer.shard_group)
            break
        except Damaged as error:
            damaged.append(str(error))
            if len(_steps(out_dir)) == 1:  # it keeps its name: a new run must not begin beside it unasked
                raise Damaged(f"{error}. There is no older one: move it away to start anew") from error
            _together(lambda: None)  # until nobody reads it any more
            _together(lambda path=path: _set_aside(path))
    optimizer.refresh()
    optimizer.updates = meta["updates"]
    return path, meta, damaged


def _set_aside(path):
    if _rank0():
        aside = path.with_name(path.name + ".damaged")
        if aside.exists():  # the same step, damaged before
            shutil.rmtree(aside)
        path.rename(aside)


def _read(tensors, path, meta, group=None, no_dist=False):
    """Reads into tensors. Raises Damaged, on all ranks, unless they are then what was saved."""
    no_dist = no_dist or not dist.is_initialized()
    try:
        if not (path / ".metadata").exists():
            raise FileNotFoundError("its .metadata is missing")
        dcp.load(tensors, checkpoint_id=path, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # missing files, cut files, other shapes: all sorts
        raise Damaged(f"{path} is damaged: {_reason(error)}") from error
    for name, found in checksums(tensors, group).items():
        if found != meta["checksums"].get(name):
            raise Damaged(f"{path} is damaged: {name} is not what was saved")


def load_model(path: Path, device: str, dtype: torch.dtype) -> Llama:
    """The model of a checkpoint alone, whole, on one device and in one dtype: for sampling and for conversion."""
    meta = read_meta(path)
    with torch.device("meta"):
        model = Llama(LlamaConfig(**meta["model"]))
    model.to_empty(device="cpu")
    _read({"model": {name: p.detach() for name, p in model.named_parameters()}}, Path(path), meta, no_dist=True)
    return model.to(device=device, dtype=dtype)
