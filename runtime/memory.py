"""How much memory a training step takes, part by part, from the settings alone: without a GPU or any allocation.

    plan = Plan(batch_size=8)                  # train.py's settings of the same names, for one rank
    peak_gib(config, plan)                     # 28.5 for Llama 3.2 1B at 8 x 2,048 tokens
    print(table(config, plan))                 # the parts at the peak, with the arithmetic
    advice(config, plan)                       # which settings would lower it most
    largest_batch(config, plan, gib=24)        # what fits

    n parameters, of which B a block and R the root (embedding, final norm, head; H: norm and an untied head); L layers;
    N tokens; P ranks share a copy. Bytes in bfloat16:

    compute weights         2n / P              AdamW: their lower halves, two moments    10n / P
    saved activations       2·N·L·(4C + 2KD + 2F)     the loss    a chunk's logits + 4VC      gradients    2n / P
    FSDP by NCCL            the gathered root 2R, two blocks 4B, a block's gradients on their way, in float32, 4B
    FSDP by copy engines    their buffers 2·(5B + 2R), the gathered root 2R and block 2B
    an untied head          instead of 2R: 4H in the loss, then its gradients on their way, in float32, 4H
    offload                 a block's gradients that leave 2B; all: instead of the weights two blocks 4B, the root 2R

They never exist all at once: activations shrink while gradients grow. So the sum is taken at every moment that can be
the peak (`moments`), and the largest counts. The optimizer's update is never the peak: it allocates nothing, and just
before it the backward of the embedding held a second gradient as large as the embedding.

How exact: with the fused kernels within 0.1% of what one H200 measured, 8 to 32 x 2,048 tokens of Llama 3.2 1B, each
activation_checkpointing (benchmarks/records/step.json), and within 0.3% with everything offloaded (benchmarks/records/study.json). Plain
PyTorch's path counts what autograd saves and what its largest backward formulas hold at once: a few percent.
compile=true is counted like the fused kernels, though a compiler plans for itself. All numbers are what PyTorch
allocates (max_memory_allocated): the CUDA context, NCCL's buffers and the allocator's reserve add 1 to 2 GiB. An
evaluation takes less than a step.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from model import LlamaConfig, triton_suits
from runtime.recompute import chunks_of_mlp, groups_of_sequences, loss_options

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """How one rank trains: train.py's settings of the same names, with every auto and None resolved."""

    batch_size: int
    micro_steps: int = 1  # micro-batches of a step on this rank
    dtype: str = "bfloat16"
    world_size: int = 1
    sharding: str = "zero3"
    shard_ranks: int = 1  # how many ranks share one copy of the model
    sync_every_micro_batch: bool = True
    copy_engines: bool = False
    compile: bool = False
    cuda_graph: bool = False
    mask_documents: bool = False
    fused_kernels: bool = True
    fused_loss: bool = True
    attention: str = "auto"
    activation_checkpointing: str = "none"
    offload_activations: bool = False
    mlp_chunks: int | None = None
    offload: str = "none"  # 'optimizer': w, m, v and gradients to CPU memory; 'all': also weights, until they are used

    @property
    def itemsize(self) -> int:
        return self.compute_dtype.itemsize

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def fsdp(self) -> bool:
        return self.world_size > 1

    @property
    def streamed(self) -> bool:
        """Whether weights.py copies each block's weights to the GPU when it computes."""
        return self.offload == "all" and not self.fsdp

    @property
    def copy_engines_gather(self) -> bool:
        return self.copy_engines and self.shard_ranks > 1 and self.offload != "all"

    @property
    def copy_engines_reduce(self) -> bool:
        """Whether the copy engines reduce the gradients, too. FSDP must hand over each rank's gradient unconverted."""
        unconverted = self.sync_every_micro_batch and self.sharding != "hybrid" and self.dtype != "float16"
        return self.copy_engines_gather and unconverted


class Part(NamedTuple):
    name: str
    bytes: float
    how: str  # the arithmetic, in words


