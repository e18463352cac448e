"""Cross-entropy over rows of logits.

    forward    lse = log Σ_j exp(x_j)        loss = lse − x_target
    backward   dx_j = exp(x_j − lse) − [j = target]        times the gradient of the loss

The softmax is never stored: two fp32 numbers per row, its maximum and Σ exp(x − maximum), reproduce it. The gradient is
computed along with the loss, while the row that was just read is still in the L2 cache. Backward returns it, unless the
loss was multiplied by something on the way: then backward computes it from the logits again.

Bytes for N rows of V 2-byte logits: the loss alone 2NV (one read), with the gradient 4NV (one read, one write).
On one H200, where a copy of as many bytes is 100%: the loss alone 82-95%, with the gradient 72-76%.

How a row is read: each thread takes 8 neighboring logits (16 bytes) at a time and keeps a maximum and a sum of its
own, rescaled whenever the maximum grows (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
Threads synchronize once per row, when these are merged.

A row whose target is -100 is ignored and not read. A target outside [0, V) is a bug in the data: its row touches no
memory outside itself, and its loss and gradient are NaN, so that no training run can miss it.
"""

import torch

from .launch import as_rows, compute_dtype, refuse_double_backward, tl, triton, use_triton

# Warps per program, measured on one H200 at V = 32,000 to 163,840 in bf16. With 4 to 16, the loss alone reads as fast
# as a copy. With the gradient, a long row needs 32: two rows then share a multiprocessor, and much of them is still in
# the L2 cache when it is read again. Rows below 65,536 need only 16: four of them share a multiprocessor, and are still
# in that cache.
LOSS_WARPS = 8
GRADIENT_WARPS = 32
IGNORED = tl.constexpr(-100)  # the target of a row that does not count
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def cross_entropy_reference(logits, targets):
    return sum_of_losses(logits, targets) / n_valid(targets)


def sum_of_losses(logits, targets):
    n_vocab = logits.shape[-1]
    targets = targets.long()
    valid = targets != -100
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~valid[..., None], 0.0)
    loss = -logits.log_softmax(-1).gather(-1, targets.clamp(0, n_vocab - 1)[..., None]).squeeze(-1)
    loss = loss.masked_fill(~valid, 0.0)
    out_of_range = valid & ((targets < 0) | (targets >= n_vocab))
    return (loss * torch.where(out_of_range, torch.nan, 1.0)).sum()  # a factor, so that the gradient is NaN too


def n_valid(targets):
    """How many targets count, at least 1, as a tensor: reading the number itself would wait for the GPU."""
    return (targets != -100).sum().clamp(min=1)


