"""Shared by the kernels: Triton or a stand-in, rows and dtypes, launch constants, sums, what autograd must not do."""

import os

import torch

# Fuse a * b + c into one instruction, rounded once: on by default up to Triton 3.9, which warns; off from 3.10.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform (macOS): the references run, and these only decorate

    class triton:
        @staticmethod
        def jit(kernel):
            return kernel

    class tl:
        @staticmethod
        def constexpr(value):
            return value

    HAS_TRITON = False
else:
    HAS_TRITON = True

# If set before Triton is imported, it runs kernels on CPU tensors, in numpy, one program after another.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: torch.Tensor) -> bool:
    """True if the Triton kernel runs for x (CUDA, or CPU under TRITON_INTERPRET=1), False if the reference does."""
    if x.is_cuda:
        # Triton launches on the current device, not on x's.
        assert x.device.index == torch.cuda.current_device(), f"call torch.cuda.set_device({x.device.index}) first"
        return True
    return INTERPRETED and x.device.type == "cpu"


def refuse_autocast(x: torch.Tensor) -> None:
    """Raises ValueError under torch.autocast, which would round some of a kernel's matmuls and not others."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):  # meta has no autocast to ask about
        raise ValueError(
            "kernels with a matmul do not run under torch.autocast: cast the model, as in model.to(torch.bfloat16)"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Rows and dtypes


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., C) as (N, C), with any two strides: a view if those of x allow one."""
    return x.reshape(-1, x.shape[-1])


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., C) as (N, C), contiguous, as the kernels read it: a copy only if x is not, like an expanded gradient."""
    return as_rows(x).contiguous()


@triton.jit
def to_compute(x):
    """x in the dtype kernels compute in: fp64 for fp64 (the tests compare in it), fp32 for everything else."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The same rule on the host, for statistics that a kernel stores."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@triton.jit
def magnitude(x):
    """|x| of fp32 as integers that sort like the numbers, NaN last: tl.max of floats would ignore NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# ----------------------------------------------------------------------------------------------------------------------
# Launch constants


def whole_row(n_cols: int) -> dict:
    """Launch constants for a program that holds a whole row of n_cols, 1 to 65,536.

    16 elements per thread up to 8,192 columns: with 32, fewer rows are in flight at once (H200).
    """
    assert 1 <= n_cols <= 65536, n_cols
    block = 1 << (n_cols - 1).bit_length()  # not by Triton's function: this check must also run without Triton
    warps = 32 if block == 65536 else min(max(block // 512, 1), 16)
    return {"BLOCK": block, "num_warps": warps}


A100_SHARED_MEMORY = 163 * 1024  # bytes per program; no kernel takes more on Hopper


def shared_memory(x: torch.Tensor) -> int:
    """Bytes of shared memory per program on x's GPU: 227 KiB on Hopper, 163 on A100, 99 on GeForce, L4 and L40S."""
    if not x.is_cuda:
        return 227 * 1024  # the interpreter has no limit
    return torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin


def row_tiles(n_rows: int, n_cols: int, x: torch.Tensor, long_row_warps: int) -> tuple[int, dict]:
    """For a persistent kernel: the number of programs P, each taking every P-th tile of whole rows, and its constants.

    One program per multiprocessor leaves only 132 partial sums of dw to add up at the end (H200). Tiles of 16 KiB, the
    next two being loaded to shared memory while one is computed, keep enough loads in flight. A longer row is a tile by
    itself, not prefetched, for long_row_warps warps, or 32 above 16,384 columns. Best of 1-4 rows x 4-32 warps x 1-4
    stages x 1-4 programs on H200. A GPU with less shared memory prefetches less: a program that needs more cannot
    launch (tests/test_kernels_compiled.py compiles for such GPUs; none was timed).
    """
    block = triton.next_power_of_2(n_cols)
    # The interpreter is serial: 4 programs are enough to test that rows are shared and partial sums add up.
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    rows = 16384 // (block * x.element_size())
    stages = 3 if shared_memory(x) >= A100_SHARED_MEMORY else 2
    if shared_memory(x) < 96 * 1024:
        stages = 1
    constants = {"ROWS": rows, "BLOCK": block, "STAGES": stages, "num_warps": 8}
    if not rows:
        warps = long_row_warps if block <= 16384 else 32
        constants = {"ROWS": 1, "BLOCK": block, "STAGES": 1, "num_warps": warps}
    return min(triton.cdiv(n_rows, constants["ROWS"]), programs), constants


# ----------------------------------------------------------------------------------------------------------------------
# Sums


@triton.jit
def _sum_rows_kernel(x_ptr, out_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([1, COLS], dtype=x_ptr.dtype.element_ty)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        total += tl.sum(tl.load(x_ptr + rows * n_cols + cols, mask=mask, other=0.0), axis=0)[None, :]
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def sum_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows of x (programs, C), contiguous: the last step of a weight gradient, rounded once to dtype."""
    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    _sum_rows_kernel[(triton.cdiv(x.shape[1], 32),)](x, out, *x.shape, ROWS=128, COLS=32)
    return out


# Opaque: torch.compile does not support addmm with another output dtype.
@torch.library.custom_op("nanocria::accumulate", mutates_args=("total",))
def accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """total (fp32, or fp64 for fp64) = a @ b, plus its previous value unless this is the first of several."""
    beta = 0 if first else 1  # with 0 the uninitialized total is never read
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)  # the tensor cores' fp32 sums
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


# ----------------------------------------------------------------------------------------------------------------------
# What backward may and may not do


def refuse_double_backward() -> None:
    """Called by every backward: under create_graph=True autograd would treat a kernel's results as constants."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the kernels have no second derivative (create_graph=True): import kernels.reference")


def saved_is_ours() -> bool:
    """In a backward: True if it may overwrite what its forward saved, because the graph is not used again.

    False under torch.compile, which plans memory itself.
    """
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()
