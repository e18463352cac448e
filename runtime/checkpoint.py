"""Checkpoints: folders out/step_000250 that are whole or not there.

    .metadata, *.distcp   the tensors, by torch.distributed.checkpoint: any number of ranks writes, any other reads
    meta.json             for a person and for sample.py: step, settings, model, dataset, val_loss, versions, checksums
                          of the tensors, and a digest of itself

A folder is written as step_000250.partial, flushed and renamed, so its name alone says that it is whole. Old ones are
deleted only after that, and lose their name first. The checksums show what the disk does to one later: a damaged one is
renamed to step_000250.damaged, and the one before it is used.
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
from torch.torch_version import TorchVersion

from data.tokens import lock, write_json
from model import Llama, LlamaConfig
from optimizers.driver import AdamW, local, sum_of_bits
from runtime import memory, memory_stats
from runtime.distributed import local_world_size, maximum, must_agree, print0, rank, unequal, worker_thread

# A lone process is not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

NOT_DAMAGE = {errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
LISTED_WITHIN = 90  # seconds after which all machines see a new folder of a network file system
META = {"step", "updates", "dtype", "loss_scale", "model", "dataset", "settings", "checksums"}


def signed(meta: dict) -> dict:
    """meta with a digest of its content: if the two do not match, read_meta reports it as damaged."""
    rest = {name: value for name, value in meta.items() if name != "digest"}
    return rest | {"digest": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def claim(out_dir: str):
    """Makes a run's folder and locks it: two runs in one would delete each other's checkpoints.

    Returns the lock, an open file that holds a number of its own. OSError or ValueError, with a sentence, where out_dir
    cannot be a run's folder.
    """
    if os.path.exists(Path(out_dir) / "meta.json"):  # pathlib's raises for a name that is too long
        if Path(out_dir).name.startswith("step_"):
            raise ValueError(
                f"{out_dir} is a checkpoint: --out_dir={Path(out_dir).parent} goes on with the newest one there"
            )
        raise ValueError(f"{out_dir} is a dataset or a checkpoint: name a folder for the run alone")
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(out_dir) / ".lock", "a+")  # noqa: SIM115
        lock(file)
        file.truncate(0)
        file.write(f"{time.time_ns()}\n")
        file.flush()
        os.fsync(file.fileno())
        return file
    except BlockingIOError as error:
        raise OSError(f"another run is writing to {out_dir}: wait for it, or change out_dir") from error
    except FileExistsError as error:
        what = "a link to a place that does not exist" if os.path.islink(out_dir) else "a file"
        raise ValueError(f"out_dir is {out_dir}, {what}: name a folder") from error
    except OSError as error:
        raise OSError(f"cannot write to out_dir {out_dir}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"out_dir is {out_dir!r}: {error}") from error


def require_one_folder(out_dir: str) -> None:
    """Ends the run where the ranks' out_dir is not the one that rank 0 has claimed: each would keep its own part of the
    checkpoints. Every rank must call it.
    """
    try:
        mark = (Path(out_dir) / ".lock").read_text()
    except OSError:
        mark = None
    must_agree({"out_dir": mark}, f"{out_dir} must be one folder that all machines share")


def newest_of_all(out_dir: str) -> Path | None:
    """newest(), once all ranks see the same: a network file system may list a new folder late."""
    deadline, found = time.monotonic() + LISTED_WITHIN, newest(out_dir)
    while unequal({"newest": found}) and maximum([time.monotonic() < deadline])[0]:
        time.sleep(1)
        found = newest(out_dir)
    must_agree({"the newest checkpoint in out_dir": found}, "the machines see different files in it")
    return found


def newest(out_dir: str) -> Path | None:
    """The whole checkpoint with the highest step in out_dir, or None."""
    return next(reversed(_steps(out_dir)), None)


def _steps(out_dir):
    """The whole checkpoints of out_dir, oldest first."""
    whole = [path for path in Path(out_dir).glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(whole, key=lambda path: int(path.name[5:]))


def from_newest(run: Path, read: Callable[[Path], Any]) -> Any:
    """read(path) for the path of a run's newest checkpoint, or for run itself if it is one.

    A run in progress deletes its old checkpoints, perhaps while they are read: then it has a newer one.
    Raises ValueError if there is none, and whatever read raises for one that still exists.
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
    """The files differ from what was saved."""


