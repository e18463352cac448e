"""Losses of training runs: read from the files that a run leaves, tabulated and drawn."""

import json
import math
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import bench
from benchmarks import records, run
from runtime.loss_plot import Losses, draw_losses, read_losses
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
    first = leave_run(
        tmp_path / "a", [4.0, 3.0], settings={"dataset": "a", "optimizer": "adamw", "out_dir": "a"}, bits_per_byte=1.25
    )
    going = leave_run(tmp_path / "c", [4.0, 2.0, 2.5])
    out = tmp_path / "both.svg"
    out.touch()  # a previous plot
    (tmp_path / "refused").mkdir()  # a run that never began
    bench.main(["run", *map(str, sorted(tmp_path.glob("*"))), f"--out={out}"])
    left_out, _, _, *rows, difference, drawn = capsys.readouterr().out.splitlines()
    assert left_out == f"left out, without losses: {tmp_path}/refused"
    assert "-0.5000; one seed" in difference
    assert rows == [
        f"| {first} | {first} | 20 | 20,000 | 600.0 | 3.0000 | 3.5000 | 3.5000 | 1.250 |",
        f"| {going} | {going} | 30 | 30,000 | 900.0 | 2.5000 | 3.0000 | 3.0000 | - |",
    ]
    assert drawn == f"drawn: {out}" and out.read_bytes().startswith(b"<?xml"), "the suffix names the format"
    bench.main(["run", str(first), "--labels=mine", "--x=steps", f"--out={tmp_path / 'one.png'}"])
    assert "| mine |" in capsys.readouterr().out and (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_the_plots_folder_is_made(tmp_path, monkeypatch):
    """Runs may be elsewhere, so that there is no out/."""
    folder = leave_run(tmp_path / "a", [4.0, 3.0])
    monkeypatch.chdir(tmp_path)
    bench.main(["run", str(folder)])
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_of_an_earlier_end_is_ignored_if_the_run_continued(tmp_path):
    folder = leave_run(tmp_path / "a", [4.0, 3.0], settings={"n_layer": 2}, bits_per_byte=1.25)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n" + json.dumps({"step": 30, "loss": 2.0, "ms": 1.8e6, "tok_per_s": 1000 / 1800}))
        file.write("\n" + json.dumps({"step": 35, "val_loss": 2.5}))  # between two lines of the log
    losses = read_losses(folder)
    assert losses.train[-1] == (30, 30_000, 15.0, 2.0) and losses.bits_per_byte is None
    assert losses.val[-1] == (35, 35_000, 17.5, 2.5)


def test_each_evaluation_draws_the_losses_unless_there_is_no_matplotlib(tmp_path, monkeypatch, capsys):
    folder = leave_run(tmp_path / "a", [3.0] * 12)
    log = RunLog(str(folder), "cpu", "float32", 1000, 1.0)
    log.open(200, None)
    log.evaluation(200, [2.5], {"a": 1.0}, 10)
    assert (folder / "loss.png").stat().st_size > 10_000
    (folder / "loss.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    log.evaluation(210, [2.4], {"a": 1.0}, 10)
    assert not [*tmp_path.glob("*/loss.png")] and not capsys.readouterr().out
    log.close()


def losses_of(settings=None, ends_at=3.0, steps=20, **more):
    """A run of 1,000 tokens a step and 360 steps an hour that falls to its validation loss."""
    points = [(n, 1000 * n, n / 360, ends_at + 1 - n / steps) for n in range(1, steps + 1)]
    fields = {"bits_per_byte": None, "settings": settings or {}, "flops_per_token": 5e9} | more
    return Losses(points, points[3::4], **fields)


SETTINGS = {"dataset": "a", "optimizer": "adamw", "learning_rate": 0.1, "seed": 1, "out_dir": "a", "profile": False,
            "keep_last": 2}  # fmt: skip


@pytest.mark.parametrize(
    "changes, labels",
    [
        ([{}, {"optimizer": "muon"}], ["optimizer=adamw", "optimizer=muon"]),
        ([{}, {"seed": 2, "out_dir": "b"}, {"learning_rate": 0.2}], ["learning_rate=0.1"] * 2 + ["learning_rate=0.2"]),
        ([{}, {"profile": True, "keep_last": 0, "wandb_log": True, "eval_iters": 9, "seed": 2}], ["runs/0", "runs/0"]),
        ([{}, {"optimizer": "muon"}, {}], ["optimizer=adamw", "optimizer=muon", "runs/2"]),  # of other code, perhaps
        ([{}, {"dataset": "a folder with a long name" * 3}], ["dataset=a", "runs/1"]),
    ],
)
def test_a_label_names_the_settings_that_differ_and_matter_and_seeds_share_it(changes, labels):
    runs = [losses_of(SETTINGS | change) for change in changes]
    folders = [Path(f"runs/{i}") for i in range(len(runs))]
    assert run.labels_of(folders, runs) == labels
    assert run.labels_of([*folders, Path("new")], [*runs, losses_of()]) == [*labels, "new"], "it has no settings yet"


def test_a_difference_is_compared_with_what_seeds_make():
    seeds = [3.0, 3.1, 3.2]
    text = run.comparison("muon", [2.5, 2.6, 2.7], "adamw", seeds)
    assert "minus adamw: -0.5000" in text and f"= {-0.5 / (0.1 * math.sqrt(2 / 3)):+.1f} standard errors" in text
    wider = run.comparison("muon", [2.4, 2.6], "adamw", seeds)  # each group has its own variance
    assert f"= {-0.6 / math.sqrt(0.02 / 2 + 0.01 / 3):+.1f} standard errors" in wider
    assert "one seed cannot tell" in run.comparison("muon", [2.0], "adamw", seeds)


def test_losses_of_different_datasets_are_not_compared():
    first, second, other = (losses_of(SETTINGS | {"dataset": name}) for name in ("a", "a", "b"))
    assert "one seed" in run.comparisons({"first": [first], "second": [second], "new": []})[0]
    assert "different datasets" in run.comparisons({"first": [first], "other": [other]})[0]
    assert not run.comparisons({"first": [first]})


def test_datasets_are_told_apart_by_their_content_not_their_name():
    one = losses_of(SETTINGS | {"dataset": "a"}, val_sha256="1")
    by_path = losses_of(SETTINGS | {"dataset": "/data/a/"}, val_sha256="1")
    prepared_anew = losses_of(SETTINGS | {"dataset": "a"}, val_sha256="2")
    assert "one seed" in run.comparisons({"one": [one], "by_path": [by_path]})[0]
    assert "different datasets" in run.comparisons({"one": [one, prepared_anew]})[0]
    mixes = [losses_of(SETTINGS | {"dataset": f"a:{share},b:{1 - share}"}, val_sha256="1") for share in (0.25, 0.5)]
    assert "different datasets" in run.comparisons({"quarter": mixes[:1], "half": mixes[1:]})[0]


@pytest.fixture
def axes(monkeypatch, tmp_path):
    """axes(runs, x) draws runs and returns the plot's axes."""
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: figures.append(figure) or savefig(figure, *a, **b))

    def draw(runs, x="tokens"):
        draw_losses(runs, tmp_path / "loss.png", x)
        return figures[-1].axes[0]

    return draw


@pytest.mark.parametrize(
    "x, label, end",
    [("tokens", "thousand tokens", 20), ("steps", "steps", 20), ("minutes", "minutes", 10 / 3),
     ("flops", "10¹² FLOPs", 100)],
)  # fmt: skip
def test_the_axis_has_units_that_fit(axes, x, label, end):
    drawn = axes({"a": [losses_of()]}, x)
    train, val = drawn.lines
    assert drawn.get_xlabel() == f"{label} of training" and train.get_xdata()[-1] == pytest.approx(end)
    assert len(val.get_xdata()) == 5 and val.get_linestyle() == "-" and val.get_marker() == "o", "points and a line"


def test_seeds_are_a_band_around_their_mean_and_labels_do_not_overlap(axes):
    seeds = [losses_of(ends_at=loss) for loss in (3.0, 3.2, 3.7)]
    drawn = axes({"seeds": seeds, "single": [losses_of(ends_at=3.31)], "third": [losses_of(ends_at=3.3)]})
    assert drawn.lines[1].get_ydata()[-1] == pytest.approx(3.3)
    heights = drawn.collections[1].get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(3.0) and heights.max() == pytest.approx(3.7 + 0.8)
    texts = {text.get_text(): text.get_window_extent() for text in drawn.texts}
    assert set(texts) == {"seeds", "single", "third"} and not texts["seeds"].overlaps(texts["single"])
    assert not texts["third"].overlaps(texts["single"]) and not texts["third"].overlaps(texts["seeds"])


@pytest.mark.parametrize(
    "flag, sentence", [("--out=a.jpg", ".png, .svg, .pdf"), ("--labels=a,b", "2 for 1"), ("--x=flops", "has not ended")]
)
def test_what_cannot_be_drawn_gets_a_sentence(tmp_path, flag, sentence):
    with pytest.raises(SystemExit, match=sentence):
        bench.main(["run", str(leave_run(tmp_path / "a", [4.0, 3.0])), flag])


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        bench.main(["run", str(leave_run(tmp_path / "a", [4.0, 3.0]))])


def test_a_whole_run_becomes_a_record_with_its_validation_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    bench.main(["record", str(leave_run(tmp_path / "a", [4.0, 3.0], **WHOLE)), "mine"])
    record = json.loads((tmp_path / "mine.json").read_text())
    assert record["val_loss"] == 3.5 and record["val_curve"] == [[20, 36_000.0, 3.5]]
    resumed = leave_run(tmp_path / "b", [4.0, 3.0], **WHOLE | {"steps": 8})
    with pytest.raises(SystemExit, match="makes no record"):
        bench.main(["record", str(resumed), "other"])
