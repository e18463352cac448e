"""The plots of README.md and benchmarks/README.md, each drawn from a record. `python bench.py readme` draws them all.

The color says who: the palette of Okabe and Ito, which color-blind readers can tell apart. The dashes say how.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files: needs no window or display
import matplotlib.pyplot as plt

from benchmarks.records import load
from benchmarks.settings import ROOT
from benchmarks.tables import is_measured, microseconds, shape, title
from data.files import atomic_write

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
FUNCTIONS = {  # of kernels: color, mark
    "nanocria": (RED, "o"), "eager": ("black", "x"), "compile": (GREEN, "^"), "torch": (SKY, "v"), "liger": (BLUE, "s"),
    "cce": (PINK, "D"), "sdpa_flash": (ORANGE, "<"), "sdpa_cudnn": (ORANGE, ">"),
}  # fmt: skip
MARKS = {"none": "o", "selective": "s", "full": "v"}  # activation checkpointing
LINUX = {  # record -> label, color
    "linux_114m": ("AdamW", BLUE), "linux_114m_fp8": ("AdamW, float8", SKY), "linux_114m_muon_w20": ("Muon", RED),
    "linux_114m_normuon": ("NorMuon", ORANGE),
}  # fmt: skip
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


def plot_sweep(record: dict, only: tuple[str, ...] = ()):
    """Speed, and below it peak memory, as batch and context grow. only: these trainers' speed alone, for README.md."""
    grown = {"batch": "batch", "seq": "block"}
    kinds = [kind for kind in grown if record.get(kind)]
    options = {
        "figsize": (max(5 * len(kinds), 7), 4 if only else 7),
        "sharex": "col",
        "sharey": "row",
        "squeeze": False,
    }
    figure, grid = plt.subplots(1 if only else 2, len(kinds), **options)
    for kind, column in zip(kinds, grid.T, strict=True):
        plot_growth(column, [row for row in record[kind] if not only or row["trainer"] in only], grown[kind])
        first = record[kind][0]
        text = "batch, sequences of {block:,} tokens" if kind == "batch" else "context, tokens, at batch {batch}"
        column[-1].set(xlabel=text.format(**first))
    for axes, label in zip(grid[:, 0], ("thousand tokens per second", "peak memory, GiB"), strict=False):
        axes.set(ylabel=label, ylim=(0, None))
    grid[0, 0].plot([], [], "kx", label="the next size is out of memory")
    legend_below(figure, grid[0, 0], columns=len(kinds) + 1)
    return figure


def plot_growth(column, rows: list[dict], size: str) -> None:
    """A line for each trainer, which ends in a cross if the next size did not fit."""
    for i, series in enumerate(by_trainer(sorted(rows, key=lambda row: row[size]))):
        fits = [row for row in series if is_measured(row)]
        sizes = [row[size] for row in fits]
        width = max(5 - i, 2)  # the first is wider, so that it shows where another covers it
        look = style(series[0]) | {"linewidth": width, "marker": "o", "markersize": 2 * width}
        for axes, heights in zip(column, (thousands(fits), [row["peak_gib"] for row in fits]), strict=False):
            axes.plot(sizes, heights, **look)
        if len(series) > len(fits) > 0:
            column[0].plot(sizes[-1], fits[-1]["tok_per_s"] / 1000, "kx", markersize=12, zorder=3)
    ticks = sorted({row[size] for row in rows})[::2]
    column[-1].set_xscale("log")
    column[-1].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    column[-1].minorticks_off()


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


def plot_kernels(record: dict):
    """For each operation and pass at its first size: the share of the card's limit that each function reaches."""
    rows = {(row["op"], row["pass"]): row for row in reversed(record["rows"])}  # the first size counts
    rows = list(rows.values())  # from the bottom up
    figure, axes = plt.subplots(figsize=(10, 0.32 * len(rows) + 1.5))
    for name, (color, mark) in FUNCTIONS.items():
        measured = [i for i, row in enumerate(rows) if name in microseconds(row)]
        shares = [rows[i]["floor_us"] / microseconds(rows[i])[name] for i in measured]
        axes.plot(shares, measured, mark, color=color, label=name)
    axes.set_yticks(range(len(rows)), [f"{row['op']} {row['pass']}, {shape(row)}" for row in rows])
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="share of the limit: a copy of as many bytes, or the matmuls alone", xlim=(0, None))
    legend_below(figure, axes, columns=8)
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


SHOWN = ("nanocria", "nanocria-long", "hf-liger-offload", "hf-offload")
PLOTS = {  # name -> record, what draws it
    "fits": ("study", lambda record: plot_sweep(record, SHOWN)), "study": ("study", plot_sweep),
    "step": ("step", plot_steps), "kernels": ("kernels", plot_kernels), "snapshot": ("snapshot", plot_snapshot),
    "linux_114m": ("linux_114m", plot_linux),
}  # fmt: skip


def draw(name: str, record: dict, path: Path) -> None:
    """Draw the record as PLOTS[name] is drawn."""
    _, plot = PLOTS[name]
    figure = plot(record)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    plt.close(figure)


def draw_all(folder: Path = FOLDER) -> None:
    for name, (record, _) in PLOTS.items():
        draw(name, load(record), folder / f"{name}.png")
