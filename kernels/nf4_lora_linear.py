"""A projection with trained adapters on a frozen weight in NF4 (QLoRA): lora_linear.py on nf4.py's four tensors.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        backward    dx = dy W + s (dy B) A        dA, dB as in lora_linear.py

W is read back from NF4 in x's dtype right before each of its two matmuls and freed after it: all projections share what
the allocator keeps of the largest. Of the packed matrices (q, k and v; gate and up) each is quantised by itself: so the
base is bit for bit the one that transformers reads with bitsandbytes, and adapters trained here fit it there.

Bytes for n weights: 0.516n held, and 2.516n moved before each matmul.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023. https://arxiv.org/abs/2305.14314
"""

import torch
from torch import nn

from .linear import Linear, apply_projection
from .lora_linear import LoRALinear
from .nf4 import BLOCK, NF4, SCALE_BLOCK, dequantize_nf4, quantize_nf4


class NF4LoRALinear(LoRALinear):
    """LoRALinear whose frozen weight (O, C) is NF4: `weight` are its codes (O, C / 2). ValueError unless C is even and
    each matrix in it has a multiple of 64 elements. On the meta device they are shapes, which runtime/checkpoint.py's
    read_base fills.
    """

    codes_dtype = torch.float8_e4m3fn  # bytes, but FSDP wants parameters of floating point (torch 2.11)

    def __init__(self, base: Linear, rows: tuple[int, ...], rank: int, alpha: float):
        super().__init__(base, rows, rank, alpha)
        for n_out in rows:
            if self.in_features % 2 or n_out * self.in_features % BLOCK:
                found = f"a projection is {n_out} x {self.in_features}: --base_dtype=bfloat16"
                raise ValueError(f"base_dtype=nf4 has blocks of {BLOCK} weights, and {found}")
        n_blocks = [n_out * self.in_features // BLOCK for n_out in rows]
        # how many rows, scales and absmax of scales each matrix has
        self.sizes = rows, n_blocks, [-(-n // SCALE_BLOCK) for n in n_blocks]
        names = ("weight", "scale_codes", "scale_absmax", "offset")
        for name, part in zip(names, self.quantize(base.weight.detach().float()), strict=True):
            part = part.view(self.codes_dtype) if part.dtype == torch.uint8 else part
            setattr(self, name, nn.Parameter(part, requires_grad=False))

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The four tensors of a weight (O, C)."""
        codes, scale_codes, scale_absmax, offset = zip(*map(quantize_nf4, weight.split(self.sizes[0])), strict=True)
        return torch.cat(codes), torch.cat(scale_codes), torch.cat(scale_absmax), torch.stack(offset)

    def check(self, name, n_in, x):
        if self.in_features != n_in or self.lora_a.dtype != x.dtype:
            found = f"({self.out_features}, {self.in_features}) in NF4 with adapters in {self.lora_a.dtype}"
            raise ValueError(f"{name} {found}: expected {x.dtype} (outputs, {n_in})")

    def reference(self, x):
        return apply_projection(self, x, *self.tensors())  # autograd's own would keep the weight that it read back

    def tensors(self):
        return self.weight, self.scale_codes, self.scale_absmax, self.offset, self.lora_a, self.lora_b

    def base_weight(self):
        return self._read_back(self.lora_a, *self.tensors()[:4])

    def _read_back(self, like, codes, scale_codes, scale_absmax, offset):
        weight = torch.empty(self.out_features, self.in_features, dtype=like.dtype, device=like.device)
        rows, n_blocks, n_scales = self.sizes
        codes, scale_codes = (x.view(torch.uint8).split(n) for x, n in ((codes, rows), (scale_codes, n_blocks)))
        packed = zip(codes, scale_codes, scale_absmax.split(n_scales), offset, strict=True)
        for part, out in zip(packed, weight.split(rows), strict=True):
            dequantize_nf4(NF4(*part), out)
        return weight

    def project(self, x, *tensors, out=None):
        *base, a, b = tensors
        return super().project(x, self._read_back(x, *base), a, b, out)

    def input_gradient(self, dy, *tensors, out=None):
        *base, a, b = tensors
        return super().input_gradient(dy, self._read_back(dy, *base), a, b, out)

    def weight_gradients(self, dy, x, *tensors, needed, sums=None, first=True):
        codes, *_, a, b = tensors
        found = super().weight_gradients(dy, x, codes, a, b, needed[3:], sums and sums[3:], first)
        return None, None, None, *found
