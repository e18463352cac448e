"""How much memory a training step takes, part by part, from the settings alone: without a GPU, without allocating.

    run = RunShape(batch_size=8)               # train.py's settings of the same names, for one rank
    peak_gib(config, run)                      # 28.5 for Llama 3.2 1B at 8 x 2,048 tokens
    print(table(config, run))                  # the parts at the peak, with the arithmetic

Where each byte goes, in bfloat16: n parameters, of which B a block and R the root (embedding, final norm, head; H: an
untied head), L layers, N tokens, P ranks that share one copy of the model:

    compute weights         2n / P              AdamW: lower halves of the weights, two moments    10n / P (8-bit: 4n)
    saved activations       2·N·L·(4C + 2KD + 2F)     the loss    a chunk's logits + 4VC           gradients    2n / P
    FSDP by NCCL            the gathered root 2R, two blocks 4B, a block's gradients being reduced in float32 4B
    FSDP by copy engines    their buffers 2·(5B + 2R), the gathered root 2R and a block 2B
    an untied head          instead of 2R: 4H in the loss, then its gradients being reduced in float32 4H
    offload                 a block's gradients being copied 2B; all: instead of the weights two blocks 4B, the root 2R
    LoRA                    gradients, masters and moments of the adapters alone

Activations shrink while gradients grow. So `phases` lists the parts at each point of a step that can be its peak, and
the largest sum counts. The update is not among them: AdamW's allocates nothing, and what those of Muon, GaLore and
APOLLO allocate is less than the activations were (but 1 GiB more for one sequence of 8B).

Within 1% of every peak that H100s and H200s measured: tests/test_memory.py holds it to the records. All numbers are
what PyTorch allocates (max_memory_allocated): the CUDA context, NCCL's buffers and the allocator's reserve add 1 to 2
GiB. compile=true is counted like the fused kernels, though a compiler plans for itself.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels import use_fp8
from lora import add_lora
from model import Llama, LlamaConfig, triton_suits
from optimizers.adamw import AdamW
from optimizers.on_cpu import OnCPU
from optimizers.on_gpu import OnGPU
from optimizers.rule import Rule
from runtime.recompute import chunks_of_mlp, groups_of_sequences, loss_options

GIB = 2**30
Named = tuple[str, torch.Tensor]  # a parameter's name, and the parameter


@dataclass(frozen=True)
class RunShape:
    """How one rank trains: train.py's settings of the same names, with every auto and None resolved."""

    batch_size: int
    micro_steps: int = 1  # micro-batches of a step on this rank
    dtype: str = "bfloat16"
    # how the model is executed
    fused_kernels: bool = True
    fused_loss: bool = True
    attention: str = "auto"
    fp8: bool = False  # takes no more: float8 operands are freed before the peak. With adapters the base is held so
    activation_checkpointing: str = "none"
    mlp_chunks: int | None = None
    offload_activations: bool = False
    compile: bool = False
    cuda_graph: bool = False
    mask_documents: bool = False
    # where things are
    offload: str = "none"  # 'optimizer': its state and the gradients in CPU memory; 'all': the weights too
    offload_dir: str | None = None  # where the optimizer's state is instead of in CPU memory
    world_size: int = 1
    sharding: str = "zero3"
    shard_ranks: int = 1  # ranks that share one copy of the model
    sync_every_micro_batch: bool = True
    copy_engines: bool = False
    # what the optimizer keeps
    rule: Rule = AdamW()
    lora_rank: int = 0
    lora_alpha: float = 32.0
    base_dtype: str = "bfloat16"

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def fsdp(self) -> bool:
        return self.world_size > 1

    @property
    def streamed(self) -> bool:
        """True if stream_weights.py copies each block's weights to the GPU when it computes."""
        return self.offload == "all" and not self.fsdp

    @property
    def copy_engines_gather(self) -> bool:
        return self.copy_engines and self.shard_ranks > 1 and self.offload != "all"

    @property
    def copy_engines_reduce(self) -> bool:
        """True if the copy engines also reduce the gradients: FSDP must hand them over unconverted."""
        unconverted = self.sync_every_micro_batch and self.sharding != "hybrid" and self.dtype != "float16"
        return self.copy_engines_gather and unconverted


class Part(NamedTuple):
    name: str
    bytes: float
    how: str  # the arithmetic, in words


# ----------------------------------------------------------------------------------------------------------------------
# What the model, the optimizer and the recomputation say of themselves


