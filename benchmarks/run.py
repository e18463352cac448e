"""Draw and tabulate the losses of training runs.

    python bench.py run out                            one run, to out/loss.png
    python bench.py run out/adamw out/muon             together, to out/loss.png
    python bench.py run out/adamw out/muon --out=muon.png

The folders are train.py's out_dir, of finished or running runs, and their labels. Tokens and hours count training,
without evaluations and saves.
"""

from pathlib import Path

from benchmarks.settings import read_settings
from benchmarks.tables import table
from configurator import SettingError
from runtime.loss_plot import Losses, draw_losses, read_losses, smoothed

# settings
out = ""  # the plot; default: loss.png in the run's folder, or out/loss.png for several


def loss_table(runs: dict[str, Losses]) -> str:
    rows = []
    for label, run in runs.items():
        steps, tokens, hours, _ = run.train[-1]
        row = {"run": label, "steps": steps, "tokens": tokens, "hours": hours, "loss": smoothed(run.train)[-1]}
        val_losses = [loss for *_, loss in run.val]
        if val_losses:
            row |= {"val_loss": val_losses[-1], "best_val_loss": min(val_losses)}
        rows.append(row | {"bits_per_byte": run.bits_per_byte})
    return table(rows, "run steps tokens hours loss val_loss best_val_loss bits_per_byte")


def main(argv: list[str]) -> None:
    folders = [Path(word) for word in argv if not word.startswith("-")]
    folders = [path for path in folders if not path.is_file()]  # out/* includes the previous plot
    folder = folders[0].absolute() if len(folders) == 1 else "out"
    s = read_settings(globals(), [word for word in argv if word.startswith("-")], out=f"{folder}/loss.png")
    if not folders:
        raise SettingError("usage: python bench.py run FOLDER... [--out=PLOT.png]")
    try:
        runs = {str(path): read_losses(path) for path in folders}
        print(loss_table(runs))
        s.out.parent.mkdir(parents=True, exist_ok=True)
        draw_losses(runs, s.out)
    except (OSError, ValueError) as error:  # ValueError: also matplotlib's, for an --out in an unknown format
        raise SettingError(str(error)) from None
    print(f"drawn: {s.out}")
