"""Masters and states in CPU memory: the GPU holds neither, and a gradient only until it is copied.

    backward        when a gradient is ready, its norm is taken; it is copied to pinned memory on a separate stream,
                    and freed when the next block's gradients arrive
    clipping        the norms are combined into one number, for which the CPU waits
    update          a CPU thread goes through the layers in the order of forward: it changes master and states, and
                    writes the new parameter into pinned memory, from where it is copied to the GPU
    next forward    each layer waits for its own parameters: the GPU computes the first while the CPU updates the last

So for n parameters in bfloat16, 2n bytes of gradients go to the CPU in each micro-batch, and 2n bytes of new parameters
come back in each step: hidden if the step is long enough. The losses are those of OnDevice except for rounding: a tie
between two bfloat16 weights goes to the even one here, away from zero there.

The parameters stay on the GPU (offload = 'optimizer': on its way there, a new one overwrites its gradient in pinned
memory), or they stay in CPU memory too (offload = 'all'). Then runtime/stream_weights.py copies each block's weights to
the GPU just before they are used (2n bytes in forward, less in backward). With several ranks FSDP does that, and also
brings the gradients back.
"""

import math
import os
from concurrent.futures import Future
from functools import partial

import torch

from kernels.c_library import c_library
from kernels.pinned_memory import pinned_empty
from optimizers.on_device import gradient_of
from optimizers.optimizer import Optimizer
from runtime.distributed import local, local_world_size, worker_thread
from runtime.stream_weights import StreamedWeights

CHUNK = 2**22  # elements in float32 at a time, which stay in the cache; best of 2^16..2^24 on 16 cores


def in_float32(x: torch.Tensor):
    """Yields pieces of x, converted in a buffer that stays in the cache: PyTorch adds mixed dtypes 4 times slower."""
    buffer = torch.empty(min(CHUNK, x.numel()), dtype=torch.float32)
    for part in x.view(-1).split(CHUNK):
        yield buffer[: part.numel()].copy_(part)


def sum_of_squares(x: torch.Tensor) -> float:
    """The sum of the squares of x's elements: within a piece in float32, over the pieces in float64."""
    return sum(torch.dot(part, part).item() for part in in_float32(x))


