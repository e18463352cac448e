"""Checkpoints: save in the background, load and verify.

    out/step_000250/.metadata, *.distcp   tensors, by torch.distributed.checkpoint: any number of ranks reads what any
                                          other number has written
    out/step_000250/meta.json             step, settings, model, dataset, val_loss, versions, a checksum of each tensor,
                                          and a digest of the file itself

run_folder.py says how a folder gets its name. The checksums find damage that happens on disk later.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from data.files import write_json
from model import Llama, LlamaConfig
from runtime import memory_stats, run_folder
from runtime.distributed import all_reduce_max, local, local_world_size, on_rank0, print0, rank, worker_thread
from runtime.pinned_memory import pinned_empty

# One process without torch.distributed is not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

NOT_DAMAGE = {errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
REQUIRED = {"step", "updates", "dtype", "loss_scale", "model", "dataset", "settings", "checksums"}  # in meta.json
SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Damaged(ValueError):
    """The files differ from what was saved."""


# ----------------------------------------------------------------------------------------------------------------------
# Save


class Saver:
    """Writes checkpoints in the background, while training continues.

        saver = Saver(out_dir, optimizer, keep_last, async_save)
        saver.wait_for_copy()                  # before each update: the GPU waits for the copy, the CPU does not
        said = saver.save(step, meta, wait)    # on every rank; "saved out/step_000250", "saving" or why it failed
        saver.report(step)                     # after each step: prints once that a background save has ended
        saver.finish(step)                     # waits for it and prints

    The tensors are copied to pinned CPU memory, 12 bytes per parameter of the rank, during the next step's forward;
    then a thread writes them to disk. Without memory for the copies, or with async_save false, save() returns when all
    is written; then only bfloat16 weights are copied, 4 bytes per parameter. keep_last 0: nothing is saved.
    reserved: bytes of CPU memory that this rank will allocate later.
    """

    def __init__(self, out_dir: str, optimizer, keep_last: int, async_save: bool = True, reserved: float = 0):
        self.out_dir, self.optimizer, self.keep_last = Path(out_dir), optimizer, keep_last
        # A group of its own: the writing thread's collectives must not mix with the main thread's.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() and keep_last else None
        )
        self.thread = worker_thread()
        self.future, self.copied, self.copies, self.seconds = None, None, None, 0.0  # seconds: of the main thread
        self.error: str | None = None  # why the last checkpoint was not written
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        n_bytes = sum(optimizer.like_tensors(lambda x, dtype: local(x).numel() * dtype.itemsize).values())
        # All ranks agree before any allocates: else the kernel's out-of-memory killer would end the run.
        missing = all_reduce_max([(n_bytes + reserved) * local_world_size - memory_stats.cpu_available()])[0]
        self.needed = f"saving in the background takes {n_bytes / 2**30:.1f} GiB of CPU memory"
        if async_save and keep_last and missing <= 0:
            self.copies = self.thread.submit(self._copies)  # pinning 15 GB takes seconds: during the first steps
        elif async_save and missing > 0:
            print0(
                f"training will pause while a checkpoint is written: {self.needed}, and less is free", file=sys.stderr
            )

    def _copies(self):
        try:
            return self.optimizer.like_tensors(_pinned_like)
        except (OSError, RuntimeError) as error:
            why = f"{self.needed} ({_reason(error)})"
            print(f"training will pause while a checkpoint is written: {why}", file=sys.stderr)
            return None

    def save(self, step: int, meta: dict, wait: bool) -> str:
        """Start to save, and with `wait` finish. meta goes into meta.json. Returns what became of it, for the log."""
        if not self.keep_last:
            return "nothing saved"
        self.finish(step)
        self.start(step, meta)
        return self.outcome() if wait or self.future.done() else "saving"

    def start(self, step: int, meta: dict) -> None:
        began = time.perf_counter()
        sums = checksums(self.optimizer.bit_sums(), self.optimizer.shard_group)
        meta = {"step": step, **self.optimizer.counters(step), **meta, "checksums": sums}
        copies = self.copies.result() if self.copies else None
        if copies is not None:
            self.copied = self._copy(copies)
        self.future = self.thread.submit(self._write, copies, self.copied, step, meta)
        if copies is None:
            concurrent.futures.wait([self.future])
        self.seconds += time.perf_counter() - began

    def _copy(self, copies) -> torch.cuda.Event | None:
        """Copies on a stream of its own, at the same time as the training. Returns the event at its end."""
        if self.stream is None:
            return self.optimizer.copy_tensors(copies)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.optimizer.copy_tensors(copies)
        return self.stream.record_event()

    def wait_for_copy(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def report(self, step: int) -> None:
        if self.future is not None and self.future.done():
            self.finish(step)

    def finish(self, step: int) -> None:
        if self.future is not None:
            print0(f"step {step:05d} | {self.outcome()}")

    def outcome(self) -> str:
        """Wait until the checkpoint is written; say so, or why it was not. The same on every rank."""
        began, future, self.future = time.perf_counter(), self.future, None
        try:
            path, self.error = future.result(), None
            return f"saved {path}"
        except OSError as error:
            self.error = str(error)
            return f"NOT SAVED: {error}. The newest checkpoint is {run_folder.newest(self.out_dir)}"
        finally:
            self.seconds += time.perf_counter() - began

    def _write(self, copies, copied, step, meta) -> Path:
        """Write out_dir/step_<step>, each rank its part, and delete all but the keep_last newest."""
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
                run_folder.commit(partial, final)

        try:
            for act in (begin, write, commit):
                on_all_ranks(act, self.group)
        except OSError:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if rank == 0:
            run_folder.remove_all_but(self.out_dir, self.keep_last)
        return final


def _pinned_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised copy on the CPU, pinned if x is on a GPU, sharded like x."""
    like = torch.empty_like(x, dtype=dtype, device="cpu")  # takes no memory until it is written
    if not local(x).is_cuda:
        return like
    pinned = pinned_empty(local(x).shape, dtype)
    # from_local() would move it to the mesh's device
    return DTensor(pinned, like._spec, requires_grad=False) if isinstance(like, DTensor) else pinned


