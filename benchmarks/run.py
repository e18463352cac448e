"""Draw and tabulate the losses of training runs.

    python bench.py run out/baby_llama                 one run, to out/loss.png
    python bench.py run out/adamw out/muon             together; labels are the settings in which they differ
    python bench.py run out/adamw out/muon --labels=AdamW,Muon --x=minutes --out=muon.svg
    python bench.py run out/adamw_* out/muon_*         several seeds of each: a band, and the difference of their
                                                       means in standard errors

The folders are train.py's out_dir, of finished or running runs. Tokens and minutes count training, without evaluations
and saves; FLOPs are the model's, without recomputation, and known when a run has ended.
"""

import math
import re
from pathlib import Path
from statistics import fmean, variance
from typing import Literal

from benchmarks.settings import read_settings
from benchmarks.tables import table
from configurator import SettingError
from data.loader import dataset_parts
from runtime.loss_plot import SUFFIXES, Losses, draw_losses, read_losses, smoothed

# settings
out = "out/loss.png"  # the plot: .png, .svg or .pdf
x: Literal["tokens", "minutes", "steps", "flops"] = "tokens"  # the horizontal axis
labels = ""  # of the folders: one,two,...; empty: from their settings

NOT_IN_LABELS = re.compile("out_dir|seed|profile|async_save|timeout|(wandb|eval|log|keep|sample)_.*")  # settings
LONGEST_LABEL = 60  # characters


def labels_of(folders: list[Path], runs: list[Losses]) -> list[str]:
    """The settings that differ between runs. Those that differ only in their seed have the same label.

    The folder's name if the settings are not known yet or too long, and for a run whose seed, too, is that of an
    earlier one: perhaps the code was changed between them. The first folder's for all if nothing differs.
    """
    known = [{name: run.settings[name] for name in run.settings if not NOT_IN_LABELS.fullmatch(name)} for run in runs]
    names = dict.fromkeys(name for settings in known for name in settings)
    differing = [name for name in names if len({str(settings.get(name)) for settings in known if settings}) > 1]
    first = next((str(folder) for folder, settings in zip(folders, known, strict=True) if settings), "")
    labels = []
    seeds = set()  # of each label
    for folder, run, settings in zip(folders, runs, known, strict=True):
        text = ", ".join(f"{name}={settings.get(name)}" for name in differing) or first
        seed = run.settings.get("seed")
        if not settings or len(text) > LONGEST_LABEL or (text, seed) in seeds:
            text = str(folder)
        seeds.add((text, seed))
        labels.append(text)
    return labels


def loss_table(folders: list[Path], runs: list[Losses], labels: list[str]) -> str:
    rows = []
    for folder, run, label in zip(folders, runs, labels, strict=True):
        steps, tokens, hours, _ = run.train[-1]
        row = {"run": label, "folder": folder, "steps": steps, "tokens": tokens, "minutes": 60 * hours}
        row |= {"loss": smoothed(run.train)[-1]}
        if run.val:
            val_losses = [loss for *_, loss in run.val]
            row |= {"val_loss": val_losses[-1], "best_val_loss": min(val_losses)}
        rows.append(row | {"bits_per_byte": run.bits_per_byte})
    return table(rows, "run folder steps tokens minutes loss val_loss best_val_loss bits_per_byte")


def comparison(label: str, losses: list[float], base: str, base_losses: list[float]) -> str:
    """The difference between the mean last validation losses of two groups, in the standard error that its seeds make:
    √(variance / n + variance of base / n of base).
    """
    difference = fmean(losses) - fmean(base_losses)
    text = f"val loss of {label} minus {base}: {difference:+.4f}"
    if min(len(losses), len(base_losses)) < 2:
        return f"{text}; one seed cannot tell whether seeds make as much"
    error = math.sqrt(variance(losses) / len(losses) + variance(base_losses) / len(base_losses))
    ratio = difference / max(error, 1e-9)
    return f"{text} = {ratio:+.1f} standard errors (seeds alone make up to 3, up to 4 if there are only two of each)"


def comparisons(groups: dict[str, list[Losses]]) -> list[str]:
    """Each group beside the first."""
    known = [run for group in groups.values() for run in group if run.settings]
    names = {run.settings["dataset"] for run in known}
    # A name may have meant other data, prepared anew since, and one dataset may have been named by its path, too.
    val_data = {(run.val_sha256, *dataset_parts(run.settings["dataset"]).values()) for run in known}
    has_digests = all(run.val_sha256 for run in known)
    if len(val_data if has_digests else names) > 1:
        return [f"the runs read different datasets, so their losses cannot be compared: {', '.join(sorted(names))}"]
    last = {label: [run.val[-1][-1] for run in group if run.val] for label, group in groups.items()}
    evaluated = [label for label in last if last[label]]
    return [comparison(label, last[label], evaluated[0], last[evaluated[0]]) for label in evaluated[1:]]


def main(argv: list[str]) -> None:
    s = read_settings(globals(), [word for word in argv if word.startswith("-")])
    folders = [Path(word) for word in argv if not word.startswith("-")]
    folders = [path for path in folders if not path.is_file()]  # out/* includes the previous plot
    refused = [path for path in folders if path.is_dir() and not (path / "metrics.jsonl").exists()]
    if 0 < len(refused) < len(folders):  # it also includes the folders of runs that were refused before a first step
        print(f"left out, without losses: {', '.join(map(str, refused))}")
        folders = [path for path in folders if path not in refused]
    if not folders:
        raise SettingError("usage: python bench.py run FOLDER... [--out=PLOT.png]")
    if not s.out.endswith(SUFFIXES):
        raise SettingError(f"--out={s.out}: its suffix is one of {', '.join(SUFFIXES)}")
    try:
        runs = [read_losses(path) for path in folders]
    except ValueError as error:
        raise SettingError(str(error)) from None
    labels = s.labels.split(",") if s.labels else labels_of(folders, runs)
    if len(labels) != len(folders):
        raise SettingError(f"--labels={s.labels}: {len(labels)} for {len(folders)} folders")
    unfinished = [str(path) for path, run in zip(folders, runs, strict=True) if run.flops_per_token is None]
    if s.x == "flops" and unfinished:
        raise SettingError(f"--x=flops: {', '.join(unfinished)} has not ended: summary.json has the FLOPs of a token")
    print(loss_table(folders, runs, labels))
    groups = {}
    for label, run in zip(labels, runs, strict=True):
        groups.setdefault(label, []).append(run)
    for text in comparisons(groups):
        print(text)
    try:
        Path(s.out).parent.mkdir(parents=True, exist_ok=True)
        draw_losses(groups, Path(s.out), s.x)
    except OSError as error:
        raise SettingError(f"--out={s.out}: {error}") from None
    print(f"drawn: {s.out}")
