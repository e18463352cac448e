"""AdamW with bfloat16 parameters that are the upper halves of float32 master weights.

    g = scale · grad      m = β₁ m + (1 − β₁) g      v = β₂ v + (1 − β₂) g²
    w = w − lr · (λ w + (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε))        parameter = w, rounded

A step moves a weight by about lr, often less than half a bf16 ulp of the weight: a bf16 weight would not move at all.
So w, m and v are fp32, and the parameter that the matmuls read is w rounded at the end of each step. Forward then casts
nothing, gradients arrive in bf16, and a step reads and writes each number once.

A bf16 is the upper half of a float32, so w need not be stored whole beside it. With the bits read as integers,

    w = 65,536 · parameter + low        −32,768 ≤ low < 32,768

where low is an int16, negative if the parameter was rounded up (to nearest, ties away from zero). This keeps all of w
in 4 bytes per parameter instead of 6, without losing a bit. Only for a NaN is the upper half not computed but set to a
NaN's: rounding could carry it into a number.

Bytes for n parameters in bf16: 26n (read parameter, low, m, v: 12; grad: 2; write all but grad: 12).
On one H200, where a copy of as many bytes is 100%: a step 97-99%.

What changes from step to step arrives in one fp32 tensor, step_scalars: the gradients' scale (NaN or inf: change
nothing), the learning rate, 1 / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ). So a captured CUDA graph replays with new values, and a
clipping factor computed on the GPU need not go through the CPU.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. https://arxiv.org/abs/1711.05101
"""

import math

import torch

from .c_library import update_in_c
from .launch import tl, triton, use_triton


def merge_halves(parameter: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """w in fp32 from its halves: parameter bf16, low int16."""
    return parameter.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low).view(torch.float32)


def split_halves(w: torch.Tensor, parameter: torch.Tensor, low: torch.Tensor) -> None:
    """Writes the halves of w: parameter = w rounded to bf16, low the rest."""
    bits = w.view(torch.int32)
    high = bits.add(0x8000).bitwise_right_shift_(16).masked_fill_(w.isnan(), 0x7FFF)
    parameter.view(torch.int16).copy_(high)
    low.copy_(bits - high.bitwise_left_shift_(16))


def read_master(parameter, w):
    """w as floating-point numbers: joined from its halves, or as it is."""
    return merge_halves(parameter, w) if w.dtype == torch.int16 else w


def write_master(whole, parameter, w):
    """The new w: into both halves, or, as it is w already, rounded to the parameter."""
    if w.dtype == torch.int16:
        split_halves(whole, parameter, w)
    elif parameter is not w:
        parameter.copy_(w)


def adamw_reference(parameter, grad, w, m, v, step_scalars, beta1, beta2, eps, weight_decay):
    whole = read_master(parameter, w)
    scale, lr, m_correction, sqrt_v_correction = step_scalars.unbind()
    g = grad.to(m.dtype) * scale
    new_m = m.lerp(g, 1 - beta1)
    new_v = v.lerp(g * g, 1 - beta2)
    step = new_m * m_correction / (new_v.sqrt() * sqrt_v_correction + eps) + weight_decay * whole
    for old, new in ((m, new_m), (v, new_v), (whole, whole - lr * step)):
        old.copy_(torch.where(torch.isfinite(scale), new, old))
    write_master(whole, parameter, w)


@triton.jit
def load_master(parameter_ptr, w_ptr, i, mask, HALVES: tl.constexpr):
    """w in fp32: joined from its halves, both int16, or loaded as it is."""
    if HALVES:
        high = tl.load(parameter_ptr + i, mask=mask, other=0).to(tl.int32)
        low = tl.load(w_ptr + i, mask=mask, other=0).to(tl.int32)
        return ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        return tl.load(w_ptr + i, mask=mask, other=0.0)


