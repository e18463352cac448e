"""The sum of the ranks' contributions to a gradient, rounded once.

    out = scale · (own + Σ_r received[r])

Each rank owns a part of every gradient and has pulled the others' shares of it (runtime/copy_engines.py). They are
bfloat16, as computed. Adding them in pairs would round again and again; here they are added in fp32 and rounded once.

Bytes for n elements and P ranks in bf16: 2n (P + 1). Any fixed order of addition will do, since only one rank computes
it.
"""

import torch

from .launch import tl, triton, use_triton


def add_ranks_reference(own, received, scale, out):
    out.copy_((own.float() + received.float().sum(0)) * scale)


@triton.jit
def _add_ranks_kernel(own_ptr, received_ptr, out_ptr, n, scale, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(own_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    for _ in tl.static_range(OTHERS):
        total += tl.load(received_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        received_ptr += n
    tl.store(out_ptr + i, (total * scale).to(out_ptr.dtype.element_ty), mask=i < n)


@torch.no_grad()
def add_ranks(own: torch.Tensor, received: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out (n,) = scale * (own (n,) + the rows of received (ranks - 1, n)), in place.

    Any floating dtypes up to float32, all contiguous. scale: 1 / ranks for their mean.
    """
    assert own.shape == out.shape == received.shape[1:], (own.shape, out.shape, received.shape)
    assert own.is_contiguous() and received.is_contiguous() and out.is_contiguous()
    if not use_triton(own):
        return add_ranks_reference(own, received, scale, out)
    n = out.numel()
    block = 2048
    grid = (triton.cdiv(n, block),)
    _add_ranks_kernel[grid](own, received, out, n, scale, OTHERS=len(received), BLOCK=block, num_warps=8)
