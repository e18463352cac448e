"""What every kernel file here needs before it can launch: Triton or a stand-in, and three small decisions."""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform (macOS): the references run, and these names only decorate

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
            raise ImportError("CUDA tensors need Triton: pip install triton")
        if x.device.index != torch.cuda.current_device():  # Triton launches there, whatever the tensors say
            raise ValueError(
                f"x is on {x.device}, the current device is cuda:{torch.cuda.current_device()}: "
                f"call torch.cuda.set_device({x.device.index}) first"
            )
        return True
    return INTERPRETED and x.device.type == "cpu"


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., C) as (N, C): a view wherever the strides allow one, with its two strides free."""
    return x.reshape(-1, x.shape[-1])


def whole_row(n_cols: int) -> dict:
    """Launch constants of a program that holds one row of n_cols in registers. ValueError where it would not fit."""
    if not 1 <= n_cols <= 65536:
        raise ValueError(f"rows of {n_cols} elements: 1 to 65,536 are supported")
    block = triton.next_power_of_2(n_cols)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def row_tiles(n_rows: int, n_cols: int, x: torch.Tensor) -> tuple[int, dict]:
    """How many programs share tiles of whole rows, each looping over its own, and their launch constants.

    Tiles of 4,096 elements give narrow rows enough loads in flight; two programs a multiprocessor fill the card.
    """
    block = triton.next_power_of_2(n_cols)
    rows = max(1, 4096 // block)
    # The interpreter is serial: 4 programs still show that they share the rows and that partial sums add up.
    programs = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    constants = {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 512, 4), 16)}
    return min(triton.cdiv(n_rows, rows), programs), constants


def refuse_double_backward() -> None:
    """Every backward calls it first: under create_graph=True autograd would take a kernel's results for constants."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the kernels have no second derivative (create_graph=True): use kernels.reference")


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
