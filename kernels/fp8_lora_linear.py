"""A projection with trained adapters whose frozen weight is multiplied in float8: lora_linear.py with fp8_linear.py.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        the first product as diag(v) (x8 W8ᵀ) diag(t)
    backward    dx = dy W + s (dy B) A        the first product as diag(u) (g8 W8)        dA, dB as in lora_linear.py

A weight that is trained has a third matmul, its gradient, which has to stay in bf16. A frozen one has none: here all
large matmuls are in float8, and what is left in bf16 has the adapters' rank as a side. A frozen weight never changes,
so it is rounded once and held as float8: the numbers are those of a bf16 one rounded before each matmul. Or it is held
as NF4, and a kernel reads rows of that and writes them as float8, by way of bf16 as for all that trains in NF4.

Bytes for n weights: 1n held, and 2n moved in backward, to transpose it. NF4: 0.516n held, and 1.516n more moved before
each matmul, for the MLP of 8B on one H200 in 0.60 and 0.75 of the time of reading back and then rounding. The limit is
looking up values. y and dx are written by the large matmul, then read and written once more where the adapters' part is
added.
"""

import torch
import torch.nn.functional as F

from .fp8_linear import (
    check_fp8,
    empty_rows,
    float8_scale,
    input_gradient_float8,
    magnitude,
    project_float8,
    quantize,
    quantize_reference,
    rounded_reference,
)
from .launch import as_rows, tl, triton, use_triton, whole_row
from .lora_linear import LoRALinear
from .nf4 import BLOCK, SCALE_BLOCK, read_nf4, tables
from .nf4_lora_linear import NF4LoRALinear


@triton.jit
def _nf4_to_float8_kernel(
    codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr, out_ptr, scales_ptr, n_blocks,
    SCALE_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program, one row of n_blocks blocks."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    block, mask = row * n_blocks + i, i < n_blocks
    w = read_nf4(
        codes_ptr, scale_codes_ptr, scale_absmax_ptr, offset_ptr, values_ptr, map_ptr, block, mask, SCALE_BLOCK, BLOCKS
    )
    w = tl.where(mask[:, None], w, 0.0).to(tl.bfloat16).to(tl.float32)
    scale = float8_scale(tl.max(magnitude(w), axis=1))
    out = out_ptr + block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out, (w / scale).to(out_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(scales_ptr + row, scale)


# Opaque as nf4.py's: torch.compile does not know enable_fp_fusion.
@torch.library.custom_op("nanocria::nf4_to_float8", mutates_args=("out", "scales"))
def nf4_to_float8(
    codes: torch.Tensor, scale_codes: torch.Tensor, scale_absmax: torch.Tensor, offset: torch.Tensor,
    out: torch.Tensor, scales: torch.Tensor,
) -> None:  # fmt: skip
    """Writes what quantize makes of a bf16 weight that is read back from NF4, without that weight.

    out (O, C), C a multiple of 64, and scales (O, 1), both contiguous; the others are NF4's parts.
    """
    values, _, scale_map = tables(codes.device)
    blocks = whole_row(out.shape[1])["BLOCK"] // BLOCK
    _nf4_to_float8_kernel[(out.shape[0],)](
        codes, scale_codes, scale_absmax, offset, values, scale_map, out, scales, out.shape[1] // BLOCK,
        SCALE_BLOCK=SCALE_BLOCK, BLOCKS=blocks, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


class Float8Products:
    """For a LoRALinear: its two products with the frozen weight, in float8."""

    def check(self, name, n_in, x):
        super().check(name, n_in, x)
        check_fp8(x, (self.out_features, self.in_features))

    def reference(self, x):
        weight = rounded_reference(self.read_weight(self.lora_a, *self.tensors()[:-2]))
        return F.linear(rounded_reference(x), weight).to(x.dtype) + self.adapted(x)

    def read_float8(self, like, *held):
        """float8 (O, C) and scales (O, 1) of the frozen weight."""
        return quantize(self.read_weight(like, *held))

    def project(self, x, *tensors, out=None):
        *held, a, b = tensors
        y = project_float8(x, *self.read_float8(x, *held), x.dtype, out)
        y_rows, low = as_rows(y), self._low(x, a)
        for rows, columns in self.parts:
            y_rows[:, rows].addmm_(low[:, columns], b[rows].T)
        return y

    def input_gradient(self, dy, *tensors, out=None):
        (dy, dlow), (*held, a, _) = dy, tensors
        w8, t = self.read_float8(dy, *held)
        dx = input_gradient_float8(*quantize(dy, t.view(-1)), w8, dy.dtype, out)
        as_rows(dx).addmm_(dlow, a)
        return dx


class FP8LoRALinear(Float8Products, LoRALinear):
    """LoRALinear whose frozen weight (O, C) is float8, beside fp32 scales (O, 1)."""

    held = ("weight", "scales")

    def quantize(self, weight):
        return quantize(weight) if use_triton(weight) else quantize_reference(weight)

    def read_weight(self, like, weight, scales):
        return scales * weight.float()  # in fp32: like's bf16 would round once more

    def read_float8(self, like, weight, scales):
        return weight, scales


class FP8NF4LoRALinear(Float8Products, NF4LoRALinear):
    """NF4LoRALinear whose weight is read back as float8."""

    def read_float8(self, like, *held):
        if self.in_features % BLOCK:  # a block may lie in two rows, of two scales
            return super().read_float8(like, *held)
        w8, t = empty_rows((self.out_features, self.in_features), like, float8=True)
        for matrix, *out in zip(self.matrices(*held), w8.split(self.rows), t.split(self.rows), strict=True):
            nf4_to_float8(*matrix, *out)
        return w8, t
