"""AdamW: one learning rate for all; matrices decay, vectors (norms) do not. kernels/adamw.py has the formula.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. https://arxiv.org/abs/1711.05101
"""

import functools
import math
from dataclasses import dataclass

import torch

from kernels import adamw
from kernels.adamw import adamw_on_cpu
from optimizers.rule import Rule


@functools.cache
def bias_corrections(betas: tuple[float, float], device: torch.device) -> torch.Tensor:
    """1 / (1 - β₁ᵗ) and 1 / √(1 - β₂ᵗ) for t = 0, 1, 2, ... until both are 1 for good: (T, 2) float32.

    A lookup table, because computing them in float64 takes nine kernels: 0.6% of the baby's step in a CUDA graph.
    """
    n_steps = max(math.log(2**-26) / math.log(beta) if beta else 1.0 for beta in betas)  # βᵗ = 2⁻²⁶ rounds away
    t = torch.arange(math.ceil(n_steps) + 1, dtype=torch.float64)
    beta1, beta2 = betas
    return torch.stack([1 / (1 - beta1**t), 1 / (1 - beta2**t).sqrt()], dim=1).float().to(device)


@dataclass(frozen=True)
class AdamW(Rule):
    supports_offload = True
    c_files = ("adamw.c",)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8

    def states(self, name, shape, rows):
        return {"exp_avg": (shape, torch.float32), "exp_avg_sq": (shape, torch.float32)}

    def scalars(self, t):
        table = bias_corrections(self.betas, t.device)
        return table.index_select(0, t.clamp(max=len(table) - 1).view(1)).view(2).unbind()

    def step_on_device(self, parameter, grad, master, states, scalars):
        adamw(parameter, grad, master, *states.values(), scalars, *self._options(parameter))

    def step_on_cpu(self, parameter, grad, master, states, scale, lr, t):
        adamw_on_cpu(parameter, grad, master, *states.values(), scale, lr, t, *self._options(parameter))

    def _options(self, parameter):
        return *self.betas, self.eps, self.weight_decay if parameter.ndim >= 2 else 0.0
