"""Measured memory: what a machine has free, what a run has used. memory.py computes it beforehand.

memory_stats.cpu_available()           # bytes
memory_stats.used_gib("cuda")          # the peak so far
memory_stats.let_segments_grow()       # so that little more than that is reserved
memory_stats.record_history() ... memory_stats.dump(path)     # PyTorch's own record, which https://pytorch.org/memory_viz draws
"""

import contextlib
import math
import os
import resource
import sys
from pathlib import Path

import torch

# The controllers in a line of /proc/self/cgroup -> their folder, the files with the limit and the use, the name of the
# cache in memory.stat.
CGROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cpu_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of CPU memory that are free or can be freed: the least of the machine's and of those of each control group
    (container, job) that this process is in. inf if the system does not say.
    """

    def number(path, name):
        lines = (line.split() for line in path.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    available = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):  # not Linux
        available = 1024 * number(proc / "meminfo", "MemAvailable:")
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        named = "memory" if "memory" in controllers.split(",") else controllers
        if named not in CGROUPS:
            continue
        place, limit, used, cache = CGROUPS[named]
        folder = cgroups / place / group.strip("/")
        while folder.is_relative_to(cgroups / place):  # a limit holds for all groups inside
            with contextlib.suppress(OSError, ValueError, StopIteration):  # no such file, or the limit is 'max'
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                available = min(available, free + number(folder / "memory.stat", cache))
            folder = folder.parent
    return available


def used_gib(device: str) -> float:
    """The peak so far: of PyTorch's allocations on the GPU; on the CPU, of this process."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
    return torch.cuda.max_memory_allocated() / 2**30


def let_segments_grow() -> None:
    """Lets PyTorch's allocator extend its pieces of memory, instead of asking for a new one each time.

    Pieces too small for the next tensor would stay empty. A user's own PYTORCH_ALLOC_CONF is left alone.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def record_history() -> None:
    """Begins to record every allocation and the Python code that asked for it; does nothing without a GPU.

    Records Python frames only, and no frees: 2 us each. Keeps the last 100,000, several KB each when written.
    """
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)


def stop_history() -> None:
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(enabled=None)


def dump(path) -> None:
    """Writes what was recorded since record_history, for https://pytorch.org/memory_viz, which uploads nothing."""
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(path))
