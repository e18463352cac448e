"""The losses of runs of train.py: read from their folders, and drawn, which needs matplotlib.

    losses = read_losses(Path("out/muon"))
    draw_losses({"muon": [losses]}, Path("loss.png"), x="tokens")

Tokens, of all ranks together, and hours count training alone, without evaluations and saves.
"""

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from data.files import atomic_write
from runtime.checkpoint import newest

# Okabe and Ito's colors: color-blind readers, too, can tell all pairs apart.
BLUE = "#0072B2"
RED = "#D55E00"
SKY = "#56B4E9"
PINK = "#CC79A7"
GREEN = "#009E73"
ORANGE = "#E69F00"
COLORS = [BLUE, RED, SKY, PINK, GREEN, ORANGE, "black"]
UNITS = {  # what x may be -> sizes, in what read_losses counts, and names: the largest that is not above the data
    "steps": [(1, "steps")],
    "tokens": [(1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens")],
    "minutes": [(24, "days"), (1, "hours"), (1 / 60, "minutes"), (1 / 3600, "seconds")],
    "flops": [(1e18, "10¹⁸ FLOPs"), (1e15, "10¹⁵ FLOPs"), (1e12, "10¹² FLOPs"), (1, "FLOPs")],
}
SUFFIXES = (".png", ".svg", ".pdf")


class Losses(NamedTuple):
    """Points are (steps, tokens, hours, loss)."""

    train: list[tuple]  # one for each line of the log
    val: list[tuple]  # one for each evaluation
    bits_per_byte: float | None  # of a finished run that evaluated on all of its validation text
    settings: dict  # of a run that has ended or saved a checkpoint; else empty
    flops_per_token: float | None  # of a run that has ended
    val_sha256: str | None = None  # of the validation data, if there is a checkpoint


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl. Skips what is none: a killed run's last line, zeros from a machine that went down."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_losses(folder: Path) -> Losses:
    """ValueError if the folder has no losses or a file in it cannot be read."""
    path = folder / "metrics.jsonl"
    train = []
    val = []
    steps = 0  # of the last line with a loss
    tokens = 0
    hours = 0.0
    tokens_per_step = 0
    hours_per_step = 0.0
    for row in read_metrics(path):
        if "ms" in row:  # its speed and time are means over the steps since the previous line
            tokens_per_step = round(row["tok_per_s"] * row["ms"] / 1000)
            hours_per_step = row["ms"] / 3.6e6
        n_steps = row["step"] - steps
        point = row["step"], tokens + n_steps * tokens_per_step, hours + n_steps * hours_per_step
        if row.get("loss") is not None:  # None: not finite
            train.append((*point, row["loss"]))
            steps, tokens, hours = point
        elif row.get("val_loss") is not None:
            val.append((*point, row["val_loss"]))
    if not train:
        raise ValueError(f"{path} has no losses: name the out_dir of a run of train.py")
    end = folder / "summary.json"  # perhaps of an earlier end
    summary = json.loads(end.read_text()) if end.is_file() else {}
    is_of_this_end = "curve" in summary and summary["curve"][-1][0] == train[-1][0]
    bits_per_byte = summary.get("bits_per_byte") if is_of_this_end else None
    checkpoint = newest(folder)
    run_info = json.loads((checkpoint / "run.json").read_text()) if checkpoint else summary
    val_sha256 = run_info.get("dataset", {}).get("val_sha256")
    settings = run_info.get("settings", {})
    return Losses(train, val, bits_per_byte, settings, summary.get("flops_per_token"), val_sha256)


def smoothed(points: Sequence[tuple]) -> list[float]:
    """At each point, the mean of the losses up to it over a window of a fiftieth of all points."""
    n = max(1, len(points) // 50)
    sums = [0.0, *itertools.accumulate(loss for *_, loss in points)]
    return [(sums[i] - sums[max(0, i - n)]) / min(n, i) for i in range(1, len(sums))]


def label_ends(axes, ends: list[tuple[float, float, str, str]], upwards: bool = False) -> None:
    """Write each (x, y, text, color) to the right of the end of its line.

    Texts that would cover another one or another end move downwards, where a falling line leaves room, or upwards.
    """
    axes.figure.draw_without_rendering()  # so that the axes have their size and limits
    size = axes.yaxis.label.get_size()
    sign = 1 if upwards else -1
    points = axes.transData.transform([end[:2] for end in ends]) * 72 / axes.figure.dpi  # in points, as fonts are
    taken = [(x, x, sign * y) for x, y in points]  # from, to and height
    for (x, y), (end_x, end_y, text, color) in sorted(zip(points, ends, strict=True), key=lambda end: sign * end[0][1]):
        left = x + 8
        right = left + 0.6 * size * len(text)
        height = sign * y
        for other_left, other_right, other in sorted(taken, key=lambda each: each[2]):
            if other_left < right and left < other_right and abs(height - other) < 1.3 * size:
                height = other + 1.3 * size
        taken.append((left, right, height))
        offset = (8, sign * height - y)
        axes.annotate(text, (end_x, end_y), offset, textcoords="offset points", va="center", color=color, fontsize=size)


def curve(run: Losses, kind: str, x: str) -> dict[int, tuple[float, float]]:
    """step -> (x, loss) of a run's train or val."""
    points = getattr(run, kind)
    losses = smoothed(points) if kind == "train" else [loss for *_, loss in points]
    column = {"steps": 0, "tokens": 1, "minutes": 2, "flops": 1}[x]
    factor = run.flops_per_token if x == "flops" else 1
    return {point[0]: (point[column] * factor, loss) for point, loss in zip(points, losses, strict=True)}


def over_seeds(curves: list[dict[int, tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """(mean x, mean loss, least, largest) at each step that all curves have."""
    rows = []
    for step in curves[0]:
        if all(step in curve for curve in curves):
            losses = [curve[step][1] for curve in curves]
            rows.append((fmean(curve[step][0] for curve in curves), fmean(losses), min(losses), max(losses)))
    return rows


def draw_losses(runs: dict[str, list[Losses]], path: Path, x: str = "tokens") -> None:
    """Draw the losses of runs: thin lines the training loss, dots the validation loss.

    runs: label -> runs that differ in their seeds: their mean is drawn, and a band from the least to the largest.
    x: steps, tokens, minutes or flops. The format is the suffix of path.
    """
    from matplotlib.figure import Figure  # not pyplot, which needs a display and shares state with other figures

    lines = []  # (label, color, look, rows of over_seeds())
    for (label, seeds), color in zip(runs.items(), itertools.cycle(COLORS)):
        for kind, look in (("train", {"linewidth": 1, "alpha": 0.5}), ("val", {"linewidth": 2, "marker": "o"})):
            rows = over_seeds([curve(run, kind, x) for run in seeds])
            if rows:
                lines.append((label, color, look, rows))
    longest = max(rows[-1][0] for *_, rows in lines)
    scale, unit = next(size for size in UNITS[x] if longest >= size[0] or size is UNITS[x][-1])
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    ends = {}  # of each label's last line: validation, if there is one
    settled = []  # losses after the first fall
    for label, color, look, rows in lines:
        places, means, least, largest = zip(*rows, strict=True)
        settled += [mean for place, mean in zip(places, means, strict=True) if place >= longest / 10]
        places = [place / scale for place in places]
        axes.plot(places, means, color=color, **look)
        axes.fill_between(places, least, largest, color=color, alpha=0.15, linewidth=0)
        ends[label] = places[-1], means[-1], label, color
    margin = 0.05 * (max(settled) - min(settled)) or 0.1
    axes.set(xlabel=f"{unit} of training", ylabel="loss; dots: validation", xlim=(0, None))
    axes.set_ylim(min(settled) - margin, max(settled) + margin)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    label_ends(axes, list(ends.values()))
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png")
