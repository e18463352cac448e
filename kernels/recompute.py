"""y = f(x), where f is a module's computation, keeping only x: backward computes f again (activation checkpointing).

    forward     y = f(x)
    backward    a graph of f(x) is built again, and run with dy

With groups > 1 a few rows of x, in a transformer a few sequences, pass through f at a time, in forward and in backward.
The activations inside f then exist for one group only, and x's gradient overwrites y's. Each group's weight gradients
are rounded to their dtype, summed in float32 and rounded once more.

Compared with torch.utils.checkpoint: f returns its output as two terms. Forward adds them and writes the sum straight
into y; backward sends dy into both terms and adds nothing. And f is told when it runs for backward, so that it can skip
what only its output needs.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.autograd.graph import get_gradient_edge

from .launch import compute_dtype, refuse_double_backward


def recomputed(
    module: torch.nn.Module, function: Callable, x: torch.Tensor, rows: torch.Tensor | None = None, groups: int = 1
) -> torch.Tensor:
    """The sum (B, ...) of the two tensors that function(x, rows, for_backward) returns, keeping only x and rows.

    x (B, ...), and rows (B, ...) or None, which gets no gradient, are cut into `groups` groups of rows. The function
    reads the module's parameters. for_backward: the values of its results do not matter, only their graph. Nothing is
    kept if there is no backward, as in evaluation. With several groups x's gradient overwrites that of the result, and
    a hook on a weight sees the gradient of each group, and then the sum (autograd.grad calls it too).
    """
    if not torch.is_grad_enabled():
        return _sum_of_terms(function, x, rows, groups)
    return _Recomputed.apply(module, function, groups, x, rows, *trainable_parameters(module))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # as in linear.py
        module, function, groups, x, rows, *_ = inputs
        ctx.module = module
        ctx.function = function
        ctx.groups = groups
        ctx.save_for_backward(x, rows)
        return _sum_of_terms(function, x, rows, groups)

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        x, rows = ctx.saved_tensors
        weights = trainable_parameters(ctx.module)
        if ctx.groups == 1:
            dx, *dweights = _gradients(ctx.function, x, rows, weights, dy)
            return None, None, None, dx, None, *dweights
        dx = dy.contiguous()
        sums = []
        for group in chunks_of(len(x), ctx.groups):
            of_group = None if rows is None else rows[group]
            dx[group], *dweights = _gradients(ctx.function, x[group], of_group, weights, dx[group])
            if sums:
                for total, dweight in zip(sums, dweights, strict=True):
                    total += dweight
            elif ctx.groups == 2:  # a single addition rounds only once
                sums = dweights
            else:
                sums = [dweight.to(compute_dtype(dweight)) for dweight in dweights]
            del dweights  # before the next group allocates its own
        dweights = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, None, None, dx, None, *dweights


def _sum_of_terms(function, x, rows, groups):
    y = torch.empty_like(x)
    for group in chunks_of(len(x), groups):
        of_group = None if rows is None else rows[group]
        torch.add(*function(x[group], of_group, False), out=y[group])
    return y


def _gradients(function, x, rows, weights, dy):
    """The gradients of x, then of the weights."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        # Nodes of the graph, not tensors: the tensors would stay in memory throughout backward.
        terms = [get_gradient_edge(term) for term in function(x, rows, True)]
    # the output is the sum of both terms, so its gradient is the gradient of each
    return torch.autograd.grad(terms, [x, *weights], [dy, dy])


def trainable_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def chunks_of(n_rows: int, chunks: int, multiple: int = 1) -> list[slice]:
    """The rows in `chunks` slices, as equal as possible, each beginning at a multiple of `multiple` rows.

    Some may be empty: the compiler unrolls a fixed number.
    """
    bounds = [n_rows * i // chunks // multiple * multiple for i in range(chunks)]
    return [slice(*pair) for pair in pairwise([*bounds, n_rows])]
