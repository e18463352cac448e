"""AdamW whose moments take one byte each, in blocks of 256 (dynamic_map.py).

    m, v = map[codes] · absmax of their block
    m = β₁ m + (1 − β₁) g      v = β₂ v + (1 − β₂) g²      w = w − lr · (λ w + m̂ / (√v̂ + ε))      as in adamw.py
    codes, absmax of m, v = quantized again, after w has moved by the exact ones

So the state of a bf16 parameter is the lower half of its w and two codes, 4.03 bytes instead of 10 (adamw.py explains
the halves and the step scalars). Only absmax stays in fp32 between steps, and one kernel does it all: a program holds
whole blocks, so it finds their new absmax in its registers.

A v above 0 never gets the code of 0, but at least the next one. The paper rounds to nearest: a v of 10⁻⁷ of its block's
largest becomes 0, its m survives, and the next small gradient moves w by m̂ / ε. On a noisy quadratic whose curvatures
span four decades, that is thousands of lr in a single step; here it stays below 3 (Li et al., Memory Efficient
Optimizers with 4-bit States, 2023, remove zero from the map for the same reason). A v that is too large only makes a
step too short.

Every operation up to the codes is rounded as PyTorch rounds it (no fused multiply-add, 1 / absmax to nearest), so the
kernel, adamw8bit.c and the reference produce the same codes bit for bit.

Bytes for n parameters in bf16: 14n (read parameter, low, m, v: 6; grad: 2; write all but grad: 6), plus 16 per block.
That is 0.54 of adamw's 26n. On one H200, where a copy of as many bytes is 100%: a step 59-61%.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. https://arxiv.org/abs/2110.02861
"""

import math

import torch

from .adamw import load_master, master_format, must_fit, read_master, store_master, write_master
from .c_library import update_in_c
from .dynamic_map import (
    ABSMAX_BLOCK,
    dequantize_blocks,
    dequantize_blocks_reference,
    quantization_tables,
    quantize_blocks,
    quantize_blocks_reference,
)
from .launch import tl, triton, use_triton


def adamw8bit_reference(
    parameter, grad, w, m, v, m_absmax, v_absmax, step_scalars, beta1, beta2, eps, weight_decay
):  # fmt: skip
    whole = read_master(parameter, w)
    scale, lr, m_correction, sqrt_v_correction = step_scalars.unbind()
    g = grad.float() * scale
    exact_m = dequantize_blocks_reference(m, m_absmax, signed=True)
    exact_v = dequantize_blocks_reference(v, v_absmax, signed=False)
    exact_m += (g - exact_m) * (1 - beta1)
    exact_v += (g * g - exact_v) * (1 - beta2)
    step = exact_m * m_correction / (exact_v.sqrt() * sqrt_v_correction + eps) + weight_decay * whole
    new_m, new_m_absmax = quantize_blocks_reference(exact_m, signed=True)
    new_v, new_v_absmax = quantize_blocks_reference(exact_v, signed=False)
    new_v = torch.maximum(new_v, exact_v > 0)
    before = m, v, m_absmax, v_absmax, whole
    after = new_m, new_v, new_m_absmax, new_v_absmax, whole - lr * step
    for old, new in zip(before, after, strict=True):
        old.copy_(torch.where(torch.isfinite(scale), new.view(old.shape), old))
    write_master(whole, parameter, w)


