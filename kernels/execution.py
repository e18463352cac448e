"""How a model is computed with these kernels: which operations, what backward recomputes, in how many chunks."""

import math
from dataclasses import dataclass
from types import ModuleType

import torch

import kernels

from . import reference
from .linear_cross_entropy import default_chunk_tokens

MLP_CHUNK = 16384  # tokens: half as many make 16 x 2,048 of Llama 3.2 1B 3% slower, in float8 5% (H200)


@dataclass(frozen=True)
class Execution:
    """How the model is computed, never what it computes: any choice gives the same loss, up to rounding.

    kernels              all: our kernels; blocks: ours, but the loss holds all logits at once; none: plain PyTorch,
                         apart from attention over sequences, which the next line decides
    attention            auto: the faster one; triton: kernels/flash_attention.py; sdpa: PyTorch's
    checkpointing        what backward recomputes. none: nothing; selective: gate and up of each MLP (an eighth of a
                         step of Llama 3.2 1B); full: each layer from its input, except the down projection (a fifth)
    mlp_chunks           in how many chunks of tokens a recomputed MLP computes; None: see chunks_of_mlp
    offload_activations  what checkpointing keeps of each layer moves to CPU memory: kernels/offload_activations.py

    ValueError for choices that do not exist or do not work together; Llama checks attention, for its head size.
    """

    kernels: str = "all"
    attention: str = "auto"
    checkpointing: str = "none"
    mlp_chunks: int | None = None
    offload_activations: bool = False

    def __post_init__(self):
        if self.kernels not in ("all", "blocks", "none"):
            raise ValueError(f"kernels {self.kernels!r}: must be all, blocks or none")
        if self.checkpointing not in ("none", "selective", "full"):
            raise ValueError(f"activation_checkpointing {self.checkpointing!r}: must be none, selective or full")
        if self.offload_activations and self.checkpointing == "none":
            raise ValueError("offload_activations needs activation_checkpointing 'selective' or 'full'")
        if self.mlp_chunks is not None and self.mlp_chunks < 1:
            raise ValueError(f"mlp_chunks is {self.mlp_chunks}: must be at least 1")
        if (self.mlp_chunks or 1) > 1 and self.checkpointing == "none":
            raise ValueError(f"mlp_chunks {self.mlp_chunks} needs activation_checkpointing 'selective' or 'full'")

    @property
    def ops(self) -> ModuleType:
        """The operations of a block: kernels/, or the same names in plain PyTorch."""
        return reference if self.kernels == "none" else kernels

    def chunks_of_mlp(self, n_tokens: int, n_embd: int) -> int:
        """How many chunks of tokens pass through the MLP, one after another, in forward and in backward.

        mlp_chunks if set. Otherwise 1, except with full checkpointing and kernels: then chunks have at least MLP_CHUNK
        and 4C tokens. Why 4C: the float32 sums of the weights' gradients take 12·C·F bytes, as much as 2C tokens of a
        chunk, so at most half of what the chunk takes.
        """
        if self.mlp_chunks:
            return min(self.mlp_chunks, max(n_tokens, 1))
        if self.checkpointing != "full" or self.kernels == "none":
            return 1
        return max(n_tokens // max(MLP_CHUNK, 4 * n_embd), 1)

    def groups_of_sequences(self, n_batch: int, n_time: int, n_embd: int) -> int:
        """How many groups of sequences pass through a layer, one after another, under full checkpointing.

        As many as the MLP would have chunks, but at most one per sequence; 1 if mlp_chunks sets the chunks.
        """
        return 1 if self.mlp_chunks else min(self.chunks_of_mlp(n_batch * n_time, n_embd), n_batch)

    def loss_options(self, n_tokens: int, vocab_size: int, dtype: torch.dtype) -> dict:
        """The arguments chunk_tokens and fp32_dweight for linear_cross_entropy.

        Full checkpointing halves the chunk, to 2,048 tokens of Llama 3 in bf16. If four such chunks hold all tokens,
        there are at most four chunks, each a multiple of 256 tokens, and the head's gradient is summed in the weight's
        dtype (except in float16).
        """
        chunk_tokens = default_chunk_tokens(vocab_size, dtype.itemsize)
        if self.checkpointing != "full":
            return {"chunk_tokens": chunk_tokens, "fp32_dweight": True}
        chunk_tokens = max(chunk_tokens // 2, 256)
        few = n_tokens <= 4 * chunk_tokens
        if chunk_tokens < n_tokens and few:
            chunk_tokens = math.ceil(n_tokens / 1024) * 256
        return {"chunk_tokens": chunk_tokens, "fp32_dweight": not few or dtype == torch.float16}
