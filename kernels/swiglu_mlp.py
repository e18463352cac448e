"""The MLP half of a block as one function: residual addition, RMSNorm, gated MLP, keeping one or two tensors.

    forward    s = x + residual     n = rms_norm(s) · w     g = n Wᵀ (N, 2F)     h = swiglu(g)     y = h Vᵀ
    backward   dh = dy V            dg, h = swiglu backward (glu.py)             dV = dyᵀ h
               dn = dg W            ds, dw, n = norm backward (rms_norm.py)      dW = dgᵀ n     dx = dresidual = ds

As separate operations, autograd would keep s, n, g and h: 2C + 3F elements per token. Backward kernels compute n and h
on their way, so they are written out there if the weight gradients need them, and not kept. g is most of the rest; with
keep_gate_up=False it is recomputed from s, for two thirds of the MLP's forward FLOPs:

                                  kept per token                price                              (Llama 3.2 1B, bf16)
    keep_gate_up=True             C + 2F elements (36 KiB)      a write of F + C elements          0.5% of a step
    keep_gate_up=False            C elements (4 KiB)            a matmul of 4·N·C·F FLOPs          an eighth of a step

Also saved: the weights and one fp32 rstd per row. Shapes: s, n (N, C), W (2F, C) with gate before up, V (C, F).

Backward writes dg over g and h over dh, element by element: it holds 3F elements per token, not 6F. With chunks > 1 the
rows pass through forward and backward in that many slices, and all of these exist for one slice at a time. The slices'
dW and dV are summed in fp32 and rounded once.

g = n Wᵀ and y = h Vᵀ may be any two projections (linear.py): float8, LoRA.
"""

from functools import partial
from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from .glu import glu_backward, glu_forward, swiglu_reference
from .launch import as_rows, compute_dtype, refuse_autocast, saved_is_ours, use_triton
from .linear import Linear, new_sums
from .rms_norm import check_norm, rms_norm_backward, rms_norm_forward, rms_norm_reference

ALIGNED = 4  # rows: cuBLAS needs a float8 matrix's scales, one fp32 per row, to begin at a multiple of 16 bytes


def swiglu_mlp_reference(
    x, residual, norm_weight, eps, gate_up, down, keep_gate_up=True, need_y=True, chunks=1
):  # fmt: skip
    def mlp(total):
        normed = rms_norm_reference(total, norm_weight, eps)
        return down.reference(swiglu_reference(gate_up.reference(normed)))

    total = x if residual is None else x + residual
    if keep_gate_up:
        return mlp(total), total
    again = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=False)
    if chunks == 1:
        return again(total), total
    rows = as_rows(total)
    y = torch.cat([again(rows[some]) for some in slices(len(rows), chunks)])
    return y.view(*total.shape[:-1], y.shape[1]).clone(), total  # FSDP warns about a view


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # as in linear.py
        projections, x, residual, norm_weight, eps, keep_gate_up, need_y, chunks, *tensors = inputs
        gate_up_proj, down_proj = projections
        n = len(gate_up_proj.tensors())
        of_gate_up, of_down = tensors[:n], tensors[n:]
        normed, total, rstd = rms_norm_forward(
            x, residual, norm_weight, eps, need_y=keep_gate_up or need_y, float8=gate_up_proj.float8_input
        )
        shape, gate_up = (*x.shape[:-1], of_down[0].shape[0]), None
        if keep_gate_up:
            gate_up = gate_up_proj.project(normed, *of_gate_up)
        if not need_y:
            y = x.new_empty(()).expand(shape)
        elif keep_gate_up:
            y = down_proj.project(glu_forward(gate_up, "silu", down_proj.float8_input), *of_down)
        else:
            y = x.new_empty(shape)
            y_rows = as_rows(y)
            for rows in slices(len(y_rows), chunks, ALIGNED):
                hidden = glu_forward(
                    gate_up_proj.project(_take(normed, rows), *of_gate_up), "silu", down_proj.float8_input
                )
                down_proj.project(hidden, *of_down, out=y_rows[rows])
        ctx.save_for_backward(total, norm_weight, rstd, gate_up, *tensors)
        ctx.projections, ctx.n, ctx.eps, ctx.chunks = projections, n, eps, chunks
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        if ctx.chunks > 1:
            return _backward_in_chunks(ctx, dy, dtotal)
        (gate_up_proj, down_proj), n = ctx.projections, ctx.n
        total, norm_weight, rstd, gate_up, *tensors = ctx.saved_tensors
        of_gate_up, of_down = tensors[:n], tensors[n:]
        _, need_dx, need_dresidual, need_dnorm, *_ = ctx.needs_input_grad
        needed = ctx.needs_input_grad[-len(tensors) :]
        ours = gate_up is None or saved_is_ours()
        if gate_up is None:
            gate_up = gate_up_proj.project(
                rms_norm_forward(total, None, norm_weight, ctx.eps, float8=gate_up_proj.float8_input)[0], *of_gate_up
            )
        dy = down_proj.with_shared(dy, *of_down)
        dhidden = down_proj.input_gradient(dy, *of_down)
        w8, t = gate_up_proj.round_weight(*of_gate_up)
        dgate_up, hidden, dgate_up8 = glu_backward(dhidden, gate_up, "silu", any(needed[n:]), t, overwrite=ours)
        del dhidden, gate_up
        ddown = down_proj.weight_gradients(dy, hidden, *of_down, needed=needed[n:])
        del hidden
        dgate_up = gate_up_proj.with_shared(dgate_up, *of_gate_up)
        dgate_up8 = (*dgate_up8, w8) if dgate_up8 else dgate_up
        dx, dnorm, normed = rms_norm_backward(
            gate_up_proj.input_gradient(dgate_up8, *of_gate_up), dtotal, total, norm_weight, rstd,
            need_dx or need_dresidual, need_dnorm, need_y=any(needed[:n]), overwrite_dy=True,
        )  # fmt: skip
        del dgate_up8
        dgate_up = gate_up_proj.weight_gradients(dgate_up, normed, *of_gate_up, needed=needed[:n])
        return None, dx if need_dx else None, dx if need_dresidual else None, dnorm, *[None] * 4, *dgate_up, *ddown


