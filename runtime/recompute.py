"""Activation checkpointing: backward recomputes what forward does not keep.

    recompute(model, "selective")     # gate and up of each layer: an eighth of a step of Llama 3.2 1B
    recompute(model, "full")          # whole layers from their inputs, except the down projection: a good fifth

Call it after Llama.set_operations and use_fp8, before torch.compile and fully_shard. 'full' wraps each layer's forward,
which then keeps only its input. From 32,768 tokens on (`groups_of_sequences`) a few sequences at a time pass through
the layer: its activations exist for one group only, and the gradient of its input overwrites that of its output. So
only the layers' inputs and one gradient grow with the batch. With offload_activations, what either mode keeps leaves
the GPU: see offload_activations.py.
"""

import math
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from kernels.launch import compute_dtype, refuse_double_backward
from kernels.linear_cross_entropy import default_chunk_tokens
from kernels.swiglu_mlp import slices
from runtime.offload_activations import OffloadedActivations

MLP_SLICE = 16384  # tokens: half as many make 16 x 2,048 of Llama 3.2 1B 3% slower, in float8 5% (H200)


def recompute(model, mode: str, mlp_chunks: int | None = None, offload_activations: bool = False) -> None:
    """Set what the backward of a Llama recomputes: 'none', 'selective' (gate and up of each MLP) or 'full' (layers).

    mlp_chunks: number of token slices of a recomputed MLP; None: see chunks_of_mlp. offload_activations: move
    what the layers keep to CPU memory. ValueError for settings that do not work together.
    """
    check_settings(mode, mlp_chunks, offload_activations)
    config, fused_kernels = model.config, model.fused_kernels
    offloaded = OffloadedActivations(config.n_layer) if offload_activations else None
    for i, layer in enumerate(model.layers):
        layer.mlp.keep_gate_up = mode != "selective"
        layer.mlp.chunks = partial(
            chunks_of_mlp, n_embd=config.n_embd, mode=mode, mlp_chunks=mlp_chunks, fused_kernels=fused_kernels
        )
        if mode == "full":
            # Wrap forward, not the layer: FSDP gathers the weights in hooks on the layer's call, and again in backward.
            layer.forward = partial(_forward, layer, mlp_chunks, offload_activations)
        if offloaded:
            offloaded.wrap(i, layer)
    model.lm_head.loss_options = partial(loss_options, vocab_size=config.vocab_size, mode=mode)


def check_settings(mode: str, mlp_chunks: int | None, offload_activations: bool) -> None:
    """ValueError for settings of recompute() that do not work together."""
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"activation_checkpointing {mode!r}: none, selective or full")
    if offload_activations and mode == "none":
        raise ValueError("offload_activations needs activation_checkpointing 'selective' or 'full'")
    if mlp_chunks is not None and (mlp_chunks < 1 or (mlp_chunks > 1 and mode == "none")):
        raise ValueError(f"mlp_chunks {mlp_chunks}: at least 1, and 1 without activation_checkpointing")


# ----------------------------------------------------------------------------------------------------------------------
# How large the pieces are


