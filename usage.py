"""Memory as it is measured: what a machine has free, what a run has used. memory.py computes it beforehand.

usage.cpu_available()           # bytes
usage.used_gib("cuda")          # the peak so far
usage.let_segments_grow()       # so that what is reserved is little more than that
usage.record_history() ... usage.dump(path)     # PyTorch's own record, which https://pytorch.org/memory_viz draws
"""

import contextlib
import math
import os
import resource
import sys
from pathlib import Path

import torch

CGROUPS = {  # the controllers of a line of /proc/self/cgroup -> where they lie, the limit, what is used, what is cache
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cpu_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of CPU memory that are free or can be freed: of the machine, and of each control group that this process
    is in, of a container or a job. inf where nobody says.
    """

    def number(path, name):
        lines = (line.split() for line in path.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    available = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):  # where it is no Linux
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
    """The most that PyTorch had allocated at once on the GPU; on the CPU, that this process had."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
    return torch.cuda.max_memory_allocated() / 2**30


def let_segments_grow() -> None:
    """Has PyTorch's allocator map pages where it needs more, instead of asking for another piece of memory each time.

    Pieces that are too small for what comes next would stay empty. What the user says in PYTORCH_ALLOC_CONF stands.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def record_history() -> None:
    """Begins to note every allocation and what Python code asked for it; without a GPU nothing.

    Python frames alone, of allocations alone, 2 us each; a ring of the last 100,000, of several KB each when written.
    """
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)


def stop_history() -> None:
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(enabled=None)


def dump(path) -> None:
    """Writes what was noted since record_history: https://pytorch.org/memory_viz shows it, in the browser alone."""
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(path))
