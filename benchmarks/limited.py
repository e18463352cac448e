"""A program held to a part of the card, as if the card were smaller.

    python -m benchmarks.limited 24 train.py config/llama32_1b.py --batch_size=8
    torchrun --standalone --nproc_per_node=4 -m benchmarks.limited 24 train.py config/llama31_8b.py

PyTorch's allocator then gives no more than 24 GiB and raises its OutOfMemoryError beyond them. What it reserves counts;
the CUDA context, half a GiB, and NCCL's buffers do not.
"""

import os
import runpy
import sys

import torch


def main(gib: float, *words: str) -> None:
    """SystemExit where the card is smaller: what fits there says nothing of so many GiB."""
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gib > total:
        sys.exit(f"--memory_limit_gib={gib:g}: the card has {total:.1f} GiB, name less")
    torch.cuda.set_per_process_memory_fraction(gib / total, device)
    run_here(*words)


def run_here(*words: str) -> None:
    """What python WORDS does, a script or -m and a module, in this process."""
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
