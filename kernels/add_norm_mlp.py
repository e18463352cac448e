"""The MLP half of a block as one function: residual addition, RMSNorm, gated MLP, keeping one or two tensors.

    forward    s = x + delta        n = rms_norm(s) · w     g = n Wᵀ (N, 2F)     h = act(gate) · up     y = h Vᵀ
    backward   dh = dy V            dg, h = backward of glu.py                   dV = dyᵀ h
               dn = dg W            ds, dw, n = backward of rms_norm.py          dW = dgᵀ n     dx = ddelta = ds

As separate operations, autograd would keep s, n, g and h: 2C + 3F elements per token. Backward kernels compute n and h
on their way, so they are written out there if the weight gradients need them, and not kept. g is most of the rest; with
save_gate_up=False it is recomputed from s, for two thirds of the MLP's forward FLOPs:

                                  kept per token                price                              (Llama 3.2 1B, bf16)
    save_gate_up=True             C + 2F elements (36 KiB)      a write of F + C elements          0.5% of a step
    save_gate_up=False            C elements (4 KiB)            a matmul of 4·N·C·F FLOPs          an eighth of a step

Also saved: the weights and one fp32 rstd per row. Shapes: s, n (N, C), W (2F, C) with gate before up, V (C, F).

Backward writes dg over g and h over dh, element by element: it holds 3F elements per token, not 6F. With chunks > 1 the
rows pass through forward and backward in that many chunks, and all of these exist for one chunk at a time. The chunks'
dW and dV are summed in fp32 and rounded once.

g = n Wᵀ and y = h Vᵀ may be any two projections (linear.py): float8, LoRA.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from .glu import glu_backward, glu_forward, glu_reference
from .launch import as_rows, compute_dtype, refuse_autocast, saved_is_ours, use_triton
from .linear import Linear, new_sums
from .recompute import chunks_of
from .rms_norm import check_norm, rms_norm_backward, rms_norm_forward, rms_norm_reference

ALIGNED = 4  # rows: cuBLAS needs a float8 matrix's scales, one fp32 per row, to begin at a multiple of 16 bytes


def add_norm_mlp_reference(
    x, delta, norm, gate_up_proj, down_proj, activation="silu", save_gate_up=True, skip_down_proj=False, chunks=1
):
    def mlp(total):
        normed = rms_norm_reference(total, norm.weight, norm.eps)
        return down_proj.reference(glu_reference(gate_up_proj.reference(normed), activation))

    total = x if delta is None else x + delta
    if save_gate_up:
        return mlp(total), total
    again = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=False)
    if chunks == 1:
        return again(total), total
    rows = as_rows(total)
    y = torch.cat([again(rows[chunk]) for chunk in chunks_of(len(rows), chunks)])
    return y.view(*total.shape[:-1], y.shape[1]).clone(), total  # FSDP warns about a view


class _AddNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # as in linear.py
        x, delta, norm_weight, eps, projections, activation, save_gate_up, skip_down_proj, chunks, *tensors = inputs
        gate_up_proj, down_proj = projections
        n = len(gate_up_proj.tensors())
        of_gate_up = tensors[:n]
        of_down = tensors[n:]
        normed, total, rstd = rms_norm_forward(
            x, delta, norm_weight, eps, need_y=save_gate_up or not skip_down_proj, float8=gate_up_proj.float8_input
        )
        gate_up = gate_up_proj.project(normed, *of_gate_up) if save_gate_up else None

        def hidden(normed_rows):
            projected = gate_up if save_gate_up else gate_up_proj.project(normed_rows, *of_gate_up)
            return glu_forward(projected, activation, down_proj.float8_input)

        shape = (*x.shape[:-1], of_down[0].shape[0])
        if skip_down_proj:
            y = x.new_empty(()).expand(shape)
        elif chunks == 1:
            y = down_proj.project(hidden(normed), *of_down)
        else:
            y = x.new_empty(shape)
            y_rows = as_rows(y)
            for rows in chunks_of(len(y_rows), chunks, ALIGNED):
                down_proj.project(hidden(_take(normed, rows)), *of_down, out=y_rows[rows])
        ctx.save_for_backward(total, norm_weight, rstd, gate_up, *tensors)
        ctx.projections = projections
        ctx.activation = activation
        ctx.eps = eps
        ctx.chunks = chunks
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        gate_up_proj, down_proj = ctx.projections
        total, norm_weight, rstd, saved_gate_up, *tensors = ctx.saved_tensors
        n = len(gate_up_proj.tensors())
        of_gate_up = tensors[:n]
        of_down = tensors[n:]
        _, need_ddelta, need_dnorm, *_ = ctx.needs_input_grad
        needed = ctx.needs_input_grad[-len(tensors) :]
        total_rows = as_rows(total)
        dy_rows = as_rows(dy)
        w8, t = gate_up_proj.round_weight(*of_gate_up)
        overwrite = saved_gate_up is None or saved_is_ours()
        several = ctx.chunks > 1
        if several:
            sums = new_sums(tensors, needed, compute_dtype(total))
            dnormed = torch.empty(total_rows.shape, dtype=total.dtype, device=total.device)
        else:
            sums = [None] * len(tensors)
        for rows in chunks_of(len(total_rows), ctx.chunks, ALIGNED):
            first = rows.start == 0
            gate_up = saved_gate_up
            if gate_up is None:
                float8 = gate_up_proj.float8_input and not several
                normed = rms_norm_forward(total_rows[rows], None, norm_weight, ctx.eps, float8=float8)[0]
                gate_up = gate_up_proj.project(normed, *of_gate_up)
                if not several:
                    del normed  # the norm's backward writes it out for dW
            shared = down_proj.share(dy_rows[rows], *of_down)
            dhidden = down_proj.input_gradient(shared, *of_down)
            dgate_up, hidden, dgate_up8 = glu_backward(
                dhidden, as_rows(gate_up), ctx.activation, any(needed[n:]), t, overwrite
            )
            del dhidden, gate_up
            ddown = down_proj.weight_gradients(shared, hidden, *of_down, needed=needed[n:], sums=sums[n:], first=first)
            del hidden
            shared = gate_up_proj.share(dgate_up, *of_gate_up)
            shared_or_float8 = (*dgate_up8, w8) if dgate_up8 else shared  # input_gradient takes either
            if several:
                gate_up_proj.weight_gradients(
                    shared, normed, *of_gate_up, needed=needed[:n], sums=sums[:n], first=first
                )
                gate_up_proj.input_gradient(shared_or_float8, *of_gate_up, out=dnormed[rows])
                del normed, shared, dgate_up
            else:
                dnormed = gate_up_proj.input_gradient(shared_or_float8, *of_gate_up)
            del dgate_up8, shared_or_float8
        dx, dnorm, normed = rms_norm_backward(
            dnormed.view(total.shape), dtotal, total, norm_weight, rstd, need_dnorm,
            need_y=not several and any(needed[:n]), overwrite_dy=True,
        )  # fmt: skip
        if several:
            dweights = [None if x is None else x.to(total.dtype) for x in sums]
        else:
            dweights = [*gate_up_proj.weight_gradients(shared, normed, *of_gate_up, needed=needed[:n]), *ddown]
        return dx, dx if need_ddelta else None, dnorm, *[None] * 6, *dweights


def _take(x, rows: slice):
    """Rows of x (..., C), or of both tensors that quantize returns."""
    return tuple(as_rows(part)[rows] for part in x) if isinstance(x, tuple) else as_rows(x)[rows]


def add_norm_mlp(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.nn.Module,
    gate_up_proj: Linear,
    down_proj: Linear,
    activation: str = "silu",
    save_gate_up: bool = True,
    skip_down_proj: bool = False,
    chunks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down_proj(act(gate) · up), x + delta), where gate_up_proj(norm(x + delta)) is gate and up (Shazeer, 2020).

    x and delta (..., C) of one dtype, or delta None for x alone; norm has a weight (C,) of any dtype and eps; the
    projections' weights are (2F, C) and (O, F), of x's dtype. activation: 'silu' or 'gelu_tanh'.
    Returns (..., O) and (..., C) in x's dtype. save_gate_up: whether the (..., 2F) projection is kept for backward or
    recomputed. skip_down_proj leaves the first result without memory, for a forward that is rerun for backward, which
    does not read it. chunks: in how many chunks the rows pass through the MLP; more than one only with
    save_gate_up=False. ValueError under autocast.
    """
    refuse_autocast(x)
    check_norm(x, delta, norm.weight)
    gate_up_proj.check("gate_up_weight", x.shape[-1], x)
    n_rows = gate_up_proj.weight.shape[0]
    assert n_rows % 2 == 0, f"gate_up_weight has {n_rows} rows: gate and up need an even number"
    down_proj.check("down_weight", n_rows // 2, x)
    assert chunks == 1 or (chunks > 1 and not save_gate_up), (chunks, save_gate_up)
    options = activation, save_gate_up, skip_down_proj, chunks
    if not use_triton(x):
        return add_norm_mlp_reference(x, delta, norm, gate_up_proj, down_proj, *options)
    tensors = *gate_up_proj.tensors(), *down_proj.tensors()
    return _AddNormMLP.apply(x, delta, norm.weight, norm.eps, (gate_up_proj, down_proj), *options, *tensors)
