"""Writes checkpoints, out/step_000250: in the background, by any number of ranks. checkpoint.py describes the folder.

A safetensors file is 8 bytes n (little-endian), n bytes of JSON, {name: {"dtype": "BF16", "shape": [O, C],
"data_offsets": [begin, end]}}, and the tensors. A tensor's rows are a contiguous range of bytes, and every rank
computes the same header: so each writes its own rows in place (https://huggingface.co/docs/safetensors).

A checkpoint is written as step_000250.partial and renamed when it is complete, so the name alone shows that it is.
A checkpoint that turns out to be damaged is renamed to step_000250.damaged.
"""

import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from data.files import atomic_write, finite, lock, open_to_write
from kernels.adamw import split_halves
from kernels.pinned_memory import pinned_empty
from model import LlamaConfig
from optimizers import Optimizer
from runtime import memory_stats
from runtime.checkpoint import best_of, checkpoints, digest_of_run, digests_of, is_model, newest, piece_ends, read_run
from runtime.distributed import from_rank_0, local, new_group, on_all_ranks, print0, say, shard_like, worker_thread
from runtime.hf import Rows, hf_rows

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.uint8: "U8",
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Save in the background


@dataclass
class Saver:
    """Writes checkpoints in the background, while training continues.

        saver = Saver(out_dir, lock_file, optimizer, config, hf_files, keep_last=2, ...)
        saver.wait_for_copy()                     # before each update: the GPU waits for the copy, the CPU does not
        message = saver.save(step, run, wait)     # on every rank; "saved out/step_000250", "saving" or why it failed
        saver.report(step)                        # after each step: prints once when a background save has finished

    The tensors are copied to pinned CPU memory, 12 bytes per parameter of the rank, during the next step's forward;
    then a thread writes them to disk. If there is no memory for the copies, or async_save is false (here or in the
    optimizer), save() returns only when all is written.
    """

    out_dir: str
    lock_file: TextIO | None  # rank 0's; None if nothing will be saved
    optimizer: Optimizer
    config: LlamaConfig
    hf_files: dict[str, bytes]  # the other files of a checkpoint, by name
    keep_last: int  # 0: save nothing
    keep_best: bool  # keep the checkpoint of the lowest validation loss, too
    async_save: bool
    timeout: float  # seconds that a rank waits for the others to write one file
    reserved: float  # bytes of CPU memory that this rank will allocate later

    def __post_init__(self):
        self.out_dir = Path(self.out_dir)
        self.best: Path | None = None  # with keep_best
        self.seconds = 0.0  # that the main thread has waited
        self.error: str | None = None  # why the last checkpoint was not written
        self.group = new_group(self.timeout)
        self.thread = worker_thread()
        self.future = None  # of the save in progress
        self.copies = None  # a future of the tensors' copies, which are None if they could not be allocated
        self.copied = None  # an event: the copies are complete
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        if self.async_save and self.optimizer.async_save and self.keep_last:
            self._allocate_copies()

    def _allocate_copies(self):
        """Allocate the copies in the thread, during the first steps: 15 GB take seconds."""
        tensors = self.optimizer.tensors()  # in this thread: it waits for updates that hooks in forward wait for too
        n_bytes = sum(local(x).nbytes for x in tensors.values())
        pauses = (
            "training will pause while a checkpoint is written: saving in the background takes "
            f"{n_bytes / 2**30:.1f} GiB of CPU memory"
        )

        def allocate():
            try:
                return {key: _pinned_like(x) for key, x in tensors.items()}
            except (OSError, RuntimeError) as error:
                say(f"{pauses} ({error})", file=sys.stderr)
                return None

        # All ranks agree before one allocates: else the kernel's out-of-memory killer would end the run.
        if memory_stats.missing_cpu_bytes(n_bytes + self.reserved) > 0:
            print0(f"{pauses}, but less is free", file=sys.stderr)
        else:
            self.copies = self.thread.submit(allocate)

    def save(self, step: int, run: dict, wait: bool) -> str:
        """Start a save, and with `wait` finish it. run goes into run.json. Returns the outcome, for the log."""
        if not self.keep_last:
            return "nothing saved"
        start = time.perf_counter()
        self.report(step, wait=True)  # of the save before this one
        run = {"step": step, **self.optimizer.counters(step), **run}
        copies = self.copies.result() if self.copies else None
        if copies is not None:
            self.copied = self._copy(copies)
        self.future = self.thread.submit(self._write, copies or self.optimizer.tensors(), self.copied, step, run)
        must_wait = wait or copies is None  # without copies the next update would change what is being written
        outcome = self.outcome() if must_wait or self.future.done() else "saving"
        self.seconds += time.perf_counter() - start
        return outcome

    def _copy(self, copies) -> torch.cuda.Event | None:
        """Copy on a separate stream, while training continues. Returns the event at the end of the copy."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # None: no-op
            for key, x in self.optimizer.tensors().items():
                local(copies[key]).copy_(local(x), non_blocking=local(copies[key]).is_pinned())
        return self.stream and self.stream.record_event()

    def wait_for_copy(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def report(self, step: int, wait: bool = False) -> None:
        if self.future is not None and (wait or self.future.done()):
            print0(f"step {step:05d} | {self.outcome()}")

    def outcome(self) -> str:
        """Wait until the checkpoint is written; return a message saying so, or why not. The same on every rank."""
        try:
            path, self.best = self.future.result()
            self.error = None
            return f"saved {path}" + (", the best so far" if path == self.best else "")
        except (OSError, ValueError) as error:
            self.error = str(error)
            return f"NOT SAVED: {error}. The newest checkpoint: {newest(self.out_dir) or 'none'}"
        finally:
            self.future = None

    def _write(self, tensors, copied, step, run) -> tuple[Path, Path | None]:
        """Write out_dir/step_<step>, each rank its part, then delete all but the newest keep_last and the best one."""
        path = self.out_dir / f"step_{step:06d}"
        partial = path.with_name(path.name + ".partial")
        if copied is not None:
            copied.synchronize()
        from_rank_0(self._keep_lock, self.group)
        try:
            if from_rank_0(path.exists, self.group):  # the run has resumed from it, and evaluated it since
                from_rank_0(lambda: add_val_loss(path, run["val_loss"]), self.group)
            else:
                rows = rows_to_save(tensors, self.optimizer.parameters, self.config)
                write_folder(partial, rows, self.hf_files, run, self.group)
                from_rank_0(lambda: commit(partial, path), self.group)
        except (OSError, ValueError):
            from_rank_0(lambda: remove_partial(self.out_dir), self.group)
            raise
        return path, from_rank_0(lambda: remove_old(self.out_dir, self.keep_last, self.keep_best), self.group)

    def _keep_lock(self):
        """Lock out_dir again if it has been deleted. OSError if another run has begun there since."""
        path = self.out_dir / ".lock"
        if not path.exists() or not os.path.samestat(os.stat(path), os.fstat(self.lock_file.fileno())):
            self.lock_file = lock_out_dir(self.out_dir)


def _pinned_like(x: torch.Tensor) -> torch.Tensor:
    """An uninitialized copy on the CPU, pinned if x is on a GPU, sharded like x."""
    if not local(x).is_cuda:
        return torch.empty_like(x, device="cpu")
    return shard_like(x, pinned_empty(local(x).shape, x.dtype))


def rows_to_save(tensors: dict, parameters: dict[str, nn.Parameter], config: LlamaConfig) -> dict[str, list[Rows]]:
    """This rank's rows of Optimizer.tensors(), or of copies of them, by the name of their file.

    A whole master is saved as the weight in the compute dtype plus the bits that bfloat16 lacks, or in float16 plus the
    master itself. So in bfloat16 a run with whole masters can resume with masters in halves, and vice versa.
    """
    model = "adapter_model.safetensors" if any(name.endswith("lora_a") for name in parameters) else "model.safetensors"
    files = {model: [], "optimizer.safetensors": []}
    for (name, state), x in tensors.items():
        dtype = parameters[name].dtype
        for rows in hf_rows(name, x, config, state):
            if state or x.dtype == dtype:
                files["optimizer.safetensors" if state else model].append(rows)
            else:
                weight, rest = _split_master(rows, dtype)
                files[model].append(weight)
                files["optimizer.safetensors"].append(rest)
    return files


def _split_master(rows: Rows, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """The weight, and what the master has beyond it. Both are computed when they are written, one at a time."""
    master = rows.tensor

    def half(i):
        halves = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        split_halves(master, *halves)
        return halves[i]

    if dtype != torch.bfloat16:
        return rows._replace(dtype=dtype, tensor=lambda: master.to(dtype)), rows._replace(name=f"master.{rows.name}")
    weight = rows._replace(dtype=dtype, tensor=partial(half, 0))
    rest = rows._replace(name=f"lower_half.{rows.name}", dtype=torch.int16, tensor=partial(half, 1))
    return weight, rest


# ----------------------------------------------------------------------------------------------------------------------
# Write a folder


def write_folder(
    folder: Path,
    rows_by_file: dict[str, list[Rows]],
    hf_files: dict[str, bytes],
    run: dict,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a folder and flush it to disk. Every rank must call it, with its own rows. The caller then renames it.

    rows_by_file: by its name, the model's first. hf_files: other files by name. run: the content of run.json.
    Of the last two only rank 0's count. Raises OSError, on all ranks, if one cannot write.
    """
    headers = {name: _header(rows) for name, rows in rows_by_file.items()}
    model = next(iter(rows_by_file))
    small = hf_files | {f"{model}.index.json": _index(model, rows_by_file[model])}

    def create():
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in small.items():
            _write_file(folder / name, content)
        for name, (header, _, n_bytes) in headers.items():
            _write_file(folder / name, header, n_bytes)
        return {name: piece_ends(folder / name) for name in [*small, *headers]}

    ends = from_rank_0(create, group)
    for name, (_, begins, _) in headers.items():
        on_all_ranks(partial(_write_rows, folder / name, rows_by_file[name], begins), group)
    digests = digests_of(folder, ends, group)

    from_rank_0(lambda: _write_file(folder / "run.json", _run_json(run | {"digests": digests})), group)


