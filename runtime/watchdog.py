"""A thread that ends the run when another rank has died or hangs, and says which.

The ranks wait for each other in every step. If one dies or hangs, the others would wait silently while NCCL's kernels
spin on the GPU. So a thread of each rank writes its progress to torchrun's store once a second and reads the others'.
"""

import functools
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from runtime.distributed import attempt_store, local_rank, on_all_ranks, rank, say, world_size

BEAT = 1.0  # seconds between two messages of a rank
MISSES = 3  # consecutive store errors after which the store counts as gone
GRACE = 5.0  # seconds to let others report first: a dead rank's peers, whose error says more, or local rank 0


class Watchdog:
    """watchdog = Watchdog(timeout)              # after init_distributed; starts the timeout
    watchdog.progress("step 12: forward")     # restarts the timeout
    watchdog.pause("step 12: saving")         # no timeout until the next progress()
    watchdog.stop()                           # the run is over
    """

    def __init__(self, timeout: float):
        self.timeout, self.beats, self.count = timeout, 0, 0  # count: how often this rank has made progress
        self.progress("starting")
        self.lost = {}  # rank -> when its death was noticed
        self.over = threading.Event()
        self.launcher = os.getppid()  # torchrun
        if world_size > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # A connection of its own: a store answers one request at a time.
            self.store = attempt_store(dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30)))
            self.store.set(f"process_{rank}", f"{_machine()} {os.getpid()}")
            threading.Thread(target=self._watch, daemon=True).start()

    def progress(self, doing: str) -> None:
        self.count, self.doing, self.deadline = self.count + 1, doing, time.monotonic() + self.timeout

    def pause(self, doing: str) -> None:
        self.count, self.doing, self.deadline = self.count + 1, doing, float("inf")

    def on_all_ranks(self, doing: str, function: Callable[[], Any]) -> Any:
        """distributed.on_all_ranks(function). If a rank hangs in it, that rank is named, not one that waits for it."""

        def finish():
            value = function()
            self.progress(f"{doing}: waiting for the other ranks")
            return value

        self.progress(doing)
        return on_all_ranks(finish)

    def stop(self) -> None:
        self.over.set()

    def _watch(self):
        processes, misses = None, 0
        while not self.over.wait(BEAT):
            if os.getppid() != self.launcher:  # nobody is left to stop or restart the ranks
                if local_rank == 0 or not self.over.wait(GRACE):  # one rank is enough to stop all
                    say(f"rank {rank}: torchrun has gone")
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                processes = processes or [self.store.get(f"process_{r}").decode().split() for r in range(world_size)]
                self._look(processes)
                misses = 0
            except dist.DistError:  # a slow answer, or the store died with its torchrun
                misses += 1
                if misses == MISSES:
                    return

    def _look(self, processes):
        self._beat()
        dead = self._first_dead(processes)
        if dead is not None:
            self._end(f"rank {dead} has ended, last at {self._status(dead)[2]}: see its output")
        if time.monotonic() > self.deadline:
            sentence = self._who_hangs()
            if time.monotonic() > self.deadline:  # check again: _who_hangs takes five seconds
                self._end(sentence)

    def _beat(self):
        self.beats += 1
        self.store.set(f"at_{rank}", f"{self.count} {self.beats} {self.doing}")

    def _status(self, other: int) -> tuple[int, int, str]:
        """Another rank's count, beats and doing, as of its last beat."""
        key = f"at_{other}"
        status = self.store.get(key).decode() if self.store.check([key]) else "0 0 starting"
        count, beats, doing = status.split(" ", 2)
        return int(count), int(beats), doing

    def _first_dead(self, processes) -> int | None:
        """The rank on this machine that died first, GRACE seconds ago or more."""
        for other, (machine, pid) in enumerate(processes):
            if machine == _machine() and other not in self.lost and not _alive(int(pid)):
                self.lost[other] = time.monotonic()
        first = min(self.lost, key=self.lost.get, default=None)
        return first if first is not None and time.monotonic() - self.lost[first] > GRACE else None

    def _who_hangs(self) -> str:
        """Names the rank that this one waits for: one that sends no beats, else the one furthest behind."""
        before = [self._status(r) for r in range(world_size)]
        for _ in range(5):
            time.sleep(BEAT)
            self._beat()  # the others may be asking too
        after = [self._status(r) for r in range(world_size)]
        silent = [r for r in range(world_size) if before[r][1] == after[r][1]]
        last = silent[0] if silent else min(range(world_size), key=lambda r: after[r][0])
        how = "no longer answers; it was" if silent else "hangs"
        me = f"rank {rank}, {self.doing}, has waited for {self.timeout:g} seconds: " if last != rank else ""
        return f"{me}rank {last} {how} at {after[last][2]}"

    def _end(self, sentence: str):
        if not self.over.is_set():
            say(sentence, file=sys.stderr)
            os._exit(1)


@functools.cache
def _machine() -> str:
    """Identifies where a process id is valid: the host, its boot, and the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _alive(pid: int) -> bool:
    """False also for a zombie: a process that has ended but whose parent has not waited for it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat")  # without /proc, assume it is alive
    except OSError:
        return False
