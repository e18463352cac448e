"""How fast an update runs through offload_dir, against plain direct reads and writes of the same sizes.

    python bench.py disk --offload_dir=/mnt/nvme                            the update of Llama 3.2 1B: 15 GB each way
    python bench.py disk --offload_dir=/mnt/nvme -- --optimizer_bits=8      any setting of train.py, after --

update      optimizers/on_disk.py on the CPU, with gradients ready: from its start until everything is on the drive
plain       the same pieces, read and written back by four threads, with nothing in between

Alternating, medians.
"""

import shlex
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from benchmarks import estimate, runner
from benchmarks.settings import read_settings
from configurator import SettingError
from model import Llama
from optimizers.on_disk import OnDisk
from optimizers.state_file import StateFile, open_state_file, page_aligned
from runtime.memory_advice import disk_bytes

# settings
offload_dir = ""  # a folder on the drive
config = "config/llama32_1b.py"  # the model
out = "out/disk.json"  # the record

UPDATES = 5  # timed, after one to warm up
PLAIN_THREADS = 4


def update_seconds(state: OnDisk, grads: list[torch.Tensor]) -> float:
    for parameter, grad in zip(state.parameters.values(), grads, strict=True):
        parameter.grad = grad
    began = time.perf_counter()
    state.apply(torch.ones(()), torch.tensor(1e-4), torch.tensor(1))
    state.finish()
    return time.perf_counter() - began


def plain_seconds(file: StateFile, pieces: list[list[torch.Tensor]]) -> float:
    """Read and write back each piece, tensors whose memory is the file."""
    largest = max(x.nbytes for piece in pieces for x in piece)
    of_thread = threading.local()

    def prepare():
        of_thread.memory = page_aligned(largest).fill_(1)

    def read_and_write(piece):
        for move in (file.read, file.write):
            for x in piece:
                move(x, of_thread.memory)

    with ThreadPoolExecutor(PLAIN_THREADS, initializer=prepare) as pool:
        began = time.perf_counter()
        list(pool.map(read_and_write, pieces))
        return time.perf_counter() - began


def measure(s: SimpleNamespace) -> dict:
    settings = {"offload": "all", "offload_dir": s.offload_dir, "gradient_accumulation_steps": 1}
    config, shape = estimate.resolve(s.config, 1, settings, s.flags)
    file = open_state_file(s.offload_dir, disk_bytes(config, shape))
    model = Llama(config).to(shape.compute_dtype)
    state = OnDisk(model, shape.rule, file=file)
    grads = [torch.full_like(parameter, 1e-3) for parameter in state.parameters.values()]
    sizes = [[len(memory) for memory in piece.pages.values()] for piece in state.pieces]
    n_bytes = 2 * sum(map(sum, sizes))
    other = open_state_file(s.offload_dir, n_bytes // 2)
    pieces = [[other.zeros((size,), torch.uint8) for size in piece] for piece in sizes]
    seconds = {"update": [], "plain": []}
    for _ in range(1 + UPDATES):
        seconds["update"].append(update_seconds(state, grads))
        seconds["plain"].append(plain_seconds(other, pieces))
    # the first time writes new pages of both files
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "n_params": sum(p.numel() for p in model.parameters()), "bytes": n_bytes,
        "update_gb_per_s": n_bytes / medians["update"] / 1e9, "plain_gb_per_s": n_bytes / medians["plain"] / 1e9,
        "plain_threads": PLAIN_THREADS, "ratio": medians["plain"] / medians["update"], "seconds": seconds,
    }  # fmt: skip


def main(argv: list[str]) -> None:
    s = read_settings(globals(), argv, for_train_py=True)
    if not s.offload_dir:
        raise SettingError("--offload_dir= is empty: name a folder on the drive to measure")
    record = runner.start("disk", s, on_cpu=True)
    key = {"offload_dir": s.offload_dir, "config": s.config, "flags": shlex.join(s.flags)}
    record.measure("drives", key, measure, s)
    runner.finish(record)
