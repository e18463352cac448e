"""Weights in CPU memory, streamed to one GPU: each block's weights are copied while another block computes.

    forward     block i computes        block i + 1's weights arrive in the other of two slots
    backward    block i computes        block i - 1's arrive; at the end the slots hold blocks 1 and 0

All blocks have the same shapes, so the parameters of block i are always views of slot i % 2, and only the slot's
content changes: no allocation per block, and one copy transfers the whole block. The root (embedding, final norm, head)
is on the GPU from the beginning of forward until backward reaches the blocks.

So the GPU holds two blocks and, for a time, the root. Of n parameters in bfloat16, 2n bytes are copied to it in
forward, less than 2n in backward. Gradients go to the CPU as soon as they are computed. optimizers/on_cpu.py writes new
weights to `cpu_weights`, each parameter's part of the pinned memory.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from kernels.pinned_memory import pinned_empty

ALIGNMENT = 256  # bytes; parameters begin at multiples of it, because the kernels load vectors


def layout(parameters: dict[str, nn.Parameter]) -> tuple[list[int], int]:
    """The offset of each parameter in one flat tensor for all, and the length of that tensor, in elements."""
    offsets = []
    end = 0
    for parameter in parameters.values():
        step = ALIGNMENT // parameter.element_size()
        offsets.append(end)
        end += -(-parameter.numel() // step) * step
    return offsets, end


def view_in(flat: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


class StreamedWeights:
    """Keeps a model's weights on the CPU, and copies each to the device before the device needs it.

    Each forward that builds a graph must have one backward before the next such forward; evaluation may come between.

    cpu_weights: the weights, by name. before_copy: called with a prefix of names, 'layers.3.' or '' for the root,
    before these weights are copied.
    """

    def __init__(self, model: nn.Module, device: str):
        self.layers = model.layers
        self.device = torch.device(device)
        self.before_copy: Callable[[str], None] = lambda prefix: None
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.cpu_weights: dict[str, torch.Tensor] = {}
        layers = [dict(layer.named_parameters(f"layers.{i}")) for i, layer in enumerate(self.layers)]
        root = {name: p for name, p in model.named_parameters() if not name.startswith("layers.")}
        dtype = model.tok_embeddings.weight.dtype
        _, length = layout(layers[0])
        self.slots = [torch.empty(length, dtype=dtype, device=self.device) for _ in range(2)]
        _, length = layout(root)
        self.root = torch.empty(length, dtype=dtype, device=self.device)
        self.root_bytes = self.root.untyped_storage().nbytes()
        self.cpu_root = self._move(root, self.root)
        self.root.untyped_storage().resize_(0)  # else resize_ in the first forward would copy it, and hold it twice
        self.cpu_layers = [self._move(layer, self.slots[i % 2]) for i, layer in enumerate(layers)]
        self.forget()
        # The compiler must not trace these hooks. Disabled here, because a decorator would import the compiler: 1.5 s.
        model.tok_embeddings.register_forward_pre_hook(torch.compiler.disable(self._before_all))
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(torch.compiler.disable(self._before), i))
            layer.register_forward_hook(partial(torch.compiler.disable(self._after), i))
        self.before_backward = torch.compiler.disable(self._before_backward)

    def _move(self, parameters: dict[str, nn.Parameter], flat: torch.Tensor) -> torch.Tensor:
        """Copy the parameters to one tensor on the CPU, make them views of flat, and return the CPU tensor.

        They become views once, here, as Module.to moves parameters: later only the content of flat changes.
        """
        offsets, length = layout(parameters)
        on_cpu = pinned_empty((length,), flat.dtype) if self.stream else torch.empty(length, dtype=flat.dtype)
        for offset, (name, parameter) in zip(offsets, parameters.items(), strict=True):
            self.cpu_weights[name] = view_in(on_cpu, offset, parameter).copy_(parameter.detach())
            parameter.data = view_in(flat, offset, parameter)
        return on_cpu

    def forget(self):
        """Mark the slots and the root as stale: the weights on the CPU are about to change."""
        self.in_slot = [None, None]  # the block that each slot holds
        self.arrived = [None, None]  # events
        self.has_root = False

    def _event(self):
        return torch.cuda.current_stream().record_event() if self.stream else None

    def _fetch(self, i: int, free):
        """Copy block i into its slot after the event `free`."""
        slot = i % 2
        self.before_copy(f"layers.{i}.")
        with torch.cuda.stream(self.stream):  # None: no-op
            if self.stream is not None:
                self.stream.wait_event(free)
            self.slots[slot].copy_(self.cpu_layers[i], non_blocking=True)
            self.arrived[slot] = self._event()
        self.in_slot[slot] = i

    def _need(self, i: int):
        """Make work queued from now on wait for block i's weights."""
        if self.in_slot[i % 2] != i:
            self._fetch(i, self._event())
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.arrived[i % 2])

    # ------------------------------------------------------------------------------------------------------------------
    # Hooks

    @torch.no_grad()
    def _before_all(self, tok_embeddings, inputs):
        if not self.has_root:
            self.root.untyped_storage().resize_(self.root_bytes)
            self.before_copy("")
            self.root.copy_(self.cpu_root, non_blocking=True)
            self.has_root = True

    @torch.no_grad()
    def _before(self, i: int, block, inputs):
        self._need(i)
        self.other_is_free = self._event()  # after it, the other slot's content has been read

    @torch.no_grad()
    def _after(self, i: int, block, inputs, outputs):
        # After block i is queued, because the CPU may first have to finish updating the weights of block i + 1.
        if i + 1 < len(self.layers) and self.in_slot[(i + 1) % 2] != i + 1:
            self._fetch(i + 1, self.other_is_free)
        for output in outputs:
            if output is not None and output.requires_grad:
                output.register_hook(partial(self.before_backward, i))

    @torch.no_grad()
    def _before_backward(self, i: int, gradient):
        """Hook on each output of block i. When the first one fires, the backward of all later blocks is queued."""
        if i + 1 == len(self.layers) and self.has_root:
            self.root.untyped_storage().resize_(0)
            self.has_root = False
        self._need(i)
        if i and self.in_slot[(i - 1) % 2] != i - 1:
            self._fetch(i - 1, self._event())
