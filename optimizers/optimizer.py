"""An optimizer is a rule (adamw.py) and a place (on_device.py, on_cpu.py); this is the code that all share.

    optimizer = Optimizer(model, AdamW(betas=(0.9, 0.95), weight_decay=0.1), OnDevice(), grad_clip=1.0)
    optimizer.scale(loss).backward()    # and, with several micro-batches, optimizer.accumulate() after each
    grad_norm = optimizer.step(lr)      # all on the device: nothing waits for it, except in OnCPU

Updates change float32 masters, of which a bfloat16 parameter is the upper half. Only parameters that require a gradient
have a master. Under FSDP masters and states are sharded like the parameters.

rule.py defines what a rule is, place.py what a place is.
"""

import torch
from torch import nn

from kernels.adamw import split_halves
from optimizers.loss_scale import LossScale
from optimizers.place import Place
from runtime.distributed import local

SPLIT_AT_ONCE = 2**24  # elements of a master


class Optimizer:
    """Create it after initialising the weights: the masters start as copies of them."""

    def __init__(self, model: nn.Module, rule, place: Place, grad_clip: float = 0.0, scales_loss: bool = False):
        """grad_clip: gradients are scaled down to this norm; 0: never. scales_loss: for float16."""
        self.place = place
        self.grad_clip = grad_clip
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient")
        place.attach(model, self.parameters, rule)
        # On the place's device, so that a CUDA graph can replay the step and no step waits for the previous one.
        device = place.device or local(next(iter(self.parameters.values()))).device
        self.lr = torch.zeros((), dtype=place.scalar_dtype, device=device)
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self.loss_scale = LossScale(device) if scales_loss else None

    @property
    def updates(self) -> int:
        """How many steps have changed the weights. Waits for the GPU."""
        return self._updates.item()

    def counters(self, step: int) -> dict:
        """For run.json after `step` steps: state that is not a parameter's tensor. Waits for the GPU."""
        loss_scale = {"loss_scale": 1.0} if self.loss_scale is None else self.loss_scale.state(step)
        return {"updates": self.updates} | loss_scale

    def load_counters(self, run: dict) -> None:
        self._updates.fill_(run["updates"])
        self.place.step = run["step"]
        if self.loss_scale is not None and run["dtype"] == "float16":
            self.loss_scale.load(run)

    # ------------------------------------------------------------------------------------------------------------------
    # A step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss if self.loss_scale is None else loss / self.loss_scale.inverse()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Adds a micro-batch's gradients to float32 sums."""
        self.place.accumulate()

    def step(self, lr: float) -> torch.Tensor:
        """Clips the gradients, updates the weights, frees the gradients; returns the norm before clipping, a scalar.

        If that is not finite, nothing changes but the loss scale. With OnCPU a thread continues the update, and the
        next forward waits for it; call place.finish() before you read the weights.
        """
        self.lr.fill_(lr)
        return self.update()

    @torch.no_grad()
    def update(self) -> torch.Tensor:
        """step without setting lr: a CUDA graph may capture and replay it."""
        norm = self.grad_norm()
        if self.loss_scale is not None:
            inverse = self.loss_scale.inverse()
            norm = norm * inverse
        finite = norm < torch.inf  # isfinite is four kernels: 0.3% of the baby's step
        scale = torch.ones_like(norm)
        if self.grad_clip:
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        if self.loss_scale is not None:
            scale = scale * inverse
            self.loss_scale.update(finite)
        # If not finite, the rule changes nothing, and the count stays.
        self.place.update(torch.where(finite, scale, torch.nan), self.lr, self._updates.add_(finite))
        return norm

    def grad_norm(self) -> torch.Tensor:
        """The norm of the gradients of all ranks, the loss scale still in it."""
        norm = self.place.norm()
        if self.place.ranks.shard is not None:
            norm = self.place.ranks.sum(norm.square_()).sqrt_()
        return norm.to(self.lr)  # its device and dtype: OnCPU waits here for the GPU

    # ------------------------------------------------------------------------------------------------------------------
    # What a checkpoint holds

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors of a checkpoint by (parameter's name, state's name), to be saved or loaded into.

        State "" is the weight: the float32 master, or if it is in halves, the parameter; the other is "lower_half".
        """
        self.place.finish()
        tensors = {}
        for name, master in self.place.masters.items():
            if master.dtype == torch.int16:
                tensors[name, ""] = self.parameters[name]
                tensors[name, "lower_half"] = master
            else:
                tensors[name, ""] = master
            for state, x in self.place.states[name].items():
                tensors[name, state] = x
        return {key: x.detach() for key, x in tensors.items()}

    @torch.no_grad()
    def set_weight(self, name: str, whole: torch.Tensor) -> None:
        """Sets this rank's rows of a parameter and of its master from float32 ones on the CPU."""
        parameter = local(self.place.weight(name))
        master = local(self.place.masters[name])
        if master.dtype != torch.int16:
            master.copy_(whole)
            parameter.copy_(master)
            return
        # In pieces: a GPU that barely fits the run has no room for a whole weight.
        pieces = (x.view(-1).split(SPLIT_AT_ONCE) for x in (whole, parameter, master))
        for part, upper, lower in zip(*pieces, strict=True):
            split_halves(part.to(upper.device), upper, lower)
