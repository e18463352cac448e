"""Losses of training runs: read from the files that a run leaves, tabulated and drawn."""

import json
import sys

import pytest

import bench
from benchmarks import records
from runtime import run_log
from runtime.run_log import RunLog

WHOLE = dict(settings={"max_iters": 20}, steps=20, val_loss=3.5, bits_per_byte=2.0, command="python train.py",
             device="CPU", versions={"nanocria": "abc"})  # fmt: skip


def leave_run(folder, losses, every=10, settings=None, **summary):
    """Write the files of a run of 1,000 tokens and half an hour per step, validated at its last line."""
    folder.mkdir()
    lines = [
        {"step": every * i, "loss": loss, "ms": 1.8e6, "tok_per_s": 1000 / 1800} for i, loss in enumerate(losses, 1)
    ]
    lines.append({"step": lines[-1]["step"], "val_loss": losses[-1] + 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    curve = [[line["step"], 0, 0] for line in lines]
    if settings:
        (folder / "summary.json").write_text(json.dumps({"settings": settings, "curve": curve} | summary))
    return folder


def test_runs_are_tabulated_and_plotted_together(tmp_path, capsys):
    first = leave_run(tmp_path / "a", [4.0, 3.0], settings={"optimizer": "adamw", "out_dir": "a"}, bits_per_byte=1.25)
    going = leave_run(tmp_path / "c", [4.0, 2.0, 2.5])
    out = tmp_path / "both.png"
    out.touch()  # a previous plot
    bench.main(["run", *map(str, sorted(tmp_path.glob("*"))), f"--out={out}"])
    _, _, *rows, drawn = capsys.readouterr().out.splitlines()
    assert rows == [
        f"| {first} | 20 | 20,000 | 10.00 | 3.0000 | 3.5000 | 3.5000 | 1.250 |",
        f"| {going} | 30 | 30,000 | 15.00 | 2.5000 | 3.0000 | 3.0000 | - |",
    ]
    assert drawn == f"drawn: {out}" and out.stat().st_size > 10_000


def test_the_summary_of_an_earlier_end_is_ignored_if_the_run_continued(tmp_path):
    folder = leave_run(tmp_path / "a", [4.0, 3.0], settings={"n_layer": 2}, bits_per_byte=1.25)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps({"step": 30, "loss": 2.0, "ms": 1.8e6, "tok_per_s": 1000 / 1800}))
        file.write("\n" + json.dumps({"step": 35, "val_loss": 2.5}))  # between two lines of the log
    losses = run_log.read_losses(folder)
    assert losses.train[-1] == (30, 30_000, 15.0, 2.0) and losses.bits_per_byte is None
    assert losses.val[-1] == (35, 35_000, 17.5, 2.5)


def test_a_run_ends_with_a_plot_or_without_matplotlib_with_none(tmp_path, monkeypatch, capsys):
    folder = leave_run(tmp_path / "a", [3.0] * 12)
    log = RunLog(str(folder), "cpu", "float32", 1000, 1.0)
    log.draw()
    assert (folder / "loss.png").stat().st_size > 10_000
    (folder / "loss.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    log.draw()
    assert not [*tmp_path.glob("*/loss.png")] and not capsys.readouterr().out


def test_a_whole_run_becomes_a_record_with_its_validation_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    bench.main(["record", str(leave_run(tmp_path / "a", [4.0, 3.0], **WHOLE)), "mine"])
    record = json.loads((tmp_path / "mine.json").read_text())
    assert record["val_loss"] == 3.5 and record["val_curve"] == [[20, 36_000.0, 3.5]]
    resumed = leave_run(tmp_path / "b", [4.0, 3.0], **WHOLE | {"steps": 8})
    with pytest.raises(SystemExit, match="makes no record"):
        bench.main(["record", str(resumed), "other"])
