"""Where each byte of a training step goes, from the settings alone: no GPU is asked, nothing is allocated.

    plan = Plan(batch_size=8)                  # what train.py's settings of the same names say, for one rank
    peak_gib(config, plan)                     # 28.6 for Llama 3.2 1B at 8 x 2,048 tokens
    print(table(config, plan))                 # the parts at the peak, with the arithmetic
    advice(config, plan)                       # which settings would lower it most
    largest_batch(config, plan, gib=24)        # what fits

    n parameters, of which B a block and R the root (embedding, final norm, head); L layers; N tokens; P ranks a copy

    weights that compute    2n / P             AdamW: their lower halves, two moments    10n / P         (bfloat16)
    saved activations       N·L·(4C + 2KD + 2F) elements      the loss    a chunk's logits + 4VC      gradients  2n / P
    FSDP                    the gathered root 2R and two blocks 4B; a block's gradients on their way, in float32, 4B;
                            of an untied head and its norm, H, 4H in the loss and 4H on their way instead of 2R
    offload                 a block's gradients that leave 2B; all: instead of the weights two blocks 4B, the root 2R

They are not all there at once: activations shrink while gradients grow. So the sum is taken at every moment that can be
the peak (`moments`), and the largest counts. The optimizer's update is none of them: it needs nothing beside what is
there already, and the embedding's gradient, just before it, existed twice.

How exact: with the fused kernels within 0.2% of what one H200 measured, 8 to 32 x 2,048 tokens of Llama 3.2 1B, each
activation_checkpointing (test_memory.py). Plain PyTorch's path counts what autograd saves and what its largest backward
formulas hold at once: a few percent. compile=true is counted like the fused kernels, though a compiler plans for
itself. Counted is what PyTorch allocates (max_memory_allocated): the CUDA context, NCCL's buffers and what the
allocator holds in reserve come on top, 1 to 2 GiB.
"""

import contextlib
import math
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

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
    copy_engines: bool = False
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
        """Weights come by weights.py."""
        return self.offload == "all" and not self.fsdp

    @property
    def copy_engines_gather(self) -> bool:
        return self.copy_engines and self.shard_ranks > 1 and self.offload != "all"

    @property
    def copy_engines_reduce(self) -> bool:
        """The gradients too, not only the weights: where FSDP hands over one gradient of each rank, as it is."""
        as_it_is = self.sync_every_micro_batch and self.sharding != "hybrid" and self.dtype != "float16"
        return self.copy_engines_gather and as_it_is


class Part(NamedTuple):
    name: str
    bytes: float
    how: str  # the arithmetic, in words


def sizes(c: LlamaConfig) -> tuple[list[int], list[int]]:
    """Of each parameter of a block, and of the root: embedding, final norm and head."""
    qkv = c.n_embd * (c.n_head + 2 * c.n_kv_head) * c.head_dim
    block = [qkv, c.n_embd**2, 2 * c.ffn_dim * c.n_embd, c.ffn_dim * c.n_embd, c.n_embd, c.n_embd]
    return block, [c.vocab_size * c.n_embd] * (1 if c.tie_embeddings else 2) + [c.n_embd]


def n_params(c: LlamaConfig) -> tuple[int, int]:
    """Of a block, and of the root."""
    block, root = sizes(c)
    return sum(block), sum(root)


