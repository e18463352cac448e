"""The plots of README.md and benchmarks/README.md, each drawn from a record. `python bench.py readme` draws them all.

The color says who, the dashes say how.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files: needs no window or display
import matplotlib.pyplot as plt

from benchmarks.settings import ROOT, load_record
from benchmarks.tables import is_measured, title
from runtime.loss_plot import BLUE, GREEN, ORANGE, PINK, RED, SKY, label_ends

PLOT_FOLDER = ROOT / "benchmarks" / "plots"
STYLES = {  # by the longest beginning of a trainer's name: color, dashes
    "nanocria": (RED, "-"), "nanocria-fp8": (RED, "--"), "nanocria-long": (ORANGE, "--"),
    "nanocria-unfused": (PINK, "-."), "nanocria-plain": (PINK, ":"), "recipe": (GREEN, "-"),
    "recipe-fp8": (GREEN, "--"), "torchtitan": ("black", "-"), "hf": (SKY, "-"), "hf-compiled": (SKY, "--"),
    "hf-liger": (BLUE, "-"),
}  # fmt: skip
MARKERS = {"none": "o", "selective": "s", "full": "v"}  # activation checkpointing
LINUX = {  # record -> label, color
    "linux_114m": ("AdamW", BLUE), "linux_114m_muon_w20": ("Muon", ORANGE), "linux_114m_soapmuon": ("SoapMuon", RED),
}  # fmt: skip
SHOWN = {  # of the study, in README.md -> where its label stands: at which batch, offset in points, alignment
    "nanocria": (64, (-12, 0), "right"), "nanocria-long": (1792, (0, 16), "right"),
    "hf-liger-offload": (112, (12, 0), "left"), "hf-offload": (8, (12, 0), "left"),
}  # fmt: skip
STEP = ("nanocria", "recipe", "hf", "hf-compiled", "hf-liger")  # in bfloat16, in README.md
WIDTH = 9  # inches: the pages show them 830 pixels wide
STYLE_OF_ALL = {
    "figure.dpi": 150, "figure.constrained_layout.use": True, "font.size": 11, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
}  # fmt: skip


def style(row: dict) -> dict:
    name = max((start for start in STYLES if row["trainer"].startswith(start)), key=len, default="")
    color, dashes = STYLES.get(name, ("gray", "-"))
    return {"color": color, "linestyle": dashes, "label": title(row["trainer"])}


def by_trainer(rows: list[dict]) -> list[list[dict]]:
    names = dict.fromkeys(row["trainer"] for row in rows)
    return [[row for row in rows if row["trainer"] == name] for name in names]


def thousands(rows: list[dict]) -> list[float]:
    """Thousand tokens per second."""
    return [row["tok_per_s"] / 1000 for row in rows]


def plot_sweep(record: dict):
    """Speed as batch and context grow."""
    figure = panels_of_growth(record)
    first = figure.axes[0]
    first.plot([], [], "kx", label="the next size is out of memory")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(figure.axes) + 1)
    return figure


def plot_study(record: dict):
    """Four trainers of the study, for README.md."""
    shown = {kind: [row for row in record[kind] if row["trainer"] in SHOWN] for kind in ("batch", "seq")}
    figure = panels_of_growth(shown)
    first, second = figure.axes
    first.set_ylim(0, 72)  # room for a label
    for row in shown["batch"]:
        batch, offset, side = SHOWN[row["trainer"]]
        if row["batch"] == batch:
            point = (batch, row["tok_per_s"] / 1000)
            look = {"ha": side, "va": "center", "color": style(row)["color"]}
            first.annotate(title(row["trainer"]), point, offset, textcoords="offset points", **look)
    second.text(0.04, 0.93, "×  the next size is out of memory", transform=second.transAxes)
    return figure


def panels_of_growth(record: dict):
    """A figure with a panel for each of batch and seq in the record."""
    kinds = [kind for kind in ("batch", "seq") if record.get(kind)]
    figure, panels = plt.subplots(1, len(kinds), figsize=(WIDTH, 4), sharey="row", squeeze=False)
    for kind, axes in zip(kinds, panels[0], strict=True):
        size = "batch" if kind == "batch" else "block"
        text = "batch, sequences of {block:,} tokens" if kind == "batch" else "context, tokens, at batch {batch}"
        axes.set(xlabel=text.format(**record[kind][0]))
        plot_growth(axes, record[kind], size)
    panels[0][0].set(ylabel="thousand tokens per second", ylim=(0, None))
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


def plot_steps(record: dict):
    """Tokens per second against peak memory at 16 x 2,048 tokens: a mark for each checkpointing."""
    points = [row for row in record["points"] if is_measured(row) and (row["batch"], row["block"]) == (16, 2048)]
    figure, axes = plt.subplots(figsize=(WIDTH, 4.5))
    ends = []
    for rows in by_trainer([row for row in points if row["trainer"] in STEP]):
        axes.plot([row["peak_gib"] for row in rows], thousands(rows), **style(rows[0]))
        for row in rows:
            mark = MARKERS[row["checkpointing"]]
            axes.plot(row["peak_gib"], row["tok_per_s"] / 1000, mark, color=style(row)["color"], markersize=8)
        fastest = max(rows, key=lambda row: row["tok_per_s"])
        look = style(fastest)
        ends.append((fastest["peak_gib"], fastest["tok_per_s"] / 1000, look["label"], look["color"]))
    axes.set(xlabel="peak memory, GiB", ylabel="thousand tokens per second", xlim=(0, None))
    marks = [axes.plot([], [], mark, color="gray", markersize=8)[0] for mark in MARKERS.values()]
    axes.legend(marks, [f"checkpointing: {name}" for name in MARKERS], loc="lower left")
    label_ends(axes, ends, upwards=True)
    return figure


def plot_snapshot(record: dict):
    """Memory in use over the allocations and frees of training steps."""
    figure, axes = plt.subplots(figsize=(WIDTH, 3.5))
    peaks = []
    for row in (row for row in record["rows"] if "gib" in row):
        shares = [i / row["at"][-1] for i in row["at"]]
        look = style(row)
        axes.plot(shares, row["gib"], **look)
        text = f"{look['label']}: {row['peak_gib']:.1f} GiB"
        peaks.append((shares[row["gib"].index(max(row["gib"]))], row["peak_gib"] + 2, text, look["color"]))
    axes.set(xlabel="allocations and frees, in their order, as a share of all", ylabel="GiB in use", ylim=(0, None))
    label_ends(axes, peaks, upwards=True)
    return figure


def plot_linux(record: dict):
    """Bits per byte of unseen files over tokens: AdamW, Muon and SoapMuon."""
    figure, axes = plt.subplots(figsize=(WIDTH, 4))
    ends = []
    for name, (label, color) in LINUX.items():
        run = load_record(name)
        s = run["settings"]
        tokens_of_a_step = s["batch_size"] * s["block_size"] * s["gradient_accumulation_steps"]
        tokens = [tokens_of_a_step * step / 1e6 for step, _, _ in run["val_curve"]]
        bits = [run["bits_per_byte"] / run["val_loss"] * loss for _, _, loss in run["val_curve"]]
        axes.plot(tokens, bits, "o-", color=color)
        ends.append((tokens[-1], bits[-1], f"{label}: {bits[-1]:.3f}", color))
    axes.axhline(record["xz_bits_per_byte"], color="gray")
    ends.append((axes.get_xlim()[1], record["xz_bits_per_byte"], f"xz -9: {record['xz_bits_per_byte']:.3f}", "gray"))
    ticks = [0.6, 0.8, 1.0, 1.5, 2.0]
    axes.set(xlabel="million tokens", ylabel="bits per byte of unseen files", yscale="log")
    axes.set(xlim=axes.get_xlim(), ylim=(0.5, None))
    axes.set_yticks(ticks, ticks)
    axes.minorticks_off()
    label_ends(axes, ends)
    return figure


PLOTS = {  # name -> record, what draws it
    "fits": ("study", plot_study), "step": ("step", plot_steps), "snapshot": ("snapshot", plot_snapshot),
    "linux_114m": ("linux_114m", plot_linux),
}  # fmt: skip


def draw_plot(plot: Callable, record: dict, path: Path) -> None:
    with plt.rc_context(STYLE_OF_ALL):
        figure = plot(record)
        figure.savefig(path)
        plt.close(figure)


def draw_all() -> None:
    for name, (record, plot) in PLOTS.items():
        draw_plot(plot, load_record(record), PLOT_FOLDER / f"{name}.png")
