"""The language-model head and its loss, never holding more than 1 GiB of logits.

    logits = x Wᵀ (N, V)        loss = cross-entropy (cross_entropy.py)        dx = dlogits · W        dW = dlogitsᵀ · x

For Llama 3 the logits of 16,384 tokens are 4.2 GB in bf16, and PyTorch holds them several times over. Here they live
one chunk of tokens at a time in a buffer that every chunk reuses. A chunk's gradient depends only on its own logits, so
forward computes it right away, writes it over the logits, and multiplies it into dx and dW before the next chunk.
Backward only scales the results.

Saved for backward: dx (N, C) in x's dtype and dW (V, C) in fp32. Both are gradients of the *sum* of the losses: the
mean's 1/n, the loss scale and the accumulation's factor all arrive as one number in backward and are multiplied in
once, when dW is rounded. So no fp16 gradient is divided into underflow, and nothing waits for a number from the GPU.
(With fp32_dweight=False dW has the weight's dtype and is rounded at every chunk anyway: so the mean's 1/n goes into
both gradients from the start, and backward scales them in place.)

FLOPs: 3 matmuls of 2·N·C·V, the minimum. Bytes beyond theirs: 4NV, to read the logits and write their gradient; the
kernel's second read mostly hits the L2 cache (cross_entropy.py). Besides its inputs, forward allocates the chunk's
logits, dx (not with overwrite_x), and dW in fp32, 4·V·C bytes; backward, when the logits' buffer is free, the scaled dx
and the rounded dW, 2·V·C bytes.
On one H200, where the three matmuls are 100%: forward and backward 91-97%.

If one chunk holds all tokens, the gradient of the logits simply stays in the buffer, and backward multiplies it, with x
scaled, straight into dx and dW: no fp32 dW, no pass to round it. (Not in fp16, where x / n may be too small to hold.)

The idea of the chunked loss with its gradient in the forward pass is Liger-Kernel's: Hsu et al., 2024.
https://arxiv.org/abs/2410.10989
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .cross_entropy import cross_entropy_reference, losses_of_rows, n_valid, sum_of_losses
from .launch import (
    accumulate,
    compute_dtype,
    refuse_autocast,
    refuse_double_backward,
    tl,
    to_compute,
    triton,
    use_triton,
)

# Bytes of logits held at once: 4,096 tokens at V = 128,256 in bf16. On one H200 with N = 16,384 and C = 2,048, 2,048
# tokens per chunk take 3% more time and 437 MiB less; 1,024 take 12% and 512 take 35% more time and save no more, since
# the peak is then in backward, with dW in fp32 and rounded (benchmarks/records/kernels.json).
LOGITS_BYTES = 2**30
PLAIN_LOGITS = 2**24  # without Triton: logits held at once, 64 MiB in fp32


def linear_cross_entropy_reference(x, weight, targets):
    return cross_entropy_reference(F.linear(x, weight), targets)


def _plain_chunks(x, weight, targets):
    """Plain PyTorch, PLAIN_LOGITS at a time: backward computes each chunk's logits again."""
    n_tokens = max(PLAIN_LOGITS // len(weight), 1)
    wide_weight = weight.to(compute_dtype(x))  # the chunks' dW are summed in this dtype

    def loss_of(x, targets):
        return sum_of_losses(F.linear(x, wide_weight.to(x.dtype)), targets)

    chunks = zip(x.split(n_tokens), targets.split(n_tokens), strict=True)
    losses = [checkpoint(loss_of, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return sum(losses) / n_valid(targets)


def _logits_buffer(x, n_tokens, n_vocab):
    row_length = -(-n_vocab // 16) * 16  # else cuBLAS takes a slow path, and the kernel cannot read vectors
    return torch.empty(n_tokens, row_length, dtype=x.dtype, device=x.device)[:, :n_vocab]


def _fill_losses(losses, x, weight, targets, logits, scale):
    """Fills losses (N,), and logits (N, V) with the gradient of their sum times scale; with scale None logits are left
    undefined.
    """
    torch.mm(x, weight.T, out=logits)
    losses_of_rows(logits, targets, scale, None if scale is None else logits, padded=True, losses=losses)


def _fill_chunks(x, weight, targets, chunk_tokens, scale, losses, dx, dweight):
    """Fills losses (N,), and dx (N, C) and dW (V, C), which are empty if not needed; dx may be x."""
    n_tokens = x.shape[0]
    buffer = _logits_buffer(x, min(chunk_tokens, n_tokens), weight.shape[0])
    scale = scale if dx.numel() or dweight.numel() else None
    for start in range(0, n_tokens, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, n_tokens))
        logits = buffer[: chunk.stop - start]
        _fill_losses(losses[chunk], x[chunk], weight, targets[chunk], logits, scale)
        if dweight.numel():
            accumulate(dweight, logits.T, x[chunk], first=start == 0)
        if dx.numel():
            torch.mm(logits, weight, out=dx[chunk])
    if n_tokens == 0:
        dweight.zero_()


# Opaque operators: torch.compile calls them as they are and leaves their loops and buffers alone.
@torch.library.custom_op("nanocria::whole_loss", mutates_args=())
def _whole_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (N,), and the gradient of their sum: dlogits (N, V) with padded rows."""
    losses, logits = _whole_loss_fake(x, weight, targets)
    _fill_losses(losses, x, weight, targets, logits, losses.new_ones(()))
    return losses, logits


@_whole_loss.register_fake
def _whole_loss_fake(x, weight, targets):
    losses = torch.empty(x.shape[0], dtype=compute_dtype(x), device=x.device)
    return losses, _logits_buffer(x, x.shape[0], weight.shape[0])


@torch.library.custom_op("nanocria::chunked_loss", mutates_args=())
def _chunked_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_tokens: int,
    need_dx: bool,
    need_dweight: bool,
    fp32_dweight: bool,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses (N,), and the gradients of their sum times scale: dx (N, C), dW (V, C); empty if not needed."""
    losses, dx, dweight = _outputs(x, weight, need_dx, need_dweight, fp32_dweight)
    _fill_chunks(x, weight, targets, chunk_tokens, scale, losses, dx, dweight)
    return losses, dx, dweight


@_chunked_loss.register_fake
def _chunked_loss_fake(x, weight, targets, chunk_tokens, need_dx, need_dweight, fp32_dweight, scale):
    return _outputs(x, weight, need_dx, need_dweight, fp32_dweight)


def _outputs(x, weight, need_dx, need_dweight, fp32_dweight):
    wide = compute_dtype(x)
    losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dweight_dtype = wide if fp32_dweight else x.dtype
    dweight = torch.empty(weight.shape if need_dweight else 0, dtype=dweight_dtype, device=x.device)
    return losses, dx, dweight


@triton.jit
def _scale_kernel(x_ptr, scale_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = to_compute(tl.load(x_ptr + i, mask=i < n, other=0.0)) * tl.load(scale_ptr)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), mask=i < n)


def _scale(x, scale, out):
    _scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, scale, out, x.numel(), BLOCK=1024)


@torch.library.custom_op("nanocria::scaled", mutates_args=())
def _scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x · scale for contiguous x, rounded once to dtype. PyTorch is a third as fast if the dtypes differ."""
    out = _scaled_fake(x, scale, dtype)
    _scale(x, scale, out)
    return out


@torch.library.custom_op("nanocria::scale_", mutates_args=("x",))
def _scale_(x: torch.Tensor, scale: torch.Tensor) -> None:
    """x *= scale, in place."""
    _scale(x, scale, x)


@_scaled.register_fake
def _scaled_fake(x, scale, dtype):
    return torch.empty(x.shape, dtype=dtype, device=x.device)


class _WholeLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        losses, dlogits = _whole_loss(x, weight, targets)
        divisor = n_valid(targets)
        ctx.save_for_backward(x, weight, dlogits, divisor)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward()
        x, weight, dlogits, divisor = ctx.saved_tensors
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        scale = dloss / divisor
        dx = _scaled(dlogits @ weight, scale, x.dtype) if need_dx else None
        dweight = dlogits.T @ _scaled(x.contiguous(), scale, x.dtype) if need_dweight else None
        return dx, dweight, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, chunk_tokens, fp32_dweight, overwrite_x):
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        over_x = overwrite_x and need_dx and x.is_contiguous()
        one = torch.ones((), dtype=compute_dtype(x), device=x.device)
        divisor = n_valid(targets)
        # dW in the weight's dtype is rounded at each chunk anyway: the mean's 1/n goes in from the start.
        scale = one if fp32_dweight else 1 / divisor.to(one.dtype)
        if over_x:
            losses, _, dweight = _outputs(x, weight, False, need_dweight, fp32_dweight)
            dx = x.detach()
            _fill_chunks(x, weight, targets, chunk_tokens, scale, losses, dx, dweight)
        else:
            needed = chunk_tokens, need_dx, need_dweight, fp32_dweight
            losses, dx, dweight = _chunked_loss(x, weight, targets, *needed, scale)
        ctx.save_for_backward(dx, dweight, divisor if fp32_dweight else one)
        ctx.weight_dtype = weight.dtype
        ctx.dx_in_place = over_x or not fp32_dweight
        ctx.dweight_in_place = not fp32_dweight
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx, dloss):
        refuse_double_backward()
        dx, dweight, divisor = ctx.saved_tensors
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        scale = dloss / divisor
        dx = _scaled_gradient(dx, scale, dx.dtype, ctx.dx_in_place) if need_dx else None
        dweight = _scaled_gradient(dweight, scale, ctx.weight_dtype, ctx.dweight_in_place) if need_dweight else None
        return dx, dweight, None, None, None, None


def _scaled_gradient(gradient, scale, dtype, in_place):
    if not in_place:
        return _scaled(gradient, scale, dtype)
    _scale_(gradient, scale)  # autograd sees the change and refuses a second backward
    return gradient


def default_chunk_tokens(vocab_size: int, itemsize: int) -> int:
    """How many tokens' logits fit into LOGITS_BYTES, a multiple of 256."""
    return max(LOGITS_BYTES // (vocab_size * itemsize) // 256 * 256, 256)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_tokens: int | None = None,
    fp32_dweight: bool = True,
    overwrite_x: bool = False,
) -> torch.Tensor:
    """cross_entropy(x @ weight.T, targets) with the logits held one chunk of tokens at a time (Hsu et al., 2024).

    x (N, C) and weight (V, C) of one floating dtype, targets (N,) integers in [0, V) or -100 (ignored).
    chunk_tokens: how many tokens' logits exist at once; None: as many as LOGITS_BYTES hold.
    Returns an fp32 scalar (fp64 for fp64): 0 with zero gradients if every target is ignored, NaN if one lies outside
    [0, V). The logits are rounded to x's dtype; softmax and loss are fp32, and dW is summed in fp32 over the chunks and
    rounded once. Gradients are computed only for what requires them. ValueError under autocast.

    fp32_dweight=False saves the last GiB: dW is summed in the dtype of the weight, rounded at each chunk (with four
    chunks its error is 1.6 times that of one rounding) and divided by the mean's n from the start, and backward scales
    both gradients in place, once only. Not in fp16, which cannot hold such sums. overwrite_x: with several chunks (in
    fp16 always), x is overwritten by its gradient, chunk by chunk: only if nothing reads x afterwards and backward runs
    once. Without Triton plain PyTorch runs, and above PLAIN_LOGITS logits in chunks of as many.
    """
    refuse_autocast(x)
    assert x.ndim == 2 and weight.shape == (weight.shape[0], x.shape[1]), (x.shape, weight.shape)
    assert x.dtype == weight.dtype and targets.shape == x.shape[:1], (x.dtype, weight.dtype, targets.shape)
    assert not targets.is_floating_point(), targets.dtype
    targets = targets.long().contiguous()
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(weight.shape[0], x.element_size())
    assert chunk_tokens >= 1, chunk_tokens
    assert fp32_dweight or x.dtype != torch.float16, "float16 cannot hold the sum of dW over the chunks"
    if not use_triton(x):
        if x.shape[0] * weight.shape[0] > PLAIN_LOGITS:
            return _plain_chunks(x, weight, targets)
        return linear_cross_entropy_reference(x, weight, targets)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if x.shape[0] <= chunk_tokens and x.dtype != torch.float16:
            return _WholeLoss.apply(x, weight, targets)
        overwrite_x = overwrite_x and not torch.compiler.is_compiling()
        return _ChunkedLoss.apply(x, weight, targets, chunk_tokens, fp32_dweight, overwrite_x)
    one = torch.ones((), dtype=compute_dtype(x), device=x.device)
    losses, _, _ = _chunked_loss(x, weight, targets, chunk_tokens, False, False, fp32_dweight, one)
    return losses.sum() / n_valid(targets)
