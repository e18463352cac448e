"""The ranks of a run: their numbers, how they connect, compare values and end together.

torchrun starts one process per GPU and tells each its rank. Without torchrun the process is rank 0 of 1, and the
collectives below return at once.
"""

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))
local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # of this machine, by torchrun --max-restarts


def say(*args, **kwargs) -> None:
    """Print. A failure to print does not end the run."""
    # OSError: a full disk, a closed terminal. RuntimeError: a signal handler prints in the middle of another print.
    # UnicodeEncodeError: an ASCII log, and a folder with another name.
    with contextlib.suppress(OSError, RuntimeError, UnicodeEncodeError):
        print(*args, flush=True, **kwargs)


def print0(*args, **kwargs) -> None:
    if rank == 0:
        say(*args, **kwargs)


def progress(items: Sequence, what: str) -> Iterator:
    """Yield the items. Every ten seconds rank 0 says on stderr how many are done."""
    last_shown = time.monotonic()
    for i, item in enumerate(items):
        now = time.monotonic()
        if rank == 0 and now - last_shown > 10:
            say(f"{what}: {i:,} of {len(items):,}", file=sys.stderr)
            last_shown = now
        yield item


def leave(code: int) -> NoReturn:
    """Exit. With several ranks, skip the interpreter's shutdown, in which gloo's threads sometimes abort."""
    if world_size > 1:
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: closed before the start, as by >&-
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def stop(message: str) -> NoReturn:
    """End the run with a message instead of a stack trace. For errors that all ranks find: printed once per machine."""
    if local_rank == 0:
        say(message, file=sys.stderr)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # restore the default, so that SIGTERM ends the sleep
        time.sleep(10)  # torchrun kills the other ranks when the first one exits: local rank 0 must print before that
    leave(1)


@contextlib.contextmanager
def stop_on_error():
    """End the run with the message of an OSError or ValueError instead of a stack trace."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):  # as on_all_ranks raises it
            raise error.__cause__ from None  # make_excepthook() then suggests settings
        stop(str(error))


def end_together(code: int) -> None:
    """Exit together with all other ranks, with the highest of their codes."""
    code = int(all_reduce_max([code])[0])  # a signal may have come to one rank since they last asked each other
    if world_size > 1:
        dist.destroy_process_group()
    if code > 128 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun would take this end after a signal for a failure, and restart
    if code or world_size > 1:
        leave(code)


def init_distributed(device: str, timeout: float) -> None:
    """Connect the ranks: NCCL between GPUs, gloo between CPUs.

    timeout: seconds that a rank waits in a collective for the others, in any phase of the run; then it gives up.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        stop("srun started several processes that know nothing of each other: start torchrun, as config/slurm.sh does")
    if world_size > 1:
        limit = timedelta(seconds=timeout)
        bound = {"device_id": torch.device(device)} if device != "cpu" else {}  # else NCCL guesses it, with a warning
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # gloo for offloaded gradients and objects
        with connecting(timeout):
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))
            store = store_of_attempt(store, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, **bound)


@contextlib.contextmanager
def connecting(timeout: float):
    """End this rank, with a sentence, if what connects the ranks fails inside or takes longer than timeout.

    They connect through a store on the first machine. If that froze or lost power, a request would wait for ever,
    whatever its own timeout: so a thread watches.
    """

    def give_up(error):
        say(f"rank {rank} cannot connect to the others: see their output. Error: {error}", file=sys.stderr)
        leave(1)

    watch = threading.Timer(timeout + 10, give_up, ["the first machine does not answer"])
    watch.daemon = True
    watch.start()
    try:
        yield
    except RuntimeError as error:  # the store's, gloo's or NCCL's
        give_up(_reason(error))
    finally:
        watch.cancel()