def _unreadable(path, what, error) -> Exception:
    """The exception for a failed read: Damaged, or OSError if the content may be good (no memory, no permission...)."""
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
        if saver.done(): print(saver.outcome())

    The tensors are copied to pinned memory of the CPU while the next step's forward runs, 12 bytes per parameter of the
    rank plus what rounding each tensor up to a power of two adds; then a thread writes them to the disk. start itself
    copies what is on the CPU already. Without memory for that, or if beside is False, start returns only when all is
    written; then only the w of bfloat16 weights is copied, 4 bytes per parameter.

    spoken_for: bytes of CPU memory that this rank will take later.
    """

    def __init__(self, out_dir: str, optimizer: AdamW, keep_last: int, beside: bool = True, spoken_for: float = 0):
        self.out_dir, self.optimizer, self.keep_last = Path(out_dir), optimizer, keep_last
        # A group of its own: the writing thread's collectives must not mix with the main thread's.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() and keep_last else None
        )
        self.thread = worker_thread()
        self.future, self.copied, self.seconds = None, None, 0.0  # seconds: what saving has cost the main thread
        self.error: str | None = None  # why the last checkpoint was not written
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        mine = [local(x) for x in optimizer.like_tensors(lambda x: x).values()]
        n_bytes = sum(memory.pinned(x.nbytes) if x.is_cuda and x.numel() else x.nbytes for x in mine)
        # All ranks agree before any of them allocates: else the kernel's out-of-memory killer would end the run.
        there = maximum([(n_bytes + spoken_for) * local_world_size - memory_stats.cpu_available()])[0] <= 0
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
        """Copies on a stream of its own, beside the training's. Returns the event at the end of the copy."""
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
        """Whether there is a save whose outcome nobody has asked for."""
        return self.future is not None

    def done(self) -> bool:
        """Whether outcome() would not have to wait."""
        return self.future is not None and self.future.done()

    def outcome(self) -> str:
        """Waits until the checkpoint is written, and says so, or why it was not: the same on every rank."""
        began, future, self.future = time.perf_counter(), self.future, None
        try:
            path, self.error = future.result(), None
            return f"saved {path}"
        except OSError as error:
            self.error = str(error)
            return f"NOT SAVED: {error}. The newest checkpoint is {newest(self.out_dir)}"
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
                    shutil.rmtree(left, ignore_errors=True)  # one that cannot be deleted does no harm
                partial.mkdir(parents=True, exist_ok=True)

        def write():
            tensors = copies or self.optimizer.tensors()
            dcp.save(tensors, checkpoint_id=partial, process_group=self.group, no_dist=self.group is None)

        def commit():
            if rank == 0:
                write_json(partial / "meta.json", signed(meta))
                _sync_folder(partial)
                if final.is_symlink() or final.exists():  # a run that went back and came here again
                    _remove(final, ignore_errors=True)  # enough if it loses its name
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
    """Calls function on all ranks. If it fails on one, all of them raise OSError, so that no rank waits for another."""
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
    """The error itself, or the first one if it collects those of several ranks."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next(iter(failures.values()))[0] if failures else error


def _reason(error) -> str:
    """The error's message in one line."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "unexpected pos" in str(error):  # torch's words, once it closes a file that it could not write
        return "the disk took a part of a file only: it is full, or files may not be so large"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _remove(path, ignore_errors=False):
    """Renames before deleting: a half-deleted folder must not look complete or block the next save."""
    if path.is_symlink():  # its target was put elsewhere on purpose: keep that
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
    other parts. One changed bit changes the sum, and so does a missing or a zeroed part.
    """
    device = next(reversed(bit_sums.values())).device  # the last is of a moment: where the group communicates
    sums = torch.stack([x.to(device) for x in bit_sums.values()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return dict(zip(bit_sums, sums.tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Load


def read_meta(path: Path) -> dict:
    """The content of a checkpoint's meta.json.

    Raises Damaged if it is none, ValueError if another version wrote it, OSError if it cannot be read now.
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
    """Writes val_loss into the meta.json of a checkpoint that a signal left without one."""
    if rank:
        return
    try:
        write_json(path / "meta.json", signed(read_meta(path) | {"val_loss": val_loss}))
    except OSError as error:  # a full disk: the next resume evaluates again
        print0(f"{path}: {_reason(error)}")


