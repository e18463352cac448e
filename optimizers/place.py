"""Common to all places: the masters and states of a model's parameters, and their sizes.

A place decides where they live and when gradients and parameters move: on_device.py, on_cpu.py, on_disk.py.

    accumulate()              after each of several micro-batches: adds the gradients to float32 sums
    gradients()               this rank's part of each, or of their sums, by parameter name
    norm()                    of these, as a scalar
    update(scale, lr, t)      updates all parameters if scale is finite; frees the gradients in any case
    finish()                  waits for updates that are still running
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from kernels.linear import packed_rows
from optimizers.rule import Ranks
from runtime.distributed import local


def new_state(parameter: torch.Tensor, shape, dtype: torch.dtype, device) -> torch.Tensor:
    """Zeros on device. Under FSDP a state with the parameter's rows is split like it; others are whole on each rank."""
    if shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=device)
    mesh = parameter.device_mesh
    if shape[0] == parameter.shape[0]:
        placements = parameter.placements
        n_rows = len(local(parameter))
    else:
        placements = [Replicate()] * mesh.ndim
        n_rows = shape[0]
    part = torch.zeros(n_rows, *shape[1:], dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    state = DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return state.to(device)


class Place:
    device: str | None = None  # of masters and states; None: each parameter's own
    scalar_dtype = torch.float32  # of the norm and of scalars computed from it
    async_save = True  # whether there is memory for copies, from which checkpoints are written during training
    step = 0  # of the run, counted by the CPU: a CUDA graph's replays are not
    cpu_weights: dict[str, torch.Tensor] = {}  # by name, the weights that runtime/stream_weights.py keeps on the CPU

    @staticmethod
    def master_dtype(dtype: torch.dtype, same_device: bool) -> torch.dtype | None:
        """The dtype of a parameter's master, or int16 for its lower half; None: a float32 parameter is its own master.

        same_device: whether the parameter is on the masters' device.
        """
        raise NotImplementedError

    def attach(self, model: nn.Module, parameters: dict[str, nn.Parameter], rule) -> None:
        """Allocates masters, as copies of the parameters, and states, as zeros. Call it after init_weights."""
        self.parameters = parameters
        self.rule = rule
        packed = packed_rows(model)
        self.rows = {name: packed.get(name, tuple(p.shape[:1])) for name, p in parameters.items()}
        groups = {}
        first = next(iter(parameters.values()))
        if isinstance(first, DTensor):
            groups = {name: first.device_mesh.get_group(name) for name in first.device_mesh.mesh_dim_names}
        self.ranks = Ranks(groups.get("shard"), groups.get("replicate"))
        self.masters = {name: self._master(self.weight(name)) for name in parameters}
        self.states = {}
        for name, p in parameters.items():
            states = rule.states(name, p.shape, self.rows[name])
            self.states[name] = {key: self._new_state(p.detach(), *state) for key, state in states.items()}
        self.sums = {}  # the float32 sums of gradients, if there are several micro-batches

    def weight(self, name: str) -> torch.Tensor:
        """A parameter where it is kept: the parameter itself, or with streamed weights its copy in CPU memory."""
        return self.cpu_weights.get(name, self.parameters[name].detach())

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

    def local_states(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This rank's part of a parameter's master, and of its states."""
        return local(self.masters[name]), {state: local(x) for state, x in self.states[name].items()}

    def require_no_grads(self) -> None:
        grads = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        assert not grads, f"{grads[0]} has a gradient beside its sum: call accumulate() after every backward, or never"

    def drop_grads(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def finish(self) -> None:
        pass
