"""Where each byte of a training step goes, from the settings alone: no GPU is asked, nothing is allocated.

    plan = Plan(batch_size=8)                  # what train.py's settings of the same names say, for one rank
    peak_gib(config, plan)                     # 30.9 for Llama 3.2 1B at 8 x 2,048 tokens
    print(table(config, plan))                 # the parts at the peak, with the arithmetic
    advice(config, plan)                       # which settings would lower it most
    largest_batch(config, plan, gib=24)        # what fits

    n parameters, of which B a block and R the root (embedding, final norm, head); L layers; N tokens; P ranks a copy

    weights that compute    2n / P             AdamW: weights that learn, two moments    12n / P         (bfloat16)
    saved activations       N·L·(4C + 2KD + 2F) elements      the loss    a chunk's logits + 4VC      gradients  2n / P
    FSDP                    the gathered root 2R and two blocks 4B; a block's gradients on their way, in float32, 4B

They are not all there at once: activations shrink while gradients grow. So the sum is taken at every moment that can be
the peak (`moments`), and the largest counts. The optimizer's update is none of them: it needs nothing beside what is
there already, and the embedding's gradient, just before it, existed twice.

How exact: with the fused kernels within 0.2% of what one H200 measured, 8 to 32 x 2,048 tokens of Llama 3.2 1B, each
activation_checkpointing (test_memory.py). Plain PyTorch's path counts what autograd saves and what its largest backward
formulas hold at once: a few percent. compile=true is counted like the fused kernels, though a compiler plans for
itself. Counted is what PyTorch allocates (max_memory_allocated): the CUDA context, NCCL's buffers and what the allocator
holds in reserve come on top, 1 to 2 GiB.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.linear_cross_entropy import LOGITS_BYTES
from model import LlamaConfig

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What a rank is to do, beside the model: train.py's settings of the same names, as they are once resolved."""

    batch_size: int
    micro_steps: int = 1  # micro-batches of a step on this rank
    dtype: str = "bfloat16"
    world_size: int = 1
    sharding: str = "zero3"
    shard_ranks: int = 1  # how many ranks share one copy of the model
    sync_every_micro_batch: bool = True
    offload: str = "none"  # 'optimizer': w, m, v in CPU memory; 'all': also weights and gradients, gathered for use

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def fsdp(self) -> bool:
        return self.world_size > 1 or self.offload == "all"


class Part(NamedTuple):
    name: str
    bytes: float
    how: str  # the arithmetic, in words


def n_params(c: LlamaConfig) -> tuple[int, int]:
    """Parameters of a block, and of the root: embedding, final norm and head."""
    kv = c.n_kv_head * c.head_dim
    block = 2 * c.n_embd**2 + 2 * c.n_embd * kv + 3 * c.n_embd * c.ffn_dim + 2 * c.n_embd
    return block, (1 if c.tie_embeddings else 2) * c.vocab_size * c.n_embd + c.n_embd


def token_bytes(c: LlamaConfig, itemsize: int) -> tuple[int, int]:
    """Bytes of a token in a layer: what forward leaves for backward, and the most there is while backward is in it."""
    # Attention keeps q, k, v, its output and one fp32 a head; where k and v are float32, attend expands them.
    kv = c.n_embd if itemsize == 4 else c.n_kv_head * c.head_dim
    attention = itemsize * (2 * c.n_embd + 2 * kv) + 4 * c.n_head
    if c.fused_kernels:  # a norm keeps the sum it reads and rstd; the MLP gate and up. kernels/swiglu_mlp.py
        norm, mlp = itemsize * c.n_embd + 4, itemsize * 2 * c.ffn_dim
        # backward: dy, the gradients of gate and up, of their product, and the product
        working = itemsize * (c.n_embd + 4 * c.ffn_dim)
    else:  # a norm keeps x and x·rstd in float32, and what it hands on; the MLP gate, up, silu(gate) and the product
        norm, mlp = (8 + itemsize) * c.n_embd + 4, (12 + itemsize) * c.ffn_dim
        working = itemsize * c.n_embd + 12 * c.ffn_dim - itemsize * c.ffn_dim  # float32; the product is free by then
    everything = 2 * norm + attention + mlp
    kept = {
        "none": everything,
        "selective": norm + attention + itemsize * c.n_embd,
        "full": itemsize * c.n_embd,
    }[c.activation_checkpointing]
    return kept, everything + working


