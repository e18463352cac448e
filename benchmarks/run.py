"""The losses of training runs, drawn together and tabled.

    python bench.py run out                            one run, to out/loss.png
    python bench.py run out/adamw out/muon             beside each other, to out/loss.png
    python bench.py run out/adamw out/muon --out=muon.png

The folders are those of train.py's out_dir, of runs that have ended or still go on. A run is called by its folder and
by the settings in which the runs differ. Tokens and hours are those of training, without evaluations and saves.
"""

from pathlib import Path
from types import SimpleNamespace

from benchmarks import cli, compare
from configurator import SettingError
from runtime.loss_plot import Losses, draw_losses, read_losses, smoothed

# settings
out = ""  # the plot; nothing: loss.png in the run's folder, or out/loss.png of several

NOT_TOLD = ("out_dir", "wandb_run_name")  # of each run its own


def parse(argv: list[str]) -> SimpleNamespace:
    folders = [word for word in argv if not word.startswith("-")]
    s = cli.read_settings(globals(), [word for word in argv if word.startswith("-")])
    if not folders:
        raise SettingError("usage: python bench.py run FOLDER... [--out=PLOT.png]")
    s.folders = [Path(folder) for folder in folders]
    s.out = Path(s.out or (s.folders[0] if len(folders) == 1 else cli.ROOT / "out") / "loss.png")
    return s


def labelled(runs: list[Losses]) -> dict[str, Losses]:
    """The runs by folder, and by the settings in which those that are known differ."""
    known = [run.settings for run in runs if run.settings]
    names = [name for name in (known[0] if known else {}) if name not in NOT_TOLD]
    names = [name for name in names if any(settings.get(name) != known[0][name] for settings in known)]
    return {
        ", ".join([str(run.folder), *(f"{name}={run.settings[name]}" for name in names if name in run.settings)]): run
        for run in runs
    }


def loss_table(runs: dict[str, Losses]) -> str:
    lines = []
    for label, run in runs.items():
        steps, tokens, hours, _ = run.train[-1]
        found = [loss for *_, loss in run.val]
        val = [f"{found[-1]:.4f}", f"{min(found):.4f}"] if found else ["-", "-"]
        bits = "-" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}"
        numbers = [f"{steps:,}", f"{tokens:,}", f"{hours:.2f}", f"{smoothed(run.train)[-1]:.4f}"]
        lines.append([label, *numbers, *val, bits])
    header = ["run", "steps", "tokens", "hours", "training loss", "validation loss", "its best", "bits per byte"]
    return compare.table(header, lines)


def main(argv: list[str]) -> None:
    s = parse(argv)
    try:
        runs = labelled([read_losses(folder) for folder in s.folders])
    except (ValueError, OSError) as error:
        raise SettingError(str(error)) from None
    print(loss_table(runs))
    try:
        s.out.parent.mkdir(parents=True, exist_ok=True)
        draw_losses(runs, s.out)
    except ImportError:
        raise SettingError("the plot needs matplotlib: pip install matplotlib") from None
    except (OSError, ValueError) as error:  # no such folder, or no format of that name
        raise SettingError(f"--out={s.out} cannot be written: {error}") from None
    print(f"drawn: {s.out}")
