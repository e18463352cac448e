"""How a run ends early: with a checkpoint after a signal or a data error, with a message after an exception."""

import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from runtime import memory_stats, run_folder
from runtime.checkpoint import Saver
from runtime.distributed import all_reduce_max, print0, rank, say, stop, world_size
from runtime.watchdog import Watchdog


class ShutdownHandler:
    """Catches signals and data errors of this rank, after which the run saves and ends.

    shutdown = ShutdownHandler()          # until listen(), Ctrl-C ends the run at once: there is nothing to save
    shutdown.listen()                     # SIGINT, SIGTERM, SIGUSR1 and SIGHUP now set `requested`
    with shutdown.on_data_error(): ...    # a ValueError inside sets it too: this rank cannot read its data
    shutdown.requested                    # true after either, on this rank alone
    shutdown.requested_anywhere(device)   # true if so on any rank, which then prints why; every rank must call it
    shutdown.exit_code                    # this rank's: 1 after a data error, else 128 + signal, else 0
    """

    def __init__(self):
        self.signal, self.has_data_error = 0, False
        self.untold = ""  # the reason, if rank 0 may not know it
        self._handle(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

    def _handle(self, number: int, handler: Callable):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells' background jobs ignore some: keep that
            signal.signal(number, handler)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self._handle(number, self._on_signal)

    def _on_signal(self, number, frame):
        # A second Ctrl-C ends the run at once, but no other signal does: schedulers send several (SLURM SIGUSR1, then
        # SIGTERM). Nor does a second Ctrl-C under torchrun: ranks get each from the terminal and again from torchrun.
        if not self.signal:
            again = "" if "RANK" in os.environ else " (Ctrl-C now stops at once, without a checkpoint)"
            reason = f"{signal.Signals(number).name}: stopping after this step{again}"
            print0(f" {reason}")
            self.untold = f"rank {rank}: {reason}" if rank else ""  # print it later: torchrun signals all ranks
        elif number == signal.SIGINT and "RANK" not in os.environ:
            os._exit(128 + number)
        self.signal = self.signal or number

    @contextlib.contextmanager
    def on_data_error(self):
        try:
            yield
        except ValueError as error:
            say(f"rank {rank}: {error}", file=sys.stderr)
            self.has_data_error = True

    @property
    def requested(self) -> bool:
        return self.has_data_error or self.signal > 0

    def requested_anywhere(self, device: str) -> bool:
        mine = float(world_size - rank) if self.requested else 0.0
        (largest,) = all_reduce_max([mine], device)  # from the lowest rank that knows why
        if self.untold and mine == largest:
            say(self.untold)
            self.untold = ""
        return largest > 0

    @property
    def exit_code(self) -> int:
        return 1 if self.has_data_error else 128 + self.signal if self.signal else 0


def on_not_finite(step: int, loss: float, grad_norm: float, loss_scale: float, saver: Saver) -> None:
    """End a run whose loss or norm is not finite. Go on if the loss is finite and loss_scale (0: not float16) >= 1."""
    if math.isfinite(loss) and loss_scale >= 1:
        print0(f"step {step:05d} | float16 overflowed: weights not updated, loss scale now {loss_scale:g}")
        return
    saver.finish(step)
    newest = run_folder.newest(saver.out_dir)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # other ranks may wait in collectives that this rank has queued
    clip = "a lower grad_clip" if saver.optimizer.grad_clip else "--grad_clip=1"
    stop(
        f"step {step}: the loss is {loss:.4f} and the gradient norm {grad_norm:.2f}, so the weights were not updated. "
        f"Try a lower learning_rate, a longer warmup_iters or {clip}, "
        + (f"from {newest} with --init_from=resume" if newest else "from the start: no checkpoint was saved yet")
    )


def make_excepthook(watchdog: Watchdog, out_dir: str, out_of_memory: Callable[[], str]) -> Callable:
    """Make an excepthook. Out of GPU memory: it prints out_of_memory(), which names settings that would help, and dumps
    what was in memory. Another rank lost: no traceback, because only that rank knows why it ended. (NCCL words some
    errors of this rank the same way, so the error itself is printed.)
    """

    def hook(kind, error, trace):
        if isinstance(error, torch.OutOfMemoryError):
            say(f"rank {rank}, {watchdog.doing}: {out_of_memory()}", file=sys.stderr)
            path = f"{out_dir}/out_of_memory_rank{rank}.pickle"
            try:
                memory_stats.dump(path)
                say(f"what was in memory: {path}, for https://pytorch.org/memory_viz", file=sys.stderr)
            except (OSError, RuntimeError) as failed:
                say(f"what was in memory could not be written to {path}: {failed}", file=sys.stderr)
            os._exit(1)
        lost = re.search(r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Timed out", str(error))
        if world_size > 1 and (lost or isinstance(error, dist.DistBackendError)):
            lost_one = f"rank {rank}, {watchdog.doing}, lost another rank or its connection: see that rank's output."
            say(f"{lost_one} Error: {error}", file=sys.stderr)
            os._exit(1)
        sys.__excepthook__(kind, error, trace)

    return hook
