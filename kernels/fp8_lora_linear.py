"""A projection with trained adapters whose frozen weight is multiplied in float8: lora_linear.py with fp8_linear.py.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        the first product as diag(v) (x8 W8ᵀ) diag(t)
    backward    dx = dy W + s (dy B) A        the first product as diag(u) (g8 W8)        dA, dB as in lora_linear.py

A weight that is trained has a third matmul, its gradient, which has to stay in bf16. A frozen one has none: here all
large matmuls are in float8, and what is left in bf16 has the adapters' rank as a side. A frozen weight never changes,
so it is rounded once and held as float8: the numbers are those of a bf16 one rounded before each matmul. Or it is held
as NF4, read back and rounded each time.

Bytes for n weights: 1n held, and 2n moved in backward, to transpose it. NF4: 0.516n held, and 5.5n more moved before
each matmul.
y and dx are written by the large matmul, then read and written once more where the adapters' part is added.
"""

import torch.nn.functional as F

from .fp8_linear import (
    check_fp8,
    input_gradient_float8,
    project_float8,
    quantize,
    quantize_reference,
    rounded_reference,
)
from .launch import as_rows, use_triton
from .lora_linear import LoRALinear
from .nf4_lora_linear import NF4LoRALinear


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
        *held, a, b = tensors
        w8, t = self.read_float8(dy, *held)
        dx = input_gradient_float8(*quantize(dy, t.view(-1)), w8, dy.dtype, out)
        as_rows(dx).addmm_(self._dlow(dy, b), a)
        return dx


class FP8LoRALinear(Float8Products, LoRALinear):
    """LoRALinear whose frozen weight (O, C) is float8, beside fp32 scales (O, 1)."""

    held = ("weight", "scales")

    def quantize(self, weight):
        return quantize(weight) if use_triton(weight) else quantize_reference(weight)

    def read_weight(self, like, weight, scales):
        return (scales * weight.float()).to(like.dtype)

    def read_float8(self, like, weight, scales):
        return weight, scales


class FP8NF4LoRALinear(Float8Products, NF4LoRALinear):
    """NF4LoRALinear whose weight is rounded to float8 when it has been read back."""
