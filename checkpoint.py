"""Checkpoints: folders out/step_000250 that are whole or not there.

    .metadata, *.distcp   the tensors, by torch.distributed.checkpoint: any number of ranks writes, any other reads
    meta.json             for a person and for sample.py: step, settings, model, dataset, val_loss, versions, checksums
                          of the tensors, and a digest of itself

A folder is written as step_000250.partial, flushed and renamed, so its name alone says that it is whole. Old ones are
deleted only after that, and lose their name first. What the disk does to it later, the checksums tell: a damaged one
is renamed to step_000250.damaged, and the one before it is used.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import memory
import usage
from data.tokens import write_json
from model import Llama, LlamaConfig
from optimizer import AdamW, local, sum_of_bits
from ranks import local_world_size, maximum, print0, rank, worker_thread

# A lone process is not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

NOT_DAMAGE = {errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
META = {"step", "updates", "dtype", "loss_scale", "model", "dataset", "settings", "checksums"}


def signed(meta: dict) -> dict:
    """meta with a digest of its content: where the two do not match, read_meta reports it as damaged."""
    rest = {name: value for name, value in meta.items() if name != "digest"}
    return rest | {"digest": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def newest(out_dir: str) -> Path | None:
    """The whole checkpoint with the highest step in out_dir, or None."""
    return next(reversed(_steps(out_dir)), None)


def _steps(out_dir):
    """The whole checkpoints of out_dir, oldest first."""
    whole = [path for path in Path(out_dir).glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def from_newest(run: Path, read: Callable[[Path], Any]) -> Any:
    """What read makes of the path of a run's newest checkpoint, or of run where it is itself one.

    A run that goes on deletes its old ones, perhaps while they are read: then it has a newer one.
    Raises ValueError where there is none, and what read raises of one that is there.
    """
    for _ in range(5):
        path = newest(run) or (run if os.path.exists(run / "meta.json") else None)
        if path is None:
            raise ValueError(f"{run} holds no checkpoint: train one first, or name another folder")
        try:
            return read(path)
        except (OSError, ValueError):
            if path.exists():
                raise
    raise ValueError(f"{run} deletes its checkpoints before they can be read: raise its --keep_last")


class Damaged(ValueError):
    """The disk holds something else than what was saved."""


class AnotherModel(ValueError):
    """What was saved is whole, and not for this one."""


def _unreadable(path, what, error) -> Exception:
    """What an error in reading means: Damaged, unless it says nothing of the content: no memory, no permission, ..."""
    cause = _cause(error)
    no_memory = isinstance(cause, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(cause)
    if no_memory or getattr(cause, "errno", None) in NOT_DAMAGE:
        return OSError(f"{path} cannot be read: {what}{_reason(error)}")
    return Damaged(f"{path} is damaged: {what}{_reason(error)}")


# ----------------------------------------------------------------------------------------------------------------------
# Save


class Saver:
    """Writes checkpoints in the background, while training goes on.

        saver = Saver(out_dir, optimizer, keep_last, beside=True)
        saver.start(step, meta)       # on every rank; waits for the checksums, not for the disk
        saver.wait_for_copy()         # before the weights change: the GPU waits for the copy, the CPU does not
        if saver.done(): path = saver.result()

    The tensors are copied to pinned memory of the CPU while the next step's forward runs, 12 bytes per parameter of the
    rank plus what rounding each tensor up to a power of two adds; then a thread writes them to the disk. What is on the
    CPU already, start copies itself. Where there is no memory for that, or beside is False, start returns only once all
    is written; for bfloat16 weights only w is copied then, 4 bytes per parameter.

    spoken_for: bytes of CPU memory that this rank has not taken yet, but will.
    """

    def __init__(self, out_dir: str, optimizer: AdamW, keep_last: int, beside: bool = True, spoken_for: float = 0):
        self.out_dir, self.optimizer, self.keep_last = Path(out_dir), optimizer, keep_last
        # Not the training's: its collectives, in the main thread, must not mix with the writing thread's.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() and keep_last else None
        )
        self.thread = worker_thread()
        self.future, self.copied, self.seconds = None, None, 0.0  # seconds: what saving has cost the main thread
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        mine = [local(x) for x in _flatten(optimizer.like_tensors(lambda x: x)).values()]
        n_bytes = sum(memory.pinned(x.nbytes) if x.is_cuda and x.numel() else x.nbytes for x in mine)
        # All ranks agree before any of them allocates: else the kernel's out-of-memory killer would end the run.
        there = maximum([(n_bytes + spoken_for) * local_world_size - usage.cpu_available()])[0] <= 0
        # Pinning 15 GB takes seconds: the thread does it while the first steps run.
        self.copies, beside = None, beside and keep_last
        self.needed = f"saving in the background takes {n_bytes / 2**30:.1f} GiB of CPU memory"
        if beside and there:
            self.copies = self.thread.submit(self._copies)
        elif beside:
            said = f"training will pause while a checkpoint is written: {self.needed}, and less is free"
            print0(said, file=sys.stderr)

    def _copies(self):
        try:
            return self.optimizer.like_tensors(lambda x: torch.empty_like(x, device="cpu", pin_memory=local(x).is_cuda))
        except RuntimeError as error:
            print(
                f"training will pause while a checkpoint is written: {self.needed} ({_reason(error)})",
                file=sys.stderr,
            )
            return None

    def start(self, step: int, meta: dict):
        """Begins to save; meta goes into meta.json beside the tensors. The save before must be done."""
        began = time.perf_counter()
        sums = checksums(self.optimizer.bit_sums(), self.optimizer.shard_group)
        meta = {"step": step, "updates": self.optimizer.updates, **meta, "checksums": sums}
        copies = self.copies.result() if self.copies else None
        if copies is not None:
            self.copied = self._copy(copies)
        self.future = self.thread.submit(self._write, copies, self.copied, step, meta)
        if copies is None:
            concurrent.futures.wait([self.future])
        self.seconds += time.perf_counter() - began

    def _copy(self, copies) -> torch.cuda.Event | None:
        """On a stream of its own, which the GPU works on beside the training's. The event is the copy's end."""
        if self.stream is None:
            return self.optimizer.copy_tensors(copies)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.optimizer.copy_tensors(copies)
        return self.stream.record_event()

    def wait_for_copy(self):
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def running(self) -> bool:
        """Whether there is a save of which nobody has asked the result."""
        return self.future is not None

    def done(self) -> bool:
        """Whether result() would not have to wait."""
        return self.future is not None and self.future.done()

    def result(self) -> Path:
        """Waits until the checkpoint is written; its path. OSError, on every rank, where the disk failed on any."""
        began, future, self.future = time.perf_counter(), self.future, None
        try:
            return future.result()
        finally:
            self.seconds += time.perf_counter() - began

    def _write(self, copies, copied, step, meta) -> Path:
        """Writes out_dir/step_<step>, on every rank its part, and deletes all but the keep_last newest."""
        final = self.out_dir / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        if copied is not None:
            copied.synchronize()

        def begin():
            if rank == 0:
                for left in self.out_dir.glob("step_*.partial"):  # by a run that was killed while it saved or deleted
                    shutil.rmtree(left, ignore_errors=True)  # what cannot be deleted is in nobody's way
                partial.mkdir(parents=True, exist_ok=True)

        def write():
            tensors = copies or self.optimizer.tensors()
            dcp.save(tensors, checkpoint_id=partial, process_group=self.group, no_dist=self.group is None)

        def commit():
            if rank == 0:
                write_json(partial / "meta.json", signed(meta))
                _sync_folder(partial)
                if final.is_symlink() or final.exists():  # a run that went back and came here again
                    _remove(final, ignore_errors=True)  # its name is what is wanted
                partial.rename(final)
                _sync_folder(final.parent)

        try:
            for act in (begin, write, commit):
                _together(act, self.group)
        except OSError:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if rank == 0:
            for old in _steps(self.out_dir)[: -self.keep_last]:
                try:
                    _remove(old)
                except OSError as error:  # the new one is whole all the same
                    print(f"cannot delete {old}: {_reason(error)}", file=sys.stderr)
        return final


def _together(function: Callable, group: dist.ProcessGroup | None = None):
    """Calls it on all ranks. If it fails on any, all of them raise OSError: nobody is left waiting for the others."""
    error = None
    try:
        function()
    except (Exception, CheckpointException) as failed:
        error = _reason(failed)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group)
    for other, error in enumerate(errors):
        if error:
            raise OSError(error if len(errors) == 1 else f"rank {other}: {error}")


def _cause(error) -> BaseException:
    """The error itself, or where it collects those of several ranks, the first of them."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next(iter(failures.values()))[0] if failures else error