def token_bytes(c: LlamaConfig, itemsize: int, chunks: int) -> tuple[int, int]:
    """Bytes of a token in a layer: what forward leaves for backward, and the most there is while backward is in it.

    chunks: slices of the MLP.
    """
    # Attention keeps q, k, v, its output and one fp32 a head; where k and v are float32, attend expands them.
    kv = c.n_embd if itemsize == 4 else c.n_kv_head * c.head_dim
    attention = itemsize * (2 * c.n_embd + 2 * kv) + 4 * c.n_head
    if c.fused_kernels:  # a norm keeps the sum it reads and rstd; the MLP gate and up. kernels/swiglu_mlp.py
        norm, mlp = itemsize * c.n_embd + 4, itemsize * 2 * c.ffn_dim
        # backward: dy, the gradients of gate and up, of their product, and the product
        working = itemsize * (c.n_embd + 4 * c.ffn_dim)
        if chunks > 1:  # nothing is kept: dy and what the slices make, each of which comes on top (in_backward)
            mlp, working = 0, itemsize * 2 * c.n_embd
    else:  # a norm keeps x and x·rstd in float32, and what it hands on; the MLP gate, up, silu(gate) and the product
        norm, mlp = (8 + itemsize) * c.n_embd + 4, (12 + itemsize) * c.ffn_dim // chunks
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
    if not c.fused_loss:
        # forward: the logits, in float32, and with ignored rows masked; backward: log p, its gradient, the logits'
        size = 8 + (itemsize if itemsize < 4 else 0)
        how = f"bytes x {n_tokens:,} tokens x {c.vocab_size:,} logits"
        return (
            Part("loss head", size * n_tokens * c.vocab_size + summed + x, f"{size} {how}"),
            Part("loss head", 12 * n_tokens * c.vocab_size + summed + x, f"12 {how}"),
        )
    row = itemsize * -(-c.vocab_size // 16) * 16
    options = c.chunks_of_loss(n_tokens, plan.compute_dtype)
    chunk, wide = options["chunk_tokens"], options["fp32_dweight"]
    if n_tokens <= chunk and plan.dtype != "float16":
        logits = f"logits of {n_tokens:,} tokens"
        forward = Part("loss head", row * n_tokens + summed + x, logits)
        backward = Part("loss head", row * n_tokens + itemsize * head + summed + 3 * x, f"{logits}, head's gradient")
        return forward, backward
    logits = f"logits of {min(chunk, n_tokens):,} tokens, head's gradient"
    if not wide:
        return (
            Part("loss head", row * chunk + itemsize * head + summed + 2 * x, logits),
            Part("loss head", itemsize * head + summed + x, "head's gradient"),
        )
    return (
        Part("loss head", row * min(chunk, n_tokens) + 4 * head + summed + 2 * x, f"{logits} in float32"),
        Part("loss head", (4 + itemsize) * head + summed + 2 * x, "head's gradient in float32 and rounded"),
    )


def moments(c: LlamaConfig, plan: Plan) -> dict[str, list[Part]]:
    """The parts at each moment that can be the peak of a rank's memory, in the order of a step.

    Under FSDP the root is gathered from forward to the end of backward. Not so where the head is not the embedding
    (collectives.py): then norm and head are there for the loss alone, and before the blocks' backward their gradients
    are reduced; the embedding's is the last. zero3 gathers a group into one buffer and copies it out of there. The
    buffer of the next block is asked for before this one computes, so two blocks are there, and at the end of forward
    the head and its buffer. A group's gradients are copied into a float32 buffer that lives until the next one's are.
    zero2 gathers once. Hybrid keeps every reduced shard in float32 until backward ends, beside the rounded one (FSDP's
    _all_reduce_state).
    """
    itemsize, shards, n_tokens, layers = plan.itemsize, plan.shard_ranks, plan.batch_size * c.block_size, c.n_layer
    block, root = n_params(c)
    total, head = root + layers * block, c.vocab_size * c.n_embd
    apart = plan.fsdp and not c.tie_embeddings  # the embedding is a group of its own, and so are norm and head
    late = head + c.n_embd  # norm and head
    chunks = c.chunks_of_mlp(n_tokens)
    kept, in_block = token_bytes(c, itemsize, chunks)
    # of the weights that learn what is not there already (kernels/adamw.py), and two float32 moments
    learning = 8 + {"float32": 0, "bfloat16": 2}.get(plan.dtype, 4)
    narrow = itemsize < 4  # so FSDP reduces gradients in another dtype than it hands on
    weights_here, states_here = plan.offload != "all", plan.offload == "none"  # states: gradients, sums and optimizer
    unsynced = plan.fsdp and plan.micro_steps > 1 and not plan.sync_every_micro_batch
    sums = total / shards * states_here if plan.micro_steps > 1 and not unsynced else 0
    buffer = int(shards > 1 and not plan.copy_engines_gather)  # of the block gathered last, or asked for next
    # gradients leave for the CPU group by group: one's are still there while those of the next are computed
    leaving = plan.offload == "optimizer" or plan.streamed
    head_leaves = leaving and not plan.fsdp and not c.tie_embeddings  # a tied one waits for the embedding's
    own_buffers = (3 + 2 * plan.copy_engines_reduce, 1 + plan.copy_engines_reduce)  # blocks, others: collectives.py
    named = ("embedding", "norm and head", "embedding or head") if apart else ("root", "root", "root")
    ranks = f" / {shards} ranks" if shards > 1 else ""
    everything = f"{total:,} parameters{ranks}"

    def at(extra, layers_saved=0, gathered=0, done=0, root_gradients=0, reducing=0, blocks_over=False, root_here=True):
        """The parts at one moment, beside those that are there all the time.

        layers_saved: blocks whose activations wait for backward; gathered: blocks whose weights are whole; done: blocks
        that backward is through with, so that their gradients are there. root_gradients, reducing: parameters of the
        root whose gradients are there, and those whose gradients are being reduced. blocks_over: only the root's
        reduction is left. root_here: how often its weights are there, where they come and go; if norm and head are a
        group, how often theirs, and once they have gone, their gradients are done. So in backward of block 3 of 16
        under zero3: 3, 1 (and one asked for), 13, the head, a block.
        """
        on_gpu = 1 + (done > 0)  # with offload_activations: the last block's, then the one that is read, and the next
        layers_saved = min(layers_saved, on_gpu) if c.offload_activations else layers_saved
        whole_sums = total if unsynced and not blocks_over else 0
        done, head_done = (0, 0) if whole_sums else (done, late * (apart and not root_here))
        reduced = f"{f'{head_done:,} of {named[1]} + ' * (head_done > 0)}{done} x {block:,} a block{ranks}"
        here = f"{root_gradients:,} of the {named[0]} + " * (root_gradients > 0)
        whole, largest = (late * root_here, late) if apart else (root, root)
        rows = [
            ("weights that compute", itemsize, total / shards * weights_here, everything),
            ("AdamW: weights and moments", learning, total / shards * states_here, everything),
            ("gathered weights", itemsize, (whole + gathered * block) * (plan.fsdp and not blocks_over),
             f"({f'{named[1]} {whole:,} + ' * (whole > 0)}{gathered} x {block:,} a block)"),
            ("weights that came", itemsize, (root * root_here + 2 * block) * plan.streamed,
             f"({f'root {root:,} + ' * root_here}2 x {block:,} a block)"),
            ("buffers of the copy engines", itemsize,
             (own_buffers[0] * block + own_buffers[1] * largest) * plan.copy_engines_gather,
             f"({own_buffers[0]} x {block:,} a block + {own_buffers[1]} x {largest:,} of the {named[2]})"),
            ("sums of micro-batches", 4, sums, everything),
            ("sums of micro-batches", 4, whole_sums, f"{total:,} parameters, on every rank"),
            ("gradients", itemsize, root_gradients + (head_done + done * block) / shards * states_here,
             f"({here}{reduced})"),
            ("gradients on their way", 4, reducing * plan.fsdp, f"{reducing:,.0f} parameters"),
            ("gradients that leave", itemsize, (block if done else head_done) / shards * leaving,
             f"{f'{block:,} parameters of a block' if done else f'{head_done:,} of {named[1]}'}{ranks}"),
            ("gradients reduced", 4,
             (head_done + done * block) / shards * (plan.fsdp and plan.sharding == "hybrid" and narrow),
             f"{reduced}, until backward ends"),
            ("saved activations", kept, layers_saved * n_tokens, f"{layers_saved} layers x {n_tokens:,} tokens"),
        ]  # fmt: skip
        found = [Part(name, size * count, f"{size:,} bytes x {how}") for name, size, count, how in rows if count]
        return [Part("cuBLAS workspaces", 2**26, "32 MiB each for forward and backward"), *found, extra]

    def in_backward(k):
        """Of block k, counted from 1: those above it are done."""
        working = (in_block - kept) * n_tokens
        if chunks > 1 and c.fused_kernels:  # a slice, with sums of the weights' gradients; or, later, those of k and v
            a_slice = itemsize * (6 * c.ffn_dim + c.n_embd) * n_tokens // chunks + 12 * c.n_embd * c.ffn_dim
            working += max(a_slice, itemsize * 2 * c.n_kv_head * c.head_dim * n_tokens)
        working = max(working, itemsize * block - kept * n_tokens)  # with few tokens the block's own gradients
        extra = Part("the block in backward", working, f"{in_block - kept:,} bytes x {n_tokens:,} tokens, beyond saved")
        gathered = k if plan.sharding == "zero2" else 1 + (k > 1) * buffer
        reducing = (block if k < layers else late * apart) * (not unsynced and not plan.copy_engines_reduce)
        head_here = not apart and (not head_leaves or k == layers)
        return at(extra, k, gathered, layers - k, root_gradients=head * head_here, reducing=reducing, root_here=0)

    def reduction(what, numel, last, filling, **here):
        """Gradients fill the float32 buffer; then a shard is made of it, float32 and rounded. Until that is done FSDP
        holds on to the last of them. With copy engines: what fills the buffer; then what is pulled, and its sum.
        """
        last = last if shards > 1 else 0
        filled = max(filling * numel, filling * last + (4 + itemsize * narrow) * numel / shards)
        filled = itemsize * (last + numel) if plan.copy_engines_reduce else filled
        extra = Part("what fills it, or is made of it", filled, f"{numel:,} parameters of the {what}")
        return at(extra, reducing=0 if plan.copy_engines_reduce else numel, root_here=not apart, **here)

    loss_forward, loss_backward = loss_bytes(c, plan, n_tokens)
    all_blocks = layers if plan.sharding == "zero2" else 0
    of_head = buffer * (apart and late > block)  # the buffer at the end of forward; just before, it is the last block's
    # Tied or not, two gradients as large as the embedding, unless the head's has left or is reduced: a tied head's
    # waits to be added to it, in place unless F.linear made it.
    copies = 3 if c.tie_embeddings and not c.fused_loss else 2 - head_leaves - apart
    embedding = Part("the embedding's input", itemsize * n_tokens * c.n_embd, f"{n_tokens:,} tokens")
    result = {
        "end of forward, in the loss": at(loss_forward, layers, all_blocks + buffer - of_head, root_here=1 + of_head),
        "backward of the loss": at(loss_backward, layers, all_blocks or buffer),
    }
    if apart:  # where sums are whole, the head's is among them
        result["reduction of the head"] = reduction(
            "head", late, head, 0 if unsynced else itemsize, layers_saved=layers, gathered=all_blocks or buffer
        )
    result |= {f"backward of block {k}": in_backward(k) for k in (layers, max(layers - 1, 1), 1)}
    result["backward of the embedding"] = at(
        embedding,
        done=layers,
        root_gradients=copies * head,
        reducing=0 if unsynced or plan.copy_engines_reduce else block,
        root_here=False,
    )
    if plan.fsdp:
        numel, last = (head, head) if apart else (root, 0)  # a tied root's last is the norm's
        filling = 4 if unsynced else itemsize
        result[f"reduction of the {named[0]}"] = reduction(
            named[0], numel, last, filling, done=layers, blocks_over=True
        )
    return result


def parts(config: LlamaConfig, plan: Plan) -> tuple[str, list[Part]]:
    """The moment of the peak, and what is in memory then."""
    found = moments(config, plan)
    peak = max(found, key=lambda moment: sum(part.bytes for part in found[moment]))
    return peak, found[peak]


def peak_gib(config: LlamaConfig, plan: Plan) -> float:
    return sum(part.bytes for part in parts(config, plan)[1]) / GIB


def largest_batch(config: LlamaConfig, plan: Plan, gib: float) -> int:
    """The largest batch_size whose peak is at most gib; 0 where not even one sequence fits."""

    def fits(batch_size):
        return peak_gib(config, replace(plan, batch_size=batch_size)) <= gib

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def pinned(n_bytes: float) -> int:
    """What PyTorch's own pinned memory takes for a tensor, a power of two; pinned.py's takes the bytes alone."""
    return 1 << (math.ceil(n_bytes) - 1).bit_length()


def cpu_parts(config: LlamaConfig, plan: Plan) -> list[Part]:
    """What a rank holds in the CPU's memory of what it offloads."""
    (block, root), itemsize, shards, layers = sizes(config), plan.itemsize, plan.shard_ranks, config.n_layer
    total = layers * sum(block) + sum(root)
    one = itemsize == 4 and plan.offload == "all"  # there a weight that computes is the one that learns
    learning = 8 if one else 12
    ranks = f" / {shards} ranks" if shards > 1 else ""
    computing, how = itemsize * total / shards, f"{itemsize} bytes x {total:,} parameters{ranks}"
    if plan.offload == "all" and plan.fsdp:  # which pins weights and gradients by itself
        computing = sum(pinned(itemsize * size / shards) for size in block * layers + root)
        how += ", each tensor rounded up to a power of two"
    a_layer, n_tokens = itemsize * config.n_embd, plan.batch_size * config.block_size
    found = [
        (plan.offload != "none", "AdamW: weights and moments", learning * total / shards,
         f"{learning} bytes x {total:,} parameters{ranks}"),
        (plan.offload != "none" and plan.micro_steps > 1, "sums of micro-batches", 4 * total / shards,
         f"4 bytes x {total:,} parameters{ranks}"),
        (plan.offload != "none", "gradients", computing, how),
        (plan.offload == "all", "weights that compute", computing, how),
        (config.offload_activations, "saved activations", (layers - 1) * a_layer * n_tokens,
         f"{a_layer:,} bytes x {layers - 1} layers x {n_tokens:,} tokens"),
    ]  # fmt: skip
    return [Part(name, n_bytes, how) for there, name, n_bytes, how in found if there]


def cpu_bytes_to_come(config: LlamaConfig, plan: Plan) -> float:
    """Of cpu_parts what is not there before the first step."""
    later = ("sums of micro-batches", "saved activations")
    return sum(part.bytes for part in cpu_parts(config, plan) if part.name in later)


CGROUPS = {  # the controllers of a line of /proc/self/cgroup -> where they lie, the limit, what is used, what is cache
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cpu_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of CPU memory that are free or can be freed: of the machine, and of each control group that this process
    is in, of a container or a job. inf where nobody says.
    """

    def number(path, name):
        lines = (line.split() for line in path.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    available = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):  # where it is no Linux
        available = 1024 * number(proc / "meminfo", "MemAvailable:")
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        named = "memory" if "memory" in controllers.split(",") else controllers
        if named not in CGROUPS:
            continue
        place, limit, used, cache = CGROUPS[named]
        folder = cgroups / place / group.strip("/")
        while folder.is_relative_to(cgroups / place):  # a limit holds for all groups inside
            with contextlib.suppress(OSError, ValueError, StopIteration):  # no such file, or the limit is 'max'
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                available = min(available, free + number(folder / "memory.stat", cache))
            folder = folder.parent
    return available


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

    sliced = config.chunks_of_mlp(plan.batch_size * config.block_size) > 1
    accumulation = 2 * plan.micro_steps * plan.world_size
    found = [
        above("activation_checkpointing", ["none", "selective", "full"], config.activation_checkpointing),
        above("offload", ["none", "optimizer", "all"], plan.offload),
        above("fused_loss", [False, True], config.fused_loss),
        above("fused_kernels", [False, True], config.fused_kernels),
        above("sync_every_micro_batch", [False, True], plan.sync_every_micro_batch),
        [{"mlp_chunks": 16}] if config.activation_checkpointing != "none" and not sliced else [],
        above("offload_activations", [False, True], config.offload_activations)
        if config.activation_checkpointing == "full"
        else [],
        [{"copy_engines": False}] if plan.copy_engines_gather else [],
        [{"sharding": "zero3"}] if plan.world_size > 1 and plan.sharding != "zero3" else [],
        [{"batch_size": plan.batch_size // 2, "gradient_accumulation_steps": accumulation}]
        if plan.batch_size % 2 == 0
        else [],
    ]
    return [settings for settings in found if settings]


def changed(config: LlamaConfig, plan: Plan, settings: dict) -> tuple[LlamaConfig, Plan]:
    """The two as they would be with these of train.py's settings."""
    of_model = {name: value for name, value in settings.items() if name in LlamaConfig.__dataclass_fields__}
    of_plan = {name: value for name, value in settings.items() if name in Plan.__dataclass_fields__}
    if "gradient_accumulation_steps" in settings:
        of_plan["micro_steps"] = settings["gradient_accumulation_steps"] // plan.world_size
    if "sharding" in settings:
        of_plan["shard_ranks"] = plan.world_size
    return replace(config, **of_model), replace(plan, **of_plan)


def advice(config: LlamaConfig, plan: Plan) -> list[tuple[str, float]]:
    """The three settings that would lower the peak most, each alone: as flags, with the GiB there would be.

    Of the values of one setting the cheapest that saves at least two thirds of what its strongest would.
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
    """What to tell whoever ran out of memory on a card of that many GiB."""
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


# ----------------------------------------------------------------------------------------------------------------------
# What really was there: PyTorch's own record, a file that https://pytorch.org/memory_viz draws


def used_gib(device: str) -> float:
    """The most that PyTorch had allocated at once on the GPU; on the CPU, that this process had."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
    return torch.cuda.max_memory_allocated() / GIB


def record_history() -> None:
    """Begins to note every allocation and what Python code asked for it; without a GPU nothing.

    Python frames alone, of allocations alone, 2 us each; a ring of the last 100,000, of several KB each when written.
    """
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)


def stop_history() -> None:
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(enabled=None)


def dump(path) -> None:
    """Writes what was noted since record_history: https://pytorch.org/memory_viz shows it, in the browser alone."""
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(path))
