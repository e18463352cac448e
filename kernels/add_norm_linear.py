"""RMSNorm, with the residual addition before it and the projection after it, keeping one tensor for backward.

    forward    s = x + delta           n = rms_norm(s) · w        y = n Wᵀ
    backward   dn = dy W        ds, dw, n = norm backward (rms_norm.py)        dW = dyᵀ n        dx = ddelta = ds

As two operations, the norm keeps s and the projection keeps n, which is s again, scaled. Here n is not kept: the norm's
backward kernel holds it in registers anyway and writes it out for dW. That costs one write of N·C elements (0.1% of a
step of Llama 3.2 1B) and saves 2·N·C bytes for each projection that reads a norm.

y = n Wᵀ may be any projection (linear.py): float8, LoRA.

Saved: s, w, W, and one fp32 rstd per row. FLOPs: the projection's 2·N·C·O forward and 4·N·C·O backward.
"""

import torch

from .launch import refuse_autocast, use_triton
from .linear import Linear
from .rms_norm import check_norm, rms_norm_backward, rms_norm_forward, rms_norm_reference


def add_norm_linear_reference(x, delta, norm, projection):
    total = x if delta is None else x + delta
    return projection.reference(rms_norm_reference(total, norm.weight, norm.eps)), total


class _AddNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # as in linear.py
        x, delta, norm_weight, eps, projection, *tensors = inputs
        normed, total, rstd = rms_norm_forward(x, delta, norm_weight, eps, float8=projection.float8_input)
        ctx.save_for_backward(total, norm_weight, rstd, *tensors)
        ctx.projection = projection
        y = projection.project(normed, *tensors)
        return (y,) if delta is None else (y, total)

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        total, norm_weight, rstd, *tensors = ctx.saved_tensors
        _, need_ddelta, need_dnorm, _, _, *needed = ctx.needs_input_grad
        shared = ctx.projection.share(dy, *tensors)
        dx, dnorm, normed = rms_norm_backward(
            ctx.projection.input_gradient(shared, *tensors), dtotal, total, norm_weight, rstd,
            need_dnorm, need_y=any(needed), overwrite_dy=True,
        )  # fmt: skip
        dweights = ctx.projection.weight_gradients(shared, normed, *tensors, needed=needed)
        return dx, dx if need_ddelta else None, dnorm, None, None, *dweights


def add_norm_linear(
    x: torch.Tensor, delta: torch.Tensor | None, norm: torch.nn.Module, projection: Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    """(projection(norm(x + delta)), x + delta), without keeping the normed tensor for backward.

    x and delta (..., C) of one dtype, or delta None for x alone; norm has a weight (C,) of any dtype and eps; the
    projection's weight (O, C) is of x's dtype. Returns (..., O) and (..., C) in x's dtype. ValueError under autocast.
    """
    refuse_autocast(x)
    check_norm(x, delta, norm.weight)
    projection.check("weight", x.shape[-1], x)
    if not use_triton(x):
        return add_norm_linear_reference(x, delta, norm, projection)
    outputs = _AddNormLinear.apply(x, delta, norm.weight, norm.eps, projection, *projection.tensors())
    return (*outputs, x) if delta is None else outputs