def store_of_attempt(store: dist.Store, timeout: float) -> dist.Store:
    """A view of the store that the ranks of this attempt share, and no others.

    The restarts of torchrun --max-restarts share one store, in which PyTorch would find the addresses of processes that
    have died (pytorch/pytorch#135712), and machines may count different numbers of restarts. So each rank writes a new
    name of its own, and rank 0 answers every name with that of the attempt, until all of its ranks have answered back.
    What dead processes have written stays without an answer.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"name of rank {rank}", name)
        attempt = store.get(f"attempt of {name}").decode()  # waits
        store.set(f"{attempt} has rank {rank}", "")
        return dist.PrefixStore(attempt, store)
    end = time.monotonic() + timeout
    for other in range(1, world_size):
        while not store.check([f"{name} has rank {other}"]):
            if store.check([f"name of rank {other}"]):
                other_name = store.get(f"name of rank {other}").decode()
                store.set(f"attempt of {other_name}", name)
            if time.monotonic() > end:
                stop(f"rank 0 has waited {timeout:g} s for rank {other}, which has not started")
            time.sleep(0.01)
    return dist.PrefixStore(name, store)


def device_mesh(device: str, hybrid: bool, timeout: float) -> DeviceMesh:
    """The ranks for FSDP: one dimension "shard"; hybrid: "replicate" between machines, "shard" within each.

    Made of groups, since a mesh that makes its own gives them PyTorch's timeout.
    """
    device_type = "cpu" if device == "cpu" else "cuda"
    if not hybrid:
        return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=("shard",))
    ranks = torch.arange(world_size).view(-1, local_world_size)  # a row per machine
    limit = timedelta(seconds=timeout)
    with connecting(timeout):
        shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
        replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=limit)
    return DeviceMesh.from_group([replicate, shard], device_type, ranks, mesh_dim_names=("replicate", "shard"))


def new_group(timeout: float) -> dist.ProcessGroup | None:
    """Another group of all ranks: a thread's collectives must not mix with the main thread's."""
    if world_size == 1:
        return None
    with connecting(timeout):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of x."""
    return x.to_local() if isinstance(x, DTensor) else x


def shard_like(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor sharded like `like`, whose part on this rank is `part`, on any device.

    DTensor.from_local() would move the part to the mesh's device.
    """
    return DTensor(part, like._spec, requires_grad=False) if isinstance(like, DTensor) else part


def worker_thread() -> ThreadPoolExecutor:
    """A thread that works on the same GPU as this one, on a separate stream.

    A new thread would start on GPU 0 and on the training's stream, where its copies would wait for the training's
    kernels.
    """
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(1)
    stream = torch.cuda.Stream()  # set_stream sets the device too
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_stream, initargs=(stream,))


# ----------------------------------------------------------------------------------------------------------------------
# Between the ranks: every rank must call these


def all_reduce_max(values: list[float]) -> list[float]:
    """The largest of each value over all ranks."""
    if world_size == 1:
        return values
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def all_reduce_sum(x: torch.Tensor) -> None:
    """Sum x over all ranks, in place."""
    if world_size > 1:
        dist.all_reduce(x)


def on_all_ranks(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Call function() on every rank. If it fails on one, all ranks raise, so that no rank waits for another.

    They raise the message of the first rank that failed, as the same class if it is a ValueError, else as OSError.
    """
    value = None
    failure = None
    try:
        value = function()
    except Exception as error:
        failure = error
        if not isinstance(error, (OSError, ValueError, RuntimeError, MemoryError)):
            traceback.print_exc()  # a bug, for which the message alone is too little
    kind = ValueError if isinstance(failure, ValueError) else OSError
    if type(failure).__init__ is ValueError.__init__:  # it takes one message, unlike UnicodeDecodeError
        kind = type(failure)
    failures = from_all_ranks((kind, _reason(failure)) if failure else None, group)
    for other, failed in enumerate(failures):
        if failed:
            kind, reason = failed
            raise kind(reason if len(failures) == 1 else f"rank {other}: {reason}") from failure
    return value


def _reason(error) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def from_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Call function() on rank 0 and return its result on every rank."""
    values = [on_all_ranks(lambda: function() if group_rank(group) == 0 else None, group)]
    if dist.is_initialized():
        dist.broadcast_object_list(values, group=group, group_src=0, device=torch.device("cpu"))
    return values[0]


def from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """The value of each rank, on every rank."""
    values = [value] * group_size(group)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group)
    return values


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def group_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


SAME_COMMAND = "give every machine the same code, command line and data, and a config that computes the same values"


def require_same_on_all_ranks(values: dict, fix: str = SAME_COMMAND) -> None:
    """End the run if these values are not the same on all ranks."""
    by_rank = from_all_ranks({name: repr(value) for name, value in values.items()})
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)  # a dict keeps their order
    differing = [name for name in names if len({of_rank.get(name) for of_rank in by_rank}) > 1]
    if differing:
        stop(f"the ranks differ in {', '.join(differing[:5])}: {fix}")


def code_of_this_rank() -> dict[str, str]:
    """PyTorch's version, and the SHA-256 of each file of nanocria that this rank has imported, by its path."""
    root = Path(__file__).resolve().parents[1]
    files = (Path(module.__file__ or "") for module in list(sys.modules.values()) if hasattr(module, "__file__"))
    own = {file for file in files if file.is_relative_to(root) and "site-packages" not in file.parts}
    digests = {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(own)}
    return {"PyTorch's version": torch.__version__} | digests
