"""AdamW over a model whose weights are in the compute dtype: it keeps the float32 weights that learn.

    optimizer = AdamW(model, betas=(0.9, 0.95), weight_decay=0.1)
    loss.backward()
    optimizer.set_step(learning_rate)
    grad_norm = optimizer.update(grad_clip=1.0)    # all on the GPU: nothing here waits for it
    optimizer.updates += 1                         # where grad_norm is finite: elsewhere nothing was changed
    optimizer.zero_grad()

For each parameter of n elements in bfloat16 it holds 12n bytes: w, m and v in float32 (kernels/adamw.py). A float32
parameter is its own w, and it holds 8n. Where several micro-batches make a step, 4n more: the sums of their gradients.
Where FSDP has sharded the parameters, all of it is sharded alike.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kernels import adamw


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of x."""
    return x.to_local() if isinstance(x, DTensor) else x


def home(parameter: torch.Tensor) -> torch.Tensor:
    """Where it lies: itself, or the CPU's copy of one that comes to the GPU when its turn comes (weights.py)."""
    return getattr(parameter, "home", parameter)


class AdamW:
    """One learning rate for all; matrices decay, vectors (norms) do not (Loshchilov and Hutter, 2019).

    Made after the weights are: w starts as a copy of them.
    """

    state_device = None  # of w, m and v; none: the parameter's

    def __init__(self, model: nn.Module, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        self.parameters = dict(model.named_parameters())
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps
        self.w = {name: self._w_of(home(p).detach()) for name, p in self.parameters.items()}
        self.m = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.sums = {}  # float32 gradients of the micro-batches so far, where there are several
        self.updates = 0
        first = next(iter(self.parameters.values()))
        self.mesh = first.device_mesh["shard"] if isinstance(first, DTensor) else None
        self.step_scalars = torch.zeros(4, device=first.device)  # kernels/adamw.py says which
        self.inverse_loss_scale = torch.ones((), device=first.device)

    def _w_of(self, parameter):
        device = self.state_device or local(parameter).device
        if parameter.dtype == torch.float32 and local(parameter).device == torch.device(device):
            return parameter
        w = torch.empty_like(parameter, dtype=torch.float32, device=device)
        local(w).copy_(local(parameter))
        return w

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks among which the shards of a parameter lie: of hybrid sharding's copies one."""
        return None if self.mesh is None else self.mesh.get_group()

    def tensors(self) -> dict:
        """All that a checkpoint must hold, as tensors to write or to read into: `model` are the float32 weights."""
        return {"model": self.w, "optimizer": {"exp_avg": self.m, "exp_avg_sq": self.v}}

    @torch.no_grad()
    def refresh(self):
        """The parameters from w, after a checkpoint was read into tensors()."""
        for name, parameter in self.parameters.items():
            local(home(parameter)).copy_(local(self.w[name]))

    @torch.no_grad()
    def accumulate(self):
        """Adds a micro-batch's gradients to float32 sums.

        bfloat16 ones would lose what is small beside the sum, and a CUDA graph writes its gradients, it does not add.
        """
        for name, parameter in self.parameters.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(self.w[name])
            self.sums[name].add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of each gradient, in the order of the parameters."""
        return [local(self.sums.get(name, p.grad)) for name, p in self.parameters.items()]

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of all ranks, a float32 scalar, the loss scale taken out."""
        norms = torch._foreach_norm(self.gradients(), 2, dtype=torch.float32)
        return self._over_shards(torch.linalg.vector_norm(torch.stack(norms))) * self.inverse_loss_scale

    def _over_shards(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all, of that of this rank's parts."""
        if self.shard_group is not None:
            norm.square_()
            dist.all_reduce(norm, group=self.shard_group)
            norm.sqrt_()
        return norm

    def set_step(self, lr: float, loss_scale: float = 1.0):
        """Sends the GPU what the next update needs to know. Not part of update, for a CUDA graph may replay that."""
        t, (beta1, beta2) = self.updates + 1, self.betas
        scalars = torch.tensor([0.0, lr, 1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)])
        self.step_scalars.copy_(scalars, non_blocking=True)
        self.inverse_loss_scale.fill_(1 / loss_scale)

    @torch.no_grad()
    def update(self, grad_clip: float = 0.0) -> torch.Tensor:
        """Scales the gradients down to the norm grad_clip (0: never), moves the weights, and returns the norm before.

        Where that norm is not finite, nothing changes; the caller, who reads it sooner or later, counts in `updates`
        those that were.
        """
        norm = self.grad_norm()
        clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip else torch.ones_like(norm)
        self.step_scalars[0] = torch.where(norm.isfinite(), clip * self.inverse_loss_scale, torch.nan)
        for (name, parameter), grad in zip(self.parameters.items(), self.gradients(), strict=True):
            if grad.numel():  # a rank may hold nothing of a small parameter
                tensors = (local(x) for x in (self.w[name], self.m[name], self.v[name]))
                adamw(
                    local(parameter.detach()),
                    grad,
                    *tensors,
                    self.step_scalars,
                    *self.betas,
                    self.eps,
                    self.decay(parameter),
                )
        return norm

    def decay(self, parameter) -> float:
        return self.weight_decay if parameter.ndim >= 2 else 0.0

    def zero_grad(self):
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.sums:
            torch._foreach_zero_([local(x) for x in self.sums.values()])
