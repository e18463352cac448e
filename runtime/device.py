"""The device and dtype of a command: resolve --device=auto and --dtype=auto, reject what the machine lacks."""

from collections.abc import Callable

import torch

from runtime import memory_stats
from runtime.distributed import local_rank, local_world_size, stop


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
    there = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def wait():
        if arrived is not None:
            arrived.synchronize()
        return there.tolist()

    return wait
