"""Draws docs/block.png and docs/step.png, the pictures of docs/learn.md:  python -m docs.draw

The shapes are those of model.py's Llama 3.2 1B, the bytes those of runtime/memory.py.
"""

import itertools
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # writes files: needs no window or display
import matplotlib.pyplot as plt
import torch

from benchmarks.trainers import llama_config
from model import Llama, LlamaConfig
from runtime.loss_plot import BLUE, GREEN, ORANGE, PINK, RED, SKY
from runtime.memory import GIB, Part, RunShape, Step, n_params, phases

HERE = Path(__file__).parent
RUN = RunShape(batch_size=8)  # sequences of 2,048 tokens, in bfloat16
STYLE = {"font.size": 11, "figure.dpi": 200, "axes.spines.top": False, "axes.spines.right": False}

# ----------------------------------------------------------------------------------------------------------------------
# One block


class Written(NamedTuple):
    """A tensor of a block's forward, and the operation that writes it."""

    operation: str
    name: str
    shape: tuple[int, ...]
    is_kept: bool = False  # until backward

    @property
    def mib(self) -> float:
        return RUN.compute_dtype.itemsize * math.prod(self.shape) / 2**20


def tensors_of_a_block(c: LlamaConfig) -> list[Written]:
    """In the order of Block.compute in model.py. Asserts that those kept are as many bytes as memory.py counts."""
    with torch.device("meta"):
        block = Llama(c).layers[0]

    def project(name: str) -> tuple[str, int]:
        n_out, n_in = block.get_submodule(name).weight.shape
        return f"{name.split('.')[1]}   {n_in:,} → {n_out:,}", n_out

    tokens = (RUN.batch_size, c.block_size)
    x = (*tokens, c.n_embd)
    kv = (*tokens, c.n_kv_head, c.head_dim)
    qkv_proj, n_qkv = project("attn.qkv_proj")
    gate_up_proj, n_gate_up = project("mlp.gate_up_proj")
    tensors = [
        Written("", "x", x, True),
        Written("attn_norm", "norm of x", x),
        Written(qkv_proj, "qkv", (*tokens, n_qkv)),
        Written("RoPE", "q", (*tokens, c.n_head, c.head_dim), True),
        Written("RoPE", "k", kv, True),
        Written("", "v", kv, True),
        Written("attention", "y", (*tokens, c.n_head, c.head_dim), True),
        Written(project("attn.o_proj")[0], "delta", x),
        Written("+", "x + delta", x, True),
        Written("mlp_norm", "norm of x", x),
        Written(gate_up_proj, "gate, up", (*tokens, n_gate_up), True),
        Written("silu(gate) · up", "product", (*tokens, c.ffn_dim)),
        Written(project("mlp.down_proj")[0], "delta", x),
        Written("+", "next x", x),
    ]
    step = Step(c, RUN)
    assert sum(t.mib for t in tensors if t.is_kept) * 2**20 == step.saved_bytes * step.n_tokens
    return tensors


def draw_block(c: LlamaConfig):
    """A row for each tensor: what writes it, its name, its shape, its bytes as a bar."""
    tensors = tensors_of_a_block(c)
    kept = sum(t.mib for t in tensors if t.is_kept)
    figure, axes = plt.subplots(figsize=(8.3, 5.6))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.92)
    sums = [i for i, t in enumerate(tensors) if t.operation in ("", "+") and t.name != "v"]
    axes.plot([0, 0], [sums[0], sums[-1]], color=ORANGE, linewidth=5, zorder=0)  # the residual stream
    for start, end in itertools.pairwise(sums):  # a sublayer leaves the stream, and its output returns to it
        axes.plot([0, 25, 25, 0], [start + 0.45, start + 0.45, end, end], color="gray", linewidth=1.5, zorder=-1)
    for i, t in enumerate(tensors):
        if t.operation:
            left = 0 if t.operation == "+" else 12
            box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "gray" if left else ORANGE}
            axes.text(left, i, t.operation, va="center", ha="left" if left else "center", bbox=box)
        axes.text(165, i, t.name, va="center", ha="right", weight="bold")
        axes.text(250, i, " x ".join(f"{n:,}" for n in t.shape), va="center", ha="right")
        end = 256 + t.mib / 7
        axes.barh(i, t.mib / 7, 0.6, 256, color=BLUE if t.is_kept else "white", edgecolor=BLUE)
        axes.text(end + 3, i, f"{t.mib:,.0f} MiB", va="center")
    axes.set(xlim=(-8, 360), ylim=(len(tensors) - 0.4, -0.6))
    axes.axis("off")
    title = f"{RUN.batch_size} x {c.block_size:,} tokens through one block, 2 bytes a number."
    figure.suptitle(f"{title} Filled: kept for backward, {kept:,.0f} MiB", fontsize=11, x=0.02, ha="left")
    return figure


