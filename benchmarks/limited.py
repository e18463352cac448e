"""A program held to a part of the card, as if the card were smaller.

    python -m benchmarks.limited 24 train.py config/llama32_1b.py --batch_size=8
    torchrun --standalone --nproc_per_node=4 -m benchmarks.limited 24 train.py config/llama31_8b.py
    python -m benchmarks.limited 24                 whether the card has as much

PyTorch's allocator then gives no more than 24 GiB and raises its OutOfMemoryError beyond them. What it reserves counts;
the CUDA context, half a GiB, and NCCL's buffers do not.
"""

import json
import os
import runpy
import sys

import torch


def hold(gib: float) -> None:
    """SystemExit where the card is smaller: what fits there says nothing of so many GiB."""
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gib > total:
        sys.exit(f"--memory_limit_gib={gib:g}: the card has {total:.1f} GiB, name less")
    torch.cuda.set_per_process_memory_fraction(gib / total, device)


def main(argv: list[str]) -> None:
    hold(float(argv[0]))
    if not argv[1:]:
        print(json.dumps({"limit_gib": float(argv[0])}))
        return
    is_module = argv[1] == "-m"
    sys.argv = argv[1 + is_module :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
