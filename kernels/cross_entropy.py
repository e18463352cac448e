"""Cross-entropy over rows of logits, with label smoothing ε and a z-loss.

    forward    lse = log Σ_j exp(x_j)        loss = lse − (1 − ε)·x_target − ε·mean(x) + z·lse²
    backward   dx_j = exp(x_j − lse)·(1 + 2z·lse) − (1 − ε)·[j = target] − ε/V        times the gradient of the loss

The softmax is never stored: two fp32 numbers per row, its maximum and Σ exp(x − maximum), reproduce it. The gradient of
a mean or a sum is computed along with the loss, while the row that was just read is still in the L2 cache. Backward
returns it, unless the loss was multiplied by something on the way: then backward computes it from the logits again.

Bytes for N rows of V 2-byte logits: the loss alone 2NV (one read), with the gradient 4NV (one read, one write).
On one H200, where a copy of as many bytes is 100%: the loss alone 82-95%, with the gradient 72-76%.

How a row is read: each thread takes 8 neighbouring logits (16 bytes) at a time and keeps a maximum and a sum of its
own, rescaled whenever the maximum grows (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
Threads synchronise once per row, when these are merged.

A row whose target is ignore_index is not read. A target outside [0, V) is a bug in the data: its row touches no memory
outside itself, and its loss and gradient are NaN, so that no training run can miss it.

z-loss: Chowdhery et al., PaLM, 2022, section 5. https://arxiv.org/abs/2204.02311
"""

import torch

from .launch import as_rows, compute_dtype, refuse_double_backward, tl, triton, use_triton

