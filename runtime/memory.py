"""How much memory a training step takes, part by part, computed from the settings alone: no GPU, no allocation.

    run = RunShape(batch_size=8)               # train.py's settings of the same names, for one rank
    peak_gib(config, run)                      # 28.5 for Llama 3.2 1B at 8 x 2,048 tokens
    print(parts_table(config, run))            # the parts at the peak, with the arithmetic

Where each byte goes, in bfloat16: n parameters, B of them in each block, R in the root (embedding, final norm, head), H
in an untied head; L layers, N tokens, P ranks that share one copy of the model:

    compute weights         2n / P              AdamW: lower halves of the weights, two moments    10n / P (8-bit: 4n)
    saved activations       2·N·L·(4C + 2KD + 2F)     the loss    a chunk's logits + 4VC + 4NC     gradients    2n / P
    FSDP by NCCL            the gathered root 2R, two blocks 4B, a block's gradients being reduced in float32 4B
    FSDP by copy engines    their buffers 2·(5B + 2R), the gathered root 2R and a block 2B
    an untied head          instead of 2R: 4H in the loss, then its gradients being reduced in float32 4H
    offload                 a block's gradients being copied 2B; all: instead of the weights two blocks 4B, the root 2R
    LoRA                    gradients, masters and moments of the adapters alone

During backward, activations shrink while gradients grow: `phases` lists the parts at each point that can be the peak,
and the largest sum counts. The update is not one of them: AdamW's allocates nothing; Muon's and GaLore's
allocate less than the activations did (but 1 GiB more for one sequence of 8B).

The estimate is within about 1% of every peak measured on H100s and H200s: tests/test_memory.py checks it against the
records. It omits what is smaller: the norms' statistics, the embedding's input. All numbers are what PyTorch allocates
(max_memory_allocated): the CUDA context, NCCL's buffers and the allocator's reserve add 1 to 2 GiB, with cuda_graph up
to 4. compile=true is counted like the fused kernels, though a compiler makes its own plan.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels import use_fp8
from kernels.attention import triton_suits
from kernels.linear import matrix_rows
from lora import add_lora
from model import Execution, Llama, LlamaConfig
from optimizers.adamw import AdamW
from optimizers.on_cpu import OnCPU
from optimizers.on_device import OnDevice
from optimizers.rule import Rule

GIB = 2**30
FSDP_2_15 = torch.__version__ >= (2, 15)  # frees gradients once they are copied; autograd converts them to float32
Named = tuple[str, torch.Tensor, tuple[int, ...]]  # a parameter's name, the parameter, the rows of its matrices


@dataclass(frozen=True)
class RunShape:
    """How one rank trains: train.py's settings of the same names, dtype and others as it has resolved them."""

    batch_size: int
    micro_steps: int = 1  # micro-batches of a step on this rank
    dtype: str = "bfloat16"
    # how the model is executed
    kernels: str = "all"
    triton: bool = True  # False on a CPU: blocks are computed by plain PyTorch, whatever `kernels` says
    attention: str = "auto"
    fp8: bool = False  # with adapters, the base is held in float8
    activation_checkpointing: str = "none"
    mlp_chunks: int | None = None
    offload_activations: bool = False
    compile: bool = False
    cuda_graph: bool = False
    mask_documents: bool = False
    # where things live
    offload: str = "none"  # 'optimizer': its state and the gradients in CPU memory; 'all': the weights too
    offload_dir: str | None = None  # holds the optimizer's state in place of CPU memory
    world_size: int = 1
    sharding: str = "zero3"
    shard_ranks: int = 1  # ranks that share one copy of the model
    sync_every_micro_batch: bool = True
    copy_engines: bool = False
    # what the optimizer keeps
    rule: Rule = AdamW()
    lora_rank: int = 0
    quantize_base: str = "none"

    @classmethod
    def of(cls, settings: Mapping, **resolved) -> "RunShape":
        """Of train.py's settings; resolved: what it made of some of them."""
        named = {name: value for name, value in settings.items() if name in cls.__dataclass_fields__}
        return cls(**named | resolved)

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def how(self) -> Execution:
        return Execution(
            self.kernels, self.attention, self.activation_checkpointing, self.mlp_chunks, self.offload_activations
        )

    @property
    def plain_blocks(self) -> bool:
        return self.kernels == "none" or not self.triton

    @property
    def fsdp(self) -> bool:
        return self.world_size > 1

    @property
    def copy_engines_gather(self) -> bool:
        packed = self.lora_rank and (self.fp8 or self.quantize_base == "nf4")  # the engines' buffers have one dtype
        return self.copy_engines and self.shard_ranks > 1 and self.offload != "all" and not packed

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
# What the model, the optimizer and the recomputation report about themselves