def param_shapes(c: LlamaConfig, run: RunShape) -> tuple[list[Named], list[Named]]:
    """One block's parameters, and the root's, embedding first: on the meta device, so without memory."""
    with torch.device("meta"):
        model = Llama(replace(c, n_layer=1)).to(run.compute_dtype)
        if run.lora_rank:
            if run.fp8:
                use_fp8(model)
            add_lora(model, run.lora_rank, run.lora_alpha, run.base_dtype)
    root = [(name, p) for name, p in model.named_parameters() if not name.startswith("layers.")]
    return list(model.layers.named_parameters("layers")), root


def n_params(c: LlamaConfig) -> int:
    return Step(c, RunShape(1)).all.n


def state_bytes(name: str, parameter: torch.Tensor, run: RunShape) -> int:
    """Bytes, over the ranks that share a copy, of a parameter's states, and of what the place keeps of its master."""
    place = OnGPU if run.offload == "none" else OnCPU
    master = place.master_dtype(parameter.dtype, same_device=run.offload != "optimizer")
    states = [
        math.prod(shape) * dtype.itemsize * (1 if shape[0] == len(parameter) else run.shard_ranks)  # split, or copies
        for shape, dtype in run.rule.states(name, parameter).values()
    ]
    return sum(states) + (master.itemsize * parameter.numel() if master else 0)


class Group(NamedTuple):
    """Parameters that are gathered, computed and reduced together: their number, and bytes of each kind."""

    name: str
    n: int
    weights: int  # as their projections hold them
    gradients: int
    wide: int  # gradients in float32
    states: int  # of the optimizer


def group_of(name: str, parameters: list[Named], run: RunShape) -> Group:
    trained = [(key, p) for key, p in parameters if p.requires_grad]
    n, weights = sum(p.numel() for _, p in parameters), sum(p.nbytes for _, p in parameters)
    gradients, wide = sum(p.nbytes for _, p in trained), sum(4 * p.numel() for _, p in trained)
    return Group(name, n, weights, gradients, wide, sum(state_bytes(key, p, run) for key, p in trained))


def counted(name: str, kind: str, *terms: tuple[int, Group], ranks: int = 1) -> list[Part]:
    """[Part] of the bytes of this kind in (times, group), ..., divided by ranks; [] if there are none."""
    terms = [(times, group) for times, group in terms if times * getattr(group, kind)]
    words = [f"{f'{times} x ' * (times > 1)}{getattr(group, kind) / group.n:g} bytes x {group.n:,} {group.name}"
             for times, group in terms]  # fmt: skip
    how = f"({' + '.join(words)})" if len(words) > 1 and ranks > 1 else " + ".join(words)
    n_bytes = sum(times * getattr(group, kind) for times, group in terms) / ranks
    return [Part(name, n_bytes, how + f" / {ranks} ranks" * (ranks > 1))] if terms else []


# ----------------------------------------------------------------------------------------------------------------------
# Bytes of activations


def token_bytes(c: LlamaConfig, run: RunShape, chunks: int) -> tuple[int, int]:
    """Bytes per token in one layer: what forward keeps for backward, and the maximum during its backward.

    chunks: slices of the MLP.
    """
    itemsize = run.compute_dtype.itemsize
    # Attention keeps q, k, v, its output and one fp32 per head; PyTorch's expands k and v in float32.
    expanded = itemsize == 4 and run.attention != "triton" and not run.mask_documents
    kv = c.n_embd if expanded else c.n_kv_head * c.head_dim
    attention = itemsize * (2 * c.n_embd + 2 * kv) + 4 * c.n_head
    if run.fused_kernels:  # a norm keeps the sum it reads and rstd; the MLP gate and up (swiglu_mlp.py)
        norm, mlp = itemsize * c.n_embd + 4, itemsize * 2 * c.ffn_dim
        working = itemsize * (c.n_embd + 4 * c.ffn_dim)  # dy, the gradients of gate, up and their product, the product
        if chunks > 1:  # nothing is kept: dy and the gradient of the norm's output; a slice comes on top
            mlp, working = 0, itemsize * 2 * c.n_embd
    else:  # a norm keeps its output, in float32 x, and x·rstd if its weight learns; the MLP gate, up, silu(gate)
        wide = 4 if run.lora_rank else 8
        norm, mlp = (wide + itemsize) * c.n_embd + 4, (12 + itemsize) * c.ffn_dim // chunks  # and the product
        working = itemsize * c.n_embd + (12 - itemsize) * c.ffn_dim  # in float32; the product is free by then
    everything = 2 * norm + attention + mlp
    block_input = itemsize * c.n_embd
    selective = norm + attention + block_input
    kept = {"none": everything, "selective": selective, "full": block_input}[run.activation_checkpointing]
    return kept, everything + working