# Warps per program, measured on one H200 at V = 32,000 to 163,840 in bf16. With 4 to 16, the loss alone reads as fast
# as a copy. With the gradient, a long row needs 32: two rows then share a multiprocessor, and much of them is still in
# the L2 cache when it is read again. Rows below 65,536 need 16: of these, four per multiprocessor survive.
LOSS_WARPS = 8
GRADIENT_WARPS = 32
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def cross_entropy_reference(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):  # fmt: skip
    n_vocab = logits.shape[-1]
    targets = targets.long()
    valid = targets != ignore_index
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~valid[..., None], 0.0)
    log_p = logits.log_softmax(-1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, targets.clamp(0, n_vocab - 1)[..., None]).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_p.mean(-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square()
    loss = loss.masked_fill(~valid, 0.0)
    out_of_range = valid & ((targets < 0) | (targets >= n_vocab))
    loss = loss * torch.where(out_of_range, torch.nan, 1.0)  # a factor, so that the gradient is NaN too
    return reduce_loss(loss, targets, ignore_index, reduction)


def reduce_loss(losses, targets, ignore_index, reduction):
    """Reduces the losses of rows (ignored rows are already 0) as the caller asked; the mean of no rows is 0."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / n_valid(targets, ignore_index)


def n_valid(targets, ignore_index):
    """How many targets count, at least 1, as a tensor: reading the number itself would wait for the GPU."""
    return (targets != ignore_index).sum().clamp(min=1)


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
    SUM: tl.constexpr, COMPUTE: tl.constexpr, PADDED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The row's maximum; Σ exp(x − maximum); and Σ x if SUM (label smoothing) needs it."""
    lane_maximum = tl.full((THREADS,), float("-inf"), COMPUTE)
    lane_sum = tl.zeros((THREADS,), COMPUTE)
    lane_x_sum = tl.zeros((THREADS,), COMPUTE)
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
        if SUM:
            lane_x_sum += tl.sum(tl.sum(tl.where(cols < n_cols, x, 0.0), axis=2), axis=0)
    maximum = zero_for_minus_inf(tl.max(lane_maximum, axis=0))
    return maximum, tl.sum(lane_sum * exp_beside(lane_maximum, maximum), axis=0), tl.sum(lane_x_sum, axis=0)


@triton.jit
def store_row_gradient(
    row_ptr, out_ptr, target, x_target, valid, maximum, exp_sum, scale, n_cols, n_readable,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of one row's loss, times scale, to out_ptr (contiguous; may be the row itself).

    Goes from the end of the row to its start: the cache still holds what row_sums read last.
    """
    tile = tile_of_row(THREADS, WIDTH)
    n_tiles = tl.cdiv(n_cols, 16 * THREADS)
    lse = maximum + tl.log2(exp_sum) * LN_2
    slope = scale * (1 + 2 * Z_LOSS * lse) / exp_sum
    offset = scale * (SMOOTHING + tl.zeros_like(lse)) / n_cols  # a bare constant would be divided in fp32
    for i in range(0, tl.where(valid, n_tiles, 0)):
        cols = (n_tiles - 1 - i) * 16 * THREADS + tile
        x = tl.load(row_ptr + cols, mask=cols < n_readable, other=0.0, eviction_policy="evict_first").to(maximum.dtype)
        gradient = (exp_beside(x, maximum) * slope - offset).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + cols, gradient, mask=cols < n_readable, eviction_policy="evict_first")
    for i in range(0, tl.where(valid, 0, n_tiles)):  # an ignored row: zeros, whatever it holds
        cols = i * 16 * THREADS + tile
        tl.store(out_ptr + cols, tl.zeros_like(cols).to(out_ptr.dtype.element_ty), mask=cols < n_readable)
    # The target's element again, after all threads have stored.
    tl.debug_barrier()
    gradient = exp_beside(x_target, maximum) * slope - offset - (1 - SMOOTHING) * scale
    inside = valid & (target >= 0) & (target < n_cols)
    tl.store(out_ptr + target, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _loss_kernel(
    logits_ptr, logits_row_stride, targets_ptr, loss_ptr, maximum_ptr, exp_sum_ptr,
    scale_ptr, gradient_ptr, gradient_row_stride, n_cols, n_readable, ignore_index,
    GRADIENT: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    PADDED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program, one row: its loss, maximum and sum, and if GRADIENT its gradient times *scale_ptr.

    n_readable: n_cols, or if rows are padded their padded length, a multiple of 16, so that only whole vectors move.
    The gradient may be written over the logits; their padding is then overwritten too.
    """
    COMPUTE: tl.constexpr = loss_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(targets_ptr + row)
    valid = target != ignore_index
    inside = valid & (target >= 0) & (target < n_cols)
    x_target = tl.load(row_ptr + target, mask=inside, other=float("nan")).to(COMPUTE)
    scale = tl.load(scale_ptr)
    maximum, exp_sum, x_sum = row_sums(
        row_ptr, tl.where(valid, n_cols, 0), n_readable, SMOOTHING > 0, COMPUTE, PADDED, THREADS, WIDTH
    )
    exp_sum = tl.where(valid & ~inside, float("nan"), exp_sum)
    loss = tl.log2(exp_sum) * LN_2 - (1 - SMOOTHING) * (x_target - maximum)  # lse − x_target
    if SMOOTHING > 0:
        loss -= SMOOTHING * (x_sum / n_cols - maximum)
    if Z_LOSS > 0:
        lse = maximum + tl.log2(exp_sum) * LN_2
        loss += Z_LOSS * lse * lse
    tl.store(loss_ptr + row, tl.where(valid, loss, 0.0))
    tl.store(maximum_ptr + row, maximum)
    tl.store(exp_sum_ptr + row, exp_sum)
    if GRADIENT:
        store_row_gradient(
            row_ptr, gradient_ptr + row * gradient_row_stride, target, x_target, valid,
            maximum, exp_sum, scale, n_cols, n_readable, SMOOTHING, Z_LOSS, THREADS, WIDTH,
        )  # fmt: skip


@triton.jit
def _gradient_kernel(
    dloss_ptr, dloss_stride, done_ptr, logits_ptr, logits_row_stride, targets_ptr,
    maximum_ptr, exp_sum_ptr, dlogits_ptr, n_cols, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program, one row: its gradient times dloss. Nothing to do if forward left it with that factor, *done_ptr."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(targets_ptr + row)
    dloss = tl.load(dloss_ptr + row * dloss_stride)
    if dloss != tl.load(done_ptr):
        valid = target != ignore_index
        inside = valid & (target >= 0) & (target < n_cols)
        x_target = tl.load(row_ptr + target, mask=inside, other=float("nan"))
        store_row_gradient(
            row_ptr, dlogits_ptr + row * n_cols, target, x_target.to(dloss.dtype), valid,
            tl.load(maximum_ptr + row), tl.load(exp_sum_ptr + row), dloss, n_cols, n_cols,
            SMOOTHING, Z_LOSS, THREADS, WIDTH,
        )  # fmt: skip


def launch_constants(logits, n_readable, warps):
    warps = min(warps, 16) if n_readable < 65536 else warps
    warps = max(1, min(warps, triton.next_power_of_2(n_readable) // 512))
    # Unaligned rows cannot be read 8 elements at a time: there neighbouring threads read neighbouring elements.
    width = 8 if logits.stride(0) % 8 == 0 and n_readable % 8 == 0 else 1
    # 32 registers per thread let two programs of 32 warps share a multiprocessor.
    constants = {"THREADS": 32 * warps, "WIDTH": width, "num_warps": warps}
    return constants | {"maxnreg": 32} if warps == 32 else constants


def losses_of_rows(logits, targets, options, scale=None, out=None, padded=False, losses=None):
    """Losses (N,) of logits (N, V), and each row's maximum and sum, also (N,). out (N, V), if given, is filled with the
    gradient of the losses' sum times scale; it may be the logits themselves. Rows of both may lie apart.

    options: (ignore_index, label_smoothing, z_loss). scale: a tensor of one number in the losses' dtype.
    padded: the columns from V to the row stride are scratch, free to be read and overwritten.
    losses: where to write them, a slice of the caller's; None: a new tensor.
    """
    ignore_index, label_smoothing, z_loss = options
    n_rows, n_cols = logits.shape
    n_readable = logits.stride(0) if padded else n_cols
    if losses is None:
        losses = torch.empty(n_rows, dtype=compute_dtype(logits), device=logits.device)
    maximum = torch.empty_like(losses)
    exp_sum = torch.empty_like(losses)
    _loss_kernel[(n_rows,)](
        logits, logits.stride(0), targets, losses, maximum, exp_sum,
        losses if scale is None else scale, losses if out is None else out, 0 if out is None else out.stride(0),
        n_cols, n_readable, ignore_index,
        GRADIENT=out is not None, SMOOTHING=label_smoothing, Z_LOSS=z_loss, PADDED=n_readable != n_cols,
        **launch_constants(logits, n_readable, LOSS_WARPS if out is None else GRADIENT_WARPS),
    )  # fmt: skip
    return losses, maximum, exp_sum


def losses_of_rows_reference(logits, targets, options, scale, out, losses):
    """losses_of_rows without Triton: the logits are scratch and hold the gradient at the end."""
    ignore_index, label_smoothing, z_loss = options
    n_vocab = logits.shape[1]
    valid = targets != ignore_index
    inside = valid & (targets >= 0) & (targets < n_vocab)
    x = logits.to(losses.dtype)
    index = targets.clamp(0, n_vocab - 1)[:, None]
    x.masked_fill_(~valid[:, None], 0.0)  # ignored rows, whatever they hold
    maximum = x.amax(-1)
    x.sub_(maximum[:, None])
    loss = -(1 - label_smoothing) * x.gather(1, index).squeeze(1)
    if label_smoothing:
        loss -= label_smoothing * x.mean(-1)
    exp_sum = x.exp_().sum(-1)
    lse = maximum + exp_sum.log()
    loss = torch.where(inside, loss + exp_sum.log() + z_loss * lse.square(), torch.nan)
    losses.copy_(torch.where(valid, loss, 0.0))
    if out is None:
        return
    scale = torch.where(valid, torch.where(inside, scale, torch.nan), 0.0)
    x.mul_((scale * (1 + 2 * z_loss * lse) / exp_sum)[:, None])
    if label_smoothing:
        x.sub_((scale * label_smoothing / n_vocab)[:, None])
    x.scatter_add_(1, index, -(1 - label_smoothing) * scale[:, None])
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, options, reduction):
        scale = torch.ones((), dtype=compute_dtype(logits), device=logits.device)
        if reduction == "mean":
            scale = scale / n_valid(targets, options[0])
        # Not in fp16, where only the scaled loss keeps gradients from underflow, nor under torch.compile, which cannot
        # trace this.
        ready = reduction != "none" and logits.dtype != torch.float16
        dlogits = logits.new_empty(logits.shape) if ready and not torch.compiler.is_compiling() else None
        losses, maximum, exp_sum = losses_of_rows(logits, targets, options, scale, dlogits)
        ctx.save_for_backward(logits, targets, maximum, exp_sum, scale)
        ctx.options = options
        ctx.ready = [] if dlogits is None else [dlogits]
        return losses if reduction == "none" else losses.sum() * scale

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward()
        logits, targets, maximum, exp_sum, scale = ctx.saved_tensors
        ignore_index, label_smoothing, z_loss = ctx.options
        n_rows, n_cols = logits.shape
        dlosses = (dloss * scale).expand(n_rows)
        # The factor already in the gradient. NaN equals nothing, so every row is computed.
        done = scale if ctx.ready else torch.full_like(scale, torch.nan)
        # Returned only once, because it may become a tensor's .grad.
        dlogits = ctx.ready.pop() if ctx.ready else logits.new_empty(logits.shape)
        _gradient_kernel[(n_rows,)](
            dlosses, dlosses.stride(0), done, logits, logits.stride(0), targets, maximum, exp_sum, dlogits,
            n_cols, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, **launch_constants(logits, n_cols, GRADIENT_WARPS),
        )  # fmt: skip
        return dlogits, None, None, None


def check_options(n_rows, targets, label_smoothing, z_loss, reduction, reductions):
    assert targets.numel() == n_rows and not targets.is_floating_point(), (targets.shape, targets.dtype, n_rows)
    assert 0 <= label_smoothing <= 1 and z_loss >= 0, (label_smoothing, z_loss)
    assert reduction in reductions, reduction


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """loss = lse − (1 − ε)·logits[target] − ε·mean(logits) + z·lse², averaged over the rows that are not ignored.

    logits (..., V) of any floating dtype, targets (...) integers in [0, V) or ignore_index. Returns fp32 (fp64 for
    fp64): a scalar for reduction 'mean' (0 if every row is ignored) and 'sum', (...) for 'none'. A target outside
    [0, V) makes the loss NaN.

    For 'mean' and 'sum', backward is free if the loss is differentiated as it is. If it was multiplied first (by
    gradient accumulation's factor, say), in fp16, and under torch.compile, backward reads the logits and writes their
    gradient again.
    """
    assert targets.shape == logits.shape[:-1], (targets.shape, logits.shape)
    check_options(targets.numel(), targets, label_smoothing, z_loss, reduction, ("mean", "sum", "none"))
    targets = targets.long()
    if not use_triton(logits):
        return cross_entropy_reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction)
    rows = as_rows(logits)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    row_targets = targets.reshape(-1).contiguous()
    options = ignore_index, label_smoothing, z_loss
    if torch.is_grad_enabled() and logits.requires_grad:
        loss = _CrossEntropy.apply(rows, row_targets, options, reduction)
    else:
        loss = reduce_loss(losses_of_rows(rows, row_targets, options)[0], targets, ignore_index, reduction)
    return loss.view(targets.shape) if reduction == "none" else loss
