"""AdamW whose moments take one byte each: 2.03 bytes per parameter instead of 8. kernels/adamw8bit.py has the formula.

The 256 elements that share a scale (2,048 in the paper) lie within one row. So under FSDP each rank's rows have their
own scales, and any number of ranks can read a checkpoint. Vectors and matrices whose rows are not a multiple
of 256 keep AdamW's float32 moments. The embedding's have 8 bits too; the paper keeps 32.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021. https://arxiv.org/abs/2110.02861
"""

import torch

from kernels import adamw8bit
from kernels.adamw8bit import adamw8bit_on_cpu
from kernels.dynamic_map import ABSMAX_BLOCK
from optimizers.adamw import AdamW


class AdamW8bit(AdamW):
    c_files = ("adamw.c", "adamw8bit.c")

    def states(self, name, shape, rows):
        if len(shape) < 2 or shape[-1] % ABSMAX_BLOCK:
            return super().states(name, shape, rows)
        codes = (shape, torch.uint8)
        absmax = ((*shape[:-1], shape[-1] // ABSMAX_BLOCK), torch.float32)
        return {"exp_avg": codes, "exp_avg_sq": codes, "exp_avg_absmax": absmax, "exp_avg_sq_absmax": absmax}

    def step_on_device(self, parameter, grad, master, states, scalars):
        if len(states) == 2:
            return super().step_on_device(parameter, grad, master, states, scalars)
        adamw8bit(parameter, grad, master, *states.values(), scalars, *self._options(parameter))

    def step_on_cpu(self, parameter, grad, master, states, scale, lr, t):
        if len(states) == 2:
            return super().step_on_cpu(parameter, grad, master, states, scale, lr, t)
        adamw8bit_on_cpu(parameter, grad, master, *states.values(), scale, lr, t, *self._options(parameter))
