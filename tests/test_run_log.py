"""What a run prints and records."""

import io
import json
import math
import re
import shutil
import sys
import time
from unittest import mock

import pytest
import torch

from runtime import run_log, save
from tests.runs import metrics

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_the_log_line_and_the_metrics_read_as_documented(train, tmp_path, capsys, monkeypatch):
    saves = []
    save_once = save.Saver.save  # each takes a day, not counted as training
    monkeypatch.setattr(save.Saver, "save", lambda *args, **more: saves.append(1) or save_once(*args, **more))
    monkeypatch.setattr(run_log, "perf_counter", lambda: time.perf_counter() + 86400 * len(saves))
    train()
    number = r"[\d,.]+"
    expected = (
        rf"step 00008/8 \| loss {number} \| lr 4\.81e-04 \| norm {number} \| {number} ms \| {number} tok/s "
        rf"\| mfu n/a \| mem {number} GiB \| data {number} ms \| eta 0h00m00s"
    )
    out = capsys.readouterr().out
    assert re.search(expected, out), out
    assert re.search(rf"step 00008 \| val loss {number} \(8 sequences\) \| saved \S+step_000008", out), out
    assert "bits per byte" not in out, "8 sequences are not all that xz had"
    lines = metrics(tmp_path / "out")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9)), "max_iters counts updates"
    names = {"step", "loss", "lr", "grad_norm", "ms", "tok_per_s", "mfu", "mem_gib", "data_ms", "time"}
    assert all(set(line) == names for line in steps) and steps[0]["data_ms"] > 0
    assert [set(line) for line in lines if "loss" not in line] == [{"step", "val_loss"}] * 2
    assert max(line["ms"] for line in steps) < 86400e3
    assert [line["tok_per_s"] * line["ms"] / 1000 for line in steps] == pytest.approx([4 * 32] * 8, rel=0.01)


def test_logged_speeds_are_computed_from_the_seconds(tmp_path, monkeypatch, capsys):
    """Two ranks, steps of a thousand tokens with 5 FLOPs each, at a peak of 1e5 FLOPs per second."""
    monkeypatch.setattr(run_log, "world_size", 2)
    monkeypatch.setattr(run_log, "peak_flops", lambda name: 1e5)
    now = [0.0]
    monkeypatch.setattr(run_log, "perf_counter", lambda: now[0])
    log = run_log.RunLog(tmp_path, "cpu", "float32", 1000, flops_per_token=5, max_iters=14, log_interval=2)
    assert log.peak_flops is None, "the peak is bfloat16's"
    log.peak_flops = 1e5
    log.open(0, None)
    monkeypatch.setattr(run_log, "all_reduce_sum", lambda totals: totals.mul_(2))
    numbers = {name: torch.tensor(x) for name, x in (("loss", 2.0), ("grad_norm", 1.0), ("z_loss", 0.12345))}
    for step, seconds in enumerate((9.0, 6.0, 2.0, 2.0), start=1):
        with log.reading():
            now[0] += 0.5
        now[0] += seconds - 0.5
        log.step(step, 1e-3, **numbers)
        with log.paused():  # evaluation and saving
            now[0] += 100
    first, second, line = capsys.readouterr().out.splitlines()
    assert first.startswith("step 00001/14 ") and "| 9000.0 ms | 111 tok/s |" in first
    assert second.startswith("step 00002/14 ") and "| 6000.0 ms | 167 tok/s |" in second
    assert "| 2000.0 ms | 500 tok/s | mfu 1.2% |" in line and "data 500.0 ms | z_loss 0.1235 | eta 0h00m20s" in line

    class Val:
        meta = {"val_bytes": 50, "xz_bits_per_byte": 1.5}
        tokens = range(100)

    log.summary(math.log(2), Val(), n_evaluated=100)
    said = capsys.readouterr().out
    assert "the median step 2000.0 ms, 500 tok/s" in said and "validation: 2.000 bits per byte" in said
    curve = json.loads((tmp_path / "summary.json").read_text())["curve"]
    assert curve == [[1, 9.0, 2.0], [2, 15.0, 2.0], [4, 19.0, 2.0]]
    log.close()


def test_a_logged_number_is_the_mean_over_the_steps_also_if_each_overwrites_it_as_a_cuda_graph_does(tmp_path):
    log = run_log.RunLog(tmp_path, "cpu", "float32", 1, flops_per_token=1, max_iters=9, log_interval=4)
    log.open(4, None)
    number = torch.zeros(())
    for step, value in enumerate((1.0, 2.0, 3.0, 7.0), start=5):
        log.step(step, 1e-3, loss=torch.ones(()), grad_norm=number.fill_(value))
    log.close()
    assert [line["grad_norm"] for line in metrics(tmp_path)] == [1.0, 4.0]