def on_all_ranks(function: Callable, group: dist.ProcessGroup | None = None) -> None:
    """Call function on all ranks. If it fails on one, all raise OSError, so that none waits for another."""
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
    if "unexpected pos" in str(error):  # torch's message when it closes a file that it could not write
        return "a file was cut short: the disk is full, or files may not be so large"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Verify


def signed(meta: dict) -> dict:
    """meta with a digest of its content, which read_meta compares."""
    rest = {name: value for name, value in meta.items() if name != "digest"}
    return rest | {"digest": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """A checksum: the bits of this rank's part of a tensor, read as integers and added up in an int64 scalar."""
    return local(x).view(SAME_SIZE_INT[x.dtype.itemsize]).sum(dtype=torch.int64)


def checksums(bit_sums: dict, group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """The sum_of_bits of each tensor over all its parts: the same however the tensor is sharded.

    bit_sums: those of this rank's parts, on any devices. group: the ranks that hold the other parts. One changed bit
    changes the sum, and so does a missing or a zeroed part.
    """
    device = next(reversed(bit_sums.values())).device  # the last is a moment's: on the device of the group's backend
    sums = torch.stack([x.to(device) for x in bit_sums.values()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return dict(zip(bit_sums, sums.tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Load


def read_meta(path: Path) -> dict:
    """The content of a checkpoint's meta.json.

    Raises Damaged if it is not what was saved, ValueError if another version wrote it, OSError if it cannot be read.
    """
    try:
        meta = json.loads((Path(path) / "meta.json").read_text())
        missing = REQUIRED - meta.keys()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a list has no keys
        raise _failure(path, "meta.json: ", error) from error
    if "digest" in meta and meta != signed(meta):
        raise Damaged(f"{path} is damaged: meta.json is not what was saved")
    if missing:
        raise ValueError(f"{path} is no checkpoint of this version: its meta.json lacks {', '.join(sorted(missing))}")
    return meta


def _failure(path, what, error) -> Exception:
    """The exception for a failed read: Damaged, or OSError if the files may be good (no memory, no permission...)."""
    cause = _cause(error)
    no_memory = isinstance(cause, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(cause)
    if no_memory or getattr(cause, "errno", None) in NOT_DAMAGE:
        return OSError(f"{path} cannot be read: {what}{_reason(error)}")
    return Damaged(f"{path} is damaged: {what}{_reason(error)}")


def load_newest(out_dir: str, optimizer, check: Callable[[Path, dict], None]) -> tuple[Path, dict, list[str]]:
    """Fill an optimizer and its model's weights, sharded in any way, from the newest checkpoint that is not damaged.

    check(path, meta) is called before the tensors are read. Returns path, meta and a sentence for each newer checkpoint
    that was damaged; those are renamed. Raises ValueError if none is left, or if it holds another model's tensors or
    another step than its name says, OSError if one cannot be read now, or not renamed. Every rank must call it.
    """
    damaged, tensors = [], optimizer.tensors()
    while path := run_folder.newest_for_all_ranks(out_dir):
        try:
            meta = on_rank0(lambda path=path: read_meta(path))
            if meta["step"] != int(path.name[5:]):
                raise ValueError(f"{path} holds step {meta['step']}: name it step_{meta['step']:06d} again")
            check(path, meta)
            _read(tensors, path, meta, optimizer.shard_group)
            break
        except Damaged as error:
            damaged.append(str(error))
            if on_rank0(lambda: len(run_folder.checkpoints(out_dir)) == 1):
                # It keeps its name: a new run must not start beside it.
                raise Damaged(". ".join(damaged) + ". There is no older one: move it away to start anew") from error
            on_all_ranks(lambda: None)  # no rank reads it any more
            on_rank0(lambda path=path: run_folder.mark_damaged(path))
    optimizer.refresh(tensors)
    optimizer.load_counters(meta)
    return path, meta, damaged


def _read(tensors, path, meta, group=None, no_dist=False):
    """Read a checkpoint into tensors, named as optimizer.tensors() names them.

    Raises Damaged, on all ranks, if the content is not what was saved, and ValueError if other tensors were saved:
    model.py may have changed since then, which the settings do not show.
    """
    no_dist = no_dist or not dist.is_initialized()
    kinds = {name.partition(".")[0] for name in tensors}  # sample.py reads the weights alone
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
    except (Exception, CheckpointException) as error:  # missing or cut files raise all sorts
        saved_by = meta.get("versions", {}).get("torch", torch.__version__)
        if saved_by != torch.__version__:  # perhaps a format that this PyTorch does not know: rename nothing
            here = f"torch {torch.__version__} cannot read it ({_reason(error)})"
            raise ValueError(f"{path} was saved by torch {saved_by}, and {here}: resume with that version") from error
        raise _failure(path, "", error) from error
    for name, found in checksums({name: sum_of_bits(x) for name, x in tensors.items()}, group).items():
        if found != meta["checksums"].get(name):
            raise Damaged(f"{path} is damaged: {name} is not what was saved")


def _shapes(path) -> dict[str, torch.Size]:
    """The shapes of the saved tensors; {} if .metadata cannot be read, which dcp.load then reports on all ranks."""
    with contextlib.suppress(Exception):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: tensor.size for name, tensor in saved.items()}
    return {}


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """The model of a run's newest checkpoint, or of one checkpoint, whole, on one device in one dtype.

    Raises ValueError if there is none, if it is damaged or another model's, OSError if it cannot be read now.
    """
    return run_folder.read_newest(Path(path), lambda newest: _load_model(newest, device, dtype))


def _load_model(path, device, dtype):
    meta = read_meta(path)
    fields = LlamaConfig.__dataclass_fields__  # an older checkpoint also has settings of how a model is executed
    with torch.device("meta"):
        model = Llama(LlamaConfig(**{name: value for name, value in meta["model"].items() if name in fields}))
    model.to_empty(device="cpu")
    _read({f"model.{name}": p.detach() for name, p in model.named_parameters()}, path, meta, no_dist=True)
    return model.to(device=device, dtype=dtype)
