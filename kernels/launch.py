"""What every kernel file here needs before it can launch: Triton or a stand-in, and three small decisions."""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform (macOS, Windows): the references run, and these names only decorate

    class triton:
        @staticmethod
        def jit(kernel):
            return kernel

    class tl:
        constexpr = None

    HAS_TRITON = False
else:
    HAS_TRITON = True

# Set before Python starts: Triton then runs kernels on CPU tensors, in numpy, one program after the other.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernel runs for x (CUDA, or CPU under TRITON_INTERPRET=1) rather than the reference."""
    if x.is_cuda:
        if not HAS_TRITON:
            raise ImportError("CUDA tensors need Triton: pip install triton (on Windows: pip install triton-windows)")
        if x.device.index != torch.cuda.current_device():  # Triton launches there, whatever the tensors say
            raise ValueError(f"x is on {x.device}, the current device is cuda:{torch.cuda.current_device()}")
        return True
    return INTERPRETED and x.device.type == "cpu"


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., C) as (N, C): a view wherever the strides allow one, with its two strides free."""
    return x.reshape(-1, x.shape[-1])


def persistent_programs(n_tiles: int, x: torch.Tensor, per_multiprocessor: int) -> int:
    """How many programs share n_tiles when each loops over its own: enough to fill the card, no more."""
    if not x.is_cuda:
        return min(n_tiles, 4)  # the interpreter is serial: 4 still test that programs share and partial sums add up
    return min(n_tiles, per_multiprocessor * torch.cuda.get_device_properties(x.device).multi_processor_count)


@triton.jit
def to_compute(x):
    """The dtype kernels compute in: fp64 for fp64 (gradcheck needs it), fp32 for everything else."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The same rule on the host, for statistics that a kernel stores."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