def _run_json(run: dict) -> bytes:
    run = finite(run)
    run["digest"] = digest_of_run(run)
    return json.dumps(run, indent=2).encode() + b"\n"


def add_val_loss(folder: Path, val_loss: float | None) -> None:
    """Give a checkpoint the validation loss that it was saved without."""
    with atomic_write(folder / "run.json") as file:
        file.write(_run_json(read_run(folder) | {"val_loss": val_loss}))


def _whole_bytes(rows):
    return math.prod(rows.whole_shape) * rows.dtype.itemsize


def _index(file, all_rows):
    """Hugging Face's index, also of a single file: without it vLLM would read optimizer.safetensors as weights."""
    total = sum(map(_whole_bytes, all_rows))
    weight_map = {rows.name: file for rows in all_rows}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def _header(all_rows):
    """The first bytes of a file with these tensors, and at which byte each begins, and the file's size.

    The widest dtype comes first, so that each tensor is aligned.
    """
    header = {"__metadata__": {"format": "pt"}}  # transformers requires the format
    offset = 0
    for rows in sorted(all_rows, key=lambda rows: -rows.dtype.itemsize):
        end = offset + _whole_bytes(rows)
        dtype = DTYPE_NAMES[rows.dtype]
        header[rows.name] = {"dtype": dtype, "shape": list(rows.whole_shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    begins = {rows.name: start + header[rows.name]["data_offsets"][0] for rows in all_rows}
    return len(text).to_bytes(8, "little") + text, begins, start + offset


def _write_file(path, content, n_bytes=0):
    """Create a file that begins with this content and has n_bytes, if that is more, and flush it to disk."""
    with open(path, "xb") as file:  # x: never through a link
        file.write(content)
        file.truncate(max(n_bytes, len(content)))
        file.flush()
        os.fsync(file.fileno())


def _write_rows(path, all_rows, begins):
    """Write this rank's rows of one file. begins: at which byte each tensor begins."""
    with open(path, "r+b") as file:
        for rows in all_rows:
            if rows.writes:
                x = rows.tensor() if callable(rows.tensor) else rows.tensor
                row_bytes = math.prod(rows.whole_shape[1:]) * rows.dtype.itemsize
                file.seek(begins[rows.name] + rows.first * row_bytes)
                file.write(x.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------------------------
# Names in out_dir


def lock_out_dir(out_dir: Path) -> TextIO:
    """Create out_dir, lock it until the file is closed, and delete what a killed run left. OSError if another run locks
    it, ValueError for a model.
    """
    if is_model(out_dir):
        raise ValueError(f"{out_dir} holds weights: name a folder for this run alone, or the one above a checkpoint")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        file = open_to_write(out_dir / ".lock", "a")
        lock(file)
        file.truncate(0)
        file.write(f"{time.time_ns()}\n")  # the other ranks compare this
        file.flush()
        os.fsync(file.fileno())
        remove_partial(out_dir)
        return file
    except BlockingIOError as error:
        raise OSError(f"another run is writing to {out_dir}: wait for it, or change out_dir") from error


def commit(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, safe against a power failure."""
    _sync(partial)
    partial.rename(final)
    _sync(final.parent)


def _sync(folder: Path) -> None:
    """Flush a folder: only then is a rename in it on disk."""
    file = os.open(folder, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def remove_partial(out_dir: Path) -> None:
    """Delete what is not a complete checkpoint, or no longer: also what a killed run left."""
    for path in out_dir.glob("step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)  # what cannot be deleted does no harm


def remove_old(out_dir: Path, keep_last: int, keep_best: bool) -> Path | None:
    """Delete all but the newest keep_last checkpoints, and with keep_best the best one, which is returned."""
    best = best_of(checkpoints(out_dir)) if keep_best else None
    for old in checkpoints(out_dir)[:-keep_last]:
        if old != best:
            renamed = f"{old.name}.{time.time_ns()}.old.partial"  # a half-deleted one must not look complete
            old.rename(old.with_name(renamed))
    remove_partial(out_dir)
    return best


def mark_damaged(path: Path) -> None:
    damaged = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(damaged, ignore_errors=True)  # the same step was damaged before
    path.rename(damaged)
