"""Full activation checkpointing: a block keeps its input alone, and backward computes the rest of it again.

A few sequences pass through a block at a time (`recomputed`): its activations exist for one group of them only, in
forward and in backward, and the gradient of its input overwrites that of its output. So only the checkpoints and one
gradient grow with the batch.

With offload_activations not even the checkpoints stay on the GPU (`OffloadedInputs`): they go to the CPU's memory.

    forward     block i's input is copied to pinned memory, on a stream of its own, while block i computes; block i + 1
                begins when that is done, and the GPU's copy is free
    backward    while block i + 1 computes its gradients, block i's input comes back

So the GPU holds two of these tensors instead of one for each layer. A layer of Llama 3.2 1B computes 120 million FLOPs
a token in forward, 0.2 us of an H200, which copies the token's 4 KiB in 0.08 us: the copies hide. The last block's
input stays on the GPU, since backward needs it first.

A tensor is freed by the stream that computes, after that stream has waited for the copy: PyTorch's allocator can then
reuse the memory at once. (With record_stream it could do so only if the copy was over when the CPU asked, which is far
ahead of the GPU.)
"""

import torch
from torch.autograd.graph import get_gradient_edge

from kernels.launch import compute_dtype, refuse_double_backward
from kernels.swiglu_mlp import slices
from runtime.pinned_memory import pinned_empty


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, groups, x, cos, sin, starts, *weights):
        ctx.block, ctx.groups, x = block, groups, x.detach()
        ctx.place = block.offloaded and block.offloaded.put(x)  # copied out while the block computes
        ctx.save_for_backward(None if block.offloaded else x, cos, sin, starts)
        return _output(block, groups, x, cos, sin, starts)

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        x, *tables, starts = ctx.saved_tensors
        x = ctx.block.offloaded.take(ctx.place, dy.device) if x is None else x
        weights = trainable_parameters(ctx.block)
        if ctx.groups == 1:
            dx, *dweights = _gradients(ctx.block, x, *tables, starts, weights, dy)
            return None, None, dx, None, None, None, *dweights
        dx, sums = dy.contiguous(), []  # a group's gradient of x overwrites that of its output
        for some in slices(len(x), ctx.groups):
            at = x[some], *tables, _of_rows(starts, some)
            dx[some], *dweights = _gradients(ctx.block, *at, weights, dx[some])
            if sums:
                torch._foreach_add_(sums, dweights)
            elif ctx.groups == 2:  # one addition, and one rounding in it
                sums = dweights
            else:
                sums = [dweight.to(compute_dtype(dweight)) for dweight in dweights]
            del dweights  # before the next group makes its own
        return None, None, dx, None, None, None, *(s.to(w.dtype) for s, w in zip(sums, weights, strict=True))


def _output(block, groups, x, cos, sin, starts):
    out = torch.empty_like(x)
    for some in slices(len(x), groups):
        torch.add(*block.addends(x[some], None, cos, sin, _of_rows(starts, some)), out=out[some])
    return out


def _of_rows(starts, some: slice):
    return None if starts is None else starts[some]


def _gradients(block, x, cos, sin, starts, weights, dy):
    """The gradients of x, then of the weights."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        # Graph nodes, not tensors: held here, the residual stream after attention would outlive the MLP's backward.
        outputs = [get_gradient_edge(addend) for addend in block.addends(x, None, cos, sin, starts, None, False)]
    return torch.autograd.grad(outputs, [x, *weights], [dy, dy])


def trainable_parameters(block: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in block.parameters() if weight.requires_grad]


def recomputed(block, groups: int, x: torch.Tensor, cos, sin, starts=None) -> torch.Tensor:
    """The output (B, T, C) of a block of model.py for its input x (B, T, C). Only x, cos, sin and starts are kept for
    backward, and nothing if there is none, as in evaluation.

    The sequences pass through the block in `groups` groups. With more than one, their gradients of the weights are
    summed in float32 and rounded once, and x's gradient overwrites the output's, which must not be read afterwards.
    A hook on a weight sees the gradient of each group, and then the sum (autograd.grad calls it too).
    """
    if not torch.is_grad_enabled():
        return _output(block, groups, x, cos, sin, starts)
    return _Recomputed.apply(block, groups, x, cos, sin, starts, *trainable_parameters(block))


class OffloadedInputs:
    """The inputs of the n_layer blocks of one forward pass: put in the order of forward, each taken once in backward.

    place = offloaded.put(x) ... x = offloaded.take(place, device)
    """

    def __init__(self, n_layer: int):
        self.n_layer = n_layer
        self.stack = []  # on the CPU, except the last block's
        self.pinned = []  # memory for the stack, reused in each pass
        self.leaving = self.coming = None  # a tensor on the GPU, and the event at the end of its copy
        self.stream = None
        self.passes = 0

    def clear(self):
        """Begins a forward pass. Drops what is left of an earlier one whose backward did not finish."""
        if self.coming is not None and self.coming[1] is not None:
            torch.cuda.current_stream().wait_event(self.coming[1])
        self.passes += 1
        self.stack.clear()
        self.leaving = self.coming = None

    def put(self, x: torch.Tensor) -> tuple[int, int]:
        """Keeps x (B, T, C), which must not change any more; returns its place. The last block's stays where it is."""
        if self.leaving is not None:
            torch.cuda.current_stream().wait_event(self.leaving[1])
            self.leaving = None
        last = len(self.stack) == self.n_layer - 1  # wanted first
        if last or not x.is_cuda:
            self.stack.append(x)
            return self.passes, len(self.stack)
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
        return self.passes, len(self.stack)

    def take(self, place: tuple[int, int], device: torch.device) -> torch.Tensor:
        """The input that was put last. Starts to copy back the one before it."""
        if place != (self.passes, len(self.stack)):
            raise RuntimeError("offload_activations: each forward has one backward, before the next forward")
        x, arrived = self.coming or self._fetch(self.stack[-1], device)
        self.stack.pop()
        self.coming = self._fetch(self.stack[-1], device) if self.stack else None
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return x

    def _fetch(self, kept, device):
        if kept.device == device:
            return kept, None
        x = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        self.stream.wait_stream(torch.cuda.current_stream())  # the memory of x may have been in use until now
        with torch.cuda.stream(self.stream):
            x.copy_(kept, non_blocking=True)
        return x, self.stream.record_event()
