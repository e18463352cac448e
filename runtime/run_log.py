"""The log of a run: lines on the screen, metrics.jsonl, wandb, loss.png, and at the end summary.json. Rank 0 writes."""

import contextlib
import errno
import io
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time

import torch

from data.files import atomic_write, display_path, finite, open_to_write, write_json
from data.loader import Blocks
from data.tokenizer import ROOT
from model import Llama
from runtime import memory_stats
from runtime.device import peak_flops, send_to_cpu, start_profiler
from runtime.distributed import (
    all_reduce_max,
    all_reduce_sum,
    local_world_size,
    print0,
    rank,
    stop,
    stop_on_error,
    world_size,
)
from runtime.loss_plot import draw_losses, read_losses, read_metrics
from runtime.memory import RunShape, peak_gib


def git_commit() -> str:
    # of this repository, not of one around it
    command = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"


def versions(device: str) -> dict[str, str]:
    names = {"nanocria": git_commit(), "python": platform.python_version(), "torch": torch.__version__}
    if device == "cpu":
        return names
    import triton

    return names | {"triton": triton.__version__, "cuda": torch.version.cuda}


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


class RunLog:
    """log = RunLog(out_dir, device, dtype, tokens_per_step, flops_per_token, max_iters, log_interval, profile)
    log.open(first_step, on_not_finite)         # starts the clock and metrics.jsonl
    log.step(step, lr, loss=..., grad_norm=...) # after each step; a line every log_interval steps. All ranks call it
    with log.reading(): ...                     # measures the time that reading data takes
    with log.paused(): ...                      # evaluation and saving: not counted as training time
    log.evaluation(step, losses, shares, n)     # after each evaluation
    log.summary(...); log.next_command(chat=False); log.close()
    """

    def __init__(
        self, out_dir: str, device: str, dtype: str, tokens_per_step: int, flops_per_token: float, max_iters: int = 0,
        log_interval: int = 1, profile: bool = False,
    ):  # fmt: skip
        self.out_dir = Path(out_dir)
        self.device = device
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.max_iters = max_iters
        self.log_interval = log_interval
        self.profile = profile
        self.profiler = None
        on_gpu = device != "cpu"
        self.device_name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        self.peak_flops = peak_flops(self.device_name) if dtype != "float32" else None
        self.versions = versions(device)
        self.pending = None  # _write_line's arguments for a line not written yet: its numbers may still be on the GPU
        self.sums = {}  # of each number, over the steps since the last line
        self.steps_since_line = 0
        self.data_seconds = 0.0
        self.seconds = []  # of each step: the mean between two lines
        self.train_seconds = 0.0  # their sum
        self.curve = []  # (step, training seconds so far, loss) of each line
        self.peak_gib = None
        self.file = None  # metrics.jsonl, on the rank that writes it
        self.wandb = None
        self.model_info = {}  # from header(), for the summary
        self.line_began = perf_counter()

    def mfu(self, tok_per_s: float) -> float | None:
        """Model FLOPs utilization: the FLOPs that the model needs over the GPUs' peak; None if that is unknown."""
        return self.flops_per_token * tok_per_s / world_size / self.peak_flops if self.peak_flops else None

    def header(self, model: Llama, run: RunShape, data: Blocks, n_sequences: int) -> None:
        """n_sequences: of the whole run."""
        config = model.config
        self.model_info = {"n_params": model.n_params(), "estimated_gib": peak_gib(config, run)}
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        print0(f"runs on   {world_size} x {self.device_name}; {versions}")
        fp8 = ", projections in float8" if run.fp8 else ""
        n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        trained = f", of which {n_trained:,} are trained" if run.lora_rank else ""
        masters = "adapters" if run.lora_rank else "weights"
        print0(f"model     {model.n_params():,} parameters{trained}; float32 {masters}, {run.dtype} compute{fp8}")
        if self.device != "cpu":
            gib = f"about {self.model_info['estimated_gib']:.1f} GiB of {memory_stats.card_gib(self.device):.1f} GiB"
            settings = f"activation checkpointing: {run.activation_checkpointing}; offload: {run.offload}"
            print0(f"memory    {gib}; {settings}")
        self._print_data(data, n_sequences)
        shape = f"{run.batch_size} sequences x {config.block_size:,} tokens x {run.micro_steps} micro-batches"
        print0(f"step      {self.tokens_per_step:,} tokens = {shape} x {world_size} ranks")
        if self.device == "cpu" and self.flops_per_token * self.tokens_per_step > 1e14:
            print0("on a CPU  each step will take many minutes: config/baby_llama.py is made for CPUs")

    def _print_data(self, data: Blocks, n_sequences: int) -> None:
        steps = self.max_iters
        for part, (name, share) in zip(data.parts, data.shares.items(), strict=True):
            times = share * n_sequences / part.n_blocks
            of_the_mix = f" {share:.1%} of the sequences;" if share < 1 else ""
            n_tokens = f"{len(part.tokens):,} tokens;"
            print0(f"data      {name}: {n_tokens}{of_the_mix} {steps:,} steps read them {times:.2f} times")
            if part.packing:
                print0(f"          {part.packing}")
            if times > 10:
                fewer = "--epochs=3 makes three" if share == 1 else "give them a smaller share"
                print0(f"          more than ten passes: the model may learn them by heart. {fewer}")

    @stop_on_error()
    def open(self, first_step: int, on_not_finite: Callable[[int, float, float], None], settings=None) -> None:
        """Open metrics.jsonl and keep its lines up to first_step. settings: wandb shows them; None: no wandb.

        on_not_finite: called after a line whose mean loss or gradient norm is not finite, with its step and these two.
        Steps after the checkpoint run again, so their lines are dropped, and so is a line that a killed run left
        unfinished. Without a checkpoint, the previous run's lines move to metrics.jsonl.old.
        """
        self.first_step = first_step
        self.on_not_finite = on_not_finite
        self.profiler = start_profiler(self.out_dir) if self.profile else None
        if rank == 0:
            self.file = self._open_metrics(first_step)
            if settings is not None:
                self._start_wandb(first_step, settings)
        self.line_began = perf_counter()

    def _open_metrics(self, first_step: int) -> io.RawIOBase:
        path = self.out_dir / "metrics.jsonl"
        if not first_step and path.is_file() and path.stat().st_size:  # its checkpoints were deleted or never written
            old = path.rename(path.with_name("metrics.jsonl.old"))
            print0(f"begins    no checkpoint found: starting over; old metrics moved to {old}")
        with atomic_write(path) as file:
            for metrics in read_metrics(path):
                if metrics["step"] <= first_step:
                    file.write(json.dumps(metrics).encode() + b"\n")
        return open_to_write(path, "ab", buffering=0)  # a buffer that a full disk does not take would fail once more

    def _start_wandb(self, first_step: int, settings: dict) -> None:
        """Start a wandb run, or continue that of the resumed run."""
        options = {"project": os.environ.get("WANDB_PROJECT", "nanocria"), "config": settings}
        path = self.out_dir / "wandb_id"
        if first_step and path.exists():
            options |= {"id": path.read_text(), "resume": "allow"}
        try:
            import wandb

            path.write_text(wandb.init(**options).id)
        except Exception as error:  # of many kinds: not installed, incompatible with another package, server errors
            fix = "pip install wandb" if isinstance(error, ImportError) else "wandb login, WANDB_MODE=offline"
            stop(f"wandb does not start ({error}). Try {fix}, or no --wandb_log")
        self.wandb = wandb

    def _call_wandb(self, function: Callable, *arguments, **options) -> None:
        """Call wandb. If its process was killed, or got a signal meant for this one, training continues without it."""
        try:
            function(*arguments, **options)
        except Exception as error:
            print0(f"wandb has ended ({error}), metrics.jsonl continues")
            self.wandb = None

    def record(self, metrics: dict) -> None:
        if not self.file:  # another rank, or eval_only, which writes nothing
            return
        metrics = finite(metrics)
        line = json.dumps(metrics).encode() + b"\n"
        try:
            written = self.file.write(line)
            if written < len(line):  # the disk is full now: else the next line would continue this one
                self.file.truncate(self.file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk: training goes on
            print0(f"{self.file.name}: {error.strerror}")
        if self.wandb:
            self._call_wandb(self.wandb.log, metrics, step=metrics["step"])

    @contextlib.contextmanager
    def reading(self):
        began = perf_counter()
        yield
        self.data_seconds += perf_counter() - began

    @contextlib.contextmanager
    def paused(self):
        self._finish_line()
        began = perf_counter()
        yield
        self.line_began += perf_counter() - began

    def step(self, step: int, lr: float, **numbers: torch.Tensor) -> None:
        """Add up a step's numbers, scalars on the device: `loss` is this rank's share, others are equal on all ranks.

        Every log_interval steps, and after the first and the last one, a line has the means since the last line. It is
        written during the next step, or before an evaluation: so the GPU has work while the CPU waits and writes. All
        ranks must call it.
        """
        if self.profiler:
            self.profiler.step()
        self._finish_line()
        self.steps_since_line += 1
        for name, number in numbers.items():
            number = number.detach().to(self.device, torch.float32, copy=True)  # a CUDA graph overwrites its results
            self.sums[name] = number if name not in self.sums else self.sums[name] + number
        if step % self.log_interval and step not in (self.first_step + 1, self.max_iters):
            return
        totals = torch.stack(list(self.sums.values()))
        all_reduce_sum(totals)
        read_means = send_to_cpu(totals / world_size / self.steps_since_line)
        self.pending = (step, lr, list(self.sums), read_means, self.steps_since_line, self.data_seconds)
        self.sums = {}
        self.steps_since_line = 0
        self.data_seconds = 0.0
        if self.device == "cpu":
            self._finish_line()

    def _finish_line(self) -> None:
        line = self.pending
        self.pending = None  # also if this line ends the run
        if line:
            self._write_line(*line)

    def _write_line(self, step: int, lr: float, names: list, read_means: Callable, n_steps: int, data_seconds: float):
        means = dict(zip(names, read_means(), strict=True))
        seconds = (perf_counter() - self.line_began) / n_steps
        self.line_began = perf_counter()
        self.seconds += [seconds] * n_steps
        self.train_seconds += seconds * n_steps
        tok_per_s = self.tokens_per_step / seconds
        gib_and_ms = [memory_stats.used_gib(self.device), 1000 * data_seconds / n_steps]
        self.peak_gib, data_ms = all_reduce_max(gib_and_ms)  # over gloo: the GPU is busy with the next step
        eta = round(seconds * (self.max_iters - step))
        others = "".join(f"| {name} {mean:.4g} " for name, mean in means.items() if name not in ("loss", "grad_norm"))
        print0(
            f"step {step:05d}/{self.max_iters} | loss {means['loss']:.4f} | lr {lr:.2e} "
            f"| norm {means['grad_norm']:.2f} | {seconds * 1000:.1f} ms | {tok_per_s:,.0f} tok/s "
            f"| mfu {percent(self.mfu(tok_per_s))} | mem {self.peak_gib:.1f} GiB | data {data_ms:.1f} ms {others}"
            f"| eta {eta // 3600}h{eta % 3600 // 60:02d}m{eta % 60:02d}s"
        )
        self.curve.append((step, self.train_seconds, means["loss"]))
        self.record(
            {"step": step, "lr": lr, **means, "ms": seconds * 1000, "tok_per_s": tok_per_s, "mfu": self.mfu(tok_per_s),
             "mem_gib": self.peak_gib, "data_ms": data_ms, "time": time()}
        )  # fmt: skip
        if not math.isfinite(means["loss"] + means["grad_norm"]):
            self.on_not_finite(step, means["loss"], means["grad_norm"])

    def evaluation(
        self, step: int, losses: list[float] | None, shares: dict[str, float], n_blocks: int
    ) -> tuple[float | None, str]:
        """Record and draw the validation loss: the mean of the datasets' losses, weighted by their shares of the mix.

        losses: None if the evaluation was interrupted. Returns the validation loss and the text to print.
        """
        if losses is None:
            return None, "interrupted"
        val_loss = sum(share * loss for share, loss in zip(shares.values(), losses, strict=True))
        metrics = {"step": step, "val_loss": val_loss}
        text = f"val loss {val_loss:.4f}"
        if len(losses) > 1:  # a mix
            metrics["val_losses"] = dict(zip(shares, losses, strict=True))
            text += "".join(f", {name} {loss:.4f}" for name, loss in metrics["val_losses"].items())
        self.record(metrics)
        if self.file and step:
            self.draw()
        return val_loss, f"{text} ({n_blocks:,} sequences)"

    def summary(self, val_loss: float, val_data: Blocks, n_evaluated: int, **more) -> None:
        """Print the run's result and write summary.json. n_evaluated: how many validation tokens are in val_loss."""
        if rank or not self.seconds:  # no step: a resumed run had only its last evaluation to do
            return
        launcher = f"torchrun --nproc_per_node={local_world_size}" if "RANK" in os.environ else "python"
        seconds = statistics.median(self.seconds[1:] or self.seconds)  # the first one compiles
        tok_per_s = self.tokens_per_step / seconds
        print0(
            f"{len(self.seconds):,} steps in {self.train_seconds / 60:.1f} minutes; "
            f"the median step {seconds * 1000:.1f} ms, {tok_per_s:,.0f} tok/s, mfu {percent(self.mfu(tok_per_s))}; "
            f"peak {self.peak_gib:.1f} GiB"
        )
        result = {
            "command": f"{launcher} train.py {shlex.join(sys.argv[1:])}",
            "device": f"{world_size} x {self.device_name}",
            "versions": self.versions,
            "steps": len(self.seconds),
            "peak_gib": self.peak_gib,
            "val_loss": val_loss,
            "curve": self.curve,
            **self.model_info,
            "flops_per_token": self.flops_per_token,
            "cpu_gib": memory_stats.used_gib("cpu"),
            "reserved_gib": None if self.device == "cpu" else torch.cuda.max_memory_reserved() / 2**30,
            **more,
            "train_seconds": self.train_seconds,
            "ms_per_step": seconds * 1000,
            "tok_per_s": tok_per_s,
            "mfu": self.mfu(tok_per_s),
        }
        meta = val_data.meta
        if "xz_bits_per_byte" in meta and n_evaluated > 0.99 * len(val_data.tokens):  # of the bytes that xz read
            result["bits_per_byte"] = val_loss / math.log(2) * len(val_data.tokens) / meta["val_bytes"]
            result["xz_bits_per_byte"] = meta["xz_bits_per_byte"]
            print0(
                f"validation: {result['bits_per_byte']:.3f} bits per byte; xz -9 needs {meta['xz_bits_per_byte']:.3f} "
                f"for the same {meta['val_bytes']:,} bytes"
            )
        try:
            write_json(self.out_dir / "summary.json", result)
        except OSError as error:  # a full disk
            print0(f"summary.json is not written: {error}")

    def next_command(self, chat: bool, best: Path | None = None) -> None:
        """Print how to sample from the best checkpoint; None: from the newest."""
        command = ["python", display_path(ROOT / "sample.py"), f"--out_dir={best or self.out_dir}"]
        print0(f"next: {shlex.join([*command, '--chat'] if chat else command)}")

    def draw(self) -> None:
        """Draw loss.png, if matplotlib is installed. A failure does not end the run."""
        try:
            draw_losses({self.out_dir.name: [read_losses(self.out_dir)]}, self.out_dir / "loss.png")
        except ImportError:  # there is no matplotlib
            pass
        except Exception as error:  # of many kinds: a full disk, matplotlib's own
            print0(f"loss.png is not drawn: {error}")

    def close(self) -> None:
        if self.profiler:
            self.profiler.stop()
        if self.file:
            self.file.close()
        if self.wandb:
            self._call_wandb(self.wandb.finish)
