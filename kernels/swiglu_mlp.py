"""The MLP half of a block as one function: residual addition, RMSNorm, gated MLP, keeping one or two tensors.

    forward    s = x + residual     n = rms_norm(s) · w     g = n Wᵀ (N, 2F)     h = swiglu(g)     y = h Vᵀ
    backward   dh = dy V            dg, h = swiglu backward (glu.py)             dV = dyᵀ h
               dn = dg W            ds, dw, n = norm backward (rms_norm.py)      dW = dgᵀ n     dx = dresidual = ds

Operation by operation, autograd keeps s, n, g and h: 2C + 3F elements a token. Each of n and h is what a backward
kernel computes on its way, so both are written out there when the weight gradients want them, and not kept. g is most
of what is left, and with keep_gate_up=False it is computed again from s, for two thirds of the MLP's forward FLOPs:

                                  kept for a token              price                              (Llama 3.2 1B, bf16)
    keep_gate_up=True             C + 2F elements (36 KiB)      a write of F + C elements          0.5% of a step
    keep_gate_up=False            C elements (4 KiB)            a matmul of 4·N·C·F FLOPs          an eighth of a step

Saved besides: the weights and one fp32 rstd a row. Shapes: s, n (N, C), W (2F, C) with gate before up, V (C, F).

Recomputing makes less survive forward, but backward is as wide as before: it holds g, dg, dh and h, 6F elements a
token. With chunks > 1 the rows pass through the MLP in that many slices, forward and backward, and all of these exist
for one slice at a time. The slices' dW and dV are added up in fp32 and rounded once.
"""

from functools import partial
from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from .fp8_linear import check_fp8, check_projection, input_gradient, project, project_reference
from .glu import glu_backward, glu_forward, swiglu_reference
from .launch import accumulate, as_rows, compute_dtype, refuse_autocast, use_triton
from .rms_norm import check_norm, rms_norm_backward, rms_norm_forward, rms_norm_reference


def swiglu_mlp_reference(
    x, residual, norm_weight, gate_up_weight, down_weight, eps=1e-5, keep_gate_up=True, need_y=True, chunks=1,
    fp8=False,
):  # fmt: skip
    def mlp(total):
        normed = rms_norm_reference(total, norm_weight, eps)
        hidden = swiglu_reference(project_reference(normed, gate_up_weight, fp8))
        return project_reference(hidden, down_weight, fp8)

    total = x if residual is None else x + residual
    if keep_gate_up:
        return mlp(total), total
    again = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=False)
    if chunks == 1:
        return again(total), total
    rows = as_rows(total)
    y = torch.cat([again(rows[some]) for some in slices(len(rows), chunks)])
    return y.unflatten(0, total.shape[:-1]).clone(), total  # FSDP warns of a view


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm_weight, gate_up_weight, down_weight, eps, keep_gate_up, need_y, chunks, fp8):
        normed, total, rstd = rms_norm_forward(x, residual, norm_weight, eps, need_y=keep_gate_up or need_y)
        shape, gate_up = (*x.shape[:-1], down_weight.shape[0]), None
        if keep_gate_up:
            gate_up = project(normed, gate_up_weight, fp8)
        if not need_y:
            y = x.new_empty(()).expand(shape)
        elif keep_gate_up:
            y = project(glu_forward(gate_up, "silu"), down_weight, fp8)
        else:
            y, normed = x.new_empty(shape), as_rows(normed)
            y_rows = as_rows(y)
            for rows in slices(len(y_rows), chunks):
                hidden = glu_forward(project(normed[rows], gate_up_weight, fp8), "silu")
                project(hidden, down_weight, fp8, out=y_rows[rows])
        ctx.save_for_backward(total, norm_weight, rstd, gate_up_weight, down_weight, gate_up)
        ctx.eps, ctx.chunks, ctx.fp8 = eps, chunks, fp8
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        if ctx.chunks > 1:
            return _backward_in_chunks(ctx, dy, dtotal)
        total, norm_weight, rstd, gate_up_weight, down_weight, gate_up = ctx.saved_tensors
        need_dx, need_dresidual, need_dnorm, need_dgate_up, need_ddown = ctx.needs_input_grad[:5]
        if gate_up is None:
            gate_up = project(rms_norm_forward(total, None, norm_weight, ctx.eps)[0], gate_up_weight, ctx.fp8)
        dhidden = input_gradient(dy, down_weight, ctx.fp8)
        dgate_up, hidden = glu_backward(dhidden, gate_up, "silu", need_y=need_ddown)
        del dhidden
        del gate_up  # where it was computed again: a kept one lives until backward returns
        ddown = as_rows(dy).T @ as_rows(hidden) if need_ddown else None
        del hidden
        dx, dnorm, normed = rms_norm_backward(
            input_gradient(dgate_up, gate_up_weight, ctx.fp8), dtotal, total, norm_weight, rstd,
            need_dx or need_dresidual, need_dnorm, need_y=need_dgate_up, overwrite_dy=True,
        )  # fmt: skip
        dweight = as_rows(dgate_up).T @ as_rows(normed) if need_dgate_up else None
        return dx if need_dx else None, dx if need_dresidual else None, dnorm, dweight, ddown, *[None] * 5


