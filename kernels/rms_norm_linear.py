"""RMSNorm, with the residual addition before it and the projection after it, keeping one tensor for backward.

    forward    s = x + residual        n = rms_norm(s) · w        y = n Wᵀ
    backward   dn = dy W        ds, dw, n = norm backward (rms_norm.py)        dW = dyᵀ n        dx = dresidual = ds

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


def rms_norm_linear_reference(x, residual, norm_weight, eps, projection):
    total = x if residual is None else x + residual
    return projection.reference(rms_norm_reference(total, norm_weight, eps)), total


class _RMSNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # as in linear.py
        projection, x, residual, norm_weight, eps, *tensors = inputs
        normed, total, rstd = rms_norm_forward(x, residual, norm_weight, eps, float8=projection.float8_input)
        ctx.save_for_backward(total, norm_weight, rstd, *tensors)
        ctx.projection = projection
        y = projection.project(normed, *tensors)
        return (y,) if residual is None else (y, total)

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        total, norm_weight, rstd, *tensors = ctx.saved_tensors
        _, need_dx, need_dresidual, need_dnorm, _, *needed = ctx.needs_input_grad
        dy = ctx.projection.with_shared(dy, *tensors)
        dx, dnorm, normed = rms_norm_backward(
            ctx.projection.input_gradient(dy, *tensors), dtotal, total, norm_weight, rstd,
            need_dx or need_dresidual, need_dnorm, need_y=any(needed), overwrite_dy=True,
        )  # fmt: skip
        dweights = ctx.projection.weight_gradients(dy, normed, *tensors, needed=needed)
        return None, dx if need_dx else None, dx if need_dresidual else None, dnorm, None, *dweights


def rms_norm_linear(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, projection: Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    """(projection(rms_norm(x + residual)), x + residual), without keeping the normed tensor for backward.

    x and residual (..., C) of one dtype and any strides, or residual None for x alone; norm_weight (C,) of any dtype,
    the projection's weight (O, C) of x's. Returns (..., O) and (..., C) in x's dtype. ValueError if shapes or dtypes do
    not fit, for what the projection does not support, and under autocast.
    """
    refuse_autocast(x)
    check_norm(x, residual, norm_weight)
    projection.check("weight", x.shape[-1], x)
    if not use_triton(x):
        return rms_norm_linear_reference(x, residual, norm_weight, eps, projection)
    outputs = _RMSNormLinear.apply(projection, x, residual, norm_weight, eps, *projection.tensors())
    return (*outputs, x) if residual is None else outputs
