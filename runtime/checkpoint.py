"""Checkpoints of a run, out/step_000250: saved in the background, and read into an optimizer or a model.

checkpoint_folder.py defines what a folder contains, run_folder.py how it gets its name.
"""

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from kernels import LoRALinear
from kernels.adamw import merge_halves, split_halves
from kernels.pinned_memory import pinned_empty
from lora import add_lora
from model import Llama, LlamaConfig, fill
from runtime import memory_stats, run_folder
from runtime.checkpoint_folder import Folder, check_sizes, fingerprint, open_folder, read_into, write_folder
from runtime.distributed import (
    all_reduce_max,
    from_rank_0,
    local,
    local_world_size,
    print0,
    say,
    shard_like,
    worker_thread,
)
from runtime.hf_config import read_config
from runtime.hf_names import Rows, hf_names, hf_rows
from runtime.safetensors_file import Damaged

PAUSES = "training will pause while a checkpoint is written"

# ----------------------------------------------------------------------------------------------------------------------
# Save


class Saver:
    """Writes checkpoints in the background, while training continues.

        saver = Saver(out_dir, optimizer, config, documents, keep_last, async_save)
        saver.wait_for_copy()                  # before each update: the GPU waits for the copy, the CPU does not
        said = saver.save(step, run, wait)     # on every rank; "saved out/step_000250", "saving" or why it failed
        saver.report(step)                     # after each step: prints once when a background save has finished
        saver.finish(step)                     # waits for the save and prints

    The tensors are copied to pinned CPU memory, 12 bytes per parameter of the rank, during the next step's forward;
    then a thread writes them to disk. If there is no memory for the copies, or async_save is false (here or in the
    optimizer's place), save() returns only when all is written. keep_last=0 saves nothing. documents: the folder's
    other files, {name: content}. reserved: bytes of CPU memory that this rank will allocate later. timeout: seconds
    that a rank waits for the others to write one file.
    """

    def __init__(
        self,
        out_dir: str,
        optimizer,
        config: LlamaConfig,
        documents: dict[str, bytes],
        keep_last: int,
        async_save: bool = True,
        reserved: float = 0,
        timeout: float = 600.0,
    ):
        self.out_dir, self.optimizer, self.keep_last = Path(out_dir), optimizer, keep_last
        self.config, self.documents = config, documents
        # A separate group: the writing thread's collectives must not mix with the main thread's.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if dist.is_initialized() else None
        )
        self.thread = worker_thread()
        self.future, self.copied, self.copies, self.seconds = None, None, None, 0.0  # seconds: the main thread's
        self.error: str | None = None  # why the last checkpoint was not written
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        tensors = optimizer.tensors()  # in this thread: it waits for updates that hooks in forward wait for too
        n_bytes = sum(local(x).nbytes for x in tensors.values())
        # All ranks agree before one allocates: else the kernel's out-of-memory killer would end the run.
        missing = all_reduce_max([(n_bytes + reserved) * local_world_size - memory_stats.cpu_available()])[0]
        self.needed = f"saving in the background takes {n_bytes / 2**30:.1f} GiB of CPU memory"
        if async_save and optimizer.place.async_save and keep_last:
            if missing <= 0:
                self.copies = self.thread.submit(self._copies, tensors)  # 15 GB take seconds: during the first steps
            else:
                print0(f"{PAUSES}: {self.needed}, but less is free", file=sys.stderr)

    def _copies(self, tensors):
        try:
            return {key: _pinned_like(x) for key, x in tensors.items()}
        except (OSError, RuntimeError) as error:
            say(f"{PAUSES}: {self.needed} ({error})", file=sys.stderr)
            return None

    def save(self, step: int, run: dict, wait: bool) -> str:
        """Start a save, and with `wait` finish it. run goes into run.json. Returns the outcome, for the log."""
        if not self.keep_last:
            return "nothing saved"
        self.finish(step)
        began = time.perf_counter()
        run = {"step": step, **self.optimizer.counters(step), **run}
        copies = self.copies.result() if self.copies else None
        if copies is not None:
            self.copied = self._copy(copies)
        self.future = self.thread.submit(self._write, copies or self.optimizer.tensors(), self.copied, step, run)
        if copies is None:
            concurrent.futures.wait([self.future])
        self.seconds += time.perf_counter() - began
        return self.outcome() if wait or self.future.done() else "saving"

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

    def report(self, step: int) -> None:
        if self.future is not None and self.future.done():
            self.finish(step)

    def finish(self, step: int) -> None:
        if self.future is not None:
            print0(f"step {step:05d} | {self.outcome()}")

    def outcome(self) -> str:
        """Wait until the checkpoint is written; return a message saying so, or why not. The same on every rank."""
        began, future, self.future = time.perf_counter(), self.future, None
        try:
            said, self.error = future.result(), None
            return said
        except (OSError, ValueError) as error:
            self.error = str(error)
            return f"NOT SAVED: {error}. The newest checkpoint: {run_folder.newest(self.out_dir) or 'none'}"
        finally:
            self.seconds += time.perf_counter() - began

    def _write(self, tensors, copied, step, run) -> str:
        """Write out_dir/step_<step>, each rank its part, then delete all but the newest keep_last checkpoints."""
        final = self.out_dir / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        if copied is not None:
            copied.synchronize()
        from_rank_0(lambda: run_folder.remove_partial(self.out_dir), self.group)
        try:
            rows = rows_to_save(tensors, self.optimizer.parameters, self.config)
            differing = write_folder(partial, rows, self.documents, run, self.group)
            from_rank_0(lambda: run_folder.commit(partial, final), self.group)
        except (OSError, ValueError):
            from_rank_0(lambda: run_folder.remove_partial(self.out_dir), self.group)
            raise
        from_rank_0(lambda: run_folder.remove_all_but(self.out_dir, self.keep_last), self.group)
        if differing:
            found = f"the copies of the model differ in {len(differing)} tensors, {differing[0]} among them"
            return f"saved {final}. WARNING: {found}; the first machine's is saved"
        return f"saved {final}"