class OnCPU(Optimizer):
    """streamed: the model's weights, if they stay in CPU memory and FSDP does not move them."""

    device = "cpu"

    def __init__(self, model, rule, *, streamed: StreamedWeights | None = None, **options):
        self.streamed = streamed
        if streamed is not None:
            self.cpu_weights = streamed.cpu_weights
        for name in rule.c_files:  # without a compiler it fails here, not in the first update
            c_library(name)
        super().__init__(model, rule, **options)
        n_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, n_cores // local_world_size))  # torchrun gives each rank one
        self.worker = worker_thread()  # runs tasks in order: sums, then updates, then the next sums
        self.pending: list[Future] = []  # work on gradients since the last update
        self.updating: dict[str, Future] = {}  # by group
        self.sums_are_stale = True  # the sums are those of an earlier step
        self.pinned_grads = {}  # memory for gradients from the GPU
        self.norms = {}  # of the gradients on their way to the CPU or there, since the last accumulate() or update
        self.copying = []  # the gradients being copied, all of one group
        self.copying_group = None
        on_gpu = local(next(iter(self.parameters.values()))).is_cuda  # then all are on the GPU
        self.stream = torch.cuda.Stream() if on_gpu else None
        # The parameters' names by what they begin with: first the root's own, then each layer's.
        layers = {f"layers.{i}.": layer for i, layer in enumerate(model.layers)}
        self.groups = {"": [name for name in self.parameters if not name.startswith("layers.")]}
        for group in layers:
            self.groups[group] = [name for name in self.parameters if name.startswith(group)]
        for group, module in ({"": model} | layers).items():
            module.register_forward_pre_hook(partial(torch.compiler.disable(self._wait_for), group), prepend=True)
            for name in self.groups[group] if on_gpu else ():
                shard = local(self.parameters[name])
                self.pinned_grads[name] = pinned_empty(shard.shape, shard.dtype)
                self.parameters[name].register_post_accumulate_grad_hook(partial(self._offload_grad, name, group))
        # model.hidden starts here, if called without model.forward, as in generate()
        model.tok_embeddings.register_forward_pre_hook(torch.compiler.disable(partial(self._wait_for, "")))
        model.layers[-1].register_forward_pre_hook(torch.compiler.disable(self._free_copied))  # the root's, copied last
        if self.streamed is not None:
            self.streamed.before_copy = self._wait_for

    @staticmethod
    def master_dtype(dtype, same_device):
        return None if same_device and dtype == torch.float32 else torch.float32

    # ------------------------------------------------------------------------------------------------------------------
    # Waiting

    def _wait_for(self, group: str, *hook_arguments):
        """Waits until a group's updated parameters have reached the GPU."""
        if group in self.updating:
            copied = self.updating.pop(group).result()
            if copied is not None:
                copied.synchronize()

    def _finish_sums(self):
        while self.pending:
            self.pending.pop().result()

    def finish(self):
        for group in self.groups:
            self._wait_for(group)
        self._finish_sums()

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    @torch.no_grad()
    def _offload_grad(self, name: str, group: str, parameter: torch.Tensor):
        self._finish_sums()  # sums of the previous micro-batch may still read this memory
        if group != self.copying_group:
            self._free_copied()
            self.copying_group = group
        grad = local(parameter.grad)
        assert name not in self.norms, f"{name} has a gradient from another backward: call accumulate() after each"
        self.norms[name] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.pinned_grads[name].copy_(grad, non_blocking=True)
        self.copying.append(grad)
        parameter.grad = None

    def _free_copied(self, *hook_arguments):
        """Frees the gradients that were being copied. With record_stream the allocator could reuse their memory only if
        the copy had finished when the CPU asked, and the CPU is far ahead of the GPU.
        """
        if self.copying:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.copying.clear()

    def _offloaded_grads(self) -> dict[str, torch.Tensor]:
        """This rank's part of each gradient, on the CPU. Those from the GPU are valid once the stream is done."""
        grads = {}
        for name, parameter in self.parameters.items():
            grads[name] = self.pinned_grads[name] if name in self.norms else local(gradient_of(name, parameter))
        return grads

    def drop_grads(self):
        super().drop_grads()
        self.norms.clear()

    def accumulate(self):
        """Adds a micro-batch's gradients to the sums while the GPU continues."""
        self._finish_sums()  # else a slow CPU would keep the gradients of many micro-batches
        grads = self._offloaded_grads()
        arrived = self.stream.record_event() if self.stream else None

        @torch.no_grad()
        def add():
            if arrived is not None:
                arrived.synchronize()
            for name, grad in grads.items():
                if self.sums_are_stale:
                    self.sums.setdefault(name, torch.empty(grad.shape, dtype=torch.float32)).copy_(grad)
                else:
                    totals = self.sums[name].view(-1).split(CHUNK)
                    for total, part in zip(totals, in_float32(grad), strict=True):
                        total.add_(part)
            self.sums_are_stale = False

        self.pending.append(self.worker.submit(add))
        self.drop_grads()

    def gradients(self):
        self._finish_sums()
        if self.sums:
            assert not self.norms and not self.sums_are_stale, "call accumulate() after every backward, or never"
            self.require_no_grads()
        if self.stream is not None:
            self.stream.synchronize()
            self.copying.clear()
        return self.sums or self._offloaded_grads()

    def local_norm(self):
        grads = self.gradients()
        if self.norms and not self.sums:  # norms taken on the GPU
            return torch.linalg.vector_norm(torch.stack(list(self.norms.values())))
        return torch.tensor(sum(sum_of_squares(grad) for grad in grads.values()), dtype=torch.float32).sqrt()

    # ------------------------------------------------------------------------------------------------------------------
    # The update

    def apply(self, scale, lr, t):
        """Starts the update, which continues during the next forward."""
        scalars = scale.item(), lr.item(), t.item()
        if math.isfinite(scalars[0]):
            grads = self.gradients()
            if self.streamed is not None:
                self.streamed.forget()
            for group, names in self.groups.items():
                self.updating[group] = self.worker.submit(self._update, {name: grads[name] for name in names}, scalars)
        self.sums_are_stale = True  # the next step's first micro-batch overwrites them
        self.drop_grads()

    @torch.no_grad()
    def _update(self, grads: dict[str, torch.Tensor], scalars) -> torch.cuda.Event | None:
        """Updates a group's parameters. Returns the event of their arrival on the GPU."""
        for name, grad in grads.items():
            parameter = local(self.weight(name))
            new = self.pinned_grads[name] if parameter.is_cuda else parameter
            if grad.numel():  # a rank may hold nothing of a small parameter
                self._step(name, new, grad, scalars)
            if parameter.is_cuda:
                with torch.cuda.stream(self.stream):
                    parameter.copy_(new, non_blocking=True)
        return self.stream.record_event() if self.stream else None

    def _step(self, name: str, new: torch.Tensor, grad: torch.Tensor, scalars):
        self.rule.step_on_cpu(new, grad, *self.local_states(name), *scalars)
