"""RMSNorm, alone and fused with the residual addition before it.

    forward    rstd = 1 / sqrt(mean(x²) + eps)        x̂ = x · rstd        y = x̂ · w
    backward   dx = rstd · (dy·w − x̂ · mean(dy·w·x̂))        dw = Σ_rows dy · x̂

Backward needs x, w and one fp32 rstd per row; x̂ costs a multiplication, so it is recomputed, not saved. `add_rms_norm`
norms s = x + delta and returns s too: the sum that the next block adds to. Its backward adds the gradient of s to dx
before storing it, so the residual stream needs no kernel of its own in either direction.

Bytes for N rows of C 2-byte elements (the weight is negligible):
    rms_norm       forward 4NC (read x, write y)                 backward 6NC (read x, dy, write dx)
    add_rms_norm   forward 8NC (read x, delta, write y, s)    backward 8NC (read s, dy, ds, write dx)
Before a float8 projection y is written as float8: 1NC less, and it saves the 3NC of fp8_linear.py's own rounding.
On one H200, where a copy of as many bytes is 100%: rms_norm forward 94-97%, backward 85-94%; add_rms_norm forward
95-97%, backward 92-97%.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. https://arxiv.org/abs/1910.07467
"""

import torch

from .fp8_linear import empty_rows, store_float8
from .launch import (
    compute_dtype,
    contiguous_rows,
    refuse_double_backward,
    row_tiles,
    sum_rows,
    tl,
    to_compute,
    triton,
    use_triton,
    whole_row,
)


def rms_norm_reference(x, weight, eps=1e-5, overwrite_dy=False):  # overwrite_dy: a permission, of no use to autograd
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * rstd * weight).to(x.dtype)


def add_rms_norm_reference(x, delta, weight, eps=1e-5, overwrite_dy=False):
    total = x + delta
    return rms_norm_reference(total, weight, eps), total


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, delta_ptr, weight_ptr, y_ptr, scales_ptr, total_ptr, rstd_ptr, n_cols,
    EPS: tl.constexpr, ADD: tl.constexpr, NEED_Y: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, one row. With ADD the sum stays in registers; without, x is read again from the cache."""
    KEEP: tl.constexpr = "" if ADD else "evict_last"
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    offsets = row * n_cols + cols
    x = to_compute(tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=KEEP))
    # Loaded here, so that it arrives while the row is summed.
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0, eviction_policy=KEEP)
    if ADD:
        x += to_compute(tl.load(delta_ptr + offsets, mask=mask, other=0.0))
        # Norm the sum as stored, not as computed: the backward pass will read it back rounded.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, rounded, mask=mask)
        x = to_compute(rounded)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + EPS)
    tl.store(rstd_ptr + row, rstd)
    if NEED_Y:
        if not ADD:
            # Read again, not kept: that frees registers for more rows in flight. The eviction policy differs, or the
            # compiler would merge the two loads.
            x = to_compute(tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first"))
        y = (x * rstd * to_compute(weight)).to(x_ptr.dtype.element_ty)
        if FLOAT8:  # rounds y again, from the dtype it is otherwise stored in
            store_float8(y.to(tl.float32), y_ptr + row * n_cols, scales_ptr + row, cols, mask)
        else:
            tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, y_ptr, n_rows, n_cols,
    ADD: tl.constexpr, NEED_DWEIGHT: tl.constexpr, NEED_Y: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent: a program takes every n-th tile of ROWS rows and sums its share of dw in fp32 registers.

    The shares go to dweight_ptr (programs, C). The caller adds them in a fixed order, so a run repeats.
    """
    cols = tl.arange(0, BLOCK)[None, :]
    HOLD_WEIGHT: tl.constexpr = BLOCK <= 8192  # a longer one would take registers that the row needs
    if HOLD_WEIGHT:
        weight = to_compute(tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0))
    dweight = tl.zeros([1, BLOCK], dtype=rstd_ptr.dtype.element_ty)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        offsets = rows * n_cols + cols
        dy = to_compute(tl.load(dy_ptr + offsets, mask=mask, other=0.0))
        x = to_compute(tl.load(x_ptr + offsets, mask=mask, other=0.0))
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        if not HOLD_WEIGHT:
            weight = to_compute(tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0))
        x_hat = x * rstd
        if NEED_DWEIGHT:
            dweight += tl.sum(dy * x_hat, axis=0)[None, :]
        if NEED_Y:
            tl.store(y_ptr + offsets, (x_hat * weight).to(y_ptr.dtype.element_ty), mask=mask)
        dx_hat = dy * weight
        dx = rstd * (dx_hat - x_hat * (tl.sum(dx_hat * x_hat, axis=1) / n_cols)[:, None])
        if ADD:
            dx += to_compute(tl.load(dtotal_ptr + offsets, mask=mask, other=0.0))
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DWEIGHT:
        tl.store(dweight_ptr + tl.program_id(0) * n_cols + cols, dweight, mask=cols < n_cols)


