"""Checkpoints between blocks in the CPU's memory: what full activation checkpointing keeps, off the GPU.

    forward     block i's input is copied to pinned memory, on a stream of its own, while block i computes; block i + 1
                begins when that is done, and the GPU's copy is free
    backward    while block i + 1 computes its gradients, block i's input comes back

So the GPU holds two of these tensors instead of one for each layer. A layer of Llama 3.2 1B computes 120 million FLOPs
a token in forward, 0.2 us of an H200, which copies the token's 4 KiB in 0.08 us: the copies hide. What the last block
reads is wanted first, and stays.

A tensor is freed by the stream that computes, once it waits for the copy: PyTorch's allocator can then hand the memory
on at once. (record_stream would have it ask the GPU, which the CPU is far ahead of, and every tensor would stay.)
"""

import torch
from torch.autograd.graph import saved_tensors_hooks

from pinned import pinned_empty


class Inputs:
    """The inputs of the blocks of one forward pass: put in the order of forward, taken in that of backward, once.

    with inputs.kept(last=False): checkpoint(block, x, cos, sin)
    """

    def __init__(self):
        self.stack = []  # on the CPU, but the last block's
        self.pinned = []  # the memory of the stack, kept from pass to pass
        self.leaving = self.coming = None  # a tensor on the GPU with the event that ends its copy
        self.stream = None
        self.passes = 0

    def clear(self):
        """Begins a forward pass. Forgets what is left of one whose backward did not come to its end."""
        if self.coming is not None and self.coming[1] is not None:
            torch.cuda.current_stream().wait_event(self.coming[1])
        self.passes += 1
        self.stack.clear()
        self.leaving = self.coming = None

    def kept(self, last: bool) -> saved_tensors_hooks:
        """Of what is saved meanwhile, the (B, T, C) tensors are put here; for backward they are taken again."""

        def pack(x):
            if x.ndim == 3:
                self.put(x, last)
                return self.passes, len(self.stack), x.device
            return x

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            if kept[:2] != (self.passes, len(self.stack)):
                raise RuntimeError("offload_activations: each forward has one backward, before the next forward")
            return self.take(kept[2])

        return saved_tensors_hooks(pack, unpack)

    def put(self, x: torch.Tensor, last: bool):
        """Keeps x (B, T, C), which nobody changes any more. last: of the last block."""
        if self.leaving is not None:
            torch.cuda.current_stream().wait_event(self.leaving[1])
            self.leaving = None
        if last or not x.is_cuda:
            self.stack.append(x)
            return
        self.stream = self.stream or torch.cuda.Stream()
        i = len(self.stack)
        if i == len(self.pinned):
            self.pinned.append(None)
        if self.pinned[i] is None or self.pinned[i].shape != x.shape or self.pinned[i].dtype != x.dtype:
            self.pinned[i] = pinned_empty(x.shape, x.dtype)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.pinned[i].copy_(x, non_blocking=True)
        self.leaving = x, self.stream.record_event()
        self.stack.append(self.pinned[i])

    def take(self, device: torch.device) -> torch.Tensor:
        """The input that was put last, and calls the one before."""
        x, arrived = self.coming or self._call(self.stack[-1], device)
        self.stack.pop()
        self.coming = self._call(self.stack[-1], device) if self.stack else None
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return x

    def _call(self, kept, device):
        if kept.device == device:
            return kept, None
        x = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        self.stream.wait_stream(torch.cuda.current_stream())  # whatever used that memory before
        with torch.cuda.stream(self.stream):
            x.copy_(kept, non_blocking=True)
        return x, self.stream.record_event()
