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
from torch import nn


class Inputs:
    """The inputs of the blocks of one forward pass: put in the order of forward, taken in that of backward."""

    def __init__(self):
        self.stack = []  # on the CPU, but the last block's
        self.pinned = []  # the memory of the stack, kept from pass to pass
        self.leaving = self.coming = None  # a tensor on the GPU with the event that ends its copy
        self.stream = None

    def clear(self):
        """Forgets a forward pass without a backward, as one that ran out of memory."""
        self.stack.clear()
        self.leaving = self.coming = None

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
            self.pinned[i] = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
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


class _OffloadedCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, inputs, last, cos, sin):
        ctx.block, ctx.inputs, ctx.tables = block, inputs, (cos, sin)
        inputs.put(x, last)
        return block._forward(x, None, cos, sin)

    @staticmethod
    def backward(ctx, dx, ddelta):
        x = ctx.inputs.take(dx.device).detach().requires_grad_()
        with torch.enable_grad(), ctx.block.mlp:
            outputs = ctx.block._forward(x, None, *ctx.tables)
        torch.autograd.backward(outputs, (dx, ddelta))
        return x.grad, *[None] * 5


def offloaded_checkpoint(block: nn.Module, inputs: Inputs, last: bool, x: torch.Tensor, cos, sin):
    """block._forward(x, None, cos, sin), of which inputs keeps x alone; backward computes the rest again."""
    return _OffloadedCheckpoint.apply(x, block, inputs, last, cos, sin)
