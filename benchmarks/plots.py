"""The plots of README.md and benchmarks/README.md, each drawn from a record. `python bench.py readme` draws them all.

The color says who: the palette of Okabe and Ito, which color-blind readers can tell apart. The dashes say how.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files: needs no window or display
import matplotlib.pyplot as plt

from benchmarks.records import load
from benchmarks.settings import ROOT
from benchmarks.tables import is_measured, title

FOLDER = ROOT / "benchmarks" / "plots"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
STYLES = {  # by the beginning of a trainer's title, the longest that fits: color, dashes
    "nanocria": (RED, "-"), "nanocria, fp8": (RED, "--"), "nanocria, activations": (ORANGE, "--"),
    "nanocria, unfused": (PINK, "-."), "nanocria, plain": (PINK, ":"), "torchtitan's recipe": (GREEN, "-"),
    "torchtitan's recipe, fp8": (GREEN, "--"), "torchtitan": ("black", "-"), "Hugging Face": (SKY, "-"),
    "Hugging Face compiled": (SKY, "--"), "Hugging Face + Liger": (BLUE, "-"),
}  # fmt: skip
MARKS = {"none": "o", "selective": "s", "full": "v"}  # activation checkpointing
LINUX = {  # record -> label, color
    "linux_114m": ("AdamW", BLUE), "linux_114m_fp8": ("AdamW, float8", SKY), "linux_114m_muon_w20": ("Muon", RED),
    "linux_114m_normuon": ("NorMuon", ORANGE),
}  # fmt: skip
SHOWN = ("nanocria", "nanocria-long", "hf-liger-offload", "hf-offload")  # of the study, in README.md
plt.rcParams |= {"figure.dpi": 150, "figure.constrained_layout.use": True, "font.size": 10, "legend.frameon": False}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}


def style(row: dict) -> dict:
    name = max((start for start in STYLES if title(row).startswith(start)), key=len, default="")
    color, dashes = STYLES.get(name, ("gray", "-"))
    return {"color": color, "linestyle": dashes, "label": title(row)}


def legend_below(figure, axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def by_trainer(rows: list[dict]) -> list[list[dict]]:
    names = dict.fromkeys(row["trainer"] for row in rows)
    return [[row for row in rows if row["trainer"] == name] for name in names]


def thousands(rows: list[dict]) -> list[float]:
    """Thousand tokens per second."""
    return [row["tok_per_s"] / 1000 for row in rows]


def plot_sweep(record: dict):
    """Speed as batch and context grow."""
    kinds = [kind for kind in ("batch", "seq") if record.get(kind)]
    options = {"figsize": (max(5 * len(kinds), 7), 4), "sharey": "row", "squeeze": False}
    figure, ((first, *others),) = plt.subplots(1, len(kinds), **options)
    for kind, axes in zip(kinds, (first, *others), strict=True):
        size = "batch" if kind == "batch" else "block"
        text = "batch, sequences of {block:,} tokens" if kind == "batch" else "context, tokens, at batch {batch}"
        axes.set(xlabel=text.format(**record[kind][0]))
        plot_growth(axes, record[kind], size)
    first.set(ylabel="thousand tokens per second", ylim=(0, None))
    first.plot([], [], "kx", label="the next size is out of memory")
    legend_below(figure, first, columns=len(kinds) + 1)
    return figure


def plot_growth(axes, rows: list[dict], size: str) -> None:
    """A line for each trainer, which ends in a cross if the next size did not fit."""
    for i, series in enumerate(by_trainer(sorted(rows, key=lambda row: row[size]))):
        fits = [row for row in series if is_measured(row)]
        width = max(5 - i, 2)  # the first is wider, so that it shows where another covers it
        look = style(series[0]) | {"linewidth": width, "marker": "o", "markersize": 2 * width}
        axes.plot([row[size] for row in fits], thousands(fits), **look)
        if len(series) > len(fits) > 0:
            axes.plot(fits[-1][size], fits[-1]["tok_per_s"] / 1000, "kx", markersize=12, zorder=3)
    ticks = sorted({row[size] for row in rows})[::2]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()


def plot_study(record: dict):
    """Four trainers of the study, for README.md."""
    return plot_sweep({kind: [row for row in record[kind] if row["trainer"] in SHOWN] for kind in ("batch", "seq")})


def plot_steps(record: dict):
    """Tokens per second against peak memory: a panel for each shape, a mark for each checkpointing."""
    points = [row for row in record["points"] if is_measured(row)]
    shapes = list(dict.fromkeys((row["batch"], row["block"]) for row in points))
    figure, panels = plt.subplots(1, len(shapes), figsize=(10, 5), sharey=True)
    for axes, (batch, block) in zip(panels, shapes, strict=True):
        for rows in by_trainer([row for row in points if (row["batch"], row["block"]) == (batch, block)]):
            axes.plot([row["peak_gib"] for row in rows], thousands(rows), **style(rows[0]))
            for row in rows:
                mark = MARKS[row["checkpointing"]]
                axes.plot(row["peak_gib"], row["tok_per_s"] / 1000, mark, color=style(row)["color"])
        axes.set(title=f"{batch} x {block:,} tokens", xlabel="peak memory, GiB", xlim=(0, None))
    panels[0].set(ylabel="thousand tokens per second", ylim=(0, None))
    for checkpointing, mark in MARKS.items():
        panels[0].plot([], [], mark, color="gray", label=f"checkpointing: {checkpointing}")
    legend_below(figure, panels[0], columns=3)
    return figure


def plot_snapshot(record: dict):
    """Memory in use over the allocations and frees of training steps."""
    figure, axes = plt.subplots(figsize=(10, 3.5))
    for row in (row for row in record["rows"] if "gib" in row):
        axes.plot([i / row["at"][-1] for i in row["at"]], row["gib"], **style(row))
        axes.axhline(row["peak_gib"], color=style(row)["color"], linewidth=0.8)
    axes.set(xlabel="allocations and frees, in their order, as a share of all", ylabel="GiB in use", ylim=(0, None))
    axes.legend()
    return figure


def plot_linux(record: dict):
    """Bits per byte of unseen files over tokens: the best run of each optimizer."""
    figure, axes = plt.subplots(figsize=(10, 4))
    for name, (label, color) in LINUX.items():
        run = load(name)
        s = run["settings"]
        tokens_of_a_step = s["batch_size"] * s["block_size"] * s["gradient_accumulation_steps"]
        tokens = [tokens_of_a_step * step / 1e6 for step, _, _ in run["val_curve"]]
        bits = [run["bits_per_byte"] / run["val_loss"] * loss for _, _, loss in run["val_curve"]]
        axes.plot(tokens, bits, "o-", color=color, label=f"{label}: {run['bits_per_byte']:.3f} at the end")
    axes.axhline(record["xz_bits_per_byte"], color="gray", linestyle=":", label="xz -9")
    ticks = [0.6, 0.8, 1.0, 1.5, 2.0]
    axes.set(xlabel="million tokens", ylabel="bits per byte of unseen files", yscale="log")
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    axes.legend()
    return figure


PLOTS = {  # name -> record, what draws it
    "fits": ("study", plot_study), "step": ("step", plot_steps), "snapshot": ("snapshot", plot_snapshot),
    "linux_114m": ("linux_114m", plot_linux),
}  # fmt: skip


def draw(plot: Callable, record: dict, path: Path) -> None:
    figure = plot(record)
    figure.savefig(path)
    plt.close(figure)


def draw_all(folder: Path = FOLDER) -> None:
    for name, (record, plot) in PLOTS.items():
        draw(plot, load(record), folder / f"{name}.png")