def sizes(c: LlamaConfig) -> tuple[list[int], list[int]]:
    """The number of elements of each parameter: in one block, and in the root (embedding, final norm, head)."""
    qkv = c.n_embd * (c.n_head + 2 * c.n_kv_head) * c.head_dim
    block = [qkv, c.n_embd**2, 2 * c.ffn_dim * c.n_embd, c.ffn_dim * c.n_embd, c.n_embd, c.n_embd]
    return block, [c.vocab_size * c.n_embd] * (1 if c.tie_embeddings else 2) + [c.n_embd]


def n_params(c: LlamaConfig) -> tuple[int, int]:
    """The number of parameters of one block, and of the root."""
    block, root = sizes(c)
    return sum(block), sum(root)


def chunks(c: LlamaConfig, plan: Plan, n_tokens: int) -> int:
    """Slices of the MLP."""
    return chunks_of_mlp(n_tokens, c.n_embd, plan.activation_checkpointing, plan.mlp_chunks, plan.fused_kernels)


def token_bytes(c: LlamaConfig, plan: Plan, chunks: int) -> tuple[int, int]:
    """Bytes per token in one layer: what forward keeps for backward, and the maximum during its backward.

    chunks: slices of the MLP.
    """
    # Attention keeps q, k, v, its output and one fp32 per head; where k and v are float32, attend expands them.
    itemsize = plan.itemsize
    expanded = itemsize == 4 and plan.attention != "triton" and not plan.mask_documents
    kv = c.n_embd if expanded else c.n_kv_head * c.head_dim
    attention = itemsize * (2 * c.n_embd + 2 * kv) + 4 * c.n_head
    if plan.fused_kernels:  # a norm keeps the sum it reads and rstd; the MLP gate and up. kernels/swiglu_mlp.py
        norm, mlp = itemsize * c.n_embd + 4, itemsize * 2 * c.ffn_dim
        # backward: dy, the gradients of gate and up, of their product, and the product
        working = itemsize * (c.n_embd + 4 * c.ffn_dim)
        if chunks > 1:  # nothing is kept: dy and what the slices make; one slice at a time comes on top (Step.backward)
            mlp, working = 0, itemsize * 2 * c.n_embd
    else:  # a norm keeps x and x·rstd in float32, and what it hands on; the MLP gate, up, silu(gate) and the product
        norm, mlp = (8 + itemsize) * c.n_embd + 4, (12 + itemsize) * c.ffn_dim // chunks
        working = itemsize * c.n_embd + 12 * c.ffn_dim - itemsize * c.ffn_dim  # float32; the product is free by then
    everything = 2 * norm + attention + mlp
    kept = {
        "none": everything,
        "selective": norm + attention + itemsize * c.n_embd,
        "full": itemsize * c.n_embd,
    }[plan.activation_checkpointing]
    return kept, everything + working


def attention_bytes(c: LlamaConfig, plan: Plan) -> int:
    """Bytes per token that attention's backward adds to what forward kept: the gradients of its output, of q, k and v,
    and the kernel's own memory. cuDNN's: dq in float32, dk and dv for each query head, three numbers per head.
    """
    found = plan.itemsize * (c.n_embd + 2 * c.n_kv_head * c.head_dim)  # the MLP's residual stream is free by then
    suits = plan.attention == "auto" and triton_suits(c.head_dim, c.block_size, plan.compute_dtype)
    if suits or plan.attention == "triton" or plan.mask_documents:
        return found + 4 * c.n_head
    return found + 4 * c.n_embd + 2 * plan.itemsize * c.n_embd * (c.n_kv_head < c.n_head) + 12 * c.n_head


