"""Draw and tabulate the losses of training runs.

    python bench.py run out/baby_llama                 one run, to out/loss.png
    python bench.py run out/adamw out/muon             together, to out/loss.png
    python bench.py run out/adamw out/muon --out=muon.png

The folders are train.py's out_dir, of finished or running runs, and their labels. Tokens and hours count training,
without evaluations and saves.
"""

from pathlib import Path

from benchmarks.settings import read_settings
from benchmarks.tables import table
from configurator import SettingError
from runtime.run_log import Losses, draw_losses, read_losses, smoothed

# settings
out = "out/loss.png"  # the plot


def loss_table(runs: dict[str, Losses]) -> str:
    rows = []
    for label, run in runs.items():
        steps, tokens, hours, _ = run.train[-1]
        row = {"run": label, "steps": steps, "tokens": tokens, "hours": hours, "loss": smoothed(run.train)[-1]}
        if run.val:
            val_losses = [loss for *_, loss in run.val]
            row |= {"val_loss": val_losses[-1], "best_val_loss": min(val_losses)}
        rows.append(row | {"bits_per_byte": run.bits_per_byte})
    return table(rows, "run steps tokens hours loss val_loss best_val_loss bits_per_byte")


def main(argv: list[str]) -> None:
    s = read_settings(globals(), [word for word in argv if word.startswith("-")])
    folders = [Path(word) for word in argv if not word.startswith("-")]
    folders = [path for path in folders if not path.is_file()]  # out/* includes the previous plot
    if not folders:
        raise SettingError("usage: python bench.py run FOLDER... [--out=PLOT.png]")
    try:
        runs = {str(path): read_losses(path) for path in folders}
    except ValueError as error:
        raise SettingError(str(error)) from None
    print(loss_table(runs))
    draw_losses(runs, Path(s.out))
    print(f"drawn: {s.out}")
