"""A projection with trained adapters on a frozen weight in NF4 (QLoRA): lora_linear.py on nf4.py's four tensors.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        backward    dx = dy W + s (dy B) A        dA, dB as in lora_linear.py

W is read back from NF4 in x's dtype right before each of its two matmuls and freed after it: all projections reuse the
memory that the allocator keeps from the largest. Each packed matrix (q, k and v; gate and up) is quantized by itself:
so the base is bit for bit the one that transformers reads with bitsandbytes, and adapters trained here fit it there.

Bytes for n weights: 0.516n held, and 2.516n moved before each matmul.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023. https://arxiv.org/abs/2305.14314
"""

import torch

from .dynamic_map import ABSMAX_BLOCK
from .linear import apply_projection
from .lora_linear import LoRALinear
from .nf4 import NF4, NF4_BLOCK, dequantize_nf4, quantize_nf4


class NF4LoRALinear(LoRALinear):
    """LoRALinear whose frozen weight (O, C) is NF4: `weight` holds its codes (O, C / 2). ValueError unless C is even
    and each matrix in it has a multiple of 64 elements. On the meta device they are only shapes, which
    runtime/checkpoint.py's read_base fills.
    """

    frozen = ("weight", "scale_codes", "scale_absmax", "offset")
    codes_dtype = torch.float8_e4m3fn  # really bytes, but FSDP needs floating-point parameters (torch 2.11)

    def reference(self, x):
        return apply_projection(self, x, *self.tensors())  # plain autograd would keep the weight read back

    def quantize(self, weight):
        matrices = [quantize_nf4(matrix) for matrix in weight.split(self.rows)]
        codes, scale_codes, scale_absmax, offset = zip(*matrices, strict=True)
        codes = torch.cat(codes).view(self.codes_dtype)
        scale_codes = torch.cat(scale_codes).view(self.codes_dtype)
        return codes, scale_codes, torch.cat(scale_absmax), torch.stack(offset)

    def matrices(self, codes, scale_codes, scale_absmax, offset):
        """The packed matrices, each with its own scales."""
        n_blocks = [n_out * self.in_features // NF4_BLOCK for n_out in self.rows]
        n_scales = [-(-n // ABSMAX_BLOCK) for n in n_blocks]
        codes = codes.view(torch.uint8).split(self.rows)
        scale_codes = scale_codes.view(torch.uint8).split(n_blocks)
        return map(NF4, codes, scale_codes, scale_absmax.split(n_scales), offset)

    def read_weight(self, like, *frozen):
        weight = torch.empty(self.out_features, self.in_features, dtype=like.dtype, device=like.device)
        for matrix, out in zip(self.matrices(*frozen), weight.split(self.rows), strict=True):
            dequantize_nf4(matrix, out)
        return weight
