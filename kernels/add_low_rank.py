"""Adds a low-rank product in place: the adapters' part of the y and dx that float8 matmuls wrote (fp8_lora_linear.py).

    y ← y + a bᵀ        of all columns of y, or of some of them

torch.addmm does the same, but cuBLAS's kernels are made for long sums, and sums of 16 elements keep no large tile busy.
Here a program is one small tile of y, and many are in flight at once.

Bytes for y (N, O) of 2-byte elements: 4NO (read and write y).

Not differentiable: fp8_lora_linear.py computes the gradients.
"""

import torch

from .launch import INTERPRETED, tl, triton, use_triton


def add_low_rank_reference(y, a, b, first=0):
    y[:, first : first + len(b)].addmm_(a, b.T)


@triton.jit
def _add_low_rank_kernel(
    y_ptr, y_row_stride, a_ptr, a_row_stride, b_ptr, b_row_stride, b_col_stride, n_rows, n_cols, first,
    RANK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program, one tile."""
    programs = tl.cdiv(n_cols, COLS)
    row = (tl.program_id(0) // programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % programs).to(tl.int64) * COLS + tl.arange(0, COLS)
    mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
    y_ptrs = y_ptr + row[:, None] * y_row_stride + (first + col)[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0)
    total = y.to(tl.float32)
    for start in tl.static_range(0, RANK, STEP):
        k = start + tl.arange(0, STEP)
        a_ptrs = a_ptr + row[:, None] * a_row_stride + k[None, :]
        b_ptrs = b_ptr + col[None, :] * b_row_stride + k[:, None] * b_col_stride
        a = tl.load(a_ptrs, mask=(row < n_rows)[:, None] & (k < RANK)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(col < n_cols)[None, :] & (k < RANK)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(y_ptrs, total.to(y.dtype), mask=mask)


@torch.no_grad()
def add_low_rank(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: int = 0) -> None:
    """y (N, C) += a (N, R) b (O, R)ᵀ in its columns first .. first + O, in place; summed in fp32, rounded once.

    All of one dtype, bf16, fp16 or fp32; y contiguous, a with contiguous rows, b of any strides. `first` instead of a
    view of the columns: the compiler would copy that.
    """
    assert len(y) == len(a) and first + len(b) <= y.shape[1] and a.shape[1] == b.shape[1], (y.shape, a.shape, b.shape)
    assert y.dtype == a.dtype == b.dtype and y.is_contiguous() and a.stride(1) == 1, (y.stride(), a.stride())
    if not use_triton(y):
        return add_low_rank_reference(y, a, b, first)
    if INTERPRETED and y.dtype == torch.bfloat16:  # the interpreter's tl.dot misreads bf16
        a = a.float()
        b = b.float()
    rank = b.shape[1]
    rows = 32
    cols = 128
    programs = triton.cdiv(len(a), rows) * triton.cdiv(len(b), cols)
    if programs:
        _add_low_rank_kernel[(programs,)](
            y, y.stride(0), a, a.stride(0), b, *b.stride(), len(a), len(b), first,
            RANK=rank, STEP=min(max(triton.next_power_of_2(rank), 16), 64), ROWS=rows, COLS=cols, num_warps=4,
        )  # fmt: skip
