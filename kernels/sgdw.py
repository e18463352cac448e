"""A step in a given direction with decoupled weight decay, for rules that compute the direction elsewhere.

    w = w − lr · (λ w + factor · direction)        parameter = w, rounded

The parameter, its master in halves and the step scalars are as in adamw.py; only the first two scalars are read.
Bytes for n parameters in bf16: 10n (read parameter, low: 4; Muon's direction, in bf16: 2; write parameter, low: 4), or
12n with the fp32 directions of NorMuon and GaLore.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. https://arxiv.org/abs/1711.05101
"""

import torch

from .adamw import load_master, master_format, must_fit, read_master, store_master, write_master
from .launch import tl, triton, use_triton


def sgdw_reference(parameter, direction, w, step_scalars, factor, weight_decay):
    whole = read_master(parameter, w)
    scale, lr = step_scalars[:2].unbind()
    new = whole - lr * (weight_decay * whole + factor * direction.to(whole.dtype))
    whole.copy_(torch.where(torch.isfinite(scale), new, whole))
    write_master(whole, parameter, w)


@triton.jit
def _sgdw_kernel(
    parameter_ptr, direction_ptr, w_ptr, step_scalars_ptr, n, factor, weight_decay,
    HALVES: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale = tl.load(step_scalars_ptr)
    lr = tl.load(step_scalars_ptr + 1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(tl.abs(scale) < float("inf"), n, 0)  # NaN is not less either
    direction = tl.load(direction_ptr + i, mask=mask, other=0.0).to(tl.float32)
    w = load_master(parameter_ptr, w_ptr, i, mask, HALVES)
    w -= lr * (weight_decay * w + factor * direction)
    store_master(w, parameter_ptr, w_ptr, i, mask, HALVES, APART)


@torch.no_grad()
def sgdw(
    parameter: torch.Tensor,
    direction: torch.Tensor,
    w: torch.Tensor,
    step_scalars: torch.Tensor,
    factor: float,
    weight_decay: float,
) -> None:
    """One step of w along -direction in place, with decoupled weight decay (Loshchilov and Hutter, 2019).

    parameter and direction: one shape, any floating dtypes. w: the fp32 master weights, which may be parameter itself;
    or, if parameter is bf16, their lower halves, int16. All contiguous. step_scalars: fp32, first the scale of the
    gradients (if it is not finite, nothing changes), then the learning rate.
    """
    bits, master = master_format(parameter, w)
    must_fit(parameter.shape, None, direction)
    assert step_scalars.ndim == 1 and len(step_scalars) >= 2 and step_scalars.dtype == torch.float32, step_scalars
    if not use_triton(parameter):
        return sgdw_reference(parameter, direction, w, step_scalars, factor, weight_decay)
    n = parameter.numel()
    block = 1024  # as in adamw.py
    _sgdw_kernel[(triton.cdiv(n, block),)](
        bits, direction, w, step_scalars, n, factor, weight_decay, **master, BLOCK=block, num_warps=4
    )
