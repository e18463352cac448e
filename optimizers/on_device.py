"""Masters and states with the parameters, on the device that computes: nothing moves, nothing waits for the CPU.

A bfloat16 parameter is the upper half of its master; the int16 lower half is kept here (kernels/adamw.py). A float32
parameter is its own master. Only for float16 is a whole master kept.
"""

import torch

from optimizers.optimizer import Optimizer
from optimizers.rule import Shard
from runtime.distributed import local


def gradient_of(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError(
            f"{name} has no gradient: let the loss depend on it, or call requires_grad_(False) before Optimizer(...)"
        )
    return parameter.grad


class OnDevice(Optimizer):
    @staticmethod
    def master_dtype(dtype, same_device):
        if dtype == torch.float32:
            return None
        return torch.int16 if dtype == torch.bfloat16 else torch.float32

    @torch.no_grad()
    def accumulate(self):
        # bfloat16 sums would lose small terms, and a CUDA graph overwrites its gradients instead of adding to them.
        for name, parameter in self.parameters.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(parameter, dtype=torch.float32)
            self.sums[name].add_(gradient_of(name, parameter))
            parameter.grad = None

    def gradients(self):
        if not self.sums:
            return {name: local(gradient_of(name, p)) for name, p in self.parameters.items()}
        self.require_no_grads()
        return {name: local(total) for name, total in self.sums.items()}

    def local_norm(self):
        # PyTorch's public get_total_norm would round bfloat16 gradients' norms to bfloat16. One launch for all:
        norms = torch._foreach_norm(list(self.gradients().values()), 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    def apply(self, scale, lr, t):
        scalars = torch.stack([scale, lr, *self.rule.scalars(t)])
        grads = self.gradients()
        shards = []
        for name, parameter in self.parameters.items():
            shard = local(parameter.detach())
            shards.append(Shard(name, parameter.shape, self.rows[name], shard, grads[name], *self.local_states(name)))
        self.rule.update(shards, scalars, self.n_steps, self.ranks)
        self.n_steps += 1
        self.drop_grads()
        for total in self.sums.values():
            local(total).zero_()
