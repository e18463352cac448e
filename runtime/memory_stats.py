"""Measured memory: how much the machine has free, how much the run has used. memory.py estimates it before the run."""

import contextlib
import math
import os
import resource
from pathlib import Path

import torch

from runtime.distributed import all_reduce_max, local_world_size

uncounted_bytes = 0  # GPU memory outside PyTorch's allocator: symmetric memory, added by copy_engines.py


def cpu_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of CPU memory that are free or can be freed; inf if the system does not say.

    The minimum over the machine and each control group (container, job) that this process is in.
    """

    def number(path, name):
        lines = (line.split() for line in path.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    available = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):  # not Linux
        available = 1024 * number(proc / "meminfo", "MemAvailable:")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # no control group, or of version 1
        group = next(line[3:] for line in (proc / "self" / "cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = cgroups / group.strip("/")
        while folder.is_relative_to(cgroups):  # a limit holds for all groups inside
            with contextlib.suppress(OSError, ValueError, StopIteration):  # no such file, or the limit is 'max'
                free = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
                available = min(available, free + number(folder / "memory.stat", "inactive_file"))
            folder = folder.parent
    return available


def missing_cpu_bytes(n_bytes: float) -> float:
    """The bytes that a machine lacks if each of its ranks takes n_bytes, or minus what is left. The largest over all
    machines. Every rank must call it.
    """
    return all_reduce_max([n_bytes * local_world_size - cpu_available()])[0]


def card_gib(device: str) -> float:
    """The GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def used_gib(device: str) -> float:
    """The peak so far: of GPU memory in use, or on a CPU of this process's memory."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (torch.cuda.max_memory_allocated() + uncounted_bytes) / 2**30


def let_segments_grow() -> None:
    """Use expandable segments in PyTorch's allocator: fixed ones too small for the next tensor would stay empty.

    A user's own PYTORCH_ALLOC_CONF takes precedence.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