def param_shapes(c: LlamaConfig, run: RunShape) -> tuple[list[Named], list[Named]]:
    """One block's parameters, and the root's, embedding first. They are on the meta device, so take no memory.

    ValueError for matrix sides that fp8 or NF4 does not support.
    """
    with torch.device("meta"):
        model = Llama(replace(c, n_layer=1)).to(run.compute_dtype)
        if run.fp8:
            use_fp8(model)
        if run.lora_rank:
            add_lora(model, run.lora_rank, 1.0, run.quantize_base)
    rows = matrix_rows(model)
    named = [(name, p, rows[name]) for name, p in model.named_parameters()]
    block = [each for each in named if each[0].startswith("layers.")]
    return block, [each for each in named if not each[0].startswith("layers.")]


def n_params(c: LlamaConfig) -> int:
    return Step(c, RunShape(1)).all.n


def state_bytes(name: str, parameter: torch.Tensor, rows: tuple[int, ...], run: RunShape) -> int:
    """Bytes of a parameter's states and of what the place keeps of its master, over all ranks of a copy."""
    place = OnDevice if run.offload == "none" else OnCPU
    master = place.master_dtype(parameter.dtype, same_device=run.offload != "optimizer")
    n_bytes = master.itemsize * parameter.numel() if master else 0
    for shape, dtype in run.rule.states(name, parameter.shape, rows).values():
        copies = 1 if shape[0] == len(parameter) else run.shard_ranks  # sharded by rows; else whole on each rank
        n_bytes += math.prod(shape) * dtype.itemsize * copies
    return n_bytes


class Group:
    """Parameters that are gathered, computed and reduced together: their number, and the bytes of each kind."""

    def __init__(self, name: str, parameters: list[Named], run: RunShape):
        trained = [each for each in parameters if each[1].requires_grad]
        self.name = name
        self.n = sum(p.numel() for _, p, _ in parameters)
        self.weights = sum(p.nbytes for _, p, _ in parameters)  # as the projections store them
        self.gradients = sum(p.nbytes for _, p, _ in trained)
        self.wide = sum(4 * p.numel() for _, p, _ in trained)  # gradients in float32
        self.states = sum(state_bytes(*each, run) for each in trained)  # the optimizer's, with the masters


def counted(name: str, kind: str, *terms: tuple[int, Group], ranks: int = 1) -> list[Part]:
    """[Part] that sums the bytes of this kind in (times, group), ..., divided by ranks; [] if there are none."""
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    n_bytes = 0
    words = []
    for times, group in terms:
        of_group = getattr(group, kind)
        if times * of_group:
            n_bytes += times * of_group
            factor = f"{times} x " if times > 1 else ""
            words.append(f"{factor}{of_group / group.n:g} bytes x {group.n:,} {group.name}{shared}")
    return [Part(name, n_bytes / ranks, " + ".join(words))] if words else []


# ----------------------------------------------------------------------------------------------------------------------
# Bytes of activations


def runs_triton(c: LlamaConfig, run: RunShape) -> bool:
    """True if attention runs our kernel, False if PyTorch's."""
    suits = run.attention == "auto" and triton_suits(c.head_dim, c.block_size, run.compute_dtype)
    return suits or run.attention == "triton" or run.mask_documents


def token_bytes(c: LlamaConfig, run: RunShape, chunks: int) -> tuple[int, int]:
    """Bytes per token in one layer: what forward keeps for backward, and the maximum during its backward.

    chunks: number of slices of the MLP.
    """
    itemsize = run.compute_dtype.itemsize
    x = itemsize * c.n_embd  # per token: the residual stream
    gate = itemsize * c.ffn_dim
    kv = itemsize * c.n_kv_head * c.head_dim
    if itemsize == 4 and not runs_triton(c, run):
        kv = x  # in float32 PyTorch's attention expands k and v to all query heads
    attention = 2 * x + 2 * kv  # q and the output, k and v
    norm = x  # the sum that a norm reads
    if run.plain_blocks:
        norm += (4 if run.lora_rank else 8) * c.n_embd  # in float32: x, and x·rstd if the weight is trained
        mlp = gate + 12 * c.ffn_dim  # in float32: gate, up and silu(gate)
        working = x - gate + 12 * c.ffn_dim  # the product is free by then
    elif chunks > 1:  # keeps nothing of the MLP; working: dy and the gradient of the norm's output; a slice is extra
        mlp = 0
        working = 2 * x
    else:
        mlp = 2 * gate  # gate and up
        working = x + gate  # dy; the product, in its gradient's memory; gate's and up's gradients overwrite gate and up
        if run.fp8:
            working += x if run.lora_rank else 2 * c.ffn_dim  # rounded; with adapters in the product's memory
    everything = 2 * norm + attention + mlp
    saved = {"none": everything, "selective": norm + attention + x, "full": x}[run.activation_checkpointing]
    return saved, everything + working