def slices(n_rows: int, chunks: int) -> list[slice]:
    """The rows in `chunks` slices, as equal as can be; some may be empty, since the compiler unrolls a fixed number."""
    bounds = [n_rows * i // chunks for i in range(chunks + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _backward_in_chunks(ctx, dy, dtotal):
    total, norm_weight, rstd, gate_up_weight, down_weight, _ = ctx.saved_tensors
    need_dx, need_dresidual, need_dnorm, need_dgate_up, need_ddown = ctx.needs_input_grad[:5]
    total_rows, dy_rows = as_rows(total), as_rows(dy)
    wide = compute_dtype(total)
    dweight, ddown = (
        torch.empty(weight.shape, dtype=wide, device=weight.device) if needed else None
        for weight, needed in ((gate_up_weight, need_dgate_up), (down_weight, need_ddown))
    )
    dnormed = torch.empty_like(total)
    for rows in slices(len(total_rows), ctx.chunks):
        normed = rms_norm_forward(total_rows[rows], None, norm_weight, ctx.eps)[0]
        gate_up = project(normed, gate_up_weight, ctx.fp8)
        dhidden = input_gradient(dy_rows[rows], down_weight, ctx.fp8)
        dgate_up, hidden = glu_backward(dhidden, gate_up, "silu", need_y=need_ddown)
        del gate_up, dhidden
        if need_ddown:
            accumulate(ddown, dy_rows[rows].T, hidden, first=rows.start == 0)
        del hidden
        if need_dgate_up:
            accumulate(dweight, dgate_up.T, normed, first=rows.start == 0)
        input_gradient(dgate_up, gate_up_weight, ctx.fp8, out=as_rows(dnormed)[rows])
        del dgate_up, normed
    dx, dnorm, _ = rms_norm_backward(
        dnormed, dtotal, total, norm_weight, rstd, need_dx or need_dresidual, need_dnorm, overwrite_dy=True
    )
    dweight, ddown = (x if x is None else x.to(total.dtype) for x in (dweight, ddown))
    return dx if need_dx else None, dx if need_dresidual else None, dnorm, dweight, ddown, *[None] * 5


def swiglu_mlp(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float = 1e-5,
    keep_gate_up: bool = True,
    need_y: bool = True,
    chunks: int = 1,
    fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(swiglu(rms_norm(x + residual) @ gate_up_weight.T) @ down_weight.T, x + residual) (Shazeer, 2020).

    x and residual (..., C) of one dtype and any strides, or residual None for x alone; norm_weight (C,) of any dtype,
    gate_up_weight (2F, C) and down_weight (O, F) of x's. Returns (..., O) and (..., C) in x's dtype. keep_gate_up:
    whether the (..., 2F) projection is kept for backward or computed again. need_y=False leaves the first result
    without memory, for a checkpoint that runs forward again: backward does not need it. chunks: in how many slices the
    rows pass through the MLP; more than one with keep_gate_up=False only. fp8: the projections are fp8_linears,
    and ask the same of their inputs. ValueError on shapes or dtypes and under autocast.
    """
    refuse_autocast(x)
    check_norm(x, residual, norm_weight)
    check_projection("gate_up_weight", gate_up_weight, x.shape[-1], x.dtype)
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gate_up_weight has {gate_up_weight.shape[0]} rows: gate above up make an even number")
    check_projection("down_weight", down_weight, gate_up_weight.shape[0] // 2, x.dtype)
    if chunks < 1 or (chunks > 1 and keep_gate_up):
        raise ValueError(f"chunks is {chunks}: at least 1, and 1 where gate_up is kept whole")
    options = norm_weight, gate_up_weight, down_weight, eps, keep_gate_up, need_y, chunks
    if fp8:
        check_fp8(x, gate_up_weight, down_weight)
    return (_SwiGLUMLP.apply if use_triton(x) else swiglu_mlp_reference)(x, residual, *options, fp8)
