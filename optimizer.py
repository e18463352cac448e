"""AdamW with float32 master weights, for a model whose parameters are in the compute dtype.

    optimizer = AdamW(model, betas=(0.9, 0.95), weight_decay=0.1)
    loss.backward()
    optimizer.set_step(learning_rate)
    grad_norm = optimizer.update(grad_clip=1.0)    # all on the GPU: nothing here waits for it
    optimizer.updates += 1                         # where grad_norm is finite: elsewhere nothing was changed
    optimizer.zero_grad()

The master weights w and the two moments m and v are float32, 12 bytes a parameter, and a bfloat16 parameter is part of
them: it is the upper half of its w, so only the lower 16 bits are kept here (kernels/adamw.py). A float32 parameter is
its w. Only in float16, and where w lies in another memory than the parameter (offload.py), is w kept whole beside it.
Where several micro-batches make a step, 4 bytes more: the float32 sums of their gradients. Under FSDP all of this is
sharded as the parameters are.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kernels import adamw
from kernels.adamw import join, split

PIECE = 2**24  # elements of w that are put together at a time


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of x."""
    return x.to_local() if isinstance(x, DTensor) else x


def home(parameter: torch.Tensor) -> torch.Tensor:
    """Where it lies: itself, or the CPU's copy of one that comes to the GPU when its turn comes (weights.py)."""
    return getattr(parameter, "home", parameter)


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """A checksum: the bits of this rank's part of a float32 tensor, read as int32 and added up in an int64 scalar."""
    return local(x).view(torch.int32).sum(dtype=torch.int64)


class AdamW:
    """One learning rate for all; matrices decay, vectors (norms) do not (Loshchilov and Hutter, 2019).

    Made after the weights are: w starts as a copy of them.
    """

    state_device = None  # of w, m and v; none: the parameter's

    def __init__(self, model: nn.Module, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        self.parameters = dict(model.named_parameters())
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps
        # The parameter itself (float32), or its lower half (int16, of bfloat16), or apart from it (float32).
        self.w = {name: self._w_of(home(p).detach()) for name, p in self.parameters.items()}
        self.m = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(m) for name, m in self.m.items()}
        self.sums = {}  # float32 gradients of the micro-batches so far, where there are several
        self.updates = 0
        first = next(iter(self.parameters.values()))
        self.mesh = first.device_mesh["shard"] if isinstance(first, DTensor) else None
        self.step_scalars = torch.zeros(4, device=first.device)  # kernels/adamw.py says which
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

    def tensors(self) -> dict:
        """What a checkpoint holds: {"model": w, "optimizer": {"exp_avg": m, "exp_avg_sq": v}}, each by name, float32.

        To be saved, or to be read into; then call refresh. All are the live tensors, except a w kept in halves: it is
        joined in new CPU memory, 4 bytes a parameter, since a GPU that just fits the run has no room for it.
        """

        def whole(name):
            if self.w[name].dtype != torch.int16:
                return self.w[name]
            w = torch.empty_like(self.m[name], device="cpu")
            self._copy_w(name, w)
            return w

        return self._of_all(whole, lambda x: x)

    def like_tensors(self, make: Callable) -> dict:
        """The structure of tensors(), with make(x) in place of each x, of its shape, dtype and mesh."""
        # m stands for w, which may be in halves
        return self._of_all(lambda name: make(self.m[name]), make)

    def bit_sums(self) -> dict:
        """The structure of tensors(), with the sum_of_bits of each."""

        def of_w(name):
            w = self.w[name]
            if w.dtype != torch.int16:
                return sum_of_bits(w)
            high = local(self.parameters[name].detach()).view(torch.int16)
            return 65536 * high.sum(dtype=torch.int64) + local(w).sum(dtype=torch.int64)

        return self._of_all(of_w, sum_of_bits)

    def _of_all(self, of_w, of):
        m, v = ({name: of(x) for name, x in kind.items()} for kind in (self.m, self.v))
        return {"model": {name: of_w(name) for name in self.w}, "optimizer": {"exp_avg": m, "exp_avg_sq": v}}

    def copy_tensors(self, copies: dict) -> None:
        """Copies what tensors() holds into copies, made by like_tensors on the CPU: queued on the current stream."""
        for name, copy in copies["model"].items():
            self._copy_w(name, copy)
        for states, into in ((self.m, copies["optimizer"]["exp_avg"]), (self.v, copies["optimizer"]["exp_avg_sq"])):
            for name, copy in into.items():
                local(copy).copy_(local(states[name]), non_blocking=local(copy).is_pinned())

    @torch.no_grad()
    def _copy_w(self, name, copy):
        pinned = local(copy).is_pinned()
        if self.w[name].dtype != torch.int16:
            local(copy).copy_(local(self.w[name]), non_blocking=pinned)
            return
        for part, high, low in self._pieces(name, copy):
            part.copy_(join(high, low), non_blocking=pinned)

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
            for part, high, low in self._pieces(name, tensors["model"][name]):
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
        """The norm over all shards, of which this rank's parts have the norm `norm`; overwrites it."""
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