def loss_parts(c: LlamaConfig, run: RunShape, n_tokens: int) -> tuple[Part, Part]:
    """Memory of the final norm, the head and the loss: at the end of forward, and the maximum in their backward."""
    itemsize = run.compute_dtype.itemsize
    options = run.how.loss_options(n_tokens, c.vocab_size, run.compute_dtype)
    head = 0 if run.lora_rank else c.vocab_size * c.n_embd  # its gradient
    if run.kernels != "all":  # all logits, in float32, with ignored rows masked; then log p, its gradient, the logits'
        chunk = n_tokens
        sizes = 10 * chunk * c.vocab_size, 12 * chunk * c.vocab_size
        how = f"logits of {chunk:,} tokens"
    else:
        chunk = min(options["chunk_tokens"], n_tokens)
        logits = chunk * c.vocab_size
        how = f"logits of {chunk:,} tokens, head's gradient"
        if chunk == n_tokens and run.dtype != "float16":  # backward computes the head's gradient from the logits
            sizes = itemsize * logits, itemsize * (logits + head)
        elif options["fp32_dweight"]:  # the gradient is summed over the chunks, then rounded
            sizes = itemsize * logits + 4 * head, (4 + itemsize) * head
        else:
            sizes = itemsize * (logits + head), itemsize * head
    # the final norm's output, and what the norm keeps for backward
    normed = (itemsize + 8 if run.plain_blocks else 2 * itemsize) * n_tokens * c.n_embd
    return tuple(Part("loss head", size + normed, how) for size in sizes)


# ----------------------------------------------------------------------------------------------------------------------
# Phases of a step


