"""Eight bits per number: blocks of 256 values, divided by their largest magnitude, each coded as the nearest of 256.

    absmax = max |x| of the block        code = the index of the map's value nearest to x / absmax
    x ≈ map[code] · absmax

The map has seven decades, each with twice as many values as the one below it. Decade i of 0..6 holds the midpoints of
linspace(0.1, 1, 2^i + 1), times 10^(i − 6), and their negatives; an unsigned map holds twice as many. With 0 and 1 that
makes 256: 1.4% of the largest apart at the top (unsigned 0.7%), and still two values below a millionth of it.

How code is found without a search: bounds lie between neighboring values of the map, and the upper 16 bits of a
float32 cut the number line into cells of 0.4 to 0.8%, none of which holds two bounds. A table entry has the code at its
cell's start in the upper half; its lower half, added to the lower 16 bits of a number beyond the bound, carries into
the upper one:

    code = (table[upper half of x / absmax] + lower half of x / absmax) >> 16

One load and a few integer operations, no branch, and exact. A binary search of the map would load eight times.

Bytes for n fp32 values: quantizing moves 5n (read 4, write 1), plus 4 per block.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. https://arxiv.org/abs/2110.02861
"""

import functools

import torch

from .launch import magnitude, tl, triton

ABSMAX_BLOCK = 256  # values that share an absmax
SMALLEST = 2.0**-126  # fp32's smallest normal number: a block whose absmax is below it is all 0
FIRST_CELL = (127 - 23) << 7  # the upper half of 2^-23; smaller numbers are nearest to 0
LAST_CELL = (127 << 7) - FIRST_CELL  # that of 1, counted from FIRST_CELL


def dynamic_map(signed: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """The 256 values in ascending order, fp32: from −0.993 to 1 if signed, else from 0 to 1."""
    parts = [torch.tensor([0.0, 1.0], device="cpu")]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1, dtype=torch.float32, device="cpu")
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        parts += [middles, -middles] if signed else [middles]
    return torch.cat(parts).sort().values.to(device)


def bounds(values: torch.Tensor) -> torch.Tensor:
    """The midpoints between neighbors of a sorted map: above bounds[i], values[i + 1] is nearer; on it, values[i]."""
    return (values[:-1] + values[1:]) / 2


def quantize_blocks_reference(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of x, uint8 of its shape, and the absmax of each 256 elements, fp32; the last block may be short.

    A NaN or an infinity makes absmax NaN or infinite, and nothing of its block is finite when read back.
    """
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % ABSMAX_BLOCK)).view(-1, ABSMAX_BLOCK)
    absmax = blocks.abs().amax(dim=1)
    inverse = torch.where(absmax >= SMALLEST, 1 / absmax, 0.0)
    codes = torch.bucketize(blocks * inverse[:, None], bounds(dynamic_map(signed, x.device)), out_int32=True)
    return codes.view(-1)[: x.numel()].view(x.shape).to(torch.uint8), absmax


def dequantize_blocks_reference(codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> torch.Tensor:
    """The values of the codes, fp32, in their shape."""
    scale = absmax.repeat_interleave(ABSMAX_BLOCK)[: codes.numel()].view(codes.shape)
    return dynamic_map(signed, codes.device)[codes.int()] * scale


@functools.cache
def quantization_tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(the map, fp32 (256,); the table that finds codes, int32 (cells,): positive cells, then negative ones)."""
    values = dynamic_map(signed)
    starts = (torch.arange(LAST_CELL + 1, dtype=torch.int32) + FIRST_CELL) << 16
    starts[0] = 0  # the first cell reaches down to 0
    halves = []
    for sign in (0, -(2**31)):
        # The lower half of a negative number is inverted, so that it grows with the number, as a positive one's does
        first = (starts | sign).view(torch.float32)
        last = (starts | 0xFFFF | sign).view(torch.float32)
        if sign:
            first, last = last, first
        code = torch.bucketize(first, bounds(values), out_int32=True)
        bound = bounds(values)[code.clamp(max=254)].view(torch.int32)
        crossed = torch.bucketize(last, bounds(values), out_int32=True) > code
        low = (bound ^ 0xFFFF if sign else bound) & 0xFFFF
        halves.append((code << 16) + torch.where(crossed, 0xFFFF - low, 0))
    return values.to(device), torch.cat(halves).to(device)


@triton.jit
def dequantize_blocks(codes, absmax, map_ptr):
    """The values of codes (BLOCKS, 256), given absmax (BLOCKS,)."""
    return tl.load(map_ptr + codes.to(tl.int32)) * absmax[:, None]


# The constants above, written out: a kernel cannot read Python's globals.
@triton.jit
def quantize_blocks(
    x, table_ptr,
    SMALLEST: tl.constexpr = 2.0**-126, FIRST: tl.constexpr = (127 - 23) << 7, LAST: tl.constexpr = 23 << 7,
):  # fmt: skip
    """The codes of x (BLOCKS, 256), int32, and absmax (BLOCKS,)."""
    absmax = tl.max(magnitude(x), axis=1).to(tl.float32, bitcast=True)
    inverse = tl.where(absmax >= SMALLEST, tl.div_rn(1.0, absmax), 0.0)
    bits = (x * inverse[:, None]).to(tl.int32, bitcast=True)
    cell = tl.minimum(tl.maximum(((bits >> 16) & 0x7FFF) - FIRST, 0), LAST)  # a NaN needs a cell, too
    entry = tl.load(table_ptr + tl.where(bits < 0, cell + LAST + 1, cell))
    return (entry + ((bits ^ (bits >> 31)) & 0xFFFF)) >> 16, absmax
