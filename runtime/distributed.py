"""Several ranks of one run: how they meet, agree, watch each other and part.

torchrun starts one process per GPU and tells each one its rank. A lone process is rank 0 of 1, and for it all of this
does nothing. Ranks wait for each other in every step, so when one dies or hangs the others would wait with it,
silently: NCCL's kernels spin on the GPU. Hence the watch: a thread in each rank that tells the others once a second,
through torchrun's store, how far it is.
"""

import contextlib
import functools
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from runtime import memory_stats

rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
world_size, local_world_size = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


BEAT = 1.0  # seconds between two messages of a rank
MISSES = 3  # after so many in a row the store is taken to have gone
GRACE = 5.0  # seconds that a dead rank's peers have to find out by themselves, and to say more about it


def print0(*args, **kwargs) -> None:
    """Rank 0 speaks for all."""
    if rank == 0:
        # a full disk, a terminal that has gone; a signal's handler that speaks in the middle of another print
        with contextlib.suppress(OSError, RuntimeError):
            try:
                print(*args, flush=True, **kwargs)
            except UnicodeEncodeError:  # a log in ASCII, say, and a folder's name that is not
                print(*(str(arg).encode("ascii", "backslashreplace").decode() for arg in args), flush=True, **kwargs)


def stop(message: str) -> NoReturn:
    """Ends the run with a sentence instead of a stack trace, once for each machine: for what all ranks find alike."""
    if local_rank == 0:
        print(message, file=sys.stderr)
    sys.exit(1)


def patience(timeout: float) -> timedelta:
    """How long a collective waits: longer than the watch, which says why."""
    return timedelta(seconds=min(2 * timeout + 60, 1e9))


def meet(device: str, timeout: float) -> "Watch":
    """Connects the ranks, by NCCL between GPUs and by gloo between CPUs, and starts their watch.

    timeout: a rank that makes no progress for so many seconds gives up and says which rank it has waited for.
    """
    if world_size > 1:
        # without it NCCL would guess, and warn that it does
        bound = {"device_id": torch.device(device)} if device != "cpu" else {}
        # gloo beside NCCL: offloaded gradients are summed on the CPU.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        options = {"rank": rank, "world_size": world_size, "timeout": patience(timeout)}
        store = _store(next(dist.rendezvous("env://"))[0])
        dist.init_process_group(backend, store=store, **options, **bound)
    return Watch(timeout)


def _store(store: dist.Store) -> dist.Store:
    """torchrun's restarts share one store, where PyTorch finds the addresses of processes that have died
    (pytorch/pytorch#135712): so each attempt has names of its own. Several machines do not agree on the number of the
    attempt: for them README.md has another remedy.
    """
    one_machine = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0) if one_machine else 0}", store)


def worker_thread() -> ThreadPoolExecutor:
    """A thread that works beside this one, on the same GPU but on a stream of its own.

    A new thread would begin with the first GPU of the machine, and on the stream that trains: torch's checkpoint writer
    waits for its stream every 10 MB.
    """
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1)
    stream = torch.cuda.Stream()  # set_stream sets the device too
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_stream, initargs=(stream,))


def part(code: int) -> None:
    """Ends together with all other ranks, without the interpreter's own shutdown: gloo's threads sometimes abort it."""
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def maximum(values: list[float], device: str = "cpu") -> list[float]:
    """The largest of each value over all ranks: every rank must ask, and all hear the same."""
    if world_size == 1:
        return values
    values = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def unequal(values: dict) -> list[str]:
    """The names of those values that are not the same on all ranks: every rank must ask, and all hear the same."""
    found = [{name: repr(value) for name, value in values.items()}] * world_size
    if world_size > 1:
        dist.all_gather_object(found, found[0])
    names = dict.fromkeys(name for of_rank in found for name in of_rank)  # in their order
    return [name for name in names if len({of_rank.get(name) for of_rank in found}) > 1]


SAME_COMMAND = "every machine needs the same command line and data, every rank a config that comes out the same"


def must_agree(values: dict, cure: str = SAME_COMMAND) -> None:
    """Ends the run where these values are not the same on all ranks. Every rank must call it."""
    names = unequal(values)
    if names:
        stop(f"the ranks differ in {', '.join(names[:5])}: {cure}")


