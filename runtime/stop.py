"""How a run ends early: after a signal it saves; after an error it says where it was.

A rank that cannot go on says why and exits. torchrun then ends the other ranks of its machine. Ranks elsewhere, or
ranks that wait for one that hangs, give up when a collective has waited for `timeout` seconds: see init_distributed.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from runtime import checkpoint
from runtime.distributed import all_reduce_max, leave, print0, rank, say, stop, world_size
from runtime.save import Saver

LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited|[Tt]imed out")  # gloo's words
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal to this process when its parent dies


class Signals:
    """signals = Signals()          # until listen(), Ctrl-C ends the run at once: there is nothing to save
    signals.listen()             # SIGINT, SIGTERM, SIGUSR1 and SIGHUP are noted from now on
    signals.received_anywhere()  # True if any rank has got one; every rank must call it
    signals.exit_code            # 128 + the signal; 0 without one
    """

    def __init__(self):
        self.number = 0  # the first signal that this rank got or heard of
        self._handle(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

    def _handle(self, number: int, handler: Callable):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells' background jobs ignore some: keep that
            signal.signal(number, handler)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self._handle(number, self._on_signal)
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            # If torchrun is killed, nobody is left to stop the ranks: they save and end, as after a signal.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _on_signal(self, number, frame):
        # A second Ctrl-C ends the run at once, but no other signal does: schedulers send several (SLURM SIGUSR1, then
        # SIGTERM). Nor does a second Ctrl-C under torchrun: ranks get each from the terminal and again from torchrun.
        if not self.number:
            again = "" if "RANK" in os.environ else " (Ctrl-C now stops at once, without a checkpoint)"
            print0(f" {signal.Signals(number).name}: stopping after this step{again}")
            self.number = number
        elif number == signal.SIGINT and "RANK" not in os.environ:
            os._exit(128 + number)

    def received_anywhere(self) -> bool:
        (number,) = all_reduce_max([self.number])  # over gloo: does not wait for the GPU
        if number and not self.number:
            print0(f"another rank got {signal.Signals(number).name}: stopping after this step")
        if number:  # else a signal may have come meanwhile
            self.number = int(number)
        return number > 0

    @property
    def exit_code(self) -> int:
        return 128 + self.number if self.number else 0


@contextlib.contextmanager
def bad_data_ends_this_rank():
    """An OSError or ValueError inside ends this rank with its message, and so the run."""
    try:
        yield
    except (OSError, ValueError) as error:
        say(f"rank {rank}: {error}", file=sys.stderr)
        leave(1)


def on_not_finite(optimizer, saver: Saver, step: int, loss: float, grad_norm: float) -> None:
    """End a run whose mean loss or gradient norm since the last log line is not finite.

    A float16 run goes on if only its norm overflowed, and its loss scale has not fallen below 1.
    """
    loss_scale = optimizer.loss_scale.scale.item() if optimizer.loss_scale else 0.0
    if math.isfinite(loss) and loss_scale >= 1:
        scale = f"loss scale now {loss_scale:g}"
        print0(f"step {step:05d} | float16 overflowed since the last line: such a step updates no weight; {scale}")
        return
    saver.report(step, wait=True)
    newest = checkpoint.newest(saver.out_dir)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # other ranks may wait in collectives that this rank has queued
    clip = "a lower grad_clip" if optimizer.grad_clip else "--grad_clip=1"
    stop(
        f"step {step}: the mean loss since the last line is {loss:.4f}, the gradient norm {grad_norm:.2f}. A step that "
        f"is not finite updates no weight. Try a lower learning_rate, a longer warmup_iters or {clip}, "
        + (f"from {newest} with --init_from=resume" if newest else "from the start: no checkpoint was saved yet")
    )


def make_excepthook(where: Callable[[], str], out_of_memory: Callable[[], str]) -> Callable:
    """Make an excepthook. Out of GPU memory: it prints out_of_memory(), which names settings that would help. Another
    rank lost: no traceback, because only that rank knows why it ended. (NCCL words some errors of this rank the same
    way, so the error itself is printed.) where: the step and phase, for messages.
    """

    def hook(kind, error, trace):
        if isinstance(error, torch.OutOfMemoryError):
            say(f"rank {rank}, {where()}: {out_of_memory()}", file=sys.stderr)
            os._exit(1)
        if world_size > 1 and (LOST.search(str(error)) or isinstance(error, dist.DistError)):
            sentence = f"rank {rank}, {where()}, lost another rank or its connection: see that rank's output."
            say(f"{sentence} Error: {error}", file=sys.stderr)
            os._exit(1)
        sys.__excepthook__(kind, error, trace)

    return hook
