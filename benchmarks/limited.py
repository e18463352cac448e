"""Run a program with part of the card's memory, as if the card were smaller.

    python -m benchmarks.limited 24 train.py config/llama32_1b.py --batch_size=8
    torchrun --standalone --nproc_per_node=4 -m benchmarks.limited 24 train.py config/llama31_8b.py

PyTorch's allocator then reserves at most 24 GiB and raises its OutOfMemoryError beyond that. The CUDA context, half a
GiB, and NCCL's buffers do not count.
"""

import os
import runpy
import sys

import torch


def main(gib: float, *words: str) -> None:
    """SystemExit if the card has less: then what fits on it would not answer the question."""
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gib > total:
        sys.exit(f"--memory_limit_gib={gib:g}: the card has {total:.1f} GiB, choose less")
    torch.cuda.set_per_process_memory_fraction(gib / total, device)
    run_here(*words)


def run_here(*words: str) -> None:
    """Do what `python WORDS` does, in this process: run a script, or -m and a module."""
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