def attention_bytes(c: LlamaConfig, run: RunShape) -> int:
    """Bytes per token that attention's backward adds: the gradients of its output, q, k and v, the kernel's own.

    cuDNN's own: dq in float32, dk and dv for each query head, three numbers per head.
    """
    itemsize = run.compute_dtype.itemsize
    gradients = itemsize * (c.n_embd + 2 * c.n_kv_head * c.head_dim)  # the MLP's residual stream is free by now
    suits = run.attention == "auto" and triton_suits(c.head_dim, c.block_size, run.compute_dtype)
    if suits or run.attention == "triton" or run.mask_documents:
        return gradients + 4 * c.n_head
    return gradients + 4 * c.n_embd + 2 * itemsize * c.n_embd * (c.n_kv_head < c.n_head) + 12 * c.n_head


def loss_parts(c: LlamaConfig, run: RunShape, n_tokens: int) -> tuple[Part, Part]:
    """The final norm, the head and the loss: at the end of forward, and the maximum in their backward."""
    itemsize, head = run.compute_dtype.itemsize, c.vocab_size * c.n_embd * (not run.lora_rank)  # whose gradient
    # the final norm's output, and what it keeps
    normed = (2 * itemsize if run.fused_kernels else itemsize + 8) * n_tokens * c.n_embd
    if not run.fused_loss:
        # forward: the logits, in float32, and with ignored rows masked; backward: log p, its gradient, the logits'
        sizes = 8 + itemsize * (itemsize < 4), 12
        how = f"bytes x {n_tokens:,} tokens x {c.vocab_size:,} logits"
        return tuple(Part("loss head", size * n_tokens * c.vocab_size + normed, f"{size} {how}") for size in sizes)
    options = loss_options(n_tokens, run.compute_dtype, c.vocab_size, run.activation_checkpointing)
    chunk = min(options["chunk_tokens"], n_tokens)
    logits = itemsize * -(-c.vocab_size // 16) * 16 * chunk
    if chunk == n_tokens and run.dtype != "float16":  # the head's gradient is made in backward, from the logits
        sizes = logits, logits + itemsize * head
    elif options["fp32_dweight"]:  # summed over the chunks, then rounded
        sizes = logits + 4 * head, (4 + itemsize) * head
    else:
        sizes = logits + itemsize * head, itemsize * head
    how = f"logits of {chunk:,} tokens, head's gradient"
    return tuple(Part("loss head", size + normed, how) for size in sizes)


# ----------------------------------------------------------------------------------------------------------------------
# Phases of a step


class Step:
    """What a rank holds, as a function of how far the step is.

    FSDP gathers a group of parameters into a buffer and, with NCCL, copies it out of there. It gathers the next block
    before this one computes, so two blocks exist at once; zero2 gathers once. A tied root stays gathered until
    backward ends. If the head is untied, norm and head are gathered for the loss alone and reduced before the
    blocks' backward, and the embedding's gradient comes last. A group's gradients stay in a float32 buffer until those
    of the next group are in theirs. Hybrid keeps each reduced shard in float32 until backward ends.
    """

    def __init__(self, c: LlamaConfig, run: RunShape):
        self.c, self.run, self.itemsize = c, run, run.compute_dtype.itemsize
        block, root = param_shapes(c, run)
        self.parameters = block * c.n_layer + root
        self.block, self.all = group_of("of a block", block, run), group_of("parameters", self.parameters, run)
        self.embedding = group_of("of the embedding", root[:1], run)
        self.apart = run.fsdp and not c.tie_embeddings  # embedding, and norm and head, are two groups; else one
        self.last = group_of("of norm and head", root[1:], run) if self.apart else group_of("of the root", root, run)
        self.unsynced = run.fsdp and run.micro_steps > 1 and not run.sync_every_micro_batch
        self.gradients_leave = run.offload == "optimizer" or run.streamed  # while those of the next group are computed
        # a tied head's gradient waits on the GPU for the embedding's; an untied one's may have gone to the CPU
        self.head_waits = c.tie_embeddings or not (run.fsdp or self.gradients_leave)
        # full checkpointing: a few sequences at a time pass through a block, their tokens through the MLP in slices
        mode, how = run.activation_checkpointing, (run.mlp_chunks, run.fused_kernels)
        in_groups = mode == "full" and not run.compile
        self.n_tokens = run.batch_size * c.block_size
        self.n_groups = groups_of_sequences(run.batch_size, c.block_size, c.n_embd, *how) if in_groups else 1
        self.group_tokens = -(-run.batch_size // self.n_groups) * c.block_size
        self.chunks = chunks_of_mlp(self.group_tokens, c.n_embd, mode, *how)
        self.kept, self.in_block = token_bytes(c, run, self.chunks)

    def always(self) -> list[Part]:
        run, ranks = self.run, self.run.shard_ranks
        times = 1 + run.cuda_graph  # which records on a stream of its own
        found = [Part("cuBLAS workspaces", times * 2**26, "32 MiB each for forward and backward")]  # on Hopper
        if run.offload != "all":
            found += counted("compute weights", "weights", (1, self.all), ranks=ranks)
        if run.offload == "none":
            found += self.masters_and_states()
        if run.copy_engines_gather:  # copy_engines.py; embedding and head share theirs
            blocks = 5 if run.copy_engines_reduce else 3
            ends = 2 if run.copy_engines_reduce and self.last.gradients else 1  # what is frozen is not reduced
            found += counted("buffers of the copy engines", "weights", (blocks, self.block), (ends, self.last))
        if run.micro_steps > 1 and run.offload == "none" and not self.unsynced:
            found += counted("gradient accumulators", "wide", (1, self.all), ranks=ranks)
        return found

    def masters_and_states(self) -> list[Part]:
        return counted("masters and optimizer states", "states", (1, self.all), ranks=self.run.shard_ranks)

    def gradients(self, blocks: int, last: int, embeddings: int, reducing: Group | None, over: bool) -> list[Part]:
        """blocks: how many have ended their backward. The rest is as in at()."""
        run, complete = self.run, [(last * self.apart, self.last), (blocks, self.block)]
        found = counted("gradients", "gradients", (embeddings, self.embedding))
        if reducing and not run.copy_engines_reduce:
            found += counted("gradients being reduced", "wide", (1, reducing))
        if self.unsynced and not over:
            whole = self.all._replace(name="parameters, on every rank")
            return found + counted("gradient accumulators", "wide", (1, whole))
        if run.offload == "none":
            found += counted("gradients", "gradients", *complete, ranks=run.shard_ranks)
        if self.gradients_leave:
            latest = (1, self.block) if blocks else complete[0]
            found += counted("gradients being offloaded", "gradients", latest, ranks=run.shard_ranks)
        if run.fsdp and run.sharding == "hybrid" and self.itemsize < 4:  # FSDP's _all_reduce_state
            found += counted("gradients reduced, until backward ends", "wide", *complete, ranks=run.shard_ranks)
        return found

    def saved(self, blocks: int) -> list[Part]:
        how = f"{self.kept:,} bytes x {blocks} layers x {self.n_tokens:,} tokens"
        return [Part("saved activations", self.kept * blocks * self.n_tokens, how)] if blocks else []

    def at(self, extra, saved, gathered=(0, 0), last=1, embeddings=0, reducing=None, over=False) -> list[Part]:
        """All parts of one phase; extra exists only then.

        saved: how many blocks have not ended their backward; last: whether norm and head have. gathered: the whole
        weights of so many blocks, and so many times those of the root, or of norm and head. embeddings: gradients as
        large as the embedding, not sharded. reducing: the group in FSDP's float32 buffer. over: backward has ended, and
        with it the accumulation of unsharded gradients.
        """
        done, (blocks, roots), found = self.c.n_layer - saved, gathered, self.always()
        if self.run.fsdp:
            found += counted("gathered weights", "weights", (blocks, self.block), (roots, self.last))
        if self.run.streamed:
            found += counted("streamed weights", "weights", (2, self.block), (roots, self.last))
        found += self.gradients(done, last, embeddings, reducing, over)
        if self.run.offload_activations:  # of the last block; in backward of the one being read, and of the next
            saved = min(saved, 1 + (done > 0))
        return [*found, *self.saved(saved), extra]

    def block_in_backward(self) -> Part:
        c, itemsize, n_tokens, beyond = self.c, self.itemsize, self.group_tokens, self.in_block - self.kept
        n_bytes = beyond * n_tokens
        if self.chunks > 1 and self.run.fused_kernels:  # a slice and its float32 gradients, or attention's backward
            sums = self.block.wide if self.run.lora_rank else 12 * c.n_embd * c.ffn_dim
            a_slice = itemsize * (6 * c.ffn_dim + c.n_embd) * n_tokens // self.chunks + sums
            n_bytes += max(a_slice, attention_bytes(c, self.run) * n_tokens + self.block.gradients)
        n_bytes = max(n_bytes, self.block.gradients - self.kept * n_tokens)  # with few tokens the block's own gradients
        if self.n_groups > 1:  # the gradients of x, of all groups, and sums of the weights'
            sums = self.block.gradients if self.n_groups == 2 else self.block.wide
            n_bytes += itemsize * c.n_embd * (self.n_tokens - n_tokens) + sums
        return Part("the block in backward", n_bytes, f"{beyond:,} bytes x {n_tokens:,} tokens, beyond saved")

    def reduction(self, group: Group) -> Part:
        """Beside FSDP's float32 buffer: the gradients that are copied into it; or this rank's sums that come out, in
        both dtypes, while FSDP still holds the group's last gradient.
        """
        held = self.embedding.gradients * (self.apart and self.run.shard_ranks > 1)
        sums = (group.wide + group.gradients * (self.itemsize < 4)) / self.run.shard_ranks
        n_bytes = group.gradients + held if self.run.copy_engines_reduce else max(group.gradients, held + sums)
        n_bytes *= not self.unsynced  # they are among the accumulators
        return Part("the reduction", n_bytes, f"{group.n:,} parameters")


def phases(config: LlamaConfig, run: RunShape) -> dict[str, list[Part]]:
    """What a rank holds at each phase of a step that can be its peak, in their order."""
    step, layers, zero2 = Step(config, run), config.n_layer, run.sharding == "zero2"
    apart, root_stays = step.apart, int(run.fsdp and not step.apart)
    buffer = int(run.shard_ranks > 1 and not run.copy_engines_gather)  # NCCL's, for what is gathered
    forward, backward = loss_parts(config, run, step.n_tokens)
    whole = layers if zero2 else buffer  # blocks that are gathered in the loss; zero3: the last one's buffer
    # the buffer is as large as the larger of the last two gathers
    in_loss = (layers * zero2, 1 + buffer) if apart and step.last.n > step.block.n else (layers * zero2 + buffer, 1)
    reducing = step.block if run.fsdp and not step.unsynced else None  # the gradients of the block before
    found = {"the loss, at the end of forward": step.at(forward, layers, in_loss, last=0)}
    found["backward of the loss"] = step.at(backward, layers, (whole, 1), last=0)
    if apart:
        head = step.reduction(step.last)
        found["reduction of the head"] = step.at(head, layers, (whole, 0), last=0, reducing=step.last)
    for k in (layers, max(layers - 1, 1), 1):
        gathered = k if zero2 else 1 + (k > 1) * buffer, root_stays
        embeddings = int(step.head_waits or (k == layers and not apart))
        before = reducing if k < layers else reducing and apart and step.last  # the last block's: the head
        found[f"backward of block {k}"] = step.at(
            step.block_in_backward(), k, gathered, embeddings=embeddings, reducing=before
        )
    x = Part("the embedding's input", step.itemsize * step.n_tokens * config.n_embd, f"{step.n_tokens:,} tokens")
    # a tied head's gradient, if F.linear made it, is added to the embedding's in a third tensor
    copies = 3 if config.tie_embeddings and not run.fused_loss else 1 + step.head_waits
    found["backward of the embedding"] = step.at(x, 0, (0, root_stays), embeddings=copies, reducing=reducing)
    if run.fsdp:
        first = step.embedding if apart else step.last
        found["reduction of the embedding"] = step.at(step.reduction(first), 0, reducing=first, over=True)
    return found


def parts(config: LlamaConfig, run: RunShape) -> tuple[str, list[Part]]:
    """The phase of the peak, and what is in memory then."""
    found = phases(config, run)
    peak = max(found, key=lambda phase: sum(part.bytes for part in found[phase]))
    return peak, found[peak]


def peak_gib(config: LlamaConfig, run: RunShape) -> float:
    return sum(part.bytes for part in parts(config, run)[1]) / GIB


def table(config: LlamaConfig, run: RunShape) -> str:
    """The parts at the peak, a line each: name, GiB, arithmetic."""
    phase, found = parts(config, run)
    rows = [*found, Part("together", sum(part.bytes for part in found), f"at the peak: {phase}")]
    width = max(len(part.name) for part in rows)
    return "\n".join(f"{part.name:<{width}} {part.bytes / GIB:7.2f} GiB  {part.how}" for part in rows)