class Step:
    """What a rank holds at each point of a step."""

    def __init__(self, c: LlamaConfig, run: RunShape):
        self.c = c
        self.run = run
        self.itemsize = run.compute_dtype.itemsize
        block, root = param_shapes(c, run)
        self.parameters = block * c.n_layer + root
        self.all = Group("parameters", self.parameters, run)
        self.block = Group("of a block", block, run)
        self.root = Group("of the root", root, run)
        self.embedding = Group("of the embedding", root[:1], run)
        self.head = Group("of norm and head", [] if c.tie_embeddings else root[1:], run)  # if untied
        self.for_loss = self.root if c.tie_embeddings else self.head  # the weights that the loss needs
        self.unsynced = run.fsdp and run.micro_steps > 1 and not run.sync_every_micro_batch
        self.reduces = run.fsdp and not self.unsynced
        # full checkpointing: a few sequences at a time pass through a block, their tokens through the MLP in slices
        in_groups = run.activation_checkpointing == "full" and not run.compile
        self.n_tokens = run.batch_size * c.block_size
        self.n_groups = run.how.groups_of_sequences(run.batch_size, c.block_size, c.n_embd) if in_groups else 1
        self.group_tokens = -(-run.batch_size // self.n_groups) * c.block_size
        self.chunks = 1 if run.plain_blocks else run.how.chunks_of_mlp(self.group_tokens, c.n_embd)
        self.saved_bytes, self.in_block_bytes = token_bytes(c, run, self.chunks)

    def always(self) -> list[Part]:
        run = self.run
        ranks = run.shard_ranks
        workspaces = 2**26 * (1 + run.cuda_graph)  # on Hopper; a graph is recorded on a separate stream
        parts = [Part("cuBLAS workspaces", workspaces, "32 MiB each for forward and backward")]
        if run.offload != "all":
            parts += counted("compute weights", "weights", (1, self.all), ranks=ranks)
        if run.offload == "none":
            parts += self.masters_and_states()
        if run.copy_engines_gather:  # copy_engines.py; embedding and head share buffers
            ends = 1 + bool(run.copy_engines_reduce and self.for_loss.gradients)  # frozen weights are not reduced
            blocks = 5 if run.copy_engines_reduce else 3
            parts += counted("buffers of the copy engines", "weights", (blocks, self.block), (ends, self.for_loss))
        if self.unsynced:  # whole on every rank
            parts += counted("gradient accumulators", "wide", (1, self.all))
        elif run.micro_steps > 1 and run.offload == "none":
            parts += counted("gradient accumulators", "wide", (1, self.all), ranks=ranks)
        return parts

    def masters_and_states(self) -> list[Part]:
        return counted("masters and optimizer states", "states", (1, self.all), ranks=self.run.shard_ranks)

    def saved(self, blocks: int) -> list[Part]:
        how = f"{self.saved_bytes:,} bytes x {blocks} layers x {self.n_tokens:,} tokens"
        return [Part("saved activations", self.saved_bytes * blocks * self.n_tokens, how)] if blocks else []

    def parts_at(self, ahead: int, blocks: int, heads: int, more: list[Part]) -> list[Part]:
        """All parts of one phase, including `more`.

        ahead: number of blocks whose backward has not ended. blocks: number of those whose whole weights are held.
        heads: number of copies of the whole weights that the loss needs.
        """
        parts = self.always()
        if self.run.fsdp:
            parts += counted("gathered weights", "weights", (blocks, self.block), (heads, self.for_loss))
        elif self.run.offload == "all":
            parts += counted("streamed weights", "weights", (2, self.block), (heads, self.root))
        if self.run.offload_activations:  # the last block's; in backward those of the block being read and of the next
            ahead = min(ahead, 1 + (ahead < self.c.n_layer))
        return parts + self.saved(ahead) + more

    def gradients(self, blocks: int, embeddings: int) -> list[Part]:
        """Gradients of an untied head and of so many `blocks`, whose backward has ended, and of so many `embeddings`:
        tensors as large as the embedding, not sharded.
        """
        run = self.run
        head = (1, self.head)
        ended = (blocks, self.block)
        parts = counted("gradients", "gradients", (embeddings, self.embedding))
        if self.unsynced:  # the others are in the accumulators
            return parts
        if run.offload == "none":
            parts += counted("gradients", "gradients", head, ended, ranks=run.shard_ranks)
        elif run.offload == "optimizer" or not run.fsdp:  # copied out while the next group's are computed
            latest = (1, self.block) if blocks else head
            parts += counted("gradients being offloaded", "gradients", latest, ranks=run.shard_ranks)
        if run.fsdp and run.sharding == "hybrid" and self.itemsize < 4:  # FSDP's _all_reduce_state
            parts += counted("gradients reduced, until backward ends", "wide", head, ended, ranks=run.shard_ranks)
        return parts

    def being_reduced(self, group: Group) -> list[Part]:
        """FSDP's float32 buffer of a group's gradients: it stays until the next group's are in theirs."""
        in_float32 = self.reduces and not self.run.copy_engines_reduce
        return counted("gradients being reduced", "wide", (in_float32, group))

    def reduction(self, group: Group) -> list[Part]:
        """That buffer, plus the larger of the gradients copied into it and this rank's sums from it, in both dtypes."""
        if not self.reduces:
            return []
        # Up to 2.14 a group's last gradient stays until the sums are done: the head's or the embedding's, if untied
        last_gradient = 0 if self.c.tie_embeddings or FSDP_2_15 else group.gradients
        sums = (group.wide + group.gradients * (self.itemsize < 4)) / self.run.shard_ranks
        more = Part("the reduction", max(group.gradients, last_gradient + sums), f"{group.n:,} parameters")
        return [*self.being_reduced(group), more]

    def block_in_backward(self) -> list[Part]:
        """What a block's backward takes beyond the saved activations."""
        c = self.c
        block = self.block
        tokens = self.group_tokens
        beyond = self.in_block_bytes - self.saved_bytes
        # with few tokens, the block's own gradients are larger
        n_bytes = max(beyond * tokens, block.gradients - self.saved_bytes * tokens)
        reads_back = self.run.quantize_base == "nf4" or self.run.fp8  # a frozen weight, from NF4, or transposed
        if self.run.lora_rank and reads_back and not self.run.plain_blocks:
            n_bytes += 2 * c.ffn_dim * c.n_embd
        parts = [Part("the block in backward", n_bytes, f"{beyond:,} bytes x {tokens:,} tokens, beyond saved")]
        if self.chunks > 1:
            a_slice = self.itemsize * (3 * c.ffn_dim + c.n_embd) * tokens // self.chunks
            mlp = Part("a slice of its MLP", a_slice + block.wide, "and its gradients' sums in float32")
            # gradients of its output, q, k and v; with PyTorch's attention also dq in float32, dk and dv per query head
            per_token = self.itemsize * (c.n_embd + 2 * c.n_kv_head * c.head_dim)
            per_token += 0 if runs_triton(c, self.run) else (4 + 2 * self.itemsize) * c.n_embd
            attention = Part("its attention", per_token * tokens + block.gradients, "and the block's gradients")
            parts.append(max(mlp, attention, key=lambda part: part.bytes))
        if self.n_groups > 1:
            sums = block.gradients if self.n_groups == 2 else block.wide
            n_bytes = self.itemsize * c.n_embd * (self.n_tokens - tokens) + sums
            parts.append(Part("the other groups", n_bytes, "the gradients of their x, and sums of the weights'"))
        return parts


def phases(config: LlamaConfig, run: RunShape) -> dict[str, list[Part]]:
    """What a rank holds at each phase of a step that can be its peak, in order."""
    step = Step(config, run)
    layers = config.n_layer
    tied = config.tie_embeddings
    stay = layers if run.sharding == "zero2" else 0  # blocks that stay gathered until their backward
    tied_head = int(run.fsdp and tied)  # stays until backward ends: it is the embedding, too
    # NCCL gathers into a buffer that FSDP copies from: it is as large as the larger of the last two gathers
    buffer = int(run.shard_ranks > 1 and not run.copy_engines_gather)
    blocks_in_loss = stay + (buffer if step.head.n <= step.block.n else 0)
    heads_in_loss = 1 + (buffer if step.head.n > step.block.n else 0)
    forward, backward = loss_parts(config, run, step.n_tokens)
    first = step.embedding  # reduced at the end
    copies = 1
    if tied:  # the head's gradient waits for the embedding's; with whole logits (F.linear) a third tensor is their sum
        first = step.root
        copies = 2 if run.kernels == "all" else 3
        if FSDP_2_15 and step.unsynced and step.itemsize < 4:
            copies = 3  # with the accumulator's 4 bytes 10: both gradients in float32, the embedding's also as computed
    by_phase = {
        "the loss, at the end of forward": step.parts_at(layers, blocks_in_loss, heads_in_loss, [forward]),
        "backward of the loss": step.parts_at(layers, stay or buffer, 1, [backward]),
        "reduction of the head": step.parts_at(layers, stay or buffer, 0, step.reduction(step.head)),
    }
    for k in range(layers, 0, -1):
        blocks = k if stay else 1 + buffer  # the next block is gathered before this one computes
        reduced = step.being_reduced(step.block if k < layers else step.head)
        more = step.gradients(layers - k, int(tied)) + reduced + step.block_in_backward()
        by_phase[f"backward of block {k}"] = step.parts_at(k, blocks, tied_head, more)
    more = step.gradients(layers, copies) + step.being_reduced(step.block)
    by_phase["backward of the embedding"] = step.parts_at(0, 0, tied_head, more)
    by_phase["reduction of the embedding"] = step.parts_at(0, 0, 0, step.gradients(layers, 0) + step.reduction(first))
    return by_phase


def parts(config: LlamaConfig, run: RunShape) -> tuple[str, list[Part]]:
    """The phase of the peak, and the parts in memory then."""
    by_phase = phases(config, run)
    peak = max(by_phase, key=lambda phase: sum(part.bytes for part in by_phase[phase]))
    return peak, by_phase[peak]


def peak_gib(config: LlamaConfig, run: RunShape) -> float:
    return sum(part.bytes for part in parts(config, run)[1]) / GIB


def parts_table(config: LlamaConfig, run: RunShape) -> str:
    """The parts at the peak and their sum, as lines_of() writes them."""
    phase, at_peak = parts(config, run)
    return lines_of([*at_peak, Part("together", sum(part.bytes for part in at_peak), f"at the peak: {phase}")])


def lines_of(parts: list[Part]) -> str:
    """One part a line: name, GiB, arithmetic."""
    width = max(len(part.name) for part in parts)
    return "\n".join(f"{part.name:<{width}} {part.bytes / GIB:7.2f} GiB  {part.how}" for part in parts)