def load_newest(out_dir: str, optimizer: AdamW, refuse: Callable) -> tuple[Path, dict, list[str]]:
    """Fills an optimizer and the weights of its model, sharded in any way, from the newest checkpoint that is whole.

    refuse(path, meta) is called before the tensors are read. Returns path, meta and what was wrong with newer ones,
    which are renamed. Raises ValueError if none is whole, or if it holds another model's tensors or another step than
    its name says, OSError if one cannot be read now, or not renamed.
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
            _together(lambda: None)  # wait until no rank reads it any more
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
    """Reads a checkpoint into tensors, named as AdamW.tensors() names them.

    Raises Damaged, on all ranks, if the content is not what was saved, and ValueError if other tensors were saved:
    model.py may have changed since then, which comparing the settings does not show.
    """
    no_dist = no_dist or not dist.is_initialized()
    kinds = {name.partition(".")[0] for name in tensors}  # sample.py asks for the weights alone
    saved = {name for name in meta["checksums"] if name.partition(".")[0] in kinds}
    if saved != tensors.keys():
        lists = {"has": sorted(saved - tensors.keys())[:3], "lacks": sorted(tensors.keys() - saved)[:3]}
        found = " and ".join(f"{verb} {', '.join(names)}" for verb, names in lists.items() if names)
        raise ValueError(f"{path} was saved by another model.py: it {found}")
    for name, shape in _shapes(path).items():
        if name in tensors and shape != tensors[name].shape:
            found = f"{name} of {tuple(shape)}, not {tuple(tensors[name].shape)}"
            raise ValueError(f"{path} was saved by another model.py, or its .metadata is damaged: it has {found}")
    try:
        if not (path / ".metadata").exists():
            raise FileNotFoundError("its .metadata is missing")
        dcp.load(tensors, checkpoint_id=path, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # missing files, cut files: all sorts
        saved_by = str(meta.get("versions", {}).get("torch", "0")).partition("+")[0]
        if TorchVersion(saved_by) > torch.__version__.partition("+")[0]:  # probably the reason: so nothing is renamed
            found = f"{path} was saved by torch {saved_by}, and torch {torch.__version__} cannot read it"
            raise ValueError(f"{found} ({_reason(error)}): resume with torch {saved_by} or newer") from error
        raise _unreadable(path, "", error) from error
    for name, found in checksums({name: sum_of_bits(x) for name, x in tensors.items()}, group).items():
        if found != meta["checksums"].get(name):
            raise Damaged(f"{path} is damaged: {name} is not what was saved")


def _shapes(path) -> dict[str, torch.Size]:
    """The shapes of the saved tensors; {} if .metadata cannot be read, which dcp.load then reports to all ranks."""
    with contextlib.suppress(Exception):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: tensor.size for name, tensor in saved.items()}
    return {}


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """The model of a run's newest checkpoint, or of one checkpoint: alone, whole, on one device and in one dtype.

    ValueError if there is none, if it is damaged or another model's, OSError if it cannot be read now.
    """
    return from_newest(Path(path), lambda newest: _load_model(newest, device, dtype))


def _load_model(path, device, dtype):
    meta = read_meta(path)
    with torch.device("meta"):
        fields = meta["model"].keys() & LlamaConfig.__dataclass_fields__.keys()  # older ones say more
        model = Llama(LlamaConfig(**{name: meta["model"][name] for name in fields}))
    model.to_empty(device="cpu")
    _read({f"model.{name}": p.detach() for name, p in model.named_parameters()}, path, meta, no_dist=True)
    return model.to(device=device, dtype=dtype)