# ----------------------------------------------------------------------------------------------------------------------
# One step

LAYERS = {  # from the bottom up: memory.py's names of what it counts, color. What is left is working memory
    "compute weights": BLUE, "masters and optimizer states": SKY, "saved activations": ORANGE, "gradients": GREEN,
    "loss head": RED, "working memory": PINK,
}  # fmt: skip


def gib_by_layer(parts: list[Part]) -> list[float]:
    gib = dict.fromkeys(LAYERS, 0.0)
    for part in parts:
        gib[part.name if part.name in LAYERS else "working memory"] += part.bytes / GIB
    return list(gib.values())


def step_timeline(c: LlamaConfig) -> list[tuple[str, float, list[Part]]]:
    """(part of the step, FLOPs per token, what is in memory), in order: the loss computes its gradients, too.

    The update has no FLOPs to speak of: it is drawn as 10% of all.
    """
    with torch.device("meta"):
        model = Llama(c)
    loss = 6 * c.n_embd * c.vocab_size
    block = (model.flops_per_token(c.block_size) - loss) / (3 * c.n_layer)  # forward; backward takes twice as many
    step = Step(c, RUN)
    by_phase = phases(c, RUN)
    points = [("forward", block, step.parts_at(k, 0, 0, [])) for k in range(1, c.n_layer + 1)]
    points.append(("loss", loss, by_phase["the loss, at the end of forward"]))
    points += [("backward", 2 * block, by_phase[f"backward of block {k}"]) for k in range(c.n_layer, 0, -1)]
    total = sum(flops for _, flops, _ in points)
    # not one of memory.py's phases, since it cannot be the peak: what is always there, and all gradients
    always = [part for part in by_phase["reduction of the embedding"] if part.name != "gradients"]
    gradients = Part("gradients", RUN.compute_dtype.itemsize * n_params(c), "")
    return [*points, ("update", 0.1 * total, [*always, gradients])]


def draw_step(c: LlamaConfig):
    """GiB in memory over the FLOPs of a step, by what they hold."""
    names, flops, parts = zip(*step_timeline(c), strict=True)
    total = sum(flops[:-1]) / 100
    edges = [0.0, *(edge / total for edge in itertools.accumulate(flops))]
    figure, axes = plt.subplots(figsize=(8.3, 4.4))
    figure.subplots_adjust(0.075, 0.115, 0.985, 0.985)
    below = [0.0] * len(names)
    for color, gib in zip(LAYERS.values(), zip(*map(gib_by_layer, parts), strict=True), strict=True):
        above = [a + b for a, b in zip(below, gib, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=color, edgecolor="white", linewidth=0.6)
        below = above
    for name in dict.fromkeys(names):
        start = edges[names.index(name)]
        end = edges[len(names) - names[::-1].index(name)]
        axes.plot([start, start], [below[names.index(name)], 33.5], color="gray", linewidth=1)
        axes.text((start + end) / 2, 33, name, ha="center", va="top", weight="bold")
    weights, state, activations, _, loss, _ = gib_by_layer(parts[names.index("loss")])
    *_, gradients, _, _ = gib_by_layer(parts[-1])
    axes.text(50, weights / 2, f"weights in bfloat16, {weights:.1f}", color="white", ha="center", va="center")
    middle = weights + state / 2
    axes.text(50, middle, f"master weights' lower halves, AdamW's two moments, {state:.1f}", ha="center", va="center")
    middle = weights + state + activations / 3
    saved = f"activations saved for backward, {activations:.1f}\n({activations / c.n_layer:.2f} a block)"
    axes.text(43, middle, saved, ha="center", va="center")
    top = max(below)
    axes.text(36.7, top + 0.3, f"{top:.1f}, the peak", ha="center")
    arrow = {"arrowstyle": "-", "color": "black"}
    logits = f"logits of a chunk,\nthe head's gradient:\n{loss:.1f}"
    axes.annotate(logits, (27.5, top - loss / 2), (1, 25), arrowprops=arrow | {"relpos": (1, 0.5)})
    axes.annotate("working memory", (66, 23.2), (70, 26.5), arrowprops=arrow)
    axes.annotate(f"gradients, up to {gradients:.1f}", (84, 18.3), (75.5, 22.5), arrowprops=arrow)
    axes.set(xlim=(0, edges[-1]), ylim=(0, 33.5), xticks=range(0, 101, 20), ylabel="GiB of GPU memory")
    axes.set(xlabel="% of the step's FLOPs (the update has almost none: its width says nothing)")
    return figure


if __name__ == "__main__":
    config = llama_config("config/llama32_1b.py")
    with plt.rc_context(STYLE):
        draw_block(config).savefig(HERE / "block.png")
        draw_step(config).savefig(HERE / "step.png")
