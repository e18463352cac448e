"""Read the losses of runs from the files in their folders, and draw them as loss.png, which needs matplotlib.

Tokens, of all ranks together, and hours count training alone, without evaluations and saves.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data.files import atomic_write


class Losses(NamedTuple):
    """Points are (steps, tokens, hours, loss)."""

    train: list[tuple]  # one for each line of the log
    val: list[tuple]  # one for each evaluation
    bits_per_byte: float | None  # of a finished run that evaluated on all of its validation text


def read_json(path: Path) -> dict:
    """{} if there is no such file; ValueError that names it if it cannot be read."""
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl. Skips what is none: a killed run's last line, zeros from a machine that went down."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


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
    summary = read_json(folder / "summary.json")  # of an earlier end, if the run went on
    is_of_this_end = "curve" in summary and summary["curve"][-1][0] == train[-1][0]
    return Losses(train, val, summary.get("bits_per_byte") if is_of_this_end else None)


def smoothed(points: Sequence[tuple]) -> list[float]:
    """At each point, the mean of the losses up to it over a window of a fiftieth of all points."""
    losses = [loss for *_, loss in points]
    n = max(1, len(points) // 50)
    return [sum(losses[max(0, i - n) : i]) / min(n, i) for i in range(1, len(losses) + 1)]


def draw_losses(runs: dict[str, Losses], path: Path) -> None:
    """Draw each run's training loss as a line and validation loss as dots: left over tokens, right over hours."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and shares state with other figures

    figure = Figure(figsize=(10, 4 + 0.2 * len(runs)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, unit, column, scale in ((left, "million tokens", 1, 1e6), (right, "hours", 2, 1)):
        for label, run in runs.items():
            (line,) = axes.plot([point[column] / scale for point in run.train], smoothed(run.train), label=label)
            places = [point[column] / scale for point in run.val]
            losses = [loss for *_, loss in run.val]
            axes.plot(places, losses, "o", color=line.get_color(), markersize=4)
        axes.set(xlabel=f"{unit} of training")
        axes.spines[["top", "right"]].set_visible(False)
    left.set(ylabel="loss (dots: validation)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", fontsize=8, frameon=False)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png")