def loss_bytes(c: LlamaConfig, plan: Plan, n_tokens: int) -> tuple[Part, Part]:
    """What the final norm, the head and the loss hold at the end of forward, and the maximum in their backward."""
    itemsize, head = plan.itemsize, c.vocab_size * c.n_embd
    x = itemsize * n_tokens * c.n_embd  # a tensor like the residual stream
    summed = x if plan.fused_kernels else 8 * n_tokens * c.n_embd  # what the final norm keeps
    if not plan.fused_loss:
        # forward: the logits, in float32, and with ignored rows masked; backward: log p, its gradient, the logits'
        size = 8 + (itemsize if itemsize < 4 else 0)
        how = f"bytes x {n_tokens:,} tokens x {c.vocab_size:,} logits"
        return (
            Part("loss head", size * n_tokens * c.vocab_size + summed + x, f"{size} {how}"),
            Part("loss head", 12 * n_tokens * c.vocab_size + summed + x, f"12 {how}"),
        )
    row = itemsize * -(-c.vocab_size // 16) * 16
    options = loss_options(n_tokens, plan.compute_dtype, c.vocab_size, plan.activation_checkpointing)
    chunk, wide = options["chunk_tokens"], options["fp32_dweight"]
    if n_tokens <= chunk and plan.dtype != "float16":
        logits = f"logits of {n_tokens:,} tokens"
        forward = Part("loss head", row * n_tokens + summed + x, logits)
        backward = Part("loss head", row * n_tokens + itemsize * head + summed + 3 * x, f"{logits}, head's gradient")
        return forward, backward
    logits = f"logits of {min(chunk, n_tokens):,} tokens, head's gradient"
    normed = x if plan.fused_kernels else 2 * x  # and its gradient, which takes its memory
    if not wide:
        return (
            Part("loss head", row * chunk + itemsize * head + summed + normed, logits),
            Part("loss head", itemsize * head + summed + x, "head's gradient"),
        )
    return (
        Part("loss head", row * min(chunk, n_tokens) + 4 * head + summed + normed, f"{logits} in float32"),
        Part("loss head", (4 + itemsize) * head + summed + normed, "head's gradient in float32 and rounded"),
    )


def counted(name: str, itemsize: int, *terms: tuple[int, int, str], ranks: int = 1) -> list[Part]:
    """[Part] for the sum of terms (count, elements, of what), divided by ranks; [] if there are no elements."""
    terms = [(count, n, of) for count, n, of in terms if count * n]
    words = " + ".join(f"{count} x {n:,} {of}" if count > 1 else f"{n:,} {of}" for count, n, of in terms)
    how = f"{itemsize} bytes x {f'({words})' if len(terms) > 1 else words}{f' / {ranks} ranks' * (ranks > 1)}"
    return [Part(name, itemsize * sum(count * n for count, n, _ in terms) / ranks, how)] if terms else []


class Step:
    """The parts at each moment of a step that can be the peak of a rank's memory, counted in parameters.

    Under FSDP the root stays gathered from forward to the end of backward. Not if the head is untied (collectives.py):
    norm and head are then gathered for the loss alone, their gradients are reduced before the blocks' backward, and the
    embedding's gradient comes last. zero3 gathers a group into one buffer and copies it out of there. FSDP asks for the
    buffer of the next block before this one computes, so two blocks exist at once, and at the end of forward the head
    and its buffer. A group's gradients stay in a float32 buffer until the next group's are in theirs. zero2 gathers
    once. Hybrid keeps every reduced shard in float32 until backward ends, beside the rounded one (FSDP's
    _all_reduce_state).
    """

    def __init__(self, c: LlamaConfig, plan: Plan):
        self.c, self.plan, self.itemsize, self.layers = c, plan, plan.itemsize, c.n_layer
        self.n_tokens = plan.batch_size * c.block_size
        in_groups = plan.activation_checkpointing == "full" and not plan.compile
        shape = plan.batch_size, c.block_size, c.n_embd
        self.groups = groups_of_sequences(*shape, plan.mlp_chunks, plan.fused_kernels) if in_groups else 1
        self.in_group = -(-plan.batch_size // self.groups) * c.block_size  # tokens
        self.chunks = chunks(c, plan, self.in_group)
        (self.block, self.root), self.head = n_params(c), c.vocab_size * c.n_embd
        self.total = self.root + self.layers * self.block
        self.apart = plan.fsdp and not c.tie_embeddings  # two groups of what is the root elsewhere:
        self.late = self.head + c.n_embd if self.apart else 0  # norm and head; and the embedding
        self.root_stays = int(plan.fsdp and not self.apart)  # whole from forward to the end of backward
        self.ends = (self.late, "of norm and head") if self.apart else (self.root, "of the root")
        self.on_gpu = plan.offload == "none"  # optimizer, gradients, and their sums
        self.unsynced = plan.fsdp and plan.micro_steps > 1 and not plan.sync_every_micro_batch
        self.reduces = plan.fsdp and not self.unsynced and not plan.copy_engines_reduce  # in a buffer of FSDP's
        self.buffer = int(plan.shard_ranks > 1 and not plan.copy_engines_gather)  # for what is gathered
        # group by group, to the CPU: those of one are still there while those of the next are computed
        self.gradients_leave = plan.offload == "optimizer" or plan.streamed

    # What there is

    def always(self) -> list[Part]:
        plan, everything = self.plan, (1, self.total, "parameters")
        ranks, itemsize = plan.shard_ranks, self.itemsize
        # the part of the master weights that is not in the parameters (kernels/adamw.py), and two float32 moments
        learning = 8 + {"float32": 0, "bfloat16": 2}.get(plan.dtype, 4)
        found = [Part("cuBLAS workspaces", 2**26, "32 MiB each for forward and backward")]
        if plan.offload != "all":
            found += counted("compute weights", itemsize, everything, ranks=ranks)
        if self.on_gpu:
            found += counted("AdamW: weights and moments", learning, everything, ranks=ranks)
        if plan.copy_engines_gather:  # collectives.py; embedding and head share theirs
            of_blocks, of_ends = (5, 2) if plan.copy_engines_reduce else (3, 1)
            ends = (of_ends, self.late, "of norm and head or embedding") if self.apart else (of_ends, *self.ends)
            found += counted("buffers of the copy engines", itemsize, (of_blocks, self.block, "of a block"), ends)
        if plan.micro_steps > 1 and not self.unsynced and self.on_gpu:
            found += counted("gradient accumulators", 4, everything, ranks=ranks)
        return found

    def gathered(self, blocks: int, ends: int) -> list[Part]:
        """The whole weights: those of so many blocks, and `ends` times those of the root, or of norm and head."""
        if self.plan.streamed:
            return counted("streamed weights", self.itemsize, (ends, *self.ends), (2, self.block, "of a block"))
        terms = (ends, *self.ends), (blocks, self.block, "of a block")
        return counted("gathered weights", self.itemsize, *terms) if self.plan.fsdp else []

    def gradients(self, done: int, head_done: int, whole: int, reducing: int, over: bool) -> list[Part]:
        """The gradients and their buffers.

        done: how many blocks have finished their backward. head_done: 1 once norm and head have, if they are a group of
        their own. whole: elements of the root's gradients, not sharded. reducing: elements in FSDP's float32 buffer.
        over: backward has ended, so gradients that wait for the last micro-batch are sharded by now, too.
        """
        found, itemsize, ranks = [], self.itemsize, self.plan.shard_ranks
        if self.unsynced and not over:
            done = head_done = 0
            found += counted("gradient accumulators", 4, (1, self.total, "parameters, on every rank"))
        reduced = (head_done, self.late, "of norm and head"), (done, self.block, "of a block")
        found += counted("gradients", itemsize, (1, whole, "of the embedding" if self.apart else "of the root"))
        if self.on_gpu:
            found += counted("gradients", itemsize, *reduced, ranks=ranks)
        found += counted("gradients being reduced", 4, (1, reducing, "parameters"))
        if self.gradients_leave:
            latest = (1, self.block, "of a block") if done else reduced[0]
            found += counted("gradients being offloaded", itemsize, latest, ranks=ranks)
        if self.plan.fsdp and self.plan.sharding == "hybrid" and itemsize < 4:
            found += counted("gradients reduced, until backward ends", 4, *reduced, ranks=ranks)
        return found

    def activations(self, saved: int, done: int) -> list[Part]:
        """What the forward of `saved` blocks has kept for backward."""
        if self.plan.offload_activations:  # the last block's; later the one being read, and the next
            saved = min(saved, 2 if done else 1)
        size = token_bytes(self.c, self.plan, self.chunks)[0]
        how = f"{size:,} bytes x {saved} layers x {self.n_tokens:,} tokens"
        return [Part("saved activations", size * saved * self.n_tokens, how)] if saved else []

    def at(self, extra, saved=0, blocks=0, ends=0, done=0, head_done=0, whole=0, reducing=0, over=False) -> list[Part]:
        """All parts of one moment: always, gathered, gradients, activations, and extra, which exists only then.

        saved: how many blocks' activations exist. blocks, ends: as gathered takes them. The rest: as gradients does.
        """
        gradients = self.gradients(done, head_done, whole, reducing, over)
        return [*self.always(), *self.gathered(blocks, ends), *gradients, *self.activations(saved, done), extra]

    # When

    def moments(self) -> dict[str, list[Part]]:
        """The parts at each moment, in the order of a step."""
        layers = self.layers
        forward, backward = loss_bytes(self.c, self.plan, self.n_tokens)
        there = layers if self.plan.sharding == "zero2" else 0
        # the buffer of the last gather: the last block's and then the head's
        of_head = self.buffer * (self.apart and self.late > self.block)
        found = {
            "end of forward, in the loss": self.at(forward, layers, there + self.buffer - of_head, 1 + of_head),
            "backward of the loss": self.at(backward, layers, there or self.buffer, 1),
        }
        if self.apart:
            filling = 0 if self.unsynced else self.itemsize  # unsynced, they are among the sums
            at = {"saved": layers, "blocks": there or self.buffer}
            found["reduction of the head"] = self.reduction(self.late, filling, **at)
        found |= {f"backward of block {k}": self.backward(k) for k in (layers, max(layers - 1, 1), 1)}
        found["backward of the embedding"] = self.backward_of_embedding()
        if self.plan.fsdp:
            numel, of = (self.head, "embedding") if self.apart else (self.root, "root")
            filling = 4 if self.unsynced else self.itemsize
            found[f"reduction of the {of}"] = self.reduction(numel, filling, done=layers, head_done=1, over=True)
        return found

    def backward(self, k: int) -> list[Part]:
        """The backward of block k, counted from 1: the blocks above it are done."""
        c, itemsize, n_tokens, last = self.c, self.itemsize, self.in_group, k == self.layers
        kept, in_block = token_bytes(c, self.plan, self.chunks)
        working = (in_block - kept) * n_tokens
        if self.chunks > 1 and self.plan.fused_kernels:  # a slice, with sums of its gradients; or attention beside them
            a_slice = itemsize * (6 * c.ffn_dim + c.n_embd) * n_tokens // self.chunks + 12 * c.n_embd * c.ffn_dim
            rounded = itemsize * (3 * c.n_embd * c.ffn_dim + c.n_embd**2)
            working += max(a_slice, attention_bytes(c, self.plan) * n_tokens + rounded)
        working = max(working, itemsize * self.block - kept * n_tokens)  # with few tokens the block's own gradients
        if self.groups > 1:  # the gradients of x, of all groups, and sums of the weights'
            working += itemsize * c.n_embd * (self.n_tokens - n_tokens)
            working += (itemsize if self.groups == 2 else 4) * self.block
        extra = Part("the block in backward", working, f"{in_block - kept:,} bytes x {n_tokens:,} tokens, beyond saved")
        return self.at(
            extra,
            saved=k,
            blocks=k if self.plan.sharding == "zero2" else 1 + (k > 1) * self.buffer,
            ends=self.root_stays,
            done=self.layers - k,
            head_done=1,
            whole=self.head * (not self.apart and (last or not self.head_left())),
            reducing=(self.late if last else self.block) * self.reduces,
        )

    def head_left(self) -> bool:
        """Whether the head's gradient has gone to the CPU before the embedding's: not if the two are tied."""
        return self.gradients_leave and not self.plan.fsdp and not self.c.tie_embeddings

    def backward_of_embedding(self) -> list[Part]:
        """The backward of the embedding, with two gradients as large as the embedding: its own and the head's. A tied
        head's waits to be added (with a third tensor if F.linear made it: fused_loss=false); an untied one's may have
        gone to the CPU, or be reduced.
        """
        c = self.c
        copies = 3 if c.tie_embeddings and not self.plan.fused_loss else 2 - self.head_left() - self.apart
        extra = Part("the embedding's input", self.itemsize * self.n_tokens * c.n_embd, f"{self.n_tokens:,} tokens")
        whole, reducing = copies * self.head, self.block * self.reduces
        return self.at(extra, ends=self.root_stays, done=self.layers, head_done=1, whole=whole, reducing=reducing)

    def reduction(self, numel: int, filling: int, **at) -> list[Part]:
        """FSDP's reduction of the gradients of numel parameters. They are copied, `filling` bytes each, into a float32
        buffer, and this rank's shard comes out, in float32 and rounded. The input and the output do not exist at once,
        but FSDP keeps the group's last gradient until the end: all of it for an embedding, or for norm and head; for a
        tied root only the norm's. With copy engines: what fills their buffer, then what they fetch, and its sum.
        """
        ranks, itemsize = self.plan.shard_ranks, self.itemsize
        last = self.head if self.apart and ranks > 1 else 0
        filled = max(filling * numel, filling * last + (4 + itemsize * (itemsize < 4)) * numel / ranks)
        if self.plan.copy_engines_reduce:
            filled = itemsize * (last + numel)
        extra = Part("input or output of the reduction", filled, f"{numel:,} parameters")
        return self.at(extra, reducing=0 if self.plan.copy_engines_reduce else numel, **at)


def moments(config: LlamaConfig, plan: Plan) -> dict[str, list[Part]]:
    """What a rank holds at each moment of a step that can be its peak."""
    return Step(config, plan).moments()


def parts(config: LlamaConfig, plan: Plan) -> tuple[str, list[Part]]:
    """The moment of the peak, and what is in memory then."""
    found = moments(config, plan)
    peak = max(found, key=lambda moment: sum(part.bytes for part in found[moment]))
    return peak, found[peak]


def peak_gib(config: LlamaConfig, plan: Plan) -> float:
    return sum(part.bytes for part in parts(config, plan)[1]) / GIB


def largest_batch(config: LlamaConfig, plan: Plan, gib: float) -> int:
    """The largest batch_size whose peak is at most gib; 0 if not even one sequence fits."""

    def fits(batch_size):
        return peak_gib(config, replace(plan, batch_size=batch_size)) <= gib

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # a batch more may be computed in smaller groups: 3,000 tokens of 1B fit 3 and 6 times into 22 GiB, but not 4 times
    return next(n for n in range(low + low // 4 + 8, -1, -1) if n <= low or fits(n))


def pinned(n_bytes: float) -> int:
    """Bytes that PyTorch's own pinned memory takes for n_bytes: the next power of two. pinned.py rounds nothing."""
    return 1 << (math.ceil(n_bytes) - 1).bit_length()


def cpu_parts(config: LlamaConfig, plan: Plan) -> list[Part]:
    """The parts that a rank keeps in the CPU's memory."""
    (block, root), itemsize, shards, layers = sizes(config), plan.itemsize, plan.shard_ranks, config.n_layer
    everything, found = (1, layers * sum(block) + sum(root), "parameters"), []
    if plan.offload != "none":
        one = itemsize == 4 and plan.offload == "all"  # then a parameter is its own master weight
        found += counted("AdamW: weights and moments", 8 if one else 12, everything, ranks=shards)
        if plan.micro_steps > 1:
            found += counted("gradient accumulators", 4, everything, ranks=shards)
        (computing,) = counted("gradients", itemsize, everything, ranks=shards)
        if plan.offload == "all" and plan.fsdp:  # FSDP pins weights and gradients by itself
            n_bytes = sum(pinned(itemsize * size / shards) for size in block * layers + root)
            computing = Part("gradients", n_bytes, f"{computing.how}, each tensor rounded up to a power of two")
        found.append(computing)
        if plan.offload == "all":
            found.append(computing._replace(name="compute weights"))
    if plan.offload_activations:
        a_layer, n_tokens = itemsize * config.n_embd, plan.batch_size * config.block_size
        how = f"{a_layer:,} bytes x {layers - 1} layers x {n_tokens:,} tokens"
        found.append(Part("saved activations", (layers - 1) * a_layer * n_tokens, how))
    return found


def cpu_bytes_to_come(config: LlamaConfig, plan: Plan) -> float:
    """The bytes of cpu_parts that are not yet allocated before the first step."""
    later = ("gradient accumulators", "saved activations")
    return sum(part.bytes for part in cpu_parts(config, plan) if part.name in later)


def table(config: LlamaConfig, plan: Plan) -> str:
    """The parts at the peak, a line each: name, GiB, arithmetic."""
    moment, found = parts(config, plan)
    rows = [(part.name, f"{part.bytes / GIB:.2f} GiB", part.how) for part in found]
    rows.append(("together", f"{peak_gib(config, plan):.2f} GiB", f"at the peak: {moment}"))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {gib:>{widths[1]}}  {how}" for name, gib, how in rows)


# ----------------------------------------------------------------------------------------------------------------------
# What to do when it is too much


def choices(config: LlamaConfig, plan: Plan) -> list[list[dict]]:
    """The settings that may lower the peak, a list for each name, the cheaper before the stronger."""

    def above(name, values, now):
        return [{name: value} for value in values[values.index(now) + 1 :]]

    found = [above("activation_checkpointing", ["none", "selective", "full"], plan.activation_checkpointing)]
    if not plan.cuda_graph:
        found.append(above("offload", ["none", "optimizer", "all"], plan.offload))
    found.append(above("fused_loss", [False, True], plan.fused_loss))
    found.append(above("fused_kernels", [False, True], plan.fused_kernels))
    found.append(above("sync_every_micro_batch", [False, True], plan.sync_every_micro_batch))
    if plan.activation_checkpointing != "none" and chunks(config, plan, plan.batch_size * config.block_size) == 1:
        found.append([{"mlp_chunks": 16}])
    if plan.activation_checkpointing == "full" and not (plan.compile or plan.cuda_graph):
        found.append(above("offload_activations", [False, True], plan.offload_activations))
    if plan.copy_engines_gather:
        found.append([{"copy_engines": False}])
    if plan.world_size > 1 and plan.sharding != "zero3":
        found.append([{"sharding": "zero3"}])
    if plan.batch_size % 2 == 0:
        accumulation = 2 * plan.micro_steps * plan.world_size
        found.append([{"batch_size": plan.batch_size // 2, "gradient_accumulation_steps": accumulation}])
    return [settings for settings in found if settings]


def changed(config: LlamaConfig, plan: Plan, settings: dict) -> tuple[LlamaConfig, Plan]:
    """config and plan with these of train.py's settings changed."""
    of_model = {name: value for name, value in settings.items() if name in LlamaConfig.__dataclass_fields__}
    of_plan = {name: value for name, value in settings.items() if name in Plan.__dataclass_fields__}
    if "gradient_accumulation_steps" in settings:
        of_plan["micro_steps"] = settings["gradient_accumulation_steps"] // plan.world_size
    if "sharding" in settings:
        of_plan["shard_ranks"] = plan.world_size
    return replace(config, **of_model), replace(plan, **of_plan)


def advice(config: LlamaConfig, plan: Plan) -> list[tuple[str, float]]:
    """The three settings that would lower the peak most, each alone: as flags, with the peak in GiB that they give.

    For each setting that is the cheapest value that saves at least two thirds of what its strongest value saves.
    """
    now, found = peak_gib(config, plan), []
    for values in choices(config, plan):
        gibs = [peak_gib(*changed(config, plan, value)) for value in values]
        if min(gibs) < now:
            enough = next(i for i, gib in enumerate(gibs) if now - gib >= 2 / 3 * (now - min(gibs)))
            flags = " ".join(f"--{name}={str(value).lower()}" for name, value in values[enough].items())
            found.append((flags, gibs[enough]))
    return sorted(found, key=lambda flags_and_gib: flags_and_gib[1])[:3]


def say_out_of_memory(config: LlamaConfig, plan: Plan, gib: float | None = None) -> str:
    """The message for a run that is out of memory, on a card of `gib` GiB."""
    now, (moment, found) = peak_gib(config, plan), parts(config, plan)
    largest = sorted(found, key=lambda part: -part.bytes)[:3]
    lines = [
        f"out of memory: this run takes about {now:.1f} GiB" + (f", the card has {gib:.1f}" if gib else ""),
        f"most of it ({moment}): " + ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in largest),
    ]
    helpful = advice(config, plan)
    if not helpful:
        lines.append("no setting is left that would lower it: more GPUs, a shorter block_size or a smaller model")
        return "\n".join(lines)
    width = max(len(flags) for flags, _ in helpful)
    lines.append("what would lower it most, each alone:")
    lines += [f"  {flags:<{width}}  about {then:.1f} GiB instead of {now:.1f}" for flags, then in helpful]
    return "\n".join(lines)
