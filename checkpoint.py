"""Checkpoints: folders out/step_000250 that are whole or not there.

    .metadata, *.distcp   the tensors, by torch.distributed.checkpoint: any number of ranks writes, any other reads
    meta.json             for a person and for sample.py: step, settings, model, dataset, losses, versions

A folder is written as step_000250.partial, flushed and renamed, so its name alone says that it is whole. Old ones are
deleted only after that, and lose their name first.
"""

import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from model import Llama, LlamaConfig
from optimizer import AdamW

# A lone process is not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def newest(out_dir: str) -> Path | None:
    """The whole checkpoint with the highest step in out_dir, or None."""
    return next(reversed(_steps(out_dir)), None)


def _steps(out_dir):
    """The whole checkpoints of out_dir, oldest first."""
    whole = [path.parent for path in Path(out_dir).glob("step_*/meta.json") if path.parent.name[5:].isdigit()]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def save(out_dir: str, step: int, optimizer: AdamW, meta: dict, keep_last: int) -> Path:
    """Writes out_dir/step_<step>, on every rank its part, and deletes all but the keep_last newest. Returns its path.

    meta goes into meta.json beside the tensors. Raises OSError where the disk does; then the older ones are untouched.
    """
    final = Path(out_dir) / f"step_{step:06d}"
    partial = final.with_name(final.name + ".partial")
    rank0 = not dist.is_initialized() or dist.get_rank() == 0
    if rank0:
        for left in Path(out_dir).glob("step_*.partial"):  # by a run that was killed while it saved or deleted
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    dcp.save(optimizer.tensors(), checkpoint_id=partial, no_dist=not dist.is_initialized())
    if rank0:
        with open(partial / "meta.json", "w") as file:
            json.dump({"step": step, "updates": optimizer.updates, **meta}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        if final.exists():  # a run that went back and came here again
            _remove(final)
        partial.rename(final)
        _sync_folder(final.parent)
        for old in _steps(out_dir)[:-keep_last]:
            _remove(old)
    if dist.is_initialized():
        dist.barrier()
    return final


def _remove(path):
    """Half a folder must not keep the name of a whole one."""
    shutil.rmtree(path.rename(path.with_name(path.name + ".old.partial")))


def _sync_folder(path):
    """A rename is on the disk once its folder is."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_meta(path: Path) -> dict:
    """The content of a checkpoint's meta.json. Raises ValueError where it is none."""
    try:
        meta = json.loads((Path(path) / "meta.json").read_text())
        missing = {"step", "updates", "dtype", "loss_scale", "model", "dataset", "settings"} - meta.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(damaged(path, error)) from error
    if missing:
        raise ValueError(f"{path} is no checkpoint of this version: its meta.json lacks {', '.join(sorted(missing))}")
    return meta


def damaged(path, error) -> str:
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return f"{path} is damaged ({reason}): delete it, and the one before it is used"


def load(path: Path, optimizer: AdamW) -> None:
    """Fills an optimizer and the weights of its model, sharded in any way. Raises ValueError where path is damaged."""
    _read(optimizer.tensors(), path, no_dist=not dist.is_initialized())
    optimizer.refresh()
    optimizer.updates = read_meta(path)["updates"]


def _read(state, path, no_dist):
    """Reads into the tensors of state."""
    try:
        dcp.load(state, checkpoint_id=path, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # missing files, cut files, other shapes: all sorts
        raise ValueError(damaged(path, error)) from error


def load_model(path: Path, device: str, dtype: torch.dtype) -> Llama:
    """The model of a checkpoint alone, whole, on one device and in one dtype: for sampling and for conversion."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(**read_meta(path)["model"]))
    model.to_empty(device="cpu")
    _read({"model": {name: p.detach() for name, p in model.named_parameters()}}, path, no_dist=True)
    return model.to(device=device, dtype=dtype)
