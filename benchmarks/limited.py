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


def hold(gib: float) -> None:
    """Leaves a smaller card as it is."""
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def main(argv: list[str]) -> None:
    hold(float(argv[0]))
    is_module = argv[1] == "-m"
    sys.argv = argv[1 + is_module :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
