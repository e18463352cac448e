"""AdamW in the CPU's memory: the GPU holds neither its weights nor its moments, and a gradient only until it is copied.

    backward        a gradient is ready: its norm is taken, it is copied to pinned memory on a stream of its own, and
                    freed when those of the next block come
    clipping        the norms make one number, for which the CPU waits
    update          a thread of the CPU, layer after layer in the order of forward: w, m and v move (kernels/adamw.py),
                    and the new parameter is written: into pinned memory, from where it is copied to the GPU
    next forward    each layer waits for its own: the GPU computes with the first while the CPU moves the last

So for n parameters in bfloat16 2n bytes of gradients go to the CPU in each micro-batch, and 2n bytes of new parameters
come back in each step: hidden if the step is long enough. w, m and v never move. The losses are those of the optimizer
on the GPU except for roundings: a bfloat16 weight in the middle of two numbers goes to the even one here, away from
zero there.

The parameters stay on the GPU (offload = 'optimizer': a new one overwrites its gradient in the pinned memory on its way
there), or stay in CPU memory beside the optimizer (offload = 'all'). Then weights.py copies each block's weights to the
GPU just before they are used (2n bytes in forward, less in backward). With several ranks FSDP does that, and takes the
gradients back too.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
from torch import nn

from kernels.adamw import CPU_CHUNK, adamw_on_cpu
from optimizers.driver import AdamW, home, local
from runtime.distributed import worker_thread
from runtime.pinned_memory import pinned_empty
from runtime.stream_weights import StreamedWeights


def in_float32(total: torch.Tensor, x: torch.Tensor):
    """Yields pairs of pieces of total and of x, those of x converted to float32 in a buffer that stays in the cache:
    PyTorch adds tensors of two dtypes 4 times slower.
    """
    buffer = torch.empty(min(CPU_CHUNK, x.numel()))
    for total_part, part in zip(total.view(-1).split(CPU_CHUNK), x.view(-1).split(CPU_CHUNK), strict=True):
        yield total_part, buffer[: part.numel()].copy_(part)


def sum_of_squares(x: torch.Tensor) -> float:
    """The sum of the squares of x's elements: within a piece in float32, over the pieces in float64."""
    return sum(torch.dot(part, part).item() for _, part in in_float32(x, x))