def test_a_profile_shows_three_steps(train, tmp_path, capsys):
    train(max_iters=12, profile=True)
    (trace,) = (tmp_path / "out/profile").glob("rank0.*.pt.trace.json")
    steps = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in e.get("name", "")]
    assert {"ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"} == set(steps)
    assert "the profile is in" in capsys.readouterr().out


DRAW = run_log.RunLog.draw  # the fixture train replaces it


def test_the_losses_are_drawn_at_each_evaluation_and_a_failure_ends_no_run(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_log.RunLog, "draw", DRAW)
    drawn = []

    def draw(runs, path):
        ((losses,),) = runs.values()
        drawn.append((len(losses.train), len(losses.val), path))
        if len(drawn) == 2:
            raise RuntimeError("no font")

    monkeypatch.setattr(run_log, "draw_losses", draw)
    train(max_iters=24, eval_interval=6)
    path = tmp_path / "out/loss.png"
    assert drawn == [(6, 1, path), (12, 2, path), (18, 3, path), (24, 4, path)]
    assert capsys.readouterr().out.count("loss.png is not drawn: no font") == 1


def test_damaged_lines_of_the_metrics_do_not_stop_a_resume(train, tmp_path):
    """Lines that a machine left when it went down, and one truncated by a kill."""
    train()
    with open(tmp_path / "out/metrics.jsonl", "ab") as file:
        file.write(b'\0\0\0"ms": 3}\n' + b'\xff}\n{"step": 9, "lo')
    train(max_iters=10)
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == list(range(1, 11))


def test_what_is_not_finite_is_null_in_the_metrics_and_the_summary(train, tmp_path, monkeypatch):
    """Other readers of JSON refuse NaN and Infinity."""
    evaluation = run_log.RunLog.evaluation
    monkeypatch.setattr(
        run_log.RunLog, "evaluation", lambda log, step, _, *more: evaluation(log, step, [math.nan], *more)
    )
    train()
    texts = [(tmp_path / "out" / name).read_text() for name in ("metrics.jsonl", "summary.json")]
    assert not any("NaN" in text for text in texts) and '"val_loss": null' in texts[1]
    assert [line["val_loss"] for line in metrics(tmp_path / "out") if "val_loss" in line] == [None, None]


def test_training_outlives_wandb_and_a_resume_continues_its_wandb_run(tmp_path, monkeypatch, capsys):
    wandb = mock.Mock()
    wandb.init.return_value.id = "a1b2"
    wandb.log.side_effect = [None, ConnectionResetError("Connection lost")]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = run_log.RunLog(tmp_path, "cpu", "float32", tokens_per_step=1, flops_per_token=1)
    log.open(0, None, {"seed": 1})
    for step in (1, 2, 3):
        log.record({"step": step})
    log.close()
    assert wandb.log.call_count == 2 and not wandb.finish.called
    assert "wandb has ended (Connection lost)" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    for step in (3, 0):
        log.open(step, None, {"seed": 1})
        log.close()
    new = dict(project="nanocria", config={"seed": 1})
    assert [call.kwargs for call in wandb.init.call_args_list] == [new, new | dict(id="a1b2", resume="allow"), new]


def test_a_full_disk_stops_neither_the_log_nor_its_end(tmp_path, capsys, monkeypatch):
    def open_full(path, *mode, **options):
        return open("/dev/full", *mode, **options)

    monkeypatch.setattr(run_log, "open_to_write", open_full)
    log = run_log.RunLog(tmp_path, "cpu", "float32", tokens_per_step=1, flops_per_token=1)
    log.open(0, None, None)
    log.record({"step": 1})
    assert "/dev/full: No space left on device" in capsys.readouterr().out
    log.close()


def test_a_line_that_a_full_disk_takes_a_part_of_does_not_spoil_the_next_one(tmp_path, capsys, monkeypatch):
    room = [99, 5, 99]

    class Disk(io.FileIO):
        def write(self, line):
            return super().write(line[: room.pop(0)])

    monkeypatch.setattr(run_log, "open_to_write", lambda path, mode, buffering: Disk(path, mode))
    log = run_log.RunLog(tmp_path, "cpu", "float32", tokens_per_step=1, flops_per_token=1)
    log.open(0, None, None)
    for step in range(3):
        log.record({"step": step})
    log.close()
    assert metrics(tmp_path) == [{"step": 0}, {"step": 2}]
    assert capsys.readouterr().out.count("metrics.jsonl: No space left on device\n") == 1


def test_a_run_without_its_checkpoints_restarts_and_keeps_the_old_metrics(train, tmp_path, capsys):
    train()
    before = (tmp_path / "out/metrics.jsonl").read_text()
    for path in (tmp_path / "out").glob("step_*"):
        shutil.rmtree(path)
    capsys.readouterr()
    train(seed=1)
    assert "no checkpoint found: starting over" in capsys.readouterr().out
    assert (tmp_path / "out/metrics.jsonl.old").read_text() == before
    assert len(metrics(tmp_path / "out")) == 10
