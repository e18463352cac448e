"""Cross-entropy over rows of logits, with label smoothing ε and a z-loss.

    forward    lse = log Σ_j exp(x_j)        loss = lse − (1 − ε)·x_target − ε·mean(x) + z·lse²
    backward   dx_j = exp(x_j − lse)·(1 + 2z·lse) − (1 − ε)·[j = target] − ε/V        times the gradient of the loss

Backward needs the logits and one fp32 lse a row; the softmax is never stored.
Bytes for N rows of V 2-byte logits: forward 2NV (one read: running maximum and sum), backward 4NV (read, write).

A row whose target is ignore_index is not read. A target outside [0, V) is a bug in the data: its row touches no memory
outside itself, and its loss and gradient are NaN, so that no training run can miss it.

z-loss: Chowdhery et al., PaLM, 2022, section 5. https://arxiv.org/abs/2204.02311
Running maximum: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import torch

from .launch import as_rows, compute_dtype, refuse_double_backward, tl, triton, use_triton

BLOCK = 16384  # logits a program holds at once; with 16 warps the best of 4096..32768 x 8..32 on H200 at V = 128,256


def cross_entropy_reference(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):  # fmt: skip
    n_vocab, targets = logits.shape[-1], targets.long()
    live = targets != ignore_index
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~live[..., None], 0.0)
    log_p = logits.log_softmax(-1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, targets.clamp(0, n_vocab - 1)[..., None]).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square()
    loss = loss.masked_fill(~live, 0.0)
    out_of_range = live & ((targets < 0) | (targets >= n_vocab))
    loss = loss * torch.where(out_of_range, torch.nan, 1.0)  # a factor, so that the gradient is NaN too
    return reduce_loss(loss, targets, ignore_index, reduction)


def reduce_loss(losses, targets, ignore_index, reduction):
    """Losses of rows (ignored rows are zeros already) to what the caller asked for; the mean of no rows is 0."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / n_live(targets, ignore_index)


def n_live(targets, ignore_index):
    """How many targets count, at least 1, as a tensor: asking for the number itself would wait for the GPU."""
    return (targets != ignore_index).sum().clamp(min=1)