@triton.jit
def _adamw8bit_kernel(
    parameter_ptr, grad_ptr, w_ptr, m_ptr, v_ptr, m_absmax_ptr, v_absmax_ptr, step_scalars_ptr,
    m_map_ptr, m_table_ptr, v_map_ptr, v_table_ptr, n,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
    HALVES: tl.constexpr, APART: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program, BLOCKS blocks."""
    scale = tl.load(step_scalars_ptr)
    lr = tl.load(step_scalars_ptr + 1)
    m_correction = tl.load(step_scalars_ptr + 2)
    sqrt_v_correction = tl.load(step_scalars_ptr + 3)
    end = tl.where(tl.abs(scale) < float("inf"), n, 0)  # NaN is not less either
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = i < end
    block_mask = block * BLOCK < end
    g = tl.load(grad_ptr + i, mask=mask, other=0.0).to(tl.float32) * scale
    # Beyond the end m and v are 0: they must not be the largest of the last block.
    m_codes = tl.load(m_ptr + i, mask=mask, other=ZERO)
    v_codes = tl.load(v_ptr + i, mask=mask, other=0)
    m = dequantize_blocks(m_codes, tl.load(m_absmax_ptr + block, mask=block_mask, other=0.0), m_map_ptr)
    v = dequantize_blocks(v_codes, tl.load(v_absmax_ptr + block, mask=block_mask, other=0.0), v_map_ptr)
    w = load_master(parameter_ptr, w_ptr, i, mask, HALVES)
    m += (g - m) * (1 - BETA1)
    v += (g * g - v) * (1 - BETA2)
    w -= lr * (m * m_correction / (tl.sqrt(v) * sqrt_v_correction + EPS) + WEIGHT_DECAY * w)
    m_codes, m_absmax = quantize_blocks(m, m_table_ptr)
    v_codes, v_absmax = quantize_blocks(v, v_table_ptr)
    v_codes = tl.maximum(v_codes, (v > 0).to(tl.int32))
    tl.store(m_ptr + i, m_codes.to(tl.uint8), mask=mask)
    tl.store(v_ptr + i, v_codes.to(tl.uint8), mask=mask)
    tl.store(m_absmax_ptr + block, m_absmax, mask=block_mask)
    tl.store(v_absmax_ptr + block, v_absmax, mask=block_mask)
    store_master(w, parameter_ptr, w_ptr, i, mask, HALVES, APART)


def _must_fit(shape, grad, m, v, m_absmax, v_absmax):
    must_fit(shape, None, grad)
    must_fit(shape, torch.uint8, m, v)
    must_fit((-(-grad.numel() // ABSMAX_BLOCK),), torch.float32, m_absmax.view(-1), v_absmax.view(-1))


@torch.no_grad()
def adamw8bit(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    w: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    m_absmax: torch.Tensor,
    v_absmax: torch.Tensor,
    step_scalars: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One step of 8-bit AdamW in place, on one parameter (Dettmers et al., 2021).

    parameter, grad and w: as for adamw; w is fp32, or, if parameter is bf16, may be its lower halves, int16. m and v:
    the moments' codes, uint8 of parameter's shape. m_absmax and v_absmax: fp32, one for each 256 elements in memory
    order; the last block may be shorter. All zero before the first step. step_scalars: fp32 (4,), as in
    adamw.py; if its scale is not finite, nothing changes.
    """
    bits, master = master_format(parameter, w)
    tensors = grad, w, m, v, m_absmax, v_absmax
    _must_fit(parameter.shape, grad, m, v, m_absmax, v_absmax)
    must_fit((4,), torch.float32, step_scalars)
    if not use_triton(parameter):
        return adamw8bit_reference(parameter, *tensors, step_scalars, beta1, beta2, eps, weight_decay)
    blocks = 4  # one warp each: 8 elements per thread, 16 bytes at a time
    tables = *quantization_tables(True, parameter.device), *quantization_tables(False, parameter.device)
    _adamw8bit_kernel[(triton.cdiv(m_absmax.numel(), blocks),)](
        bits, *tensors, step_scalars, *tables, parameter.numel(),
        BETA1=beta1, BETA2=beta2, EPS=eps, WEIGHT_DECAY=weight_decay, **master, BLOCK=ABSMAX_BLOCK, BLOCKS=blocks,
        ZERO=127,  # m's code of 0, after 127 negative values
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@torch.no_grad()
def adamw8bit_on_cpu(
    parameter, grad, w, m, v, m_absmax, v_absmax, scale, lr, t, beta1, beta2, eps, weight_decay
):  # fmt: skip
    """The same step on the CPU with all threads, by adamw8bit.c, in one pass.

    Tensors as for adamw8bit, on the CPU, w always fp32; parameter may be grad itself, which is read before it is
    written. t: the number of this update, from 1. The caller skips updates whose scale is not finite.
    """
    must_fit(parameter.shape, None, parameter)
    must_fit(parameter.shape, torch.float32, w)
    _must_fit(parameter.shape, grad, m, v, m_absmax, v_absmax)
    tables = *quantization_tables(True, w.device), *quantization_tables(False, w.device)
    scalars = scale, lr, 1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t), 1 - beta1, 1 - beta2, eps, weight_decay
    update_in_c("adamw8bit", parameter, grad, (w, m, v, m_absmax, v_absmax, *tables), scalars)
