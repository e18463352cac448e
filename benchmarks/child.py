"""What runner.py starts in a separate process.

python -m benchmarks.child call generate.measure '{"trainer": "hf", "batch": 1, ...}'    prints a line of JSON
python -m benchmarks.child within 24 train.py config/llama32_1b.py    as on a card of 24 GiB: PyTorch's allocator
    raises its OutOfMemoryError beyond that. The CUDA context, half a GiB, and NCCL's buffers do not count.
"""

import importlib
import json
import os
import runpy
import sys
import traceback

import torch
import torch.distributed as dist


def call(function: str, arguments: str) -> None:
    module, _, name = function.partition(".")
    try:
        result = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**json.loads(arguments))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once, so that torchrun ends the other ranks: an orderly exit might wait for them
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def within(gib: str, *argv: str) -> None:
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if float(gib) > total:  # then what fits on it would not answer the question
        sys.exit(f"--memory_limit_gib={gib}: the card has {total:.1f} GiB, choose less")
    torch.cuda.set_per_process_memory_fraction(float(gib) / total, device)
    run_here(*argv)


def run_here(*argv: str) -> None:
    """Do what `python ARGV` does, in this process: run a script, or -m and a module."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    {"call": call, "within": within}[sys.argv[1]](*sys.argv[2:])
