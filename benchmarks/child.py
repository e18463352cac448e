"""What runner.py starts in a separate process: train.py, or a function of benchmarks/, in so many GiB of GPU memory.

python -m benchmarks.child 24 train.py config/llama32_1b.py            as on a card of 24 GiB; 0: all of the card's
python -m benchmarks.child 0 generate.measure '{"trainer": "hf", "batch": 1, ...}'    prints a line of JSON

Beyond the limit PyTorch's allocator raises its OutOfMemoryError. The CUDA context, half a GiB, and NCCL's buffers do
not count.
"""

import importlib
import json
import os
import runpy
import sys
import traceback

import torch
import torch.distributed as dist


def limit_memory(gib: float) -> None:
    device = int(os.environ.get("LOCAL_RANK", 0))
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(gib / total, device)


def run_train_py(argv: list[str]) -> None:
    sys.argv = ["train.py", *argv]
    runpy.run_path("train.py", run_name="__main__")


def call_function(function: str, arguments: str) -> None:
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


if __name__ == "__main__":
    limit, what, *argv = sys.argv[1:]
    if float(limit):
        limit_memory(float(limit))
    if what == "train.py":
        run_train_py(argv)
    else:
        call_function(what, *argv)
