"""Call a function of benchmarks/ and print its result as a line of JSON, which runner.call() reads.

python -m benchmarks.call generate.measure '{"arm": "hf", "config": "config/llama32_1b.py", "batch": 1, ...}'
"""

import importlib
import json
import os
import sys
import traceback

import torch.distributed as dist


def main(function: str, arguments: str) -> None:
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
    main(*sys.argv[1:])
