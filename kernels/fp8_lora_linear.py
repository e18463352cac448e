"""A projection with trained adapters whose frozen weight is multiplied in float8: lora_linear.py with fp8_linear.py.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        the first product as diag(v) (x8 W8ᵀ) diag(t)
    backward    dx = dy W + s (dy B) A        the first product as diag(u) (g8 W8)        dA, dB as in lora_linear.py

A trained weight has a third matmul, its gradient, which must stay in bf16. A frozen one has none: here all large
matmuls are in float8, and those left in bf16 have the adapters' rank as a side. A frozen weight never changes, so it is
rounded once and held as float8: the results are those of a bf16 weight rounded before each matmul. Or it is held as
NF4, and a kernel reads that and writes float8 (for backward transposed), by way of bf16 like everything in NF4.

Bytes for n weights: 1n held, and 2n moved in backward, to transpose it. NF4: 0.516n held, and 1.516n moved before each
matmul. The lookup of values is the limit. The large matmul writes y and dx; adding the adapters' part reads and writes
them once more (add_low_rank.py).
"""

import torch
import torch.nn.functional as F

from .add_low_rank import add_low_rank
from .dynamic_map import ABSMAX_BLOCK
from .fp8_linear import (
    FLOAT8,
    check_fp8,
    float8_scale,
    input_gradient_float8,
    project_float8,
    quantize,
    quantize_reference,
    rounded_reference,
    transpose,
)
from .launch import as_rows, magnitude, tl, triton, use_triton
from .lora_linear import LoRALinear
from .nf4 import NF4_BLOCK, read_nf4, read_scales, tables
from .nf4_lora_linear import NF4LoRALinear


@triton.jit
def _nf4_to_float8_kernel(
    codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr,
    out_ptr, out_row_stride, out_col_stride, scales_ptr, n_rows, n_blocks,
    SCALE_BLOCK: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program handles SPAN blocks of ROWS rows, BLOCKS at a time.

    A block's largest weight is 1 or -1 times its scale, so a row's float8 scale follows from those of its blocks. A row
    of zeros gets a different scale than from quantize, and is zero with either.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < n_rows)[:, None]
    i = tl.arange(0, ALL)
    all_blocks = row[:, None] * n_blocks + i[None, :]
    in_rows = is_row & (i < n_blocks)[None, :]
    largest = read_scales(scale_codes_ptr, scale_absmax_ptr, offset_ptr, map_ptr, all_blocks, in_rows, SCALE_BLOCK)
    largest = tl.where(in_rows, largest, 0.0).to(tl.bfloat16).to(tl.float32)
    scale = float8_scale(tl.max(magnitude(largest), axis=1))
    first = tl.program_id(1) * SPAN
    if first == 0:
        tl.store(scales_ptr + row, scale, mask=row < n_rows)
    for start in range(first, first + SPAN, BLOCKS):
        j = start + tl.arange(0, BLOCKS)
        col = start * 64 + tl.arange(0, BLOCKS * 64)
        block = row[:, None] * n_blocks + j[None, :]
        inside = is_row & (j < n_blocks)[None, :]
        w = read_nf4(
            codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr,
            tl.reshape(block, (ROWS * BLOCKS,)), tl.reshape(inside, (ROWS * BLOCKS,)), SCALE_BLOCK, ROWS * BLOCKS,
        )  # fmt: skip
        w = tl.reshape(w, (ROWS, BLOCKS * 64)).to(tl.bfloat16).to(tl.float32)
        out = out_ptr + row[:, None] * out_row_stride + col.to(tl.int64)[None, :] * out_col_stride
        is_col = (col < n_blocks * 64)[None, :]
        tl.store(out, (w / scale[:, None]).to(out_ptr.dtype.element_ty), mask=is_row & is_col)


