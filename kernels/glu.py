"""Gated linear units, the elementwise half of the MLP: y = act(gate) · up, gate and up packed side by side.

    silu       act(g) = g·σ(g)                        act'(g) = σ(g)·(1 + g·(1 − σ(g)))              (SwiGLU)
    gelu_tanh  act(g) = g·σ(2u), u = √(2/π)·(g + 0.044715·g³): almost g·Φ(g)                         (GeGLU)
    backward   d_gate = dy · up · act'(gate)          d_up = dy · act(gate)

Backward needs only gate_up; act(gate) is recomputed, so the product is never saved for its own sake.
Bytes for N rows of F 2-byte elements: forward 6NF (read gate, up, write y), backward 10NF (read gate, up, dy,
write both gradients). Gate and up stay where one packed projection wrote them: no chunk, no copy, no cat in backward.
Before a float8 projection y is written as float8: 1NF less, and it saves the 3NF of fp8_linear.py's own rounding. After
one, backward also writes its result as float8: 2NF more, and it saves 6NF there.
On one H200, where a copy of as many bytes is 100%: swiglu forward 101-102%, backward 100-101%; geglu forward 101-103%,
backward 101%.

Shazeer, GLU Variants Improve Transformer, 2020. https://arxiv.org/abs/2002.05202
"""

import torch
import torch.nn.functional as F

from .fp8_linear import empty_rows, float8_scale, store_float8
from .launch import contiguous_rows, magnitude, refuse_double_backward, tl, to_compute, triton, use_triton, whole_row

GLU_BLOCK = 1024  # elements of F per program; with 4 warps within 1% of the best of 512..4096 x 2..8 on H200


def glu_reference(gate_up, activation="silu"):
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up.dtype)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """act(gate) and act'(gate). The compiler drops whichever the caller does not use."""
    if ACTIVATION == "silu":
        sigma = tl.sigmoid(gate)
        slope = sigma * (1 + gate * (1 - sigma))
    else:
        # (1 + tanh u) / 2 = σ(2u): no tanh needed, and nothing cancels where tanh u nears −1
        two_u = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
        sigma = tl.sigmoid(two_u)
        slope = sigma + gate * sigma * (1 - sigma) * 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    return gate * sigma, slope


@triton.jit
def _row_and_column(n_cols, SPAN: tl.constexpr):
    """The row, and the first of the columns, that this program handles: programs that run together share rows, which is
    3% faster than sharing columns.
    """
    programs = tl.cdiv(n_cols, SPAN)
    row = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * SPAN
    return row, first


@triton.jit
def _glu_fwd_kernel(
    x_ptr, y_ptr, scales_ptr, n_cols, ACTIVATION: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr
):
    row, first = _row_and_column(n_cols, BLOCK)
    cols = first + tl.arange(0, BLOCK)
    mask = cols < n_cols
    gate_ptrs = x_ptr + row * (2 * n_cols) + cols
    gate = to_compute(tl.load(gate_ptrs, mask=mask, other=0.0))
    up = to_compute(tl.load(gate_ptrs + n_cols, mask=mask, other=0.0))
    activated, _ = _activate(gate, ACTIVATION)
    y = (activated * up).to(x_ptr.dtype.element_ty)
    if FLOAT8:  # rounds y again, from the dtype it is otherwise stored in; one program has the whole row
        store_float8(y.to(tl.float32), y_ptr + row * n_cols, scales_ptr + row, cols, mask)
    else:
        tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