def _reason(error) -> str:
    """One line."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "unexpected pos" in str(error):  # torch's words, once it closes a file that it could not write
        return "the disk took a part of a file only: it is full, or files may not be so large"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _remove(path, ignore_errors=False):
    """Half a folder must not keep the name of a whole one, nor be in the way of the next."""
    if path.is_symlink():  # what it points to was put elsewhere by somebody who wants it
        return path.unlink()
    shutil.rmtree(path.rename(path.with_name(f"{path.name}.{time.time_ns()}.old.partial")), ignore_errors)


def _sync_folder(path):
    """A rename is on the disk once its folder is."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def checksums(bit_sums: dict, group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """For each float32 tensor the sum of its bits, taken as integers: the same however the tensor is sharded.

    bit_sums: those sums of this rank's parts (optimizer.sum_of_bits), on any devices. group: the ranks that hold the
    others. One changed bit changes the sum, and so does a missing or a zeroed part.
    """
    flat = _flatten(bit_sums)
    device = next(reversed(flat.values())).device  # of the moments: where the group communicates
    sums = torch.stack([x.to(device) for x in flat.values()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return dict(zip(flat, sums.tolist(), strict=True))


def _flatten(tensors, prefix=""):
    flat = {}
    for name, value in tensors.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _map(function, tensors):
    return {name: _map(function, x) if isinstance(x, dict) else function(x) for name, x in tensors.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Load


def read_meta(path: Path) -> dict:
    """The content of a checkpoint's meta.json.

    Raises Damaged where it is none, ValueError where another version's, OSError where it cannot be read now.
    """
    try:
        meta = json.loads((Path(path) / "meta.json").read_text())
        missing = META - meta.keys()
    except (OSError, ValueError, AttributeError) as error:  # a list has no keys
        raise _unreadable(path, "meta.json: ", error) from error
    if "digest" in meta and meta != signed(meta):
        raise Damaged(f"{path} is damaged: meta.json is not what was saved")
    if missing:
        raise ValueError(f"{path} is no checkpoint of this version: its meta.json lacks {', '.join(sorted(missing))}")
    return meta


def set_val_loss(path: Path, val_loss: float) -> None:
    """Into the meta.json of a checkpoint that a signal had left without one."""
    if rank:
        return
    try:
        write_json(path / "meta.json", signed(read_meta(path) | {"val_loss": val_loss}))
    except OSError as error:  # a full disk: the next resume evaluates again
        print0(f"{path}: {_reason(error)}")


def load_newest(out_dir: str, optimizer: AdamW, refuse: Callable) -> tuple[Path, dict, list[str]]:
    """Fills an optimizer and the weights of its model, sharded in any way, from the newest checkpoint that is whole.

    refuse(path, meta) is called before the tensors are read. Returns path, meta and what was wrong with newer ones,
    which are renamed. Raises ValueError where none is whole, or another model's tensors or another step than its name
    says are in it, OSError where one cannot be read now, or renamed.
    """
    damaged, tensors = [], optimizer.tensors()
    while path := newest(out_dir):
        try:
            meta = read_meta(path)
            if meta["step"] != int(path.name[5:]):
                raise ValueError(f"{path} holds step {meta['step']}: name it step_{meta['step']:06d} again")
            refuse(path, meta)
            _read(tensors, path, meta, optimizer.shard_group)
            break
        except Damaged as error:
            damaged.append(str(error))
            if len(_steps(out_dir)) == 1:  # it keeps its name: a new run must not begin beside it unasked
                raise Damaged(". ".join(damaged) + ". There is no older one: move it away to start anew") from error
            _together(lambda: None)  # until nobody reads it any more
            _together(lambda path=path: _set_aside(path))
    optimizer.refresh(tensors)
    optimizer.updates = meta["updates"]
    return path, meta, damaged


def _set_aside(path):
    if rank == 0:
        aside = path.with_name(path.name + ".damaged")
        if aside.is_symlink() or aside.exists():  # the same step, damaged before
            _remove(aside)
        path.rename(aside)


def _read(tensors, path, meta, group=None, no_dist=False):
    """Reads into tensors. Raises Damaged, on all ranks, unless they are then what was saved, and AnotherModel where
    other tensors were saved: settings are compared before, but model.py may have changed since.
    """
    no_dist = no_dist or not dist.is_initialized()
    wanted = _flatten(tensors)
    kinds = {name.partition(".")[0] for name in wanted}  # to write text the weights are enough
    saved = {name for name in meta["checksums"] if name.partition(".")[0] in kinds}
    if saved != wanted.keys():
        lists = {"has": sorted(saved - wanted.keys())[:3], "lacks": sorted(wanted.keys() - saved)[:3]}
        found = " and ".join(f"{verb} {', '.join(names)}" for verb, names in lists.items() if names)
        raise AnotherModel(f"{path} was saved by another model.py: it {found}")
    for name, shape in _shapes(path).items():
        if name in wanted and shape != wanted[name].shape:
            found = f"{name} of {tuple(shape)}, not {tuple(wanted[name].shape)}"
            raise AnotherModel(f"{path} was saved by another model.py, or its .metadata is damaged: it has {found}")
    try:
        if not (path / ".metadata").exists():
            raise FileNotFoundError("its .metadata is missing")
        dcp.load(tensors, checkpoint_id=path, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # missing files, cut files: all sorts
        raise _unreadable(path, "", error) from error
    for name, found in checksums(_map(sum_of_bits, tensors), group).items():
        if found != meta["checksums"].get(name):
            raise Damaged(f"{path} is damaged: {name} is not what was saved")


def _shapes(path) -> dict[str, torch.Size]:
    """Of the tensors that were saved; none where .metadata cannot be read, which dcp.load will tell all ranks."""
    with contextlib.suppress(Exception):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: tensor.size for name, tensor in saved.items()}
    return {}


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """The model of a run's newest checkpoint, or of one checkpoint: alone, whole, on one device and in one dtype.

    ValueError where there is none, or a damaged one or another model's, OSError where it cannot be read now.
    """
    return from_newest(Path(path), lambda newest: _load_model(newest, device, dtype))


def _load_model(path, device, dtype):
    meta = read_meta(path)
    with torch.device("meta"):
        model = Llama(LlamaConfig(**meta["model"]))
    model.to_empty(device="cpu")
    _read({"model": {name: p.detach() for name, p in model.named_parameters()}}, path, meta, no_dist=True)
    return model.to(device=device, dtype=dtype)
