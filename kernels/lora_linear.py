"""A projection with a frozen weight and trained adapters of low rank (LoRA), one for each matrix packed in the weight.

    forward     y = x Wᵀ + s (x Aᵀ) Bᵀ        s = α / r
    backward    dx = dy W + s (dy B) A        dA = s (dy B)ᵀ x        dB = s dyᵀ (x Aᵀ)        no dW

q, k and v are packed in one W, gate and up in another, but published adapters have an A and a B for each. So A stacks
the matrices' (r, C), and B their (Oᵢ, r): the columns i·r..(i+1)·r of x Aᵀ belong to the rows of matrix i.

Subclasses define how the frozen W is held: `frozen` names its tensors, quantize makes them, read_weight reads them
back. nf4_lora_linear.py holds it in four bits; fp8_lora_linear.py multiplies it in float8.

FLOPs for m matrices: 2·N·C·O forward and as many backward, since a frozen W has no gradient; for the adapters
2·N·r·(m·C + O) forward and 2·N·r·(3·m·C + 2·O) backward, which recomputes x Aᵀ. Saved: x (unless the fused function
recomputes it), W, A and B.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. https://arxiv.org/abs/2106.09685
"""

from itertools import accumulate as running_sums
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from .launch import as_rows
from .linear import Linear, weight_gradient


class LoRALinear(Linear):
    """y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ on the frozen weight of base (O, C), with the functions of a projection.

    Each matrix packed in the weight has its own adapters: lora_a (matrices·rank, C) starts uniform within ±1/√C, as in
    peft, and lora_b (O, rank) at zero, so y starts as the base's.
    """

    frozen = ("weight",)  # the tensors of the frozen weight: `weight` comes first, and has O rows

    def __init__(self, base: Linear, rank: int, alpha: float):
        nn.Module.__init__(self)
        self.out_features, self.in_features = base.weight.shape
        self.rows = base.rows
        self.bias = None
        for name, part in zip(self.frozen, self.quantize(base.weight.detach()), strict=True):
            setattr(self, name, nn.Parameter(part, requires_grad=False))
        self.lora_a = nn.Parameter(base.weight.new_empty(len(self.rows) * rank, self.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(self.out_features, rank))
        nn.init.uniform_(self.lora_a, -(self.in_features**-0.5), self.in_features**-0.5)
        self.scale = alpha / rank
        bounds = [0, *running_sums(self.rows)]
        # for each matrix: its rows of B, its columns of x Aᵀ
        self.parts = [(slice(*pair), slice(i * rank, (i + 1) * rank)) for i, pair in enumerate(pairwise(bounds))]

    def _apply(self, fn, recurse=True):
        """Called by .to(), .half() and the like, which would convert NF4's codes, and float8 without its scales."""
        empty = torch.empty(0, dtype=self.weight.dtype)
        if len(self.frozen) > 1 and fn(empty).dtype != empty.dtype:
            raise ValueError("weights in NF4 or float8 keep their dtype: convert the model before add_lora")
        return super()._apply(fn, recurse)

    def reference(self, x):
        return F.linear(x, self.weight) + self.adapted(x)

    def adapted(self, x):
        """The adapters' part of y in plain PyTorch, for autograd."""
        low = F.linear(x, self.lora_a)
        parts = [F.linear(low[..., columns], self.lora_b[rows]) for rows, columns in self.parts]
        return self.scale * torch.cat(parts, dim=-1)

    def check(self, name, n_in, x):
        assert self.in_features == n_in, f"{name} has {self.in_features} columns: expected {n_in}"
        assert self.lora_a.dtype == x.dtype, f"adapters in {self.lora_a.dtype}: expected {x.dtype}"

    def tensors(self):
        return *(getattr(self, name) for name in self.frozen), self.lora_a, self.lora_b

    def flops(self):
        adapters = self.lora_a.numel() + self.lora_b.numel()
        return 4 * self.in_features * self.out_features + 6 * adapters

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The frozen tensors of a weight (O, C)."""
        return (weight,)

    @staticmethod
    def read_weight(like: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The weight (O, C) that the frozen tensors represent, in the dtype of `like`; for float8 in fp32."""
        return weight

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """W + s B A of each matrix, (O, C): summed in fp32, rounded once."""
        weight = self.read_weight(self.lora_a, *self.tensors()[:-2])
        merged = weight.to(torch.promote_types(self.lora_a.dtype, torch.float32), copy=True)
        for rows, columns in self.parts:
            merged[rows] += self.scale * self.lora_b[rows].to(merged.dtype) @ self.lora_a[columns].to(merged.dtype)
        return merged.to(self.lora_a.dtype)

    # The adapters' part is written first; the large matmul adds to it, and its FLOPs hide the second pass over y.

    def project(self, x, *tensors, out=None):
        *frozen, a, b = tensors
        y = x.new_empty(*x.shape[:-1], self.out_features) if out is None else out
        low = self._low(x, a)
        y_rows = as_rows(y)
        for rows, columns in self.parts:
            y_rows[:, rows].addmm_(low[:, columns], b[rows].T, beta=0)
        y_rows.addmm_(as_rows(x), self.read_weight(x, *frozen).T)
        return y

    def share(self, dy, *tensors):
        return dy, self._dlow(dy, tensors[-1])

    def input_gradient(self, shared, *tensors, out=None):
        dy, dlow = shared
        *frozen, a, _ = tensors
        dx = dy.new_empty(*dy.shape[:-1], self.in_features) if out is None else out
        as_rows(dx).addmm_(dlow, a, beta=0).addmm_(as_rows(dy), self.read_weight(dy, *frozen))
        return dx

    def weight_gradients(self, shared, x, *tensors, needed, sums=(None, None), first=True):
        dy, dlow = shared
        *frozen, a, b = tensors
        sum_a, sum_b = sums[-2:]
        da = weight_gradient(dlow, x, sum_a, first) if needed[-2] else None
        db = None
        if needed[-1]:
            dy = as_rows(dy)
            low = self._low(x, a)
            db = torch.empty_like(b) if sum_b is None else sum_b
            for rows, columns in self.parts:
                if sum_b is None:
                    torch.mm(dy[:, rows].T, low[:, columns], out=db[rows])
                else:
                    weight_gradient(dy[:, rows], low[:, columns], sum_b[rows], first)
        return *(None for _ in frozen), da, db

    # Both scale in the matmul and write straight to where the result belongs: next to W's large matmuls,
    # every launch saved counts.

    def _low(self, x, a):
        """s x Aᵀ: (N, len(rows)·rank)."""
        x = as_rows(x)
        return x.new_empty(len(x), len(a)).addmm_(x, a.T, beta=0, alpha=self.scale)

    def _dlow(self, dy, b):
        """s dy B, the gradient of x Aᵀ: (N, len(rows)·rank)."""
        dy = as_rows(dy)
        dlow = dy.new_empty(len(dy), len(self.parts) * b.shape[1])
        for rows, columns in self.parts:
            dlow[:, columns].addmm_(dy[:, rows], b[rows], beta=0, alpha=self.scale)
        return dlow
