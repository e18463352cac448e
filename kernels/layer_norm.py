"""LayerNorm. Llama does not use it; a GPT-2 or a ViT does, and it shows what RMSNorm leaves out.

    forward    µ = mean(x)        rstd = 1 / sqrt(mean((x − µ)²) + eps)        x̂ = (x − µ) · rstd        y = x̂ · w + b
    backward   dx = rstd · (dy·w − mean(dy·w) − x̂ · mean(dy·w·x̂))        dw = Σ_rows dy · x̂        db = Σ_rows dy

Backward needs x, w and two fp32 numbers per row (µ, rstd).
Bytes for N rows of C 2-byte elements: forward 4NC (read x, write y), backward 6NC (read x, dy, write dx).
On one H200, where a copy of as many bytes is 100%: forward 88-95%, backward 66-89%.

Ba, Kiros and Hinton, Layer Normalization, 2016. https://arxiv.org/abs/1607.06450
"""

import torch

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


def layer_norm_reference(x, weight, bias, eps=1e-5):
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x_wide - x_wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight + bias).to(x.dtype)


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, n_cols: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program, one row. Centring first keeps the variance of a row far from zero exact.

    A row longer than CHUNK is read twice: for the statistics, and from the cache for y. Keeping it would take the
    registers that let more rows be in flight. Each lane keeps the mean and the squared deviations of the columns that
    it has seen (Welford, 1962); the row's follow from those.
    """
    KEEP: tl.constexpr = "evict_last" if n_cols > CHUNK else ""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * n_cols
    y_ptr += row * n_cols
    lanes = tl.arange(0, CHUNK)
    mean = to_compute(tl.load(x_ptr + lanes, mask=lanes < n_cols, other=0.0, eviction_policy=KEEP))
    deviations = tl.zeros([CHUNK], dtype=mean_ptr.dtype.element_ty)
    for start in range(CHUNK, n_cols, CHUNK):
        cols = start + lanes
        mask = cols < n_cols
        x = to_compute(tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=KEEP))
        delta = tl.where(mask, x - mean, 0.0)
        mean += delta / (start // CHUNK + 1)
        deviations += delta * (x - mean)
    seen = (n_cols - lanes + CHUNK - 1) // CHUNK if n_cols > CHUNK else 1
    row_mean = tl.sum(mean * seen, axis=0) / n_cols
    centred = tl.where(lanes < n_cols, mean - row_mean, 0.0)
    rstd = tl.rsqrt(tl.sum(deviations + centred * centred * seen, axis=0) / n_cols + EPS)
    tl.store(mean_ptr + row, row_mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, CHUNK):
        cols = start + lanes
        mask = cols < n_cols
        if n_cols > CHUNK:
            x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            centred = to_compute(x) - row_mean
        weight = to_compute(tl.load(weight_ptr + cols, mask=mask, other=0.0, eviction_policy=KEEP))
        bias = to_compute(tl.load(bias_ptr + cols, mask=mask, other=0.0, eviction_policy=KEEP))
        tl.store(y_ptr + cols, (centred * rstd * weight + bias).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_to_l2(x_ptr, row, n_rows, n_cols, BLOCK: tl.constexpr):
    """Prefetches a row into the L2 cache, by reading one element of each 32 bytes."""
    STEP: tl.constexpr = 256 // x_ptr.dtype.element_ty.primitive_bitwidth
    cols = tl.arange(0, BLOCK // STEP)[None, :] * STEP
    # volatile, or the compiler would drop the unused load
    tl.load(x_ptr + row * n_cols + cols, mask=(row < n_rows) & (cols < n_cols), volatile=True)


@triton.jit
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, n_rows, n_cols,
    NEED_DX: tl.constexpr, NEED_DWEIGHT: tl.constexpr, NEED_DBIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent, as in rms_norm.py: each program keeps its share of dw and db in fp32 until its last row."""
    cols = tl.arange(0, BLOCK)[None, :]
    weight_ptrs = weight_ptr + cols
    HOLD_WEIGHT: tl.constexpr = BLOCK <= 8192
    if HOLD_WEIGHT:
        weight = to_compute(tl.load(weight_ptrs, mask=cols < n_cols, other=0.0))
    dweight = tl.zeros([1, BLOCK], dtype=rstd_ptr.dtype.element_ty)
    dbias = tl.zeros([1, BLOCK], dtype=rstd_ptr.dtype.element_ty)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < n_cols)
        dy_ptrs = dy_ptr + rows * n_cols + cols
        x_ptrs = x_ptr + rows * n_cols + cols
        dy = to_compute(tl.load(dy_ptrs, mask=mask, other=0.0))
        x = to_compute(tl.load(x_ptrs, mask=mask, other=0.0))
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        if not HOLD_WEIGHT:
            weight = to_compute(tl.load(weight_ptrs, mask=cols < n_cols, other=0.0))
        x_hat = tl.where(mask, (x - mean) * rstd, 0.0)
        dx_hat = dy * weight
        mean_dx_hat = (tl.sum(dx_hat, axis=1) / n_cols)[:, None]
        slope = (tl.sum(dx_hat * x_hat, axis=1) / n_cols)[:, None]
        if not HOLD_WEIGHT:
            # Two sums of this length leave no registers for the row: it is read again, from the L1 cache (with another
            # policy, or the compiler would merge the two loads), while the next row is prefetched to L2.
            prefetch_to_l2(dy_ptr, rows + tl.num_programs(0), n_rows, n_cols, BLOCK)
            prefetch_to_l2(x_ptr, rows + tl.num_programs(0), n_rows, n_cols, BLOCK)
            dy = to_compute(tl.load(dy_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"))
            x = to_compute(tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"))
            weight = to_compute(tl.load(weight_ptrs, mask=cols < n_cols, other=0.0, eviction_policy="evict_first"))
            x_hat = tl.where(mask, (x - mean) * rstd, 0.0)
            dx_hat = dy * weight
        if NEED_DWEIGHT:
            dweight += tl.sum(dy * x_hat, axis=0)[None, :]
        if NEED_DBIAS:
            dbias += tl.sum(dy, axis=0)[None, :]
        if NEED_DX:
            dx = rstd * (dx_hat - mean_dx_hat - x_hat * slope)
            tl.store(dx_ptr + rows * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DWEIGHT:
        tl.store(dweight_ptr + tl.program_id(0) * n_cols + cols, dweight, mask=cols < n_cols)
    if NEED_DBIAS:
        tl.store(dbias_ptr + tl.program_id(0) * n_cols + cols, dbias, mask=cols < n_cols)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = contiguous_rows(x)
        n_rows, n_cols = rows.shape
        mean = torch.empty(n_rows, dtype=compute_dtype(x), device=x.device)
        rstd = torch.empty_like(mean)
        block = triton.next_power_of_2(n_cols)
        _layer_norm_fwd_kernel[(n_rows,)](
            rows, weight.contiguous(), bias.contiguous(), y, mean, rstd, n_cols,
            EPS=eps, CHUNK=min(block, 4096), num_warps=min(max(block // 1024, 1), 16),  # best on H200
        )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        x, weight, mean, rstd = ctx.saved_tensors
        need_dx, need_dweight, need_dbias, _ = ctx.needs_input_grad
        rows = contiguous_rows(x)
        n_rows, n_cols = rows.shape
        # 4 stages are 2 to 5% faster than 3 on H200, but 12% slower if n_cols is 4,096.
        programs, constants = row_tiles(n_rows, n_cols, x, stages=4 if n_cols <= 3072 else 3)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else rstd
        dweight = torch.empty(programs, n_cols, dtype=rstd.dtype, device=x.device) if need_dweight else rstd
        dbias = torch.empty(programs, n_cols, dtype=rstd.dtype, device=x.device) if need_dbias else rstd
        _layer_norm_bwd_kernel[(programs,)](
            contiguous_rows(dy), rows, weight.contiguous(), mean, rstd, dx, dweight, dbias, n_rows, n_cols,
            NEED_DX=need_dx, NEED_DWEIGHT=need_dweight, NEED_DBIAS=need_dbias, **constants,
        )  # fmt: skip
        return (
            dx if need_dx else None,
            sum_rows(dweight, weight.dtype) if need_dweight else None,
            sum_rows(dbias, ctx.bias_dtype) if need_dbias else None,
            None,
        )


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """y = (x − mean) / sqrt(var + eps) · weight + bias over the last dimension (Ba, Kiros and Hinton, 2016).

    x (..., C), weight and bias (C,), any floating dtypes; returns y (..., C) in x's dtype, contiguous. Computed in fp32
    (fp64 for fp64) and rounded once.
    """
    assert weight.shape == bias.shape == x.shape[-1:], (weight.shape, bias.shape, x.shape)
    whole_row(x.shape[-1])  # asserts that a row is not too long
    return _LayerNorm.apply(x, weight, bias, eps) if use_triton(x) else layer_norm_reference(x, weight, bias, eps)