def _pinned_like(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised copy on the CPU, pinned if x is on a GPU, sharded like x."""
    if not local(x).is_cuda:
        return torch.empty_like(x, device="cpu")
    return shard_like(x, pinned_empty(local(x).shape, x.dtype))


def rows_to_save(tensors: dict, parameters: dict[str, nn.Parameter], config: LlamaConfig) -> dict[str, list[Rows]]:
    """This rank's rows of Optimizer.tensors(), or of copies of them, by the file they go to.

    A whole master is saved as the weight in the compute dtype plus the bits that bfloat16 lacks, or in float16 plus the
    master itself. So in bfloat16 a run with whole masters can resume with masters in halves, and vice versa.
    """
    model = "adapter_model" if any(name.endswith("lora_a") for name in parameters) else "model"
    files = {model: [], "optimizer": []}
    for (name, state), x in tensors.items():
        dtype = parameters[name].dtype
        for rows in hf_rows(name, x, config, state):
            if state or x.dtype == dtype:
                files["optimizer" if state else model].append(rows)
            else:
                weight, beside = _split_master(rows, dtype)
                files[model].append(weight)
                files["optimizer"].append(beside)
    return files


def _split_master(rows: Rows, dtype: torch.dtype) -> tuple[Rows, Rows]:
    if dtype != torch.bfloat16:
        weight = rows._replace(dtype=dtype, tensor=partial(rows.tensor.to, dtype))
        return weight, rows._replace(name=f"master.{rows.name}")

    def half(i):
        halves = torch.empty_like(rows.tensor, dtype=dtype), torch.empty_like(rows.tensor, dtype=torch.int16)
        split_halves(rows.tensor, *halves)
        return halves[i]

    lower = rows._replace(name=f"lower_half.{rows.name}", dtype=torch.int16, tensor=partial(half, 1))
    return rows._replace(dtype=dtype, tensor=partial(half, 0)), lower


# ----------------------------------------------------------------------------------------------------------------------
# Read


def read_weights(
    folder: Folder, parameters: dict[str, nn.Parameter], config: LlamaConfig, put: Callable,
    tensors: dict | None = None,
) -> None:  # fmt: skip
    """Call put(name, rows) with this rank's float32 rows, on the CPU, of each parameter; fill the states too.

    tensors: Optimizer.tensors(). Every rank must call it. It needs memory for the rank's rows of one parameter at a
    time, or none if run and folder both have masters in halves: those are read in place. Raises, on all ranks, what
    read_into raises, and ValueError if the folder has extra tensors.
    """
    weights = {hf_name for name in parameters for hf_name in hf_names(name)}
    # What the folder keeps in addition to every weight: read_into raises if one weight lacks it.
    kept = min({name.partition(".")[0] for name in folder.tensors} & {"lower_half", "master"}, default="")
    in_place = kept == "lower_half" and any(state == kept for _, state in tensors or {})
    states = [
        rows
        for (name, state), x in (tensors or {}).items()
        if in_place or state not in ("", "lower_half")
        for rows in hf_rows(name, x, config, state)
    ]
    found = {
        name
        for name, (file, _) in folder.tensors.items()
        if not name.startswith(("lower_half.", "master.")) and (tensors or not file.startswith("optimizer"))
    }
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied_twice = config.tie_embeddings and head in found
    more = found - weights - {rows.name for rows in states} - {head}
    more = {name for name in more if not name.endswith("rotary_emb.inv_freq")}  # from old versions
    if more:
        raise ValueError(f"{folder.path} has {len(more)} tensors that the model does not have: {min(more)}, ...")

    def rows() -> Iterator[Rows]:  # read_into reads each item before it asks for the next
        for name, parameter in () if in_place else parameters.items():
            whole = yield from _read_weight(name, parameter, config, kept)
            if tied_twice and hf_names(name) == [embedding]:
                again = torch.empty_like(parameter, dtype=torch.float32, device="cpu")
                yield from hf_rows("lm_head.weight", again, config)
                if not torch.equal(local(again), whole):
                    said = "config.json says tie_word_embeddings: set it to false"
                    raise ValueError(f"{folder.path} has a separate {head}, but {said}")
            put(name, whole)
        yield from states

    read_into(folder, rows())


def _read_weight(name, parameter, config, kept):
    """Yield the rows to read, and return this rank's part of the master: whole, merged, or the weight itself."""
    halves = kept == "lower_half"
    upper = torch.empty_like(parameter, dtype=torch.bfloat16 if halves else torch.float32, device="cpu").detach()
    yield from hf_rows(name, upper, config, "" if halves else kept)
    if not halves:
        return local(upper)
    lower = torch.empty_like(upper, dtype=torch.int16)
    yield from hf_rows(name, lower, config, kept)
    return merge_halves(local(upper), local(lower))


@contextlib.contextmanager
def _base_is_no_checkpoint():
    """Turn Damaged into ValueError: an older checkpoint would have the same base, so going back does not help."""
    try:
        yield
    except Damaged as error:
        raise ValueError(str(error)) from error


@_base_is_no_checkpoint()
def open_base(folder: Folder, path: Path | None = None) -> Folder:
    """The folder of the base weights of a checkpoint of adapters. Every rank must call it.

    path: where it is now; None: where it was. ValueError if it is gone, damaged, or another model.
    """
    path = path or Path(str(folder.adapter.get("base_model_name_or_path"))).expanduser()
    if not run_folder.is_model(path):
        where = "set base_model_name_or_path in adapter_config.json to their folder, or pass train.py --init_from"
        raise ValueError(f"{folder.path} has adapters of the weights in {path}, which are not there: {where}")
    base = open_folder(path)
    if base.adapter or fingerprint(base) != folder.config.get("nanocria_base"):
        where = "put that base back, or set base_model_name_or_path in adapter_config.json to its folder"
        raise ValueError(f"{path} is not the base that the adapters in {folder.path} were trained on: {where}")
    return base


@_base_is_no_checkpoint()
def read_base(
    folder: Folder, model: Llama, dtype: torch.dtype | None = None, cpu_weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Fill the frozen weights of a model with adapters from a folder. Every rank must call it. Raises ValueError,
    OSError. dtype: the dtype to quantise from, in which the adapters were trained; None: the model's.
    cpu_weights: where streamed weights are kept.

    For NF4 and float8 each rank quantises the whole projections one at a time and keeps its rows: so the bits are those
    of a single rank, and no device ever holds more than one whole projection of the base.
    """
    adapted = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    packed = {name: m for name, m in adapted.items() if len(m.held) > 1}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and name.endswith(".weight")}

    def put(name, whole):
        if name not in packed:
            local((cpu_weights or frozen)[name].detach()).copy_(whole)
            return
        projection = packed[name]
        parts = projection.quantize(whole.to(local(projection.weight).device, dtype or projection.lora_a.dtype))
        for parameter, part in zip(projection.tensors()[:-2], parts, strict=True):
            fill(parameter, part.view(parameter.shape))

    whole = {name: torch.empty(m.out_features, m.in_features, device="meta") for name, m in packed.items()}
    read_weights(folder, frozen | whole, model.config, put)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32, quantize_base: str | None = None
) -> Llama:
    """Load the model of a run's newest checkpoint, of one checkpoint or of published weights, whole, on one device.

    In float32 the weights are the master weights, unless the checkpoint's optimizer files were deleted. A checkpoint of
    adapters gives the model with its adapters (to merge them: lora.merge_lora). quantize_base: how its frozen weights
    are held, 'none' (the original weights, in dtype, even after training with fp8) or 'nf4'; None: as in the run.
    Raises ValueError if there is no model, or if it is damaged, of another architecture or beyond float16's range;
    OSError if it cannot be read now.
    """
    return run_folder.read_newest(Path(path), lambda newest: _load_model(newest, device, dtype, quantize_base))


def _load_model(path, device, dtype, quantize_base):
    masters = dtype == torch.float32 and any(path.glob("optimizer*.safetensors"))  # which may be deleted to save room
    folder = open_folder(path, ("model", "optimizer") if masters else ("model",))
    settings, _ = read_config(folder)
    base = open_base(folder) if folder.adapter else None
    check_sizes(base or folder, settings)
    with torch.device("meta"):
        model = Llama(LlamaConfig(**settings)).to(dtype)
        if folder.adapter:
            run = folder.run["settings"]
            add_lora(model, run["lora_rank"], run["lora_alpha"], quantize_base or run["quantize_base"])
    model.to_empty(device=device)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if base:
        read_base(base, model, dtype=getattr(torch, folder.run["dtype"]))
    read_weights(folder, parameters, model.config, lambda name, whole: parameters[name].detach().copy_(whole))
    for name, p in model.named_parameters():
        if p.dtype == torch.float16 and not torch.stack(p.aminmax()).isfinite().all():
            raise ValueError(f"{path} has numbers in {name} that float16 cannot hold: use bfloat16 or float32")
    return model