# Opaque, as in nf4.py: torch.compile does not support enable_fp_fusion.
@torch.library.custom_op("nanocria::nf4_to_float8", mutates_args=("out", "scales"))
def nf4_to_float8(
    codes: torch.Tensor, scale_codes: torch.Tensor, scale_absmax: torch.Tensor, offset: torch.Tensor,
    out: torch.Tensor, scales: torch.Tensor,
) -> None:  # fmt: skip
    """Writes what quantize would make of the weight read back from NF4 to bf16, without storing that.

    out (O, C) of any strides, C a multiple of 64, and scales (O, 1), contiguous; the others are NF4's parts.
    """
    values, scale_map = tables(codes.device)
    n_rows = out.shape[0]
    n_blocks = out.shape[1] // NF4_BLOCK
    span = triton.next_power_of_2(n_blocks)
    sizes = {"ALL": span, "ROWS": 1, "SPAN": span, "BLOCKS": min(span, 32), "num_warps": 1}
    if out.stride(1) != 1:  # transposed: a tile of 32 rows and 128 columns at a time
        sizes |= {"ROWS": 32, "SPAN": min(span, 16), "BLOCKS": min(span, 2), "num_warps": 4}
    _nf4_to_float8_kernel[(triton.cdiv(n_rows, sizes["ROWS"]), triton.cdiv(n_blocks, sizes["SPAN"]))](
        codes, scale_codes, scale_absmax, offset, values, scale_map, out, *out.stride(), scales, n_rows, n_blocks,
        SCALE_BLOCK=ABSMAX_BLOCK, **sizes, enable_fp_fusion=False,
    )  # fmt: skip


class Float8Products:
    """For a LoRALinear: computes its two products with the frozen weight in float8.

    read_float8(like, *frozen, transposed): float8 (O, C), or transposed (C, O), and scales (O, 1) of the frozen weight.
    """

    def check(self, name, n_in, x):
        super().check(name, n_in, x)
        check_fp8(x, (self.out_features, self.in_features))

    def reference(self, x):
        weight = rounded_reference(self.read_weight(self.lora_a, *self.tensors()[:-2]))
        return F.linear(rounded_reference(x), weight).to(x.dtype) + self.adapted(x)

    def project(self, x, *tensors, out=None):
        *frozen, a, b = tensors
        y = project_float8(x, *self.read_float8(x, *frozen), x.dtype, out)
        y_rows = as_rows(y)
        low = self._low(x, a)
        for rows, columns in self.parts:
            add_low_rank(y_rows, low[:, columns], b[rows], rows.start)
        return y

    def input_gradient(self, shared, *tensors, out=None):
        dy, dlow = shared
        *frozen, a, _ = tensors
        wt8, t = self.read_float8(dy, *frozen, transposed=True)
        dx = input_gradient_float8(*quantize(dy, t.view(-1)), wt8, dy.dtype, out)
        add_low_rank(as_rows(dx), dlow, a.T)
        return dx


class FP8LoRALinear(Float8Products, LoRALinear):
    """LoRALinear whose frozen weight (O, C) is float8, with fp32 scales (O, 1)."""

    frozen = ("weight", "scales")

    def quantize(self, weight):
        return quantize(weight) if use_triton(weight) else quantize_reference(weight)

    def read_weight(self, like, weight, scales):
        return scales * weight.float()  # in fp32: like's bf16 would round again

    def read_float8(self, like, weight, scales, transposed=False):
        return transpose(weight) if transposed else weight, scales


class FP8NF4LoRALinear(Float8Products, NF4LoRALinear):
    """NF4LoRALinear whose weight is read back as float8. C must be a multiple of 64, but for the reference."""

    def read_float8(self, like, *frozen, transposed=False):
        assert self.in_features % NF4_BLOCK == 0, self.in_features  # else a block spans two rows, which have two scales
        shape = self.out_features, self.in_features
        w8 = torch.empty(shape[::-1] if transposed else shape, dtype=FLOAT8, device=like.device)
        t = torch.empty(shape[0], 1, dtype=torch.float32, device=like.device)
        rows_of = (w8.T if transposed else w8).split(self.rows)
        for matrix, *out in zip(self.matrices(*frozen), rows_of, t.split(self.rows), strict=True):
            nf4_to_float8(*matrix, *out)
        return w8, t