def loss_bytes(c: LlamaConfig, plan: Plan, n_tokens: int) -> tuple[Part, Part]:
    """What the final norm, the head and the loss hold at the end of forward, and at most in their backward."""
    itemsize, head = plan.itemsize, c.vocab_size * c.n_embd
    x = itemsize * n_tokens * c.n_embd  # a tensor like the residual stream
    summed = x if c.fused_kernels else 8 * n_tokens * c.n_embd  # what the final norm keeps
    if not c.fused_loss:  # log p, its gradient, and the logits' gradient made of them; forward holds less
        held = 12 * n_tokens * c.vocab_size + summed + x
        part = Part("loss head", held, f"three times the logits in float32, 12 bytes x {n_tokens:,} x {c.vocab_size:,}")
        return part, part
    row = itemsize * -(-c.vocab_size // 16) * 16
    chunk = max(LOGITS_BYTES // (c.vocab_size * itemsize) // 256 * 256, 256)
    if n_tokens <= chunk and plan.dtype != "float16":
        logits = f"logits of {n_tokens:,} tokens"
        forward = Part("loss head", row * n_tokens + summed + 2 * x, logits)
        backward = Part("loss head", row * n_tokens + itemsize * head + summed + 3 * x, f"{logits}, head's gradient")
        return forward, backward
    logits = f"logits of {min(chunk, n_tokens):,} tokens, head's gradient in float32"
    return (
        Part("loss head", row * min(chunk, n_tokens) + 4 * head + summed + 3 * x, logits),
        Part("loss head", (4 + itemsize) * head + summed + 2 * x, "head's gradient in float32 and rounded"),
    )


def moments(c: LlamaConfig, plan: Plan) -> dict[str, list[Part]]:
    """The parts at each moment that can be the peak of a rank's memory, in the order of a step.

    Under FSDP the root is gathered from forward to the end of backward. zero3 gathers a block into one buffer and
    copies it out of there; the buffer of the next block is asked for before this one computes, so two blocks are there.
    A block's gradients are copied into a float32 buffer that lives until the next block's are. zero2 gathers once.
    Hybrid keeps every reduced shard in float32 until backward ends, beside the rounded one (FSDP's _all_reduce_state).
    """
    itemsize, shards, n_tokens, layers = plan.itemsize, plan.shard_ranks, plan.batch_size * c.block_size, c.n_layer
    block, root = n_params(c)
    total, head = root + layers * block, c.vocab_size * c.n_embd
    ranks = f" / {shards} ranks" if shards > 1 else ""
    kept, in_block = token_bytes(c, itemsize)
    unsynced = plan.fsdp and plan.micro_steps > 1 and not plan.sync_every_micro_batch
    learning = 12 if itemsize < 4 else 8  # a float32 weight is the one that learns
    in_cpu = {"none": (), "optimizer": ("learn",), "all": ("learn", "compute")}[plan.offload]

    def at(gathered, saved, gradients, root_gradients, reducing, summed=layers, extra=None):
        """gathered, gradients and summed count blocks, saved layers, root_gradients and reducing parameters."""
        parts = [Part("cuBLAS workspaces", 64 * 2**20, "32 MiB each for forward and backward, on Hopper")]
        if "compute" not in in_cpu:
            how = f"{itemsize} bytes x {total:,} parameters{ranks}"
            parts.append(Part("weights that compute", itemsize * total / shards, how))
        if "learn" not in in_cpu:
            how = f"{learning} bytes x {total:,} parameters{ranks}"
            parts.append(Part("AdamW: weights and moments", learning * total / shards, how))
        if plan.fsdp and gathered is not None:
            how = f"{itemsize} bytes x (root {root:,} + {gathered} blocks x {block:,})"
            parts.append(Part("gathered weights", itemsize * (root + gathered * block), how))
        if unsynced:
            how = f"4 bytes x {root + summed * block:,} parameters, on every rank"
            parts.append(Part("sums of micro-batches", 4 * (root + summed * block), how))
        elif plan.micro_steps > 1 and "compute" not in in_cpu:
            parts.append(Part("sums of micro-batches", 4 * total / shards, f"4 bytes x {total:,} parameters{ranks}"))
        sharded = 0 if "compute" in in_cpu else gradients * block
        if sharded + root_gradients:
            how = f"{itemsize} bytes x ({root_gradients:,} of the root + {gradients} blocks x {block:,}{ranks})"
            parts.append(Part("gradients", itemsize * (root_gradients + sharded / shards), how))
        if plan.fsdp and reducing:
            parts.append(Part("gradients on their way", 4 * reducing, f"4 bytes x {reducing:,.0f} parameters"))
        if plan.fsdp and plan.sharding == "hybrid" and itemsize < 4 and gradients:
            how = f"4 bytes x {gradients} blocks x {block:,}{ranks}, until backward ends"
            parts.append(Part("gradients reduced", 4 * gradients * block / shards, how))
        if saved:
            how = f"{kept:,} bytes x {saved} layers x {n_tokens:,} tokens"
            parts.append(Part("saved activations", kept * saved * n_tokens, how))
        return [*parts, extra] if extra else parts

    def in_backward(k):
        """Of block k, counted from 1: those above it are done, and what is gathered for it depends on the sharding."""
        done = 0 if unsynced else layers - k
        gathered = k if plan.sharding == "zero2" else 1 + (k > 1 and shards > 1)
        # or, with few tokens, the gradients of the block itself
        working = max((in_block - kept) * n_tokens, itemsize * block - kept * n_tokens)
        extra = Part(
            "the block in backward", working, f"{in_block - kept:,} bytes x {n_tokens:,} tokens beyond the saved"
        )
        return at(gathered, k, done, head, block if done else 0, extra=extra)

    loss_forward, loss_backward = loss_bytes(c, plan, n_tokens)
    buffer = int(shards > 1)  # of the block gathered last, or asked for next; a rank of its own needs none
    whole = layers if plan.sharding == "zero2" else 0
    done = 0 if unsynced else layers
    # Tied or not, two gradients as large as the embedding: a tied head's waits to be added to it.
    embedding = Part("the embedding's input", itemsize * n_tokens * c.n_embd, f"{n_tokens:,} tokens")
    result = {
        "end of forward, in the loss": at(whole + buffer, layers, 0, 0, 0, extra=loss_forward),
        "backward of the loss": at(whole or buffer, layers, 0, 0, 0, extra=loss_backward),
        f"backward of block {layers}": in_backward(layers),
        f"backward of block {max(layers - 1, 1)}": in_backward(max(layers - 1, 1)),
        "backward of block 1": in_backward(1),
        "backward of the embedding": at(0, 0, done, 2 * head, block if done else 0, extra=embedding),
    }
    if (
        plan.fsdp
    ):  # the root's gradients reduced: first beside themselves, then beside their shards, float32 and rounded
        shard = (4 + itemsize % 4) * root / shards
        result["reduction of the root"] = at(
            None, 0, layers, root, root + max(0, shard - itemsize * root) / 4, summed=0
        )
    return result


def parts(config: LlamaConfig, plan: Plan) -> tuple[str, list[Part]]:
    """The moment of the peak, and what is in memory then."""
    found = moments(config, plan)
    peak = max(found, key=lambda moment: sum(part.bytes for part in found[moment]))
    return peak, found[peak]


def peak_gib(config: LlamaConfig, plan: Plan) -> float:
    return sum(part.bytes for part in parts(config, plan)[1]) / GIB
