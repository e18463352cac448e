"""The device: choose it and the dtype, copy to and from it, replay CUDA graphs on it, profile it."""

import re
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from runtime import memory_stats
from runtime.distributed import local_rank, local_world_size, print0, rank, stop

PEAK_FLOPS = {  # dense bf16 with fp32 accumulation, from the datasheets; the first matching name counts
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """FLOPs per second of the card in bfloat16 and float16; None for a card that is not listed."""
    other = r"(?! (Laptop|Ti|D)\b|.*\bMIG\b)"  # not variants with more or fewer cores, nor MIG slices
    peaks = (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b{other}", device_name))
    return next(peaks, None)


def pick_device(device: str) -> str:
    """Return 'cpu' or 'cuda:<local rank>', and make it the current device. device: 'auto', 'cuda' or 'cpu'."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        stop("--device=cuda, but torch finds no CUDA device: use --device=cpu, or install a torch for your driver")
    n_gpus = torch.cuda.device_count()
    if local_world_size > n_gpus:
        stop(f"{local_world_size} ranks on this machine need a GPU each, but torch finds {n_gpus} CUDA devices")
    torch.cuda.set_device(local_rank)
    memory_stats.let_segments_grow()
    return f"cuda:{local_rank}"


def pick_dtype(dtype: str, device: str) -> str:
    """Return dtype, or for 'auto': float32 on a CPU, bfloat16 on a GPU, float16 on a GPU older than Ampere."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def send_to_device(values: torch.Tensor, device: str) -> torch.Tensor:
    """Copy CPU values to the device. The CPU does not wait for the copy."""
    return values if device == "cpu" else values.pin_memory().to(device, non_blocking=True)


def send_to_cpu(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start a copy; return a function that waits for it and returns the values as a list."""
    copy = values.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def wait():
        if copied is not None:
            copied.synchronize()
        return copy.tolist()

    return wait


class CUDAGraph:
    """A function of tensors whose kernel launches are recorded once and replayed together.

    A small model's step is hundreds of kernels of a few microseconds each: launching them takes the CPU longer than
    running them takes the GPU. The first call runs the function, which compiles the kernels and allocates what it
    keeps. The second records its kernels, later calls replay them. From the second on the function must launch the same
    kernels on every call and must not wait for the GPU.
    """

    recorded = weakref.WeakSet()  # a new graph shares the memory pool of those still alive

    def __init__(self, function: Callable):
        self.function = function
        self.graph = None
        self.has_run = False

    def __call__(self, *inputs: torch.Tensor):
        if not self.has_run:
            self.has_run = True
            return self.function(*inputs)
        if self.graph is None:
            self._record(inputs)
        for recorded, new in zip(self.inputs, inputs, strict=True):
            recorded.copy_(new)
        self.graph.replay()
        return self.output

    def _record(self, inputs):
        pool = next((other.graph.pool() for other in CUDAGraph.recorded), None)
        self.inputs = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the saving thread may call CUDA meanwhile
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.output = self.function(*self.inputs)
        CUDAGraph.recorded.add(self)


def start_profiler(out_dir: Path) -> torch.profiler.profile:
    """Trace three steps, and on a GPU record the allocations of the first ten, to out_dir/profile. Call step() after
    each step, stop() at the end of the run.
    """
    folder = out_dir / "profile"
    on_gpu = torch.cuda.is_initialized()

    def write(trace: torch.profiler.profile) -> None:
        torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}")(trace)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        print0(
            f"the profile is in {folder}: *.json for https://ui.perfetto.dev or TensorBoard, *.pickle, what was in GPU "
            "memory, for https://pytorch.org/memory_viz"
        )

    if on_gpu:  # Python's frames, no frees: 2 us each; several KB each when written
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
    schedule = torch.profiler.schedule(wait=5, warmup=2, active=3, repeat=1)  # wait: to compile and allocate
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profiler.start()
    return profiler