class OffloadedAdamW(AdamW):
    """AdamW with w, m and v on the CPU, whatever device computes; the same interface."""

    state_device = "cpu"

    def __init__(
        self,
        model: nn.Module,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
        weights: StreamedWeights | None = None,
    ):
        super().__init__(model, betas, weight_decay, eps)
        self.worker = worker_thread()  # works in order: sums, then updates, then the next sums
        self.busy: list[Future] = []  # the work on gradients since the last update
        self.sums_are_stale = True  # the sums are those of an earlier step
        self.pinned_grads, self.norms = {}, {}  # gradients that have come from the GPU, and their norms
        # By module: the root's own parameters, then each layer's.
        self.groups = {"": [name for name in self.parameters if not name.startswith("layers.")]}
        model.register_forward_pre_hook(self._waiter(""), prepend=True)
        for i, layer in enumerate(model.layers):
            prefix = f"layers.{i}."
            self.groups[prefix] = [name for name in self.parameters if name.startswith(prefix)]
            layer.register_forward_pre_hook(self._waiter(prefix), prepend=True)
        model.layers[-1].register_forward_pre_hook(self._free_root)
        on_gpu = local(next(iter(self.parameters.values()))).is_cuda  # then all are
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.copying, self.copying_group = [], None  # the gradients that are being copied, all of one group
        for group, names in self.groups.items():
            for name in names if on_gpu else []:
                shard = local(self.parameters[name])
                self.pinned_grads[name] = pinned_empty(shard.shape, shard.dtype)
                self.parameters[name].register_post_accumulate_grad_hook(partial(self._land, name, group))
        self.updating: dict[str, Future] = {}  # by group
        self.weights = weights
        if weights is not None:
            weights.before_copy = self._wait_for

    def _waiter(self, group: str) -> Callable:
        @torch.compiler.disable
        def wait(module, inputs):
            self._wait_for(group)

        return wait

    def _wait_for(self, group: str):
        """Waits until a group's updated parameters have reached the GPU."""
        if group in self.updating:
            copied = self.updating.pop(group).result()
            if copied is not None:
                copied.synchronize()

    def finish(self):
        """Waits for all pending updates and gradient sums."""
        for group in self.groups:
            self._wait_for(group)
        self._finish_sums()

    def _finish_sums(self):
        for future in self.busy:
            future.result()
        self.busy.clear()

    def tensors(self) -> dict:
        self.finish()
        return super().tensors()

    def bit_sums(self) -> dict:
        self.finish()
        return super().bit_sums()

    def copy_tensors(self, copies: dict) -> None:
        self.finish()
        super().copy_tensors(copies)

    def refresh(self, tensors: dict) -> None:
        self.finish()
        super().refresh(tensors)
        if self.weights is not None:
            self.weights.forget()

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    @torch.no_grad()
    def _land(self, name: str, group: str, parameter: torch.Tensor):
        """Sends a gradient to the CPU as soon as backward has computed it."""
        self._finish_sums()  # those of the micro-batch before may still read this memory
        if group != self.copying_group:
            self._free_copied()
            self.copying_group = group
        grad = local(parameter.grad)
        self.norms[name] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.pinned_grads[name].copy_(grad, non_blocking=True)
        self.copying.append(grad)
        parameter.grad = None

    @torch.compiler.disable
    def _free_root(self, last_layer, inputs):
        """Frees the root's gradients, which were the last to be copied in the micro-batch before."""
        if self.copying:
            self._free_copied()

    def _free_copied(self):
        """Frees the gradients that were being copied. With record_stream the allocator could reuse the memory only if
        the copy was over when the CPU asked, and the CPU is far ahead of the GPU.
        """
        torch.cuda.current_stream().wait_stream(self.stream)
        self.copying.clear()

    def _landed(self) -> dict[str, torch.Tensor]:
        """This rank's part of each gradient, on the CPU. Those from the GPU are valid once the stream is done."""
        return {name: self.pinned_grads.get(name, p.grad if p.grad is None else local(p.grad))
                for name, p in self.parameters.items()}  # fmt: skip

    @torch.no_grad()
    def accumulate(self):
        """Adds a micro-batch's gradients to float32 sums, while the GPU goes on."""
        self._finish_sums()  # else a slow CPU would have to keep the gradients of many micro-batches
        grads, landed = self._landed(), self.stream.record_event() if self.stream else None

        @torch.no_grad()
        def add():
            if landed is not None:
                landed.synchronize()
            for name, grad in grads.items():
                if self.sums_are_stale:
                    self.sums.setdefault(name, torch.empty(grad.shape)).copy_(grad)
                else:
                    for total, part in in_float32(self.sums[name], grad):
                        total.add_(part)
            self.sums_are_stale = False

        self.busy.append(self.worker.submit(add))
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        if self.stream is not None:
            self.stream.synchronize()
            self.copying.clear()
        self._finish_sums()
        landed = self._landed()
        return [self.sums.get(name, landed[name]) for name in self.parameters]

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """The same as AdamW's; from the norms that _land took on the GPU, if there are no sums."""
        grads = self.gradients()
        if self.norms and not self.sums:
            norm = torch.linalg.vector_norm(torch.stack(list(self.norms.values())))
        else:
            norm = torch.tensor(sum(sum_of_squares(grad) for grad in grads)).sqrt()
        return self._over_shards(norm) / self.loss_scale

    # ------------------------------------------------------------------------------------------------------------------
    # The update

    def set_step(self, lr: float, loss_scale: float = 1.0):
        self.lr, self.loss_scale = lr, loss_scale
        self.inverse_loss_scale.fill_(1 / loss_scale)

    @torch.no_grad()
    def update(self, grad_clip: float = 0.0) -> torch.Tensor:
        """Does what AdamW's does, but the weights move on the CPU beside the next forward."""
        norm = self.grad_norm()
        value = norm.item()
        if math.isfinite(value):
            clip = min(grad_clip / (value + 1e-6), 1.0) if grad_clip else 1.0
            grads = dict(zip(self.parameters, self.gradients(), strict=True))
            options = (clip / self.loss_scale, self.lr, self.updates + 1, *self.betas, self.eps)
            if self.weights is not None:
                self.weights.forget()
            for group, names in self.groups.items():
                self.updating[group] = self.worker.submit(self._update, {name: grads[name] for name in names}, options)
        self.sums_are_stale = True
        return norm

    @torch.no_grad()
    def _update(self, grads: dict, options) -> torch.cuda.Event | None:
        """Moves the parameters of a group. Returns the event of their arrival on the GPU."""
        for name, grad in grads.items():
            parameter = local(home(self.parameters[name]).detach())
            new = self.pinned_grads[name] if parameter.is_cuda else parameter
            if grad.numel():  # a rank may hold nothing of a small parameter
                states = (local(x[name]) for x in (self.w, self.m, self.v))
                adamw_on_cpu(new, grad, *states, *options, self.decay(self.parameters[name]))
            if parameter.is_cuda:
                with torch.cuda.stream(self.stream):
                    parameter.copy_(new, non_blocking=True)
        return self.stream.record_event() if self.stream else None

    def zero_grad(self):
        """Drops the gradients. Keeps the sums: the next step's first micro-batch overwrites them."""
        for parameter in self.parameters.values():
            parameter.grad = None
