"""NF4: four bits per weight, with 8-bit scales, bit for bit as in bitsandbytes ("double quantization").

    block of 64 weights      absmax = max |w|      code = the nearest of 16 values to w · (1 / absmax)
    all absmax               offset = their mean   absmax − offset in 8 bits, blocks of 256 (dynamic_map.py)
    read back                scale = map[scale_code] · scale_absmax + offset      w ≈ values[code] · scale

The 16 values lie at the quantiles of a normal distribution, closer together where there are more weights. Even
elements of the flat weight are in the high half of a byte. The scale is rounded twice, after the product and after the
sum. A block of zeros stays zero. One NaN makes the whole weight NaN, through the mean.

Bytes for n bf16 weights: 0.516n held (4 bits; 8 for each 64; 32 for each 16,384). Reading back moves 2.516n (read
codes, scales, write w). On one H200, where a copy of as many bytes is 100%: forward 81-90%. Weights are quantized once,
when they are loaded: plain PyTorch does that.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023. https://arxiv.org/abs/2305.14314
"""

import functools
from typing import NamedTuple

import torch

from .dynamic_map import (
    ABSMAX_BLOCK,
    bounds,
    dequantize_blocks_reference,
    dynamic_map,
    quantize_blocks_reference,
)
from .launch import tl, triton, use_triton

NF4_BLOCK = 64  # weights that share a scale
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
QUANTIZED_AT_ONCE = 2**20  # weights: the temporaries stay smaller than a large weight


class NF4(NamedTuple):
    """A weight (..., C) of n elements."""

    codes: torch.Tensor  # uint8 (..., C / 2), two per byte
    scale_codes: torch.Tensor  # uint8 (n / 64,)
    scale_absmax: torch.Tensor  # fp32 (n / 16384, rounded up,)
    offset: torch.Tensor  # fp32 ()


def values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)  # whatever the default dtype is


def dequantize_nf4_reference(weight, out=None):
    scale = dequantize_blocks_reference(weight.scale_codes, weight.scale_absmax, signed=True) + weight.offset
    halves = torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1).view(-1, NF4_BLOCK).int()
    w = values_on(scale.device)[halves] * scale[:, None]
    out = _empty_weight(weight.codes) if out is None else out
    out.copy_(w.view(out.shape))
    return out


def _empty_weight(codes):
    return torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=torch.bfloat16, device=codes.device)


@functools.cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 values, and the map of the scales."""
    return values_on(device), dynamic_map(True, device)


@triton.jit
def read_scales(
    scale_codes_ptr, scale_absmax_ptr, offset_ptr, map_ptr, block, mask, SCALE_BLOCK: tl.constexpr
):  # fmt: skip
    """The scales of these blocks in fp32. Must be launched without fusion."""
    code = tl.load(scale_codes_ptr + block, mask=mask, other=0).to(tl.int32)
    absmax = tl.load(scale_absmax_ptr + block // SCALE_BLOCK, mask=mask, other=0.0)
    return tl.load(map_ptr + code) * absmax + tl.load(offset_ptr)


@triton.jit
def read_nf4(
    codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr, block, mask,
    SCALE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The weights (BLOCKS, 64) of these blocks in fp32. Must be launched without fusion."""
    byte = tl.load(codes_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :], mask=mask[:, None], other=0)
    scale = read_scales(scale_codes_ptr, scale_absmax_ptr, offset_ptr, map_ptr, block, mask, SCALE_BLOCK)
    # Looked up by shuffles between the threads of a warp, each of which holds one of the 16 values.
    values = tl.load(values_ptr + tl.arange(0, 16))
    code = tl.reshape(byte, (BLOCKS * 32,)).to(tl.int32)
    pairs = tl.join(tl.gather(values, code >> 4, axis=0), tl.gather(values, code & 15, axis=0))
    return tl.reshape(pairs, (BLOCKS, 64)) * scale[:, None]


@triton.jit
def _dequantize_nf4_kernel(
    codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr, out_ptr, n_blocks,
    SCALE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < n_blocks
    w = read_nf4(
        codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr, block, mask, SCALE_BLOCK, BLOCKS
    )
    out = out_ptr + block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out, w.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@torch.no_grad()
def quantize_nf4(weight: torch.Tensor) -> NF4:
    """weight in NF4 with 8-bit scales (Dettmers et al., 2023): 0.516 bytes per element.

    weight (..., C): bf16, fp16 or fp32, contiguous. ValueError unless C is even and the elements are a multiple of 64.
    """
    if weight.numel() % NF4_BLOCK or weight.shape[-1] % 2:
        raise ValueError(f"NF4 needs an even width and a multiple of 64 weights, not {tuple(weight.shape)}")
    assert weight.numel() > 0, weight.shape
    assert weight.is_contiguous(), weight.stride()
    values = values_on(weight.device)
    codes = []
    absmax = []
    for chunk in weight.view(-1).split(QUANTIZED_AT_ONCE):
        blocks = chunk.float().view(-1, NF4_BLOCK)
        absmax.append(blocks.abs().amax(dim=1))
        nearest = torch.bucketize(blocks * (1 / absmax[-1].clamp(min=1.2e-38))[:, None], bounds(values), out_int32=True)
        codes.append((nearest[:, 0::2] << 4 | nearest[:, 1::2]).to(torch.uint8))
    absmax = torch.cat(absmax)
    offset = absmax.mean()
    scales = quantize_blocks_reference(absmax - offset, signed=True)
    return NF4(torch.cat(codes).view(*weight.shape[:-1], -1), *scales, offset)


# Opaque: torch.compile lacks enable_fp_fusion. A product in fp64 would not help: LLVM narrows it, then fuses.
@torch.library.custom_op("nanocria::dequantize_nf4", mutates_args=("out",))
def _dequantize(
    codes: torch.Tensor, scale_codes: torch.Tensor, scale_absmax: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
) -> None:
    if not use_triton(codes):
        dequantize_nf4_reference(NF4(codes, scale_codes, scale_absmax, offset), out)
        return
    values, scale_map = tables(codes.device)
    blocks = 64
    _dequantize_nf4_kernel[(triton.cdiv(scale_codes.numel(), blocks),)](
        codes, scale_codes, scale_absmax, offset, values, scale_map, out, scale_codes.numel(),
        SCALE_BLOCK=ABSMAX_BLOCK, BLOCKS=blocks, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def dequantize_nf4(weight: NF4, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight (..., C) = values[code] · scale, rounded once (Dettmers et al., 2023).

    out: where to write it, any floating dtype, contiguous; None: a new bf16 tensor. Returns out. Runs under
    torch.compile and in a captured CUDA graph.
    """
    codes, scale_codes, scale_absmax, offset = weight
    out = _empty_weight(codes) if out is None else out
    n_blocks = out.numel() // NF4_BLOCK
    n_scales = -(-n_blocks // ABSMAX_BLOCK)
    assert out.numel() == 2 * codes.numel() and scale_codes.numel() == n_blocks, (out.shape, codes.shape, n_blocks)
    assert scale_absmax.numel() == n_scales and offset.numel() == 1, (scale_absmax.shape, n_scales, offset.shape)
    assert all(x.is_contiguous() for x in (out, codes, scale_codes, scale_absmax))
    _dequantize(codes, scale_codes, scale_absmax, offset, out)
    return out