def chunks_of_mlp(n_tokens: int, n_embd: int, mode: str, mlp_chunks: int | None, fused_kernels: bool = True) -> int:
    """How many slices of tokens the MLP processes, one after another, in forward and in backward.

    That is mlp_chunks if set. Otherwise 1, except with full checkpointing and fused kernels: then slices have at least
    MLP_SLICE and 4C tokens. Why 4C: the float32 sums of the weights' gradients take 12·C·F bytes, as much as 2C tokens
    of a slice, so at most half of what the slice takes.
    """
    if mlp_chunks:
        return min(mlp_chunks, max(n_tokens, 1))
    if mode != "full" or not fused_kernels:
        return 1
    return max(n_tokens // max(MLP_SLICE, 4 * n_embd), 1)


def groups_of_sequences(
    n_batch: int, n_time: int, n_embd: int, mlp_chunks: int | None, fused_kernels: bool = True
) -> int:
    """How many groups of sequences pass through a layer, one after another, under full checkpointing.

    As many as the MLP would have slices, but at most one per sequence; 1 if mlp_chunks sets the slices.
    """
    return 1 if mlp_chunks else min(chunks_of_mlp(n_batch * n_time, n_embd, "full", None, fused_kernels), n_batch)


def loss_options(n_tokens: int, dtype: torch.dtype, vocab_size: int, mode: str) -> dict:
    """The arguments chunk_tokens and fp32_dweight for linear_cross_entropy.

    Full checkpointing halves the chunk, to 2,048 tokens of Llama 3 in bf16. If four such chunks hold all tokens, there
    are at most four chunks, each a multiple of 256 tokens, and the head's gradient is summed in the weight's dtype
    (except in float16).
    """
    chunk_tokens = default_chunk_tokens(vocab_size, dtype.itemsize)
    if mode != "full":
        return {"chunk_tokens": chunk_tokens, "fp32_dweight": True}
    chunk_tokens = max(chunk_tokens // 2, 256)
    few = n_tokens <= 4 * chunk_tokens
    if chunk_tokens < n_tokens and few:
        chunk_tokens = math.ceil(n_tokens / 1024) * 256
    return {"chunk_tokens": chunk_tokens, "fp32_dweight": not few or dtype == torch.float16}


# ----------------------------------------------------------------------------------------------------------------------
# Layers that keep only their input


def compute(layer, *inputs):
    """The layer's own forward, unwrapped."""
    return type(layer).forward(layer, *inputs)


def _forward(layer, mlp_chunks, offloads, x, branch, cos, sin, doc_starts=None, cache=None):
    """Replaces a layer's forward. Returns its output as residual stream and branch, or as their sum and None."""
    if cache is not None:
        return compute(layer, x, branch, cos, sin, doc_starts, cache)
    if branch is not None:
        x = x + branch  # one tensor to keep instead of two
    fused_kernels = layer.mlp.fused_kernels
    if torch.compiler.is_compiling() or not (fused_kernels or offloads):
        # PyTorch's checkpoint: the compiler drops what backward does not need, and with plain operations recomputation
        # stops at the last tensor needed. Fused functions benefit from neither, hence recomputed().
        if not torch.is_grad_enabled():
            return compute(layer, x, None, cos, sin, doc_starts)
        inputs = layer, x, None, cos, sin, doc_starts
        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    groups = groups_of_sequences(*x.shape, mlp_chunks, fused_kernels)
    return recomputed(layer, groups, x, cos, sin, doc_starts), None


def recomputed(layer, groups: int, x: torch.Tensor, cos, sin, doc_starts=None) -> torch.Tensor:
    """The output (B, T, C) of a layer of model.py for its input x (B, T, C). Keeps only x, cos, sin and doc_starts for
    backward, and nothing if there is no backward, as in evaluation.

    The sequences pass through the layer in `groups` groups. With more than one, the groups' weight gradients, rounded
    to their dtype, are summed in float32, and x's gradient overwrites the output's, which is lost.
    A hook on a weight sees the gradient of each group, and then the sum (autograd.grad calls it too).
    """
    if not torch.is_grad_enabled():
        return _output(layer, groups, x, cos, sin, doc_starts)
    return _Recomputed.apply(layer, groups, x, cos, sin, doc_starts, *trainable_parameters(layer))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, groups, x, cos, sin, doc_starts, *weights):
        ctx.layer, ctx.groups = layer, groups
        ctx.save_for_backward(x, cos, sin, doc_starts)
        return _output(layer, groups, x, cos, sin, doc_starts)

    @staticmethod
    def backward(ctx, dy):
        refuse_double_backward()
        x, *tables, doc_starts = ctx.saved_tensors
        weights = trainable_parameters(ctx.layer)
        if ctx.groups == 1:
            dx, *dweights = _gradients(ctx.layer, x, *tables, doc_starts, weights, dy)
            return None, None, dx, None, None, None, *dweights
        dx, sums = dy.contiguous(), []  # a group's gradient of x overwrites that of its output
        for some in slices(len(x), ctx.groups):
            at = x[some], *tables, _of_rows(doc_starts, some)
            dx[some], *dweights = _gradients(ctx.layer, *at, weights, dx[some])
            if sums:
                for total, dweight in zip(sums, dweights, strict=True):
                    total += dweight
            elif ctx.groups == 2:  # a single addition rounds only once
                sums = dweights
            else:
                sums = [dweight.to(compute_dtype(dweight)) for dweight in dweights]
            del dweights  # before the next group allocates its own
        return None, None, dx, None, None, None, *(s.to(w.dtype) for s, w in zip(sums, weights, strict=True))


def _output(layer, groups, x, cos, sin, doc_starts):
    out = torch.empty_like(x)
    for some in slices(len(x), groups):
        torch.add(*compute(layer, x[some], None, cos, sin, _of_rows(doc_starts, some)), out=out[some])
    return out


def _of_rows(doc_starts, some: slice):
    return None if doc_starts is None else doc_starts[some]


def _gradients(layer, x, cos, sin, doc_starts, weights, dy):
    """The gradients of x, then of the weights."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = compute(layer, x, None, cos, sin, doc_starts, None, False)
        # Graph nodes, not tensors: tensors would keep the residual stream after attention alive in the MLP's backward.
        outputs = [get_gradient_edge(output) for output in outputs]
    # the output is the sum of both, so its gradient is the gradient of each
    return torch.autograd.grad(outputs, [x, *weights], [dy, dy])


def trainable_parameters(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in layer.parameters() if weight.requires_grad]
