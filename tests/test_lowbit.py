"""Numbers in eight bits (the map of AdamW's moments) and in four (NF4): the kernels against their references.

NF4's codes, scales and what is read back are also compared bit for bit with recorded ones of bitsandbytes.
"""

import hashlib

import pytest
import torch
import triton
import triton.language as tl

from kernels import dequantize_nf4, quantize_nf4, reference
from kernels.dynamic_map import (
    ABSMAX_BLOCK,
    bounds,
    dequantize_blocks_reference,
    dynamic_map,
    quantization_tables,
    quantize_blocks,
    quantize_blocks_reference,
)
from test_kernels import BF16, DEVICE, FP32, HAS_GPU, assert_same, full_size

UINT8 = torch.uint8
each_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


# ----------------------------------------------------------------------------------------------------------------------
# Eight bits: the dynamic map


@each_sign
def test_dynamic_map_has_256_values_in_seven_decades(signed):
    values = dynamic_map(signed)
    assert len(values.unique()) == 256 and (values.diff() > 0).all() and values[-1] == 1
    first = 1 if signed else 2  # values in the lowest decade, twice as many in each above it
    expected = [10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / (first << i)) for i in range(7) for k in range(first << i)]
    torch.testing.assert_close(values[values > 0][:-1].double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    assert values[127 if signed else 0] == 0 and (not signed or torch.equal(values[:127], -values[128:255].flip(0)))


@triton.jit
def _codes_kernel(x_ptr, table_ptr, codes_ptr, absmax_ptr, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    codes, absmax = quantize_blocks(tl.load(x_ptr + i), table_ptr)
    tl.store(codes_ptr + i, codes)
    tl.store(absmax_ptr + block, absmax)


def quantize_by_kernel(x, signed):
    x = x.view(-1, ABSMAX_BLOCK)
    codes = torch.full(x.shape, -1, dtype=torch.int32, device=DEVICE)
    absmax = x.new_empty(len(x))
    table = quantization_tables(signed, x.device)[1]
    _codes_kernel[(triton.cdiv(len(x), 4),)](x, table, codes, absmax, BLOCKS=4)
    assert codes.min() >= 0 and codes.max() <= 255
    return codes.to(UINT8), absmax


@each_sign
def test_the_code_table_matches_a_search_at_every_bound(signed):
    """A block whose absmax is 1 is divided by 1: numbers next to a bound, or on it, stay there."""
    edges = bounds(dynamic_map(signed)).view(torch.int32)
    x = torch.cat([(edges + ulps).view(FP32) for ulps in range(-2, 3)])
    x = torch.cat([x, torch.rand(4000) ** 12, torch.tensor([0.0, -0.0, 1e-45, 1e-30])])
    x = torch.cat([x, -x]) if signed else x.abs()
    blocks = -(-len(x) // (4 * (ABSMAX_BLOCK - 1))) * 4
    x = torch.nn.functional.pad(x, (0, blocks * (ABSMAX_BLOCK - 1) - len(x))).view(blocks, ABSMAX_BLOCK - 1)
    x = torch.cat([torch.ones(blocks, 1), x], dim=1).to(DEVICE)
    codes, absmax = quantize_by_kernel(x, signed)
    expected = torch.bucketize(x, bounds(dynamic_map(signed, DEVICE)), out_int32=True).to(UINT8)
    assert (absmax == 1).all() and torch.equal(codes, expected), f"{(codes != expected).sum()} codes differ"
    assert_same(quantize_blocks_reference(x, signed), (expected, absmax), "reference")


@each_sign
def test_nan_inf_zeros_and_denormals_stay_in_their_block(signed):
    x = torch.randn(8, ABSMAX_BLOCK, device=DEVICE).abs()
    x[0, 3] = float("nan")
    x[1, 5] = float("inf")
    x[2] = 0.0
    x[3] = 1e-42
    x[4] = 3e38
    by_kernel = quantize_by_kernel(x, signed)
    by_reference = quantize_blocks_reference(x, signed)
    for quantized in (by_kernel, by_reference):
        back = dequantize_blocks_reference(*quantized, signed)
        assert back[0].isnan().all() and not back[1].isfinite().any()
        assert (back[2] == 0).all() and back[3].abs().max() <= 1e-42
        torch.testing.assert_close(back[4:], x[4:], rtol=0.05, atol=0.01)
    assert_same([x[2:] for x in by_kernel], [x[2:] for x in by_reference], "kernel and reference")


# ----------------------------------------------------------------------------------------------------------------------
# Four bits: NF4


def digest(x):
    return hashlib.sha256(x.cpu().reshape(-1).view(UINT8).numpy().tobytes()).hexdigest()[:16]


def patterned_weight(n, dtype):
    """Uses no random generator, and the sum of absmax is exact in any order: the same on every machine."""
    i = torch.arange(n, device=DEVICE)
    return (((i * 7919) % 1009 - 504) * (1 + (i // 64) * 11 % 37) / 65536).to(dtype)


# From bitsandbytes 0.50.2 on a CPU: quantize_4bit(weight, compress_statistics=True, quant_type="nf4"), dequantize_4bit
SMALL_CODES = (
    "0ec8521fda7410ec9531fdb7420eda631feb8521fda7310ec9521fdb7420ed9631feb8520fda6310ec9521fdb7420ed9"
    "631feb8420fda6310ec9521fdb7410ec9631feb8420eda6310ec8521fdb7410ec9631feb8420eda6310ec8521fdb7410"
    "ec9631feb8420eda6310ec8521fda7410ec9531fdb7420eda6310ec8521fda74"
)
DIGESTS = {  # of codes, scale_codes, scale_absmax, offset and what is read back, for 32,768 weights
    BF16: ["f2f3c5dc4f247796", "377650f5436dd07e", "0379910df3ea4e9b", "20db5ff93ec2f8c1", "7d98504f2f6e32d4"],
    FP32: ["ecde248929b320e4", "914752270b3601d8", "c3a0f69103fb6c6a", "94389299fc8b7353", "2cd33299ab16a267"],
}
each_dequantize = pytest.mark.parametrize(
    "dequantize", [dequantize_nf4, reference.dequantize_nf4], ids=["kernel", "reference"]
)


@each_dequantize
def test_nf4_has_the_bits_of_bitsandbytes(dequantize, monkeypatch):
    monkeypatch.setattr("kernels.nf4.QUANTIZED_AT_ONCE", 64 * 300)
    small = quantize_nf4(patterned_weight(256, BF16).view(2, 128))
    assert bytes(small.codes.view(-1).tolist()).hex() == SMALL_CODES
    assert small.codes.shape == (2, 64) and small.scale_codes.tolist() == [1, 47, 206, 255]
    assert small.scale_absmax.tolist() == [float.fromhex("0x1.069p-3")]
    assert small.offset.item() == float.fromhex("0x1.117p-3")
    for dtype, expected in DIGESTS.items():
        weight = quantize_nf4(patterned_weight(2**15, dtype).view(8, -1))
        # The interpreter truncates to bf16 instead of rounding: there the exact product is compared, rounded here
        back = dequantize(weight, torch.empty(8, 4096, dtype=FP32, device=DEVICE)).to(dtype)
        assert [digest(x) for x in (*weight, back)] == expected, dtype


@pytest.mark.parametrize("shape", [(64,), (37, 192), (2, 32, 66), (8, 4096)], ids=str)
def test_nf4_is_read_back_as_by_the_reference_bit_for_bit(shape):
    weight = quantize_nf4((0.02 * torch.randn(shape, device=DEVICE)).to(BF16))
    outs = [torch.empty(shape, dtype=FP32, device=DEVICE) for _ in range(2)]
    assert_same([dequantize_nf4(weight, outs[0])], [reference.dequantize_nf4(weight, outs[1])], "what is read back")
    back = dequantize_nf4(weight)
    assert back.dtype == BF16 and back.shape == shape
    # On a GPU its bits are those of the rounded value; the interpreter truncates.
    torch.testing.assert_close(back.float(), outs[1].to(BF16).float(), rtol=0 if HAS_GPU else 2**-7, atol=0)


@each_dequantize
def test_nf4_keeps_zeros_and_shows_a_nan(dequantize):
    weight = 0.02 * torch.randn(8, 128, device=DEVICE)
    weight[2] = 0
    weight[3, :64] = 1e-39
    assert (dequantize(quantize_nf4(weight))[2] == 0).all()
    weight[7, 100] = float("nan")
    assert dequantize(quantize_nf4(weight)).isnan().all()


@pytest.mark.parametrize("shape", [(20, 20), (64, 5)], ids=str)
def test_nf4_says_which_weights_it_cannot_hold(shape):
    with pytest.raises(ValueError, match="an even width and a multiple of 64 weights, not"):
        quantize_nf4(torch.ones(shape))


def test_nf4_compiles_into_one_graph():
    weight = quantize_nf4(0.02 * torch.randn(4, 64, device=DEVICE))
    out = torch.empty(4, 64, dtype=BF16, device=DEVICE)
    x = torch.randn(2, 64, device=DEVICE)
    torch.library.opcheck(torch.ops.nanocria.dequantize_nf4.default, (*weight, out))

    def project(x, weight):
        return x @ dequantize_nf4(weight).to(x.dtype).T

    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), project(x, weight))


@full_size
def test_nf4_needs_no_temporary_as_large_as_the_weight():
    weight = torch.randn(8192, 4096, device=DEVICE, dtype=BF16)
    quantize_nf4(weight[:64])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantized = quantize_nf4(weight)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < weight.nbytes, f"{peak / weight.nbytes:.2f} of the weight"
    held = sum(x.nbytes for x in quantized)
    assert abs(held / weight.numel() - 0.516) < 0.001, f"{held / weight.numel():.4f} bytes per element"


@full_size
def test_nf4_past_2_to_the_31_elements():
    weight = torch.ones(2**31 + 64 * 100, dtype=BF16, device=DEVICE)
    weight[-64:] = 3
    back = dequantize_nf4(quantize_nf4(weight), out=weight)
    assert (back[-64:].float() - 3).abs().max() < 0.05 and (back[:64].float() - 1).abs().max() < 0.05
