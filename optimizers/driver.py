"""AdamW with float32 master weights, for a model whose parameters are in the compute dtype.

    optimizer = AdamW(model, betas=(0.9, 0.95), weight_decay=0.1)
    loss.backward()
    optimizer.set_step(learning_rate)
    grad_norm = optimizer.update(grad_clip=1.0)    # all on the GPU: nothing here waits for it
    optimizer.updates += 1                         # if grad_norm is finite: otherwise nothing has changed
    optimizer.zero_grad()

The master weights w and the two moments m and v are float32, 12 bytes a parameter, and a bfloat16 parameter is part of
them: it is the upper half of its w, so only the lower 16 bits are kept here (kernels/adamw.py). A float32 parameter is
its w. Only in float16, and if w is in another memory than the parameter (offload.py), is w kept whole beside it. With
several micro-batches a step, the float32 sums of their gradients take 4 bytes more. Under FSDP all of this is sharded
like the parameters.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kernels import adamw
from kernels.adamw import join, split

PIECE = 2**24  # elements of w that are joined at a time


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of x."""
    return x.to_local() if isinstance(x, DTensor) else x


def home(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter itself, or with streamed weights its copy in the CPU's memory (weights.py)."""
    return getattr(parameter, "home", parameter)


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """A checksum: the bits of this rank's part of a float32 tensor, read as int32 and added up in an int64 scalar."""
    return local(x).view(torch.int32).sum(dtype=torch.int64)


def saved_names(w: dict, m: dict, v: dict) -> dict:
    """The three dicts in one, by the names that tensors have in a checkpoint."""
    kinds = {"model": w, "optimizer.exp_avg": m, "optimizer.exp_avg_sq": v}
    return {f"{kind}.{name}": x for kind, tensors in kinds.items() for name, x in tensors.items()}


class AdamW:
    """One learning rate for all; matrices decay, vectors (norms) do not (Loshchilov and Hutter, 2019).

    Create it after the weights are initialised: w starts as a copy of them.
    """

    state_device = None  # of w, m and v; None: the parameter's

    def __init__(self, model: nn.Module, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        self.parameters = dict(model.named_parameters())
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps
        # The parameter itself (float32), the lower half beside a bfloat16 parameter (int16), or a whole copy (float32).
        self.w = {name: self._w_of(home(p).detach()) for name, p in self.parameters.items()}
        self.m = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(m) for name, m in self.m.items()}
        self.sums = {}  # the float32 sums of gradients, if there are several micro-batches
        self.updates = 0
        first = next(iter(self.parameters.values()))
        self.mesh = first.device_mesh["shard"] if isinstance(first, DTensor) else None
        self.step_scalars = torch.zeros(4, device=first.device)  # kernels/adamw.py lists them
        self.inverse_loss_scale = torch.ones((), device=first.device)

    def _w_of(self, parameter):
        device = torch.device(self.state_device or local(parameter).device)
        if parameter.dtype == torch.float32 and local(parameter).device == device:
            return parameter
        if parameter.dtype == torch.bfloat16 and self.state_device is None:
            return torch.zeros_like(parameter, dtype=torch.int16)
        w = torch.empty_like(parameter, dtype=torch.float32, device=device)
        local(w).copy_(local(parameter))
        return w

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of the parameters (hybrid sharding has several copies); None without FSDP."""
        return None if self.mesh is None else self.mesh.get_group()

    # ------------------------------------------------------------------------------------------------------------------
    # What a checkpoint holds: for each parameter w, m and v in float32

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds, float32, by their names there (saved_names).

        To be saved, or to be read into; then call refresh. All are the live tensors, except a w kept in halves: it is
        joined in new CPU memory, 4 bytes a parameter, since a GPU that just fits the run has no room for it.
        """
        in_halves = [name for name, w in self.w.items() if w.dtype == torch.int16]
        joined = {f"model.{name}": torch.empty_like(self.m[name], device="cpu") for name in in_halves}
        self.copy_tensors(joined)
        return saved_names(self.w, self.m, self.v) | joined

    def like_tensors(self, make: Callable) -> dict:
        """make(x) for each x of tensors(), by the same names. make needs only the shape, dtype and mesh of x."""
        # m stands for w, which may be in halves
        return {name: make(x) for name, x in saved_names(self.m, self.m, self.v).items()}

    def bit_sums(self) -> dict[str, torch.Tensor]:
        """The sum_of_bits of each of tensors(), by the same names."""
        sums = {}
        for name, x in saved_names(self.w, self.m, self.v).items():
            if x.dtype == torch.int16:  # the lower half of a w
                upper = local(self.parameters[name.removeprefix("model.")].detach()).view(torch.int16)
                sums[name] = 65536 * upper.sum(dtype=torch.int64) + local(x).sum(dtype=torch.int64)
            else:
                sums[name] = sum_of_bits(x)
        return sums

    @torch.no_grad()
    def copy_tensors(self, copies: dict[str, torch.Tensor]) -> None:
        """Copies what tensors() holds into copies on the CPU, by the same names: queued on the current stream."""
        states = saved_names(self.w, self.m, self.v)
        for name, copy in copies.items():
            pinned = local(copy).is_pinned()
            if states[name].dtype == torch.int16:
                for part, upper, lower in self._pieces(name.removeprefix("model."), copy):
                    part.copy_(join(upper, lower), non_blocking=pinned)
            else:
                local(copy).copy_(local(states[name]), non_blocking=pinned)

    def _pieces(self, name, whole):
        """Pieces of at most PIECE elements, as (part of whole, upper half, lower half): this rank's part of each."""
        parts = local(whole), local(self.parameters[name].detach()), local(self.w[name])
        return zip(*(x.view(-1).split(PIECE) for x in parts), strict=True)

    @torch.no_grad()
    def refresh(self, tensors: dict) -> None:
        """Sets the model's parameters, and halves, from what was read into tensors(), on any device."""
        for name, parameter in self.parameters.items():
            if self.w[name].dtype != torch.int16:  # w itself was read into
                local(home(parameter)).copy_(local(self.w[name]))
                continue
            for part, high, low in self._pieces(name, tensors[f"model.{name}"]):
                split(part.to(high.device), high, low)

    # ------------------------------------------------------------------------------------------------------------------
    # A step

    @torch.no_grad()
    def accumulate(self):
        """Adds a micro-batch's gradients to float32 sums.

        bfloat16 ones would lose what is small beside the sum, and a CUDA graph writes its gradients, it does not add.
        """
        for name, parameter in self.parameters.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(self.m[name])
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
        """The norm over all shards, given that of this rank's parts, which it overwrites."""
        if self.shard_group is not None:
            norm.square_()
            dist.all_reduce(norm, group=self.shard_group)
            norm.sqrt_()
        return norm

    def set_step(self, lr: float, loss_scale: float = 1.0):
        """Sends the GPU the numbers of the next update. Not part of update, because a CUDA graph may replay that."""
        t, (beta1, beta2) = self.updates + 1, self.betas
        scalars = torch.tensor([0.0, lr, 1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)])
        self.step_scalars.copy_(scalars, non_blocking=True)
        self.inverse_loss_scale.fill_(1 / loss_scale)

    @torch.no_grad()
    def update(self, grad_clip: float = 0.0) -> torch.Tensor:
        """Scales the gradients down to the norm grad_clip (0: never), moves the weights, and returns the norm before.

        If the norm is not finite, nothing changes. The caller reads the norm later and increments `updates` only when
        it is finite.
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