@triton.jit
def store_master(w, parameter_ptr, w_ptr, i, mask, HALVES: tl.constexpr, APART: tl.constexpr):
    """Stores w as load_master reads it; if the parameter is a tensor APART from w, also that, rounded."""
    if HALVES:
        bits = w.to(tl.int32, bitcast=True)
        high = tl.where(w == w, (bits + 0x8000) >> 16, 0x7FFF)
        tl.store(parameter_ptr + i, high.to(tl.int16), mask=mask)
        tl.store(w_ptr + i, (bits - (high << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(w_ptr + i, w, mask=mask)
    if APART:
        tl.store(parameter_ptr + i, w.to(parameter_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    parameter_ptr, grad_ptr, w_ptr, m_ptr, v_ptr, step_scalars_ptr, n,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
    HALVES: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale = tl.load(step_scalars_ptr)
    lr = tl.load(step_scalars_ptr + 1)
    m_correction = tl.load(step_scalars_ptr + 2)
    sqrt_v_correction = tl.load(step_scalars_ptr + 3)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(tl.abs(scale) < float("inf"), n, 0)  # NaN is not less either
    g = tl.load(grad_ptr + i, mask=mask, other=0.0).to(tl.float32) * scale
    m = tl.load(m_ptr + i, mask=mask, other=0.0)
    v = tl.load(v_ptr + i, mask=mask, other=0.0)
    w = load_master(parameter_ptr, w_ptr, i, mask, HALVES)
    m += (g - m) * (1 - BETA1)
    v += (g * g - v) * (1 - BETA2)
    w -= lr * (m * m_correction / (tl.sqrt(v) * sqrt_v_correction + EPS) + WEIGHT_DECAY * w)
    tl.store(m_ptr + i, m, mask=mask)
    tl.store(v_ptr + i, v, mask=mask)
    store_master(w, parameter_ptr, w_ptr, i, mask, HALVES, APART)


def must_fit(shape, dtype: torch.dtype | None, *tensors: torch.Tensor) -> None:
    """Asserts that the tensors are contiguous and have this shape and dtype (None: any)."""
    for x in tensors:
        fits = x.shape == shape and x.dtype == (dtype or x.dtype) and x.is_contiguous()
        assert fits, (x.dtype, x.shape, x.stride(), dtype, shape)


def master_format(parameter: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """The parameter and the constants that load_master and store_master take for these two. Asserts that they fit."""
    halves = w.dtype == torch.int16 and parameter.dtype == torch.bfloat16
    must_fit(parameter.shape, None, parameter)
    must_fit(parameter.shape, torch.int16 if halves else torch.float32, w)
    apart = not halves and parameter.data_ptr() != w.data_ptr()
    return parameter.view(torch.int16) if halves else parameter, {"HALVES": halves, "APART": apart}


@torch.no_grad()
def adamw(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    w: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step_scalars: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW in place, on one parameter (Loshchilov and Hutter, 2019).

    parameter and grad: one shape, any floating dtypes. m and v: fp32 of that shape. w: the fp32 master weights, which
    may be parameter itself; or, if parameter is bf16, their lower halves, int16. All contiguous. step_scalars: fp32
    (4,), as above; if its scale is not finite, nothing changes.
    """
    bits, master = master_format(parameter, w)
    must_fit(parameter.shape, None, grad)
    must_fit(parameter.shape, torch.float32, m, v)
    must_fit((4,), torch.float32, step_scalars)
    if not use_triton(parameter):
        return adamw_reference(parameter, grad, w, m, v, step_scalars, beta1, beta2, eps, weight_decay)
    n = parameter.numel()
    block = 1024  # best of 512..4096 x 4..8 warps on H200, by 2%
    _adamw_kernel[(triton.cdiv(n, block),)](
        bits, grad, w, m, v, step_scalars, n,
        BETA1=beta1, BETA2=beta2, EPS=eps, WEIGHT_DECAY=weight_decay, **master, BLOCK=block, num_warps=4,
    )  # fmt: skip


@torch.no_grad()
def adamw_on_cpu(parameter, grad, w, m, v, scale, lr, t, beta1, beta2, eps, weight_decay):
    """The same step on the CPU with all threads, by adamw.c: one pass over the five tensors.

    Tensors as for adamw, on the CPU, w always fp32; parameter may be grad itself, which is read before it is written.
    t: the number of this update, from 1. The caller skips updates whose scale is not finite.
    """
    must_fit(parameter.shape, None, parameter, grad)
    must_fit(parameter.shape, torch.float32, w, m, v)
    scalars = scale, lr, 1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t), 1 - beta1, 1 - beta2, eps, weight_decay
    update_in_c("adamw", parameter, grad, (w, m, v), scalars)