def slices(n_rows: int, chunks: int, multiple: int = 1) -> list[slice]:
    """The rows in `chunks` slices, as equal as possible, each beginning at a multiple of `multiple` rows.

    Some may be empty: the compiler unrolls a fixed number.
    """
    bounds = [n_rows * i // chunks // multiple * multiple for i in range(chunks)]
    return [slice(*pair) for pair in pairwise([*bounds, n_rows])]


def _take(x, rows: slice):
    """Rows of x (..., C), or of both tensors that quantize returns."""
    return tuple(as_rows(part)[rows] for part in x) if isinstance(x, tuple) else as_rows(x)[rows]


def _backward_in_chunks(ctx, dy, dtotal):
    (gate_up_proj, down_proj), n = ctx.projections, ctx.n
    total, norm_weight, rstd, _, *tensors = ctx.saved_tensors
    of_gate_up, of_down = tensors[:n], tensors[n:]
    _, need_dx, need_dresidual, need_dnorm, *_ = ctx.needs_input_grad
    needed = ctx.needs_input_grad[-len(tensors) :]
    total_rows, dy_rows = as_rows(total), as_rows(dy)
    sums = new_sums(tensors, needed, compute_dtype(total))
    dnormed = torch.empty(total.shape, dtype=total.dtype, device=total.device)  # contiguous, which x need not be
    w8, t = gate_up_proj.round_weight(*of_gate_up)
    for rows in slices(len(total_rows), ctx.chunks, ALIGNED):
        first = rows.start == 0
        normed = rms_norm_forward(total_rows[rows], None, norm_weight, ctx.eps)[0]
        gate_up = gate_up_proj.project(normed, *of_gate_up)
        dy = down_proj.with_shared(dy_rows[rows], *of_down)
        dhidden = down_proj.input_gradient(dy, *of_down)
        dgate_up, hidden, dgate_up8 = glu_backward(dhidden, gate_up, "silu", any(needed[n:]), t, overwrite=True)
        del gate_up, dhidden
        down_proj.weight_gradients(dy, hidden, *of_down, needed=needed[n:], sums=sums[n:], first=first)
        del hidden
        dgate_up = gate_up_proj.with_shared(dgate_up, *of_gate_up)
        gate_up_proj.weight_gradients(dgate_up, normed, *of_gate_up, needed=needed[:n], sums=sums[:n], first=first)
        dgate_up8 = (*dgate_up8, w8) if dgate_up8 else dgate_up
        gate_up_proj.input_gradient(dgate_up8, *of_gate_up, out=as_rows(dnormed)[rows])
        del dgate_up, dgate_up8, normed
    dx, dnorm, _ = rms_norm_backward(
        dnormed, dtotal, total, norm_weight, rstd, need_dx or need_dresidual, need_dnorm, overwrite_dy=True
    )
    dweights = [x if x is None else x.to(total.dtype) for x in sums]
    return None, dx if need_dx else None, dx if need_dresidual else None, dnorm, *[None] * 4, *dweights


def swiglu_mlp(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: Linear,
    down: Linear,
    keep_gate_up: bool = True,
    need_y: bool = True,
    chunks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down(swiglu(gate_up(rms_norm(x + residual)))), x + residual) (Shazeer, 2020).

    x and residual (..., C) of one dtype and any strides, or residual None for x alone; norm_weight (C,) of any dtype,
    the projections' weights (2F, C) and (O, F) of x's. Returns (..., O) and (..., C) in x's dtype. keep_gate_up:
    whether the (..., 2F) projection is kept for backward or recomputed. need_y=False leaves the first result without
    memory, for a checkpoint that reruns forward: backward does not need it. chunks: in how many slices the rows pass
    through the MLP; more than one only with keep_gate_up=False. ValueError if shapes or dtypes do not fit, for what a
    projection does not support, and under autocast.
    """
    refuse_autocast(x)
    check_norm(x, residual, norm_weight)
    gate_up.check("gate_up_weight", x.shape[-1], x)
    n_rows = gate_up.weight.shape[0]
    if n_rows % 2:
        raise ValueError(f"gate_up_weight has {n_rows} rows: gate and up need an even number")
    down.check("down_weight", n_rows // 2, x)
    if chunks < 1 or (chunks > 1 and keep_gate_up):
        raise ValueError(f"chunks is {chunks}: must be at least 1, and exactly 1 with keep_gate_up=True")
    if not use_triton(x):
        return swiglu_mlp_reference(x, residual, norm_weight, eps, gate_up, down, keep_gate_up, need_y, chunks)
    return _SwiGLUMLP.apply(
        (gate_up, down), x, residual, norm_weight, eps, keep_gate_up, need_y, chunks,
        *gate_up.tensors(), *down.tensors(),
    )  # fmt: skip