def last_words(watch: "Watch", out_dir: str, out_of_memory: Callable[[], str]) -> Callable:
    """An excepthook. Out of GPU memory: says which settings would help. Another rank lost: no traceback, for only that
    rank knows why it ended. (NCCL words some failures of its own rank the same way.)
    """
    say = functools.partial(print, file=sys.stderr, flush=True)

    def hook(kind, error, trace):
        if isinstance(error, torch.OutOfMemoryError):
            say(f"rank {rank}, {watch.doing}: {out_of_memory()}")
            path = f"{out_dir}/out_of_memory_rank{rank}.pickle"
            try:
                memory_stats.dump(path)
                say(f"what was in memory: {path}, for https://pytorch.org/memory_viz")
            except (OSError, RuntimeError) as trouble:
                say(f"what was in memory could not be written to {path}: {trouble}")
            os._exit(1)
        lost = re.search(r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Timed out", str(error))
        if world_size > 1 and (lost or isinstance(error, dist.DistBackendError)):
            found = f"rank {rank}, {watch.doing}, lost another rank or its connection"
            say(f"{found}: see that rank's output. Error: {error}")
            os._exit(1)
        sys.__excepthook__(kind, error, trace)

    return hook


class Interruption:
    """Why the run is to end after this step, with a checkpoint: a signal, or data that cannot be read.

    interruption.listen()                 # to SIGINT, SIGTERM, SIGUSR1 and SIGHUP
    interruption.unreadable(error)        # this rank has read bad data
    interruption.here                     # whether this rank has a reason
    interruption.agreed(device)           # the signal's number, BAD_DATA, or 0: the same on all ranks, which all ask
    """

    BAD_DATA = 1000  # no signal has this number, and it outweighs any

    def __init__(self):
        self.signal, self.bad_data = 0, False

    def listen(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # what nohup ignores stays ignored
                signal.signal(number, self._hear)

    def _hear(self, number, frame):
        """After the first signal another Ctrl-C ends the run at once. Another signal does not, for schedulers send
        several (SLURM SIGUSR1, and SIGTERM later); nor does it under torchrun, which passes on the Ctrl-C that the
        terminal has already sent to all.
        """
        if not self.signal:
            again = "" if "RANK" in os.environ else " (Ctrl-C now stops at once, without a checkpoint)"
            print0(f" {signal.Signals(number).name}: stopping after this step{again}")
        elif number == signal.SIGINT and "RANK" not in os.environ:
            os._exit(128 + number)
        self.signal = self.signal or number

    def unreadable(self, error: ValueError):
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        self.bad_data = True

    @property
    def here(self) -> bool:
        return self.bad_data or self.signal > 0

    def agreed(self, device: str) -> int:
        return int(maximum([self.BAD_DATA if self.bad_data else self.signal], device)[0])


class Watch:
    """Knows what this rank is doing, asks what the others do, and ends the run when one of them has died or hangs.

    watch.at("step 12: forward")  # this rank made progress; `timeout` seconds until the next call
    watch.rest("writing")         # from here on it may take its time
    watch.stop()                  # the run is over
    """

    def __init__(self, timeout: float):
        self.timeout, self.deadline = timeout, float("inf")
        self.beats, self.count, self.doing = 0, 0, "starting"  # how often this rank has made progress, and its stage
        self.lost = {}  # when the death of which rank was noticed
        self.over = threading.Event()
        self.launcher = os.getppid()  # torchrun
        if world_size > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # A connection of its own: a store answers one question at a time.
            self.store = _store(dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30)))
            self.store.set(f"process_{rank}", f"{_machine()} {os.getpid()}")
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, doing: str):
        self.count, self.doing, self.deadline = self.count + 1, doing, time.monotonic() + self.timeout

    def rest(self, doing: str):
        self.count, self.doing, self.deadline = self.count + 1, doing, float("inf")

    def stop(self):
        self.over.set()

    def _watch(self):
        processes, misses = None, 0
        while not self.over.wait(BEAT):
            if os.getppid() != self.launcher:  # killed: nobody would stop the ranks any more, or start them anew
                print0("torchrun has gone")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                processes = processes or [self.store.get(f"process_{r}").decode().split() for r in range(world_size)]
                self._look(processes)
                misses = 0
            except dist.DistError:  # a slow answer; or the store has gone with the torchrun that kept it
                misses += 1
                if misses == MISSES:
                    return

    def _look(self, processes):
        self._beat()
        gone = self._first_gone(processes)
        if gone is not None:
            self._leave(f"rank {gone} has ended, last at {self._heard(gone)[2]}: see what it said")
        if time.monotonic() > self.deadline:
            sentence = self._who_hangs()
            if time.monotonic() > self.deadline:  # still: asking has taken a while
                self._leave(sentence)

    def _beat(self):
        self.beats += 1
        self.store.set(f"at_{rank}", f"{self.count} {self.beats} {self.doing}")

    def _heard(self, other: int) -> tuple[int, int, str]:
        """How far another rank was at its last beat: count, beats, doing."""
        key = f"at_{other}"
        said = self.store.get(key).decode() if self.store.check([key]) else "0 0 starting"
        count, beats, doing = said.split(" ", 2)
        return int(count), int(beats), doing

    def _first_gone(self, processes) -> int | None:
        """The rank on this machine that died first, GRACE seconds ago or more."""
        for other, (node, pid) in enumerate(processes):
            if node == _machine() and other not in self.lost and not _alive(int(pid)):
                self.lost[other] = time.monotonic()
        first = min(self.lost, key=self.lost.get, default=None)
        return first if first is not None and time.monotonic() - self.lost[first] > GRACE else None

    def _who_hangs(self) -> str:
        """Which rank this one has waited for: one that is silent, or else the one furthest behind."""
        before = [self._heard(r) for r in range(world_size)]
        for _ in range(5):
            time.sleep(BEAT)
            self._beat()  # they ask too
        after = [self._heard(r) for r in range(world_size)]
        silent = [r for r in range(world_size) if r != rank and before[r][1] == after[r][1]]
        last = silent[0] if silent else min(range(world_size), key=lambda r: after[r][0])
        how = "no longer answers; it was" if silent else "hangs"
        me = f"rank {rank}, {self.doing}, has waited for {self.timeout:g} seconds: " if last != rank else ""
        return f"{me}rank {last} {how} at {after[last][2]}"

    def _leave(self, sentence: str):
        if not self.over.is_set():
            print(sentence, file=sys.stderr, flush=True)
            os._exit(1)


@functools.cache
def _machine() -> str:
    """Where a process's number means the same: the host, since it was started, and the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _alive(pid: int) -> bool:
    """Also false for a zombie, which is a process that has ended and that nobody has asked about yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat")  # without /proc nobody is found dead
    except OSError:
        return False