def rms_norm_forward(x, delta, weight, eps, need_y=True, float8=False):
    """Returns y (None if not needed), x + delta (x without a delta), rstd (N,).

    float8: instead of y, returns (y8, scales) as fp8_linear.py's quantize would compute them.
    """
    add = delta is not None
    rows = contiguous_rows(x)
    n_rows, n_cols = rows.shape
    y, scales = empty_rows(x.shape, x, float8) if need_y else (None, None)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add else x
    rstd = torch.empty(n_rows, dtype=compute_dtype(x), device=x.device)
    # A kernel needs a tensor for each pointer: where it reads or writes none, another one stands in.
    _rms_norm_fwd_kernel[(n_rows,)](
        rows, contiguous_rows(delta) if add else rows, weight.contiguous(),
        y if need_y else rstd, rstd if scales is None else scales, total, rstd, n_cols,
        EPS=eps, ADD=add, NEED_Y=need_y, FLOAT8=float8, **whole_row(n_cols),
    )  # fmt: skip
    return y if scales is None else (y, scales), total, rstd


def rms_norm_backward(dy, dtotal, x, weight, rstd, need_dweight, need_y=False, overwrite_dy=False):
    """Returns dx plus dtotal (if not None); dweight and y recomputed, each None if not needed.

    overwrite_dy: dx may overwrite dy, contiguous and of x's shape and dtype: each row is read, then written.
    """
    refuse_double_backward()
    add = dtotal is not None
    rows = contiguous_rows(x)
    dy_rows = contiguous_rows(dy)
    n_rows, n_cols = rows.shape
    # A third row to read needs more loads in flight: at 16,384 columns 0.93 of the copy rate instead of 0.85.
    programs, constants = row_tiles(n_rows, n_cols, x, long_row_warps=32 if add else 16)
    dx = dy if overwrite_dy else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_y else None
    dweight = torch.empty(programs, n_cols, dtype=rstd.dtype, device=x.device) if need_dweight else None
    _rms_norm_bwd_kernel[(programs,)](
        dy_rows, contiguous_rows(dtotal) if add else dy_rows, rows, weight.contiguous(), rstd,
        dx, dweight if need_dweight else rstd, y if need_y else rstd, n_rows, n_cols,
        ADD=add, NEED_DWEIGHT=need_dweight, NEED_Y=need_y, **constants,
    )  # fmt: skip
    return dx, sum_rows(dweight, weight.dtype) if need_dweight else None, y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps, overwrite_dy):
        y, total, rstd = rms_norm_forward(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.overwrite_dy = overwrite_dy
        return y if delta is None else (y, total)

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        total, weight, rstd = ctx.saved_tensors
        _, need_ddelta, need_dweight, _, _ = ctx.needs_input_grad
        overwrite_dy = ctx.overwrite_dy and dy.is_contiguous()
        dx, dweight, _ = rms_norm_backward(dy, dtotal, total, weight, rstd, need_dweight, overwrite_dy=overwrite_dy)
        return dx, dx if need_ddelta else None, dweight, None, None


def check_norm(x, delta, weight):
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    assert delta is None or (x.shape == delta.shape and x.dtype == delta.dtype), (x.shape, delta.shape)
    whole_row(x.shape[-1])  # asserts that a row is not too long


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, overwrite_dy: bool = False) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, 2019).

    x (..., C), weight (C,), any floating dtypes; returns y (..., C) in x's dtype. Computed in fp32 (fp64
    for fp64) and rounded once. overwrite_dy: backward may write the gradient of x over that of y: only if nothing else
    reads it.
    """
    check_norm(x, None, weight)
    return _RMSNorm.apply(x, None, weight, eps, overwrite_dy) if use_triton(x) else rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, overwrite_dy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + delta), x + delta) in one pass, and one pass backward.

    x and delta (..., C) of one dtype, weight (C,); returns two (..., C) in x's dtype. The norm takes the rounded sum,
    so the result equals that of two separate operations. overwrite_dy: as for rms_norm.
    """
    check_norm(x, delta, weight)
    if use_triton(x):
        return _RMSNorm.apply(x, delta, weight, eps, overwrite_dy)
    return add_rms_norm_reference(x, delta, weight, eps)
