"""AdamW: one learning rate for all; matrices decay, vectors (norms) do not. kernels/adamw.py has the formula.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. https://arxiv.org/abs/1711.05101
"""

import torch

from kernels import adamw
from kernels.adamw import adamw_on_cpu


class AdamW:
    def __init__(self, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1, eps: float = 1e-8):
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps

    def states(self, parameter):
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), (parameter.shape, torch.float32))

    def scalars(self, t):
        beta1, beta2 = self.betas
        return (1 - beta1**t).reciprocal(), (1 - beta2**t).rsqrt()  # the bias corrections

    def step_on_gpu(self, parameter, grad, master, states, scalars):
        adamw(parameter, grad, master, *states.values(), scalars, *self._options(parameter))

    def step_on_cpu(self, parameter, grad, master, states, scale, lr, t):
        adamw_on_cpu(parameter, grad, master, *states.values(), scale, lr, t, *self._options(parameter))

    def _options(self, parameter):
        return *self.betas, self.eps, self.weight_decay if parameter.ndim >= 2 else 0.0
