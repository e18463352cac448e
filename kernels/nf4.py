"""NF4: four bits per weight, with 8-bit scales, bit for bit as in bitsandbytes ("double quantisation").

    block of 64 weights      absmax = max |w|      code = the nearest of 16 values to w · (1 / absmax)
    all absmax               offset = their mean   absmax − offset in 8 bits, blocks of 256 (dynamic_map.py)
    read back                scale = map[scale_code] · scale_absmax + offset      w ≈ values[code] · scale

The 16 values lie at the quantiles of a normal distribution, closer together where there are more weights. Even
elements of the flat weight are in the high half of a byte. The scale is rounded twice, after the product and after the
sum. A block of zeros stays zero. One NaN makes the whole weight NaN, through the mean.

Bytes for n bf16 weights: 0.516n held (4 bits; 8 for each 64; 32 for each 16,384). Quantising moves 2.6n (read weight,
write codes and fp32 absmax; the 8-bit scales are negligible), reading back 2.516n (read codes, scales, write w). On one
H200, where a copy of as many bytes is 100%: forward 81-90%.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023. https://arxiv.org/abs/2305.14314
"""

import functools
from typing import NamedTuple

import torch

from .dynamic_map import BLOCK as SCALE_BLOCK
from .dynamic_map import bounds, dequantize_blocks_reference, dynamic_map, quantize_blocks_reference
from .launch import magnitude, tl, triton, use_triton

BLOCK = 64  # weights that share a scale
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
CHUNK = 2**22  # weights that the reference quantises at a time: its temporaries stay smaller than a large weight


class NF4(NamedTuple):
    """A weight (..., C) of n elements. The parts may be viewed in other shapes; codes gives the weight's."""

    codes: torch.Tensor  # uint8 (..., C / 2), two per byte
    scale_codes: torch.Tensor  # uint8 (n / 64,)
    scale_absmax: torch.Tensor  # fp32 (n / 16384, rounded up,)
    offset: torch.Tensor  # fp32 ()


def values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)  # whatever the default dtype is


def _quantize_codes_reference(weight):
    values = values_on(weight.device)
    codes = []
    absmax = []
    for chunk in weight.reshape(-1).split(CHUNK):
        blocks = chunk.float().view(-1, BLOCK)
        absmax.append(blocks.abs().amax(dim=1))
        nearest = torch.bucketize(blocks * (1 / absmax[-1].clamp(min=1.2e-38))[:, None], bounds(values), out_int32=True)
        codes.append((nearest[:, 0::2] << 4 | nearest[:, 1::2]).to(torch.uint8))
    return torch.cat(codes).view(*weight.shape[:-1], -1), torch.cat(absmax)


def quantize_nf4_reference(weight):
    return _with_scales(*_quantize_codes_reference(weight))


def dequantize_nf4_reference(weight, out=None):
    scale = dequantize_blocks_reference(weight.scale_codes.view(-1), weight.scale_absmax, signed=True) + weight.offset
    halves = torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1).view(-1, BLOCK).int()
    w = values_on(scale.device)[halves] * scale[:, None]
    out = _empty_weight(weight.codes) if out is None else out
    out.copy_(w.view(out.shape))
    return out


def _with_scales(codes, absmax):
    offset = absmax.mean()
    return NF4(codes, *quantize_blocks_reference(absmax - offset, signed=True), offset)


def _empty_weight(codes):
    return torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=torch.bfloat16, device=codes.device)


@functools.cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 16 values, the 15 bounds between them, the map of the scales."""
    return values_on(device), bounds(values_on(device)), dynamic_map(True, device)


@triton.jit
def _quantize_nf4_kernel(weight_ptr, codes_ptr, absmax_ptr, bounds_ptr, n_blocks, BLOCKS: tl.constexpr):
    """One program, BLOCKS blocks."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < n_blocks
    i = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(weight_ptr + i, mask=mask[:, None], other=0.0).to(tl.float32)
    absmax = tl.max(magnitude(x), axis=1).to(tl.float32, bitcast=True)
    x *= tl.div_rn(1.0, tl.maximum(absmax, 1.2e-38))[:, None]
    code = tl.zeros([BLOCKS, 64], dtype=tl.int32)
    for bound in tl.static_range(15):
        code += (x > tl.load(bounds_ptr + bound)).to(tl.int32)
    even, odd = tl.split(tl.reshape(code, (BLOCKS, 32, 2)))
    bytes_at = codes_ptr + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(bytes_at, (even << 4 | odd).to(tl.uint8), mask=mask[:, None])
    tl.store(absmax_ptr + block, absmax, mask=mask)


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


def _quantize_codes(weight):
    if not use_triton(weight):
        return _quantize_codes_reference(weight)
    codes = torch.empty(*weight.shape[:-1], weight.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(weight.numel() // BLOCK, dtype=torch.float32, device=weight.device)
    blocks = 32
    _quantize_nf4_kernel[(triton.cdiv(len(absmax), blocks),)](
        weight, codes, absmax, tables(weight.device)[1], len(absmax), BLOCKS=blocks, num_warps=4
    )
    return codes, absmax


@torch.no_grad()
def quantize_nf4(weight: torch.Tensor) -> NF4:
    """weight in NF4 with 8-bit scales (Dettmers et al., 2023): 0.516 bytes per element.

    weight (..., C): bf16, fp16 or fp32, contiguous, a multiple of 64 elements, C even.
    """
    assert weight.numel() > 0 and weight.numel() % BLOCK == 0 and weight.shape[-1] % 2 == 0, weight.shape
    assert weight.is_contiguous(), weight.stride()
    return _with_scales(*_quantize_codes(weight))


# Opaque: torch.compile lacks enable_fp_fusion. A product in fp64 would not help: LLVM narrows it, then fuses.
@torch.library.custom_op("nanocria::dequantize_nf4", mutates_args=("out",))
def _dequantize(
    codes: torch.Tensor, scale_codes: torch.Tensor, scale_absmax: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
) -> None:
    if not use_triton(codes):
        dequantize_nf4_reference(NF4(codes, scale_codes, scale_absmax, offset), out)
        return
    values, _, scale_map = tables(codes.device)
    blocks = 64
    _dequantize_nf4_kernel[(triton.cdiv(scale_codes.numel(), blocks),)](
        codes, scale_codes, scale_absmax, offset, values, scale_map, out, scale_codes.numel(),
        SCALE_BLOCK=SCALE_BLOCK, BLOCKS=blocks, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def dequantize_nf4(weight: NF4, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight (..., C) = values[code] · scale, rounded once (Dettmers et al., 2023).

    out: where to write it, any floating dtype, contiguous; None: a new bf16 tensor. Returns out. Runs under
    torch.compile and in a captured CUDA graph.
    """
    codes, scale_codes, scale_absmax, offset = weight
    out = _empty_weight(codes) if out is None else out
    n_blocks = out.numel() // BLOCK
    n_scales = -(-n_blocks // SCALE_BLOCK)
    assert out.numel() == 2 * codes.numel() and scale_codes.numel() == n_blocks, (out.shape, codes.shape, n_blocks)
    assert scale_absmax.numel() == n_scales and offset.numel() == 1, (scale_absmax.shape, n_scales, offset.shape)
    assert all(x.is_contiguous() for x in (out, codes, scale_codes, scale_absmax))
    _dequantize(codes, scale_codes, scale_absmax, offset, out)
    return out