@triton.jit
def tile_of_row(THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """16 columns per thread, as (16/WIDTH, THREADS, WIDTH): a thread holds all of the first and last dimensions."""
    vectors = tl.arange(0, 16 // WIDTH)[:, None, None] * THREADS + tl.arange(0, THREADS)[None, :, None]
    return vectors * WIDTH + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def exp_beside(x, maximum):
    """exp(x − maximum). Subtracts first: log₂e · x of a large x is rounded by more than 1."""
    return tl.exp2((x - maximum) * LOG2_E)


@triton.jit
def zero_for_minus_inf(maximum):
    """If all logits so far are -inf, there is no maximum to subtract."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def row_sums(
    row_ptr, n_cols, n_readable,
    COMPUTE: tl.constexpr, PADDED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The row's maximum, and Σ exp(x − maximum)."""
    lane_maximum = tl.full((THREADS,), float("-inf"), COMPUTE)
    lane_sum = tl.zeros((THREADS,), COMPUTE)
    tile = tile_of_row(THREADS, WIDTH)
    for start in range(0, n_cols, 16 * THREADS):
        cols = start + tile
        # Kept in the cache as long as possible: the gradient reads the row again, from its end.
        x = tl.load(row_ptr + cols, mask=cols < n_readable, other=float("-inf"), eviction_policy="evict_last")
        x = x.to(COMPUTE)
        if PADDED:
            x = tl.where(cols < n_cols, x, float("-inf"))
        # tl.max ignores NaN, the sum does not.
        new_maximum = tl.maximum(lane_maximum, tl.max(tl.max(x, axis=2), axis=0))
        maximum = zero_for_minus_inf(new_maximum)
        exp_x = exp_beside(x, maximum[None, :, None])
        lane_sum = lane_sum * exp_beside(lane_maximum, maximum) + tl.sum(tl.sum(exp_x, axis=2), axis=0)
        lane_maximum = new_maximum
    maximum = zero_for_minus_inf(tl.max(lane_maximum, axis=0))
    return maximum, tl.sum(lane_sum * exp_beside(lane_maximum, maximum), axis=0)


@triton.jit
def store_row_gradient(
    row_ptr, out_ptr, target, x_target, valid, maximum, exp_sum, scale, n_cols, n_readable,
    THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of one row's loss, times scale, to out_ptr (contiguous; may be the row itself).

    Goes from the end of the row to its start: the cache still holds what row_sums read last.
    """
    tile = tile_of_row(THREADS, WIDTH)
    n_tiles = tl.cdiv(n_cols, 16 * THREADS)
    slope = scale / exp_sum
    for i in range(0, tl.where(valid, n_tiles, 0)):
        cols = (n_tiles - 1 - i) * 16 * THREADS + tile
        x = tl.load(row_ptr + cols, mask=cols < n_readable, other=0.0, eviction_policy="evict_first").to(maximum.dtype)
        gradient = (exp_beside(x, maximum) * slope).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + cols, gradient, mask=cols < n_readable, eviction_policy="evict_first")
    for i in range(0, tl.where(valid, 0, n_tiles)):  # an ignored row: zeros, whatever it holds
        cols = i * 16 * THREADS + tile
        tl.store(out_ptr + cols, tl.zeros_like(cols).to(out_ptr.dtype.element_ty), mask=cols < n_readable)
    # The target's element again, after all threads have stored.
    tl.debug_barrier()
    gradient = exp_beside(x_target, maximum) * slope - scale
    inside = valid & (target >= 0) & (target < n_cols)
    tl.store(out_ptr + target, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _loss_kernel(
    logits_ptr, logits_row_stride, targets_ptr, loss_ptr, maximum_ptr, exp_sum_ptr,
    scale_ptr, gradient_ptr, gradient_row_stride, n_cols, n_readable,
    GRADIENT: tl.constexpr, PADDED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program, one row: its loss, maximum and sum, and if GRADIENT its gradient times *scale_ptr.

    n_readable: n_cols, or if rows are padded their padded length, a multiple of 16, so that only whole vectors move.
    The gradient may be written over the logits; their padding is then overwritten too.
    """
    COMPUTE: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(targets_ptr + row)
    valid = target != IGNORED
    inside = valid & (target >= 0) & (target < n_cols)
    x_target = tl.load(row_ptr + target, mask=inside, other=float("nan")).to(COMPUTE)
    scale = tl.load(scale_ptr)
    maximum, exp_sum = row_sums(row_ptr, tl.where(valid, n_cols, 0), n_readable, COMPUTE, PADDED, THREADS, WIDTH)
    exp_sum = tl.where(valid & ~inside, float("nan"), exp_sum)
    loss = tl.log2(exp_sum) * LN_2 - (x_target - maximum)  # lse − x_target
    tl.store(loss_ptr + row, tl.where(valid, loss, 0.0))
    tl.store(maximum_ptr + row, maximum)
    tl.store(exp_sum_ptr + row, exp_sum)
    if GRADIENT:
        store_row_gradient(
            row_ptr, gradient_ptr + row * gradient_row_stride, target, x_target, valid,
            maximum, exp_sum, scale, n_cols, n_readable, THREADS, WIDTH,
        )  # fmt: skip


@triton.jit
def _gradient_kernel(
    dloss_ptr, done_ptr, logits_ptr, logits_row_stride, targets_ptr,
    maximum_ptr, exp_sum_ptr, dlogits_ptr, n_cols, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program, one row: its gradient times dloss. Nothing to do if forward left it with that factor, *done_ptr."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(targets_ptr + row)
    dloss = tl.load(dloss_ptr)
    if dloss != tl.load(done_ptr):
        valid = target != IGNORED
        inside = valid & (target >= 0) & (target < n_cols)
        x_target = tl.load(row_ptr + target, mask=inside, other=float("nan"))
        store_row_gradient(
            row_ptr, dlogits_ptr + row * n_cols, target, x_target.to(dloss.dtype), valid,
            tl.load(maximum_ptr + row), tl.load(exp_sum_ptr + row), dloss, n_cols, n_cols, THREADS, WIDTH,
        )  # fmt: skip


def launch_constants(logits, n_readable, warps):
    warps = min(warps, 16) if n_readable < 65536 else warps
    warps = max(1, min(warps, triton.next_power_of_2(n_readable) // 512))
    # Unaligned rows cannot be read 8 elements at a time: there neighboring threads read neighboring elements.
    width = 8 if logits.stride(0) % 8 == 0 and n_readable % 8 == 0 else 1
    # 32 registers per thread let two programs of 32 warps share a multiprocessor.
    constants = {"THREADS": 32 * warps, "WIDTH": width, "num_warps": warps}
    return constants | {"maxnreg": 32} if warps == 32 else constants


def losses_of_rows(logits, targets, scale=None, out=None, padded=False, losses=None):
    """Losses (N,) of logits (N, V), and each row's maximum and sum, also (N,). out (N, V), if given, is filled with the
    gradient of the losses' sum times scale; it may be the logits themselves. Rows of both may lie apart.

    scale: a tensor of one number in the losses' dtype.
    padded: the columns from V to the row stride are scratch, free to be read and overwritten.
    losses: where to write them, a slice of the caller's; None: a new tensor.
    """
    n_rows, n_cols = logits.shape
    n_readable = logits.stride(0) if padded else n_cols
    if losses is None:
        losses = torch.empty(n_rows, dtype=compute_dtype(logits), device=logits.device)
    maximum = torch.empty_like(losses)
    exp_sum = torch.empty_like(losses)
    _loss_kernel[(n_rows,)](
        logits, logits.stride(0), targets, losses, maximum, exp_sum,
        losses if scale is None else scale, losses if out is None else out, 0 if out is None else out.stride(0),
        n_cols, n_readable, GRADIENT=out is not None, PADDED=n_readable != n_cols,
        **launch_constants(logits, n_readable, LOSS_WARPS if out is None else GRADIENT_WARPS),
    )  # fmt: skip
    return losses, maximum, exp_sum


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        scale = torch.ones((), dtype=compute_dtype(logits), device=logits.device) / n_valid(targets)
        # Not in fp16, where only the scaled loss keeps gradients from underflow, nor under torch.compile, which cannot
        # trace this.
        ready = logits.dtype != torch.float16 and not torch.compiler.is_compiling()
        dlogits = logits.new_empty(logits.shape) if ready else None
        losses, maximum, exp_sum = losses_of_rows(logits, targets, scale, dlogits)
        ctx.save_for_backward(logits, targets, maximum, exp_sum, scale)
        ctx.ready = [dlogits] if ready else []
        return losses.sum() * scale

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward()
        logits, targets, maximum, exp_sum, scale = ctx.saved_tensors
        n_rows, n_cols = logits.shape
        # The factor already in the gradient. NaN equals nothing, so every row is computed.
        done = scale if ctx.ready else torch.full_like(scale, torch.nan)
        # Returned only once, because it may become a tensor's .grad.
        dlogits = ctx.ready.pop() if ctx.ready else logits.new_empty(logits.shape)
        _gradient_kernel[(n_rows,)](
            dloss * scale, done, logits, logits.stride(0), targets, maximum, exp_sum, dlogits, n_cols,
            **launch_constants(logits, n_cols, GRADIENT_WARPS),
        )  # fmt: skip
        return dlogits, None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """loss = lse − logits[target], averaged over the rows that are not ignored.

    For models that have their logits: the model's head calls losses_of_rows, from linear_cross_entropy.py.

    logits (..., V) of any floating dtype, targets (...) integers in [0, V) or -100 (ignored). Returns an fp32 scalar
    (fp64 for fp64): 0 if every row is ignored, NaN if a target lies outside [0, V).

    Backward is free if the loss is differentiated as it is. If it was multiplied first (by gradient accumulation's
    factor, say), in fp16, and under torch.compile, backward reads the logits and writes their gradient again.
    """
    assert targets.shape == logits.shape[:-1], (targets.shape, logits.shape)
    assert not targets.is_floating_point(), targets.dtype
    targets = targets.long()
    if not use_triton(logits):
        return cross_entropy_reference(logits, targets)
    rows = as_rows(logits)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    targets = targets.reshape(-1).contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(rows, targets)
    return losses_of_rows(rows, targets)[0].sum() / n_valid(targets)
