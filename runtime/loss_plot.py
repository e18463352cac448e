"""Read the losses of runs from the files in their folders, and draw them as loss.png, which needs matplotlib.

Tokens, of all ranks together, and hours count training alone, without evaluations and saves.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.files import atomic_write
from runtime.checkpoint import newest

LONGEST_LINE = 2**16  # bytes; a line of metrics.jsonl has a few hundred


class Losses(NamedTuple):
    """Points are (steps, tokens, hours, loss)."""

    folder: Path
    train: list[tuple]  # one for each line of the log
    val: list[tuple]  # one for each evaluation
    bits_per_byte: float | None  # of a finished run that evaluated on all of its validation text
    settings: dict  # {} if the run has saved nothing yet


def read_json(path: Path) -> dict:
    """{} if there is no such file; ValueError that names it if it cannot be read."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it holds no JSON object")
    return content


def metrics_of(path: Path) -> Iterator[dict]:
    """The lines of metrics.jsonl. Skips what is none: a killed run's last line, another program's, one without end."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)
                continue
            with contextlib.suppress(ValueError, RecursionError):
                metrics = json.loads(line)
                if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
                    yield metrics


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
    for row in metrics_of(path):
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):  # a loss that is not finite
            if "loss" in row:  # its speed and time are means over the steps since the previous line
                tokens_per_step = round(row["tok_per_s"] * row["ms"] / 1000)
                hours_per_step = row["ms"] / 3.6e6
            n_steps = row["step"] - steps
            point = row["step"], tokens + n_steps * tokens_per_step, hours + n_steps * hours_per_step
            if "loss" in row:
                train.append((*point, float(row["loss"])))
                steps, tokens, hours = point
            elif "val_loss" in row:
                val.append((*point, float(row["val_loss"])))
    if not train:
        raise ValueError(f"{path} has no losses: name the out_dir of a run of train.py")
    checkpoint = newest(folder)
    saved = read_json(checkpoint / "run.json") if checkpoint else {}
    summary = read_json(folder / "summary.json")
    settings = saved.get("settings") or summary.get("settings", {})  # a resumed run still has the last run's summary
    bits_per_byte = None
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):  # no summary, or an earlier run's
        if summary["curve"][-1][0] == train[-1][0]:
            bits_per_byte = float(summary["bits_per_byte"])
    return Losses(folder, train, val, bits_per_byte, settings if isinstance(settings, dict) else {})


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