@triton.jit
def _glu_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, y_ptr, factors_ptr, dx8_ptr, scales_ptr, n_cols,
    ACTIVATION: tl.constexpr, NEED_Y: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A program handles SPAN columns, BLOCK at a time: one block, or the row for float8, whose scale is per row."""
    row, first = _row_and_column(n_cols, SPAN)
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, SPAN, BLOCK):
        cols = first + i + tl.arange(0, BLOCK)
        mask = cols < n_cols
        offsets = row * (2 * n_cols) + cols
        gate = to_compute(tl.load(x_ptr + offsets, mask=mask, other=0.0))
        up = to_compute(tl.load(x_ptr + offsets + n_cols, mask=mask, other=0.0))
        dy = to_compute(tl.load(dy_ptr + row * n_cols + cols, mask=mask, other=0.0))
        activated, slope = _activate(gate, ACTIVATION)
        dgate = (dy * up * slope).to(dx_ptr.dtype.element_ty)
        dup = (dy * activated).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offsets, dgate, mask=mask)
        tl.store(dx_ptr + offsets + n_cols, dup, mask=mask)
        if NEED_Y:
            tl.store(y_ptr + row * n_cols + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)
        if FLOAT8:
            dgate = dgate.to(tl.float32) * tl.load(factors_ptr + cols, mask=mask, other=0.0)
            dup = dup.to(tl.float32) * tl.load(factors_ptr + n_cols + cols, mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.maximum(magnitude(dgate), magnitude(dup)))
    if FLOAT8:  # dx is read again, from the cache: a row of it in registers would leave room for few rows at once
        scale = float8_scale(tl.max(largest, axis=0))
        tl.store(scales_ptr + row, scale)
        tl.debug_barrier()
        for i in range(0, 2 * SPAN, BLOCK):
            cols = i + tl.arange(0, BLOCK)
            mask = cols < 2 * n_cols
            offsets = row * (2 * n_cols) + cols
            dx = tl.load(dx_ptr + offsets, mask=mask).to(tl.float32) * tl.load(factors_ptr + cols, mask=mask)
            tl.store(dx8_ptr + offsets, (dx / scale).to(dx8_ptr.dtype.element_ty), mask=mask)


def _sizes(n_cols, max_block=GLU_BLOCK):
    block = min(max_block, triton.next_power_of_2(n_cols))
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


def glu_forward(gate_up, activation, float8=False):
    """Returns y, or with float8 (y8, scales) as fp8_linear.py's quantize would compute them."""
    n_cols = gate_up.shape[-1] // 2
    y, scales = empty_rows((*gate_up.shape[:-1], n_cols), gate_up, float8)
    rows = contiguous_rows(gate_up)
    sizes = whole_row(n_cols) if float8 else _sizes(n_cols)
    _glu_fwd_kernel[(rows.shape[0] * triton.cdiv(n_cols, sizes["BLOCK"]),)](
        rows, y, scales if float8 else y, n_cols, ACTIVATION=activation, FLOAT8=float8, **sizes
    )
    return (y, scales) if float8 else y


def glu_backward(dy, gate_up, activation, need_y=False, factors=None, overwrite=False):
    """Returns the gradient of gate_up, and y again if need_y: the kernel has it in registers anyway and writes it over
    dy, or a contiguous copy of it. overwrite: the gradient is written over gate_up, which must be contiguous.

    The last result is what fp8_linear.py's quantize would make of the gradient and factors (2F,), if given.
    """
    refuse_double_backward()
    n_cols = dy.shape[-1]
    float8 = factors is not None
    rows = contiguous_rows(gate_up)
    dy = dy.contiguous()
    dx = gate_up if overwrite else torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    dx8 = empty_rows(gate_up.shape, gate_up, float8) if float8 else None
    sizes = _sizes(n_cols, 2 * GLU_BLOCK if float8 else GLU_BLOCK)
    span = sizes["BLOCK"] * (triton.cdiv(n_cols, sizes["BLOCK"]) if float8 else 1)
    _glu_bwd_kernel[(rows.shape[0] * triton.cdiv(n_cols, span),)](
        dy, rows, dx, dy, *((factors, *dx8) if float8 else (dx, dx, dx)),
        n_cols, ACTIVATION=activation, NEED_Y=need_y, FLOAT8=float8, SPAN=span, **sizes,
    )  # fmt: skip
    return dx, dy if need_y else None, dx8


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, activation):
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return glu_forward(gate_up, activation)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        return glu_backward(dy, gate_up, ctx.activation)[0], None


def glu(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) · up for gate_up (..., 2F) = [gate, up] (Shazeer, 2020).

    activation: 'silu' or 'gelu_tanh'. Returns (..., F) in gate_up's dtype, computed in fp32 (fp64 for fp64) and rounded
    once.
    """
    assert gate_up.shape[-1] % 2 == 0 and activation in ("silu", "gelu_tanh"), (gate_up.shape, activation)
    return _GLU.apply(gate_up, activation) if use_triton(gate_up) else glu_reference(gate_up, activation)
