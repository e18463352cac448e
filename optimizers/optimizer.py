"""What all optimizers share. Each is a rule (adamw.py) and a place for its state (on_device.py, on_cpu.py, on_disk.py).

    optimizer = OnDevice(model, AdamW(betas=(0.9, 0.95), weight_decay=0.1), grad_clip=1.0)
    optimizer.scale(loss).backward()    # and, with several micro-batches, optimizer.accumulate() after each
    grad_norm = optimizer.step(lr)      # all on the device: nothing waits for it, except in OnCPU

Updates change float32 masters, of which a bfloat16 parameter is the upper half. Only parameters that require a gradient
have a master. Under FSDP masters and states are sharded like the parameters.

rule.py defines what a rule is. A place is a subclass of Optimizer, with these methods:

    master_dtype(dtype, same_device)    of a parameter's master, int16 for its lower half; None: it is its own master.
                                        same_device: whether the parameter is on the masters' device
    accumulate()                        after each of several micro-batches: adds the gradients to float32 sums
    gradients()                         this rank's part of each, or of their sums, by parameter name
    local_norm()                        of these, as a scalar
    apply(scale, lr, t)                 updates all parameters if scale is finite; frees the gradients in any case
    finish()                            waits for updates that are still running
"""

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate

from kernels.adamw import split_halves
from kernels.linear import matrix_rows
from optimizers.loss_scale import LossScale
from optimizers.rule import Ranks, Rule
from runtime.distributed import local

SPLIT_AT_ONCE = 2**24  # elements of a master


class Optimizer:
    device: str | None = None  # of masters and states; None: each parameter's own
    async_save = True  # whether there is memory for copies, from which checkpoints are written during training
    cpu_weights: dict[str, torch.Tensor] = {}  # by name, the weights that runtime/stream_weights.py keeps on the CPU

    def __init__(self, model: nn.Module, rule: Rule, grad_clip: float = 0.0, scales_loss: bool = False):
        """Create it after initializing the weights: masters start as copies of them, states as zeros.

        grad_clip: the largest norm of the gradients; 0 disables clipping. scales_loss: for float16.
        """
        self.rule = rule
        self.grad_clip = grad_clip
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.rows = matrix_rows(model)
        first = next(iter(self.parameters.values()))
        groups = {}
        if isinstance(first, DTensor):
            groups = {name: first.device_mesh.get_group(name) for name in first.device_mesh.mesh_dim_names}
        self.ranks = Ranks(groups.get("shard"), groups.get("replicate"))
        self.masters = {name: self._master(self.weight(name)) for name in self.parameters}
        self.states = {}
        for name, p in self.parameters.items():
            states = rule.states(name, p.shape, self.rows[name])
            self.states[name] = {key: self._new_state(p.detach(), *state) for key, state in states.items()}
        self.sums = {}  # the float32 sums of gradients, if there are several micro-batches
        self.n_steps = 0  # of the run so far, counted by the CPU: a CUDA graph's replays are not
        # On the masters' device, so that a CUDA graph can replay the step and no step waits for the previous one.
        device = self.device or local(first).device
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
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
        self.n_steps = run["step"]
        if self.loss_scale is not None and run["dtype"] == "float16":
            self.loss_scale.load(run)

    # ------------------------------------------------------------------------------------------------------------------
    # A step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss if self.loss_scale is None else loss / self.loss_scale.inverse()

    def step(self, lr: float) -> torch.Tensor:
        """Clips the gradients, updates the weights, frees the gradients; returns the norm before clipping, a scalar.

        If that is not finite, nothing changes but the loss scale. With OnCPU a thread continues the update, and the
        next forward waits for it; call finish() before you read the weights.
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
        self.apply(torch.where(finite, scale, torch.nan), self.lr, self._updates.add_(finite))
        return norm

    def grad_norm(self) -> torch.Tensor:
        """The norm of the gradients of all ranks, the loss scale still in it."""
        norm = self.local_norm()
        if self.ranks.shard is not None:
            norm = self.ranks.sum(norm.square_()).sqrt_()
        return norm.to(self.lr.device)  # OnCPU waits here for the GPU

    def finish(self) -> None:
        pass

    def drop_grads(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def require_no_grads(self) -> None:
        grads = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        assert not grads, f"{grads[0]} has a gradient beside its sum: call accumulate() after every backward, or never"

    # ------------------------------------------------------------------------------------------------------------------
    # Masters and states

    def weight(self, name: str) -> torch.Tensor:
        """A parameter where it is kept: the parameter itself, or with streamed weights its copy in CPU memory."""
        return self.cpu_weights.get(name, self.parameters[name].detach())

    def local_states(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This rank's part of a parameter's master, and of its states."""
        return local(self.masters[name]), {state: local(x) for state, x in self.states[name].items()}

    def _master(self, parameter):
        same_device = self.device in (None, local(parameter).device.type)
        dtype = self.master_dtype(parameter.dtype, same_device)
        if dtype is None:
            return parameter
        master = self._new_state(parameter.detach(), parameter.shape, dtype)
        if dtype != torch.int16:  # the lower half of a weight that starts in bfloat16 is zero
            local(master).copy_(local(parameter))
        return master

    def _new_state(self, parameter, shape, dtype):
        return new_state(parameter, shape, dtype, self.device or local(parameter).device)

    # ------------------------------------------------------------------------------------------------------------------
    # What a checkpoint holds

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors of a checkpoint by (parameter's name, state's name), to be saved or loaded into.

        State "" is the weight: the float32 master, or if it is in halves, the parameter; the other is "lower_half".
        """
        self.finish()
        tensors = {}
        for name, master in self.masters.items():
            tensors[name, ""] = master
            if master.dtype == torch.int16:
                tensors[name, ""] = self.parameters[name]
                tensors[name, "lower_half"] = master
            for state, x in self.states[name].items():
                tensors[name, state] = x
        return {key: x.detach() for key, x in tensors.items()}

    @torch.no_grad()
    def set_weight(self, name: str, whole: torch.Tensor) -> None:
        """Sets this rank's rows of a parameter and of its master from float32 ones on the CPU."""
        parameter = local(self.weight(name))
        master = local(self.masters[name])
        if master.dtype != torch.int16:
            master.copy_(whole)
            parameter.copy_(master)
            return
        # In pieces: a GPU that barely fits the run has no room for a whole weight.
        pieces = (x.view(-1).split(SPLIT_AT_ONCE) for x in (whole, parameter, master))
        for part, upper, lower in zip(*pieces, strict=True):
            split_halves(part.to(upper.device), upper, lower)


def new_state(parameter: torch.Tensor, shape, dtype: torch.dtype, device) -> torch.Tensor:
    """Zeros on device. Under FSDP a state with the parameter's rows is split like it; others are whole on each rank."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=device)
    mesh = parameter.device_mesh
    placements = parameter.placements if shape[0] == parameter.shape[0] else [Replicate()] * mesh.ndim
    return dtensor.zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements).to(device)