@triton.jit
def exp(x):
    """tl.exp, but results below 1e-38 are zero: to get those right takes three instructions beside the exponential."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def row_loss(
    row_ptr, col_stride, target, live, n_cols, n_readable,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one row and its log-sum-exp, in one sweep that keeps a running maximum and sum.

    n_readable: n_cols, or where the row is padded the length with its padding: a multiple of 16 reads whole vectors.
    """
    # First of all loads, so that the sweeps' barriers stand between it and a gradient written over the row.
    inside = live & (target >= 0) & (target < n_cols)
    x_target = tl.load(row_ptr + target * col_stride, mask=inside, other=float("nan")).to(COMPUTE)
    row_max = tl.full((), float("-inf"), COMPUTE)
    exp_sum = tl.full((), 0.0, COMPUTE)
    x_sum = tl.full((), 0.0, COMPUTE)
    for start in range(0, tl.where(live, n_cols, 0), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        # Kept in the cache as long as may be: the gradient will read the row again, from its end.
        x_ptrs = row_ptr + cols.to(tl.int64) * col_stride
        x = tl.load(x_ptrs, mask=cols < n_readable, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        x = tl.where(mask, x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # Where all so far is -inf there is nothing to shift by. tl.max passes over NaN: the sum below does not.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        exp_sum = exp_sum * exp(row_max - shift) + tl.sum(exp(x - shift), axis=0)
        row_max = new_max
        if SMOOTHING > 0:
            x_sum += tl.sum(tl.where(mask, x, 0.0), axis=0)
    lse = tl.where(live & ~inside, float("nan"), row_max + tl.log(exp_sum))
    loss = lse - (1 - SMOOTHING) * x_target
    if SMOOTHING > 0:
        loss -= SMOOTHING * (x_sum / n_cols)
    if Z_LOSS > 0:
        loss += Z_LOSS * lse * lse
    return tl.where(live, loss, 0.0), lse


@triton.jit
def store_row_gradient(
    row_ptr, col_stride, out_ptr, target, live, lse, scale, n_cols, n_readable,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's loss, times scale, to out_ptr (contiguous; the row itself is allowed).

    From the end of the row to its start: what row_loss read last is what the cache still holds.
    """
    n_blocks = tl.cdiv(n_cols, BLOCK)
    target = target.to(tl.int32)  # one outside the vocabulary may come back inside: lse is NaN then
    for i in range(0, tl.where(live, n_blocks, 0)):
        cols = (n_blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        x_ptrs = row_ptr + cols.to(tl.int64) * col_stride
        x = tl.load(x_ptrs, mask=cols < n_readable, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        gradient = exp(x - lse)
        if Z_LOSS > 0:
            gradient *= 1 + 2 * Z_LOSS * lse
        if SMOOTHING > 0:
            gradient -= (SMOOTHING + tl.zeros_like(lse)) / n_cols  # a bare constant would be divided in fp32
        gradient = tl.where(cols == target, gradient - (1 - SMOOTHING), gradient) * scale
        tl.store(out_ptr + cols, gradient.to(out_ptr.dtype.element_ty), mask=cols < n_readable)
    for i in range(0, tl.where(live, 0, n_blocks)):  # an ignored row: zeros, whatever lies there
        cols = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=cols < n_readable)


@triton.jit
def _cross_entropy_fwd_kernel(
    logits_ptr, logits_row_stride, logits_col_stride, targets_ptr, targets_stride,
    loss_ptr, lse_ptr, n_cols, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row * targets_stride)
    loss, lse = row_loss(
        logits_ptr + row * logits_row_stride, logits_col_stride, target, target != ignore_index, n_cols, n_cols,
        SMOOTHING, Z_LOSS, loss_ptr.dtype.element_ty, BLOCK,
    )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _cross_entropy_bwd_kernel(
    dloss_ptr, dloss_stride, logits_ptr, logits_row_stride, logits_col_stride, targets_ptr, targets_stride,
    lse_ptr, dlogits_ptr, n_cols, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row * targets_stride)
    store_row_gradient(
        logits_ptr + row * logits_row_stride, logits_col_stride, dlogits_ptr + row * n_cols,
        target, target != ignore_index, tl.load(lse_ptr + row), tl.load(dloss_ptr + row * dloss_stride), n_cols, n_cols,
        SMOOTHING, Z_LOSS, lse_ptr.dtype.element_ty, BLOCK,
    )  # fmt: skip


def launch_constants(n_cols):
    block = min(BLOCK, triton.next_power_of_2(n_cols))
    return {"BLOCK": block, "num_warps": max(block // 1024, 1)}


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, label_smoothing, z_loss):
        """The losses of the rows (N,); reductions are left to PyTorch."""
        n_rows, n_cols = logits.shape
        losses = torch.empty(n_rows, dtype=compute_dtype(logits), device=logits.device)
        lse = torch.empty_like(losses)
        _cross_entropy_fwd_kernel[(n_rows,)](
            logits, logits.stride(0), logits.stride(1), targets, targets.stride(0), losses, lse, n_cols, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, **launch_constants(n_cols),
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, lse)
        ctx.options = ignore_index, label_smoothing, z_loss
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        refuse_double_backward()
        logits, targets, lse = ctx.saved_tensors
        ignore_index, label_smoothing, z_loss = ctx.options
        n_rows, n_cols = logits.shape
        dlogits = torch.empty(n_rows, n_cols, dtype=logits.dtype, device=logits.device)
        _cross_entropy_bwd_kernel[(n_rows,)](
            dlosses, dlosses.stride(0), logits, logits.stride(0), logits.stride(1), targets, targets.stride(0),
            lse, dlogits, n_cols, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, **launch_constants(n_cols),
        )  # fmt: skip
        return dlogits, None, None, None, None


def check_options(n_rows, targets, label_smoothing, z_loss, reduction, reductions):
    if targets.numel() != n_rows or targets.is_floating_point():
        raise ValueError(f"targets {tuple(targets.shape)} {targets.dtype}: expected {n_rows} integers, one a row")
    if not 0 <= label_smoothing <= 1 or z_loss < 0:
        raise ValueError(
            f"label_smoothing {label_smoothing} must lie in [0, 1] and z_loss {z_loss} must not be negative"
        )
    if reduction not in reductions:
        raise ValueError(f"reduction must be one of {', '.join(reductions)}; got {reduction!r}")


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """loss = lse − (1 − ε)·logits[target] − ε·mean(logits) + z·lse², averaged over the rows that are not ignored.

    logits (..., V) of any strides and floating dtype, targets (...) integers in [0, V) or ignore_index. Returns fp32
    (fp64 for fp64): a scalar for reduction 'mean' (0 where every row is ignored) and 'sum', (...) for 'none'.
    A target outside [0, V) makes the loss NaN. ValueError for unfit shapes or options.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}")
    check_options(targets.numel(), targets, label_smoothing, z_loss, reduction, ("mean", "sum", "none"))
    targets = targets.long()
    if not use_triton(logits):
        return cross_entropy_reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction)
    losses = _CrossEntropy.apply(as_rows(logits), targets.reshape(-1), ignore_index, label_smoothing, z_loss)
    return reduce_loss(losses.view(targets.shape), targets, ignore_index, reduction)
