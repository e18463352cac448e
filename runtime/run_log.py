"""What a run says of itself: its lines on the screen, metrics.jsonl, wandb, and the summary.json that it ends with.

    log = RunLog(out_dir, device, dtype, tokens_per_step, flops_per_token)
    log.open(first_step)                              # metrics.jsonl, from there on
    log.step_seconds.append(0.41)                     # after each step
    log.line(step, max_iters, loss, lr, grad_norm, seconds, peak_gib, data_ms)
    log.record({"step": 100, "val_loss": 3.2})
    log.summary(...)

Rank 0 speaks and writes for all.
"""

import contextlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from data.files import atomic_write
from data.tokens import Tokens
from runtime.distributed import local_world_size, print0, rank, stop, world_size

PEAK_FLOPS = {  # dense bf16 with fp32 accumulation, by the makers' datasheets; the first name that fits
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """FLOPs per second that the card can do in bfloat16 and float16; None for a card that is not listed."""
    other = r"(?! (Laptop|Ti|D)\b|.*\bMIG\b)"  # cards of that name with more or fewer cores, and slices of one
    fitting = (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b{other}", device_name))
    return next(fitting, None)


def git_commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.check_output(
            command, cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"


def versions(device: str) -> dict[str, str]:
    found = {"nanocria": git_commit(), "python": platform.python_version(), "torch": torch.__version__}
    if device == "cpu":
        return found
    import triton

    return found | {"triton": triton.__version__, "cuda": torch.version.cuda}


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


class RunLog:
    def __init__(self, out_dir: str, device: str, dtype: str, tokens_per_step: int, flops_per_token: float):
        self.out_dir, self.tokens_per_step, self.flops_per_token = Path(out_dir), tokens_per_step, flops_per_token
        on_gpu = device != "cpu"
        self.device_name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        self.peak_flops = peak_flops(self.device_name) if dtype != "float32" else None
        self.versions = versions(device)
        self.step_seconds = []  # of each step
        self.curve = []  # (step, seconds so far, loss) of each line
        self.file, self.wandb = None, None

    def mfu(self, tok_per_s: float) -> float | None:
        """Model FLOPs utilisation: the FLOPs the model needs, over what the GPUs could do; None where nobody knows."""
        return self.flops_per_token * tok_per_s / world_size / self.peak_flops if self.peak_flops else None

    def open(self, first_step: int, **wandb_options) -> None:
        """metrics.jsonl as it was after first_step; wandb too where there are options for its init.

        Steps after a checkpoint will be run again: their lines go, and so does one that a killed run left unfinished.
        """
        if rank:
            return
        path = self.out_dir / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if first_step and path.exists() else []

        def belongs(line):
            try:
                return json.loads(line).get("step", 0) <= first_step
            except (ValueError, AttributeError, TypeError):  # cut short, or damaged when the machine went down
                return False

        kept = [line for line in lines if belongs(line)]
        with atomic_write(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())
        self.file = open(path, "a")  # noqa: SIM115
        if wandb_options:
            self._start_wandb(first_step, wandb_options)

    def _start_wandb(self, first_step: int, options: dict) -> None:
        """A resumed run goes on in its own run of wandb."""
        known = self.out_dir / "wandb_id"
        if first_step and known.exists():
            options = options | {"id": known.read_text(), "resume": "allow"}
        try:
            import wandb

            known.write_text(wandb.init(**options).id)
        except ImportError as error:
            stop(f"--wandb_log=true: {error}: pip install wandb, or leave it out")
        except (wandb.errors.Error, ValueError) as error:
            cure = "wandb login, or WANDB_MODE=offline, or no --wandb_log"
            stop(f"wandb does not start ({error}). What may help: {cure}")
        self.wandb = wandb

    def _tell_wandb(self, function: Callable, *arguments, **options) -> None:
        """The training does not end with wandb's own process, which may be killed, or get the signal meant for us."""
        try:
            function(*arguments, **options)
        except Exception as error:
            print0(f"wandb has ended ({error}), metrics.jsonl goes on")
            self.wandb = None

    def record(self, metrics: dict) -> None:
        """One line of metrics.jsonl, and the same to wandb."""
        if rank:
            return
        try:
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk: the weights are worth more than their log
            print0(f"{self.file.name}: {error.strerror}")
        if self.wandb:
            self._tell_wandb(self.wandb.log, metrics, step=metrics["step"])

    def line(self, step: int, max_iters: int, loss, lr, grad_norm, seconds, peak_gib, data_ms, **more) -> None:
        """The line of a step, on the screen and recorded; seconds: of a step, on average since the line before. more:
        numbers that are only recorded.
        """
        tok_per_s = self.tokens_per_step / seconds
        left = round(seconds * (max_iters - step))
        print0(
            f"step {step:05d}/{max_iters} | loss {loss:.4f} | lr {lr:.2e} | norm {grad_norm:.2f} "
            f"| {seconds * 1000:.1f} ms | {tok_per_s:,.0f} tok/s | mfu {percent(self.mfu(tok_per_s))} "
            f"| mem {peak_gib:.1f} GiB | data {data_ms:.1f} ms "
            f"| eta {left // 3600}h{left % 3600 // 60:02d}m{left % 60:02d}s"
        )
        self.curve.append((step, sum(self.step_seconds), loss))
        grad_norm = grad_norm if math.isfinite(grad_norm) else None  # inf is no JSON
        self.record(
            {"step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "ms": seconds * 1000,
             "tok_per_s": tok_per_s, "mfu": self.mfu(tok_per_s), "mem_gib": peak_gib, "data_ms": data_ms, **more}
        )  # fmt: skip

    def summary(self, peak_gib: float | None, val_loss: float, all_of_val: Tokens | None, **more) -> None:
        """What came of the run, in two lines and in summary.json; all_of_val: the tokens, where val_loss is of all."""
        if rank:
            return
        launcher = f"torchrun --nproc_per_node={local_world_size}" if "RANK" in os.environ else "python"
        found = {
            "command": f"{launcher} train.py {shlex.join(sys.argv[1:])}",
            "device": f"{world_size} x {self.device_name}",
            "versions": self.versions,
            "steps": len(self.step_seconds),
            "peak_gib": peak_gib,
            "val_loss": val_loss,
            "curve": self.curve,
            **more,
        }
        if self.step_seconds:  # none where a run went on only to evaluate
            after_first = sorted(self.step_seconds[1:] or self.step_seconds)  # the first one compiles
            seconds = after_first[len(after_first) // 2]  # the median step
            tok_per_s = self.tokens_per_step / seconds
            found |= {"train_seconds": sum(self.step_seconds), "ms_per_step": seconds * 1000}
            found |= {"tok_per_s": tok_per_s, "mfu": self.mfu(tok_per_s)}
            print0(
                f"{found['steps']:,} steps in {found['train_seconds'] / 60:.1f} minutes; the median step "
                f"{seconds * 1000:.1f} ms, {tok_per_s:,.0f} tok/s, mfu {percent(found['mfu'])}; peak {peak_gib:.1f} GiB"
            )
        if all_of_val and "gzip_bits_per_byte" in all_of_val.meta:  # the model has read all that gzip and xz read
            meta = all_of_val.meta
            found["bits_per_byte"] = val_loss / math.log(2) * len(all_of_val) / meta["val_bytes"]
            found |= {name: meta[name] for name in ("gzip_bits_per_byte", "xz_bits_per_byte")}
            print0(
                f"validation: {found['bits_per_byte']:.3f} bits per byte; gzip -9 needs "
                f"{meta['gzip_bits_per_byte']:.3f}, xz -9 {meta['xz_bits_per_byte']:.3f} "
                f"for the same {meta['val_bytes']:,} bytes"
            )
        path = self.out_dir / "summary.json"
        try:
            path.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            print0(f"{path}: {error.strerror}")

    def close(self) -> None:
        if self.file:
            with contextlib.suppress(OSError):  # what a full disk did not take: record has said so
                self.file.close()
        if self.wandb:
            self._tell_wandb(self.wandb.finish)
