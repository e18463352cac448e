"""RMSNorm, with the residual addition before it and the projection after it, keeping one tensor for backward.

    forward    s = x + residual        n = rms_norm(s) · w        y = n Wᵀ
    backward   dn = dy W        ds, dw, n = norm backward (rms_norm.py)        dW = dyᵀ n        dx = dresidual = ds

Apart, the norm keeps s and the projection keeps n, which is s again, scaled. Here n is not kept: the norm's backward
kernel holds it in registers anyway and writes it out for dW. That costs one write of N·C elements (0.1% of a step of
Llama 3.2 1B) and saves 2·N·C bytes for each projection that reads a norm.

Saved: s, w, W, and one fp32 rstd a row. FLOPs: the projection's 2·N·C·O forward and 4·N·C·O backward.
"""

import torch

from .fp8_linear import check_fp8, check_projection, input_gradient, project, project_reference
from .launch import as_rows, refuse_autocast, use_triton
from .rms_norm import check_norm, rms_norm_backward, rms_norm_forward, rms_norm_reference


def rms_norm_linear_reference(x, residual, norm_weight, weight, eps=1e-5, fp8=False):
    total = x if residual is None else x + residual
    return project_reference(rms_norm_reference(total, norm_weight, eps), weight, fp8), total


class _RMSNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm_weight, weight, eps, fp8):
        normed, total, rstd = rms_norm_forward(x, residual, norm_weight, eps)
        ctx.save_for_backward(total, norm_weight, rstd, weight)
        ctx.fp8 = fp8
        y = project(normed, weight, fp8)
        return (y,) if residual is None else (y, total)

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        total, norm_weight, rstd, weight = ctx.saved_tensors
        need_dx, need_dresidual, need_dnorm, need_dweight = ctx.needs_input_grad[:4]
        dx, dnorm, normed = rms_norm_backward(
            input_gradient(dy, weight, ctx.fp8), dtotal, total, norm_weight, rstd,
            need_dx or need_dresidual, need_dnorm, need_y=need_dweight, overwrite_dy=True,
        )  # fmt: skip
        dweight = as_rows(dy).T @ as_rows(normed) if need_dweight else None
        return dx if need_dx else None, dx if need_dresidual else None, dnorm, dweight, None, None


def rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) @ weight.T, x + residual), the normed tensor not kept for backward.

    x and residual (..., C) of one dtype and any strides, or residual None for x alone; norm_weight (C,) of any dtype,
    weight (O, C) of x's. Returns (..., O) and (..., C) in x's dtype. fp8: the projection is an fp8_linear, and asks the
    same of its inputs. ValueError on shapes or dtypes and under autocast.
    """
    refuse_autocast(x)
    check_norm(x, residual, norm_weight)
    check_projection("weight", weight, x.shape[-1], x.dtype)
    if fp8:
        check_fp8(x, weight)
    if not use_triton(x):
        return rms_norm_linear_reference(x, residual, norm_weight, weight, eps, fp8)
    if residual is None:
        return *_RMSNormLinear.apply(x, None, norm_weight, weight, eps, fp8), x
    return _RMSNormLinear.apply(x, residual, norm_weight, weight, eps, fp8)
