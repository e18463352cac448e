"""Signals, kills, hanging ranks, full disks: how a run reacts to them."""

import array
import fcntl
import io
import os
import random
import re
import signal
import subprocess
import sys
import termios
import time
from unittest import mock

import pytest
import torch

from data.loader import Blocks
from runtime import checkpoint
from runtime.distributed import on_all_ranks, say, stop_on_error
from runtime.stop import Signals
from tests.runs import (
    LONGER,
    ROOT,
    SHORT,
    SMALL,
    alive,
    assert_close,
    at_read,
    error_of,
    free_port,
    losses,
    metrics,
    run,
    start,
    step_losses,
    torchrun,
    wait_until,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_ctrl_c_saves_and_resume_repeats_losses_bit_for_bit(train, text_data, tmp_path):
    """Nobody reads the run's output, so it blocks in a print when the signal handler prints too."""
    settings = SMALL | SHORT | dict(max_iters=100, eval_interval=100, dataset=text_data)
    train(**settings, out_dir=tmp_path / "whole")
    process = start(settings | {"out_dir": tmp_path / "out"})
    unread = array.array("i", [0])
    wait_until(lambda: not fcntl.ioctl(process.stdout, termios.FIONREAD, unread) and unread[0] > 3500)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # so that the handler meets the full pipe
    said, errors = process.communicate()
    assert process.returncode == 130 and "interrupted | saved" in said, said + errors
    assert "run the same command again" in said and metrics(tmp_path / "out")[-1]["step"] < 100, said
    train(**settings)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_out_of_memory_error_names_the_three_settings_that_save_most(text_data, tmp_path):
    script = wrapped(
        tmp_path,
        "import model, runtime.memory_advice\n"
        "runtime.memory_advice.card_gib = lambda device: 24\n"
        "def full(*args, **options): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        "model.Llama.forward = full",
    )
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", activation_checkpointing="selective")
    done = run(settings, script)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "rank 0, step 0, training: out of memory" in done.stderr, done.stderr
    helpful = re.findall(r"^  --(\w+)=\S+.*about [\d.]+ GiB instead of [\d.]+", done.stderr, re.MULTILINE)
    assert len(helpful) == 3 and "offload" in helpful, done.stderr


def test_out_of_memory_before_the_first_step_reaches_the_excepthook_that_names_settings():
    with pytest.raises(torch.OutOfMemoryError), stop_on_error():
        on_all_ranks(mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))


@pytest.mark.parametrize("n_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_run_repeats_losses_bit_for_bit(train, text_data, tmp_path, n_kills):
    """kill -9 at random moments, many of them during a save: there is one after every step."""
    settings = SMALL | SHORT | dict(dataset=text_data, max_iters=10 * n_kills, eval_interval=1, eval_iters=1)
    train(**settings, out_dir=tmp_path / "whole")
    rng = random.Random(0)
    partial = 0
    for _ in range(n_kills):
        process = start(settings | {"out_dir": tmp_path / "out"})
        for _ in range(rng.randrange(6)):
            while "| loss" not in (line := process.stdout.readline()) and line:
                pass
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        _, errors = process.communicate()
        assert "Traceback" not in errors and process.returncode in (-signal.SIGKILL, 0), errors  # 0: this test was late
        partial += bool(list((tmp_path / "out").glob("step_*.partial")))
    assert partial or n_kills < 20, "no kill met a checkpoint that was being written: the test tests nothing"
    train(**settings)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_killed_rank_ends_the_others_and_the_run_resumes_on_one(train_on_ranks, alone, tmp_path):
    script = wrapped(tmp_path, at_read(30, "os.kill(os.getpid(), signal.SIGKILL)", "1"))
    done = train_on_ranks(2, script, code=1)
    assert re.search(r"rank 0, step \d+, training, lost another rank", done.stderr), done.stderr
    assert 'train.py", line' not in done.stderr, done.stderr
    train_on_ranks(1)
    assert_close(step_losses(alone), step_losses(tmp_path / "out"), 1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_ranks_save_and_end_when_torchrun_dies(text_data, tmp_path):
    script = wrapped(tmp_path, f"open(f'{tmp_path}/rank{{os.getpid()}}', 'w').close()")
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=10**6, eval_interval=10**5)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(torchrun(2, settings, script), cwd=ROOT, stdout=log, stderr=log)
    wait_until(lambda: "step 00015/" in (tmp_path / "log").read_text())
    process.kill()
    process.wait()
    ranks = [int(path.name[4:]) for path in tmp_path.glob("rank*")]
    wait_until(lambda: not any(map(alive, ranks)))
    assert checkpoint.newest(tmp_path / "out") is not None, (tmp_path / "log").read_text()


@pytest.mark.parametrize("ranks, told", [("12", "another rank got SIGTERM"), ("012", " SIGTERM")])
def test_a_signal_to_any_rank_is_reported_once_and_all_save(train_on_ranks, tmp_path, ranks, told):
    script = wrapped(tmp_path, at_read(5, "signal.raise_signal(signal.SIGTERM)", ranks))
    done = train_on_ranks(3, script, code=128 + signal.SIGTERM, gradient_accumulation_steps=3)
    until_saved = done.stdout.partition("run the same command again")[0]
    assert until_saved.count("SIGTERM") == 1 and f"{told}: stopping after this step\n" in until_saved, done.stdout
    assert re.search(r"step 0000[234] \| interrupted \| saved", until_saved), done.stdout


@pytest.mark.parametrize("n_reads", [30, 9])
def test_a_hanging_rank_ends_the_run_and_the_other_says_where_it_was(train_on_ranks, tmp_path, n_reads):
    """In training, or in the first evaluation."""
    hangs = "signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(1000)"
    script = wrapped(tmp_path, at_read(n_reads, hangs, "1"))
    said = train_on_ranks(2, script, code=1, max_iters=1000, eval_interval=2, timeout=3).stderr
    assert re.search(r"rank 0, step \d+, .*, lost another rank or its connection", said), said


def test_invalid_data_on_one_rank_ends_all_and_a_resume_goes_on(train_on_ranks, tmp_path):
    """Repaired, the run equals one without the error."""
    bad = wrapped(tmp_path, at_read(5, "raise ValueError('train.bin holds token 999')", "1"))
    settings = dict(max_iters=8, eval_interval=2, eval_iters=1, gradient_accumulation_steps=2)
    done = train_on_ranks(2, bad, code=1, **settings)
    assert done.stderr.count("rank 1: train.bin holds token 999") == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for out_dir in (tmp_path / "out", tmp_path / "whole"):
        train_on_ranks(2, out_dir=out_dir, **settings)
    assert_close(step_losses(tmp_path / "out"), step_losses(tmp_path / "whole"), 1e-6)


def test_a_broken_stream_does_not_stop_training(text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out")
    with open("/dev/full", "w") as full:
        errors = start(settings, stdout=full).communicate()[1]
    assert "Traceback" not in errors, errors
    assert checkpoint.newest(tmp_path / "out").name == "step_000008"


def test_signal_during_evaluation_stops_it_and_saves(text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", eval_iters=100, init_from="scratch")
    script = wrapped(tmp_path, at_read(8, "signal.raise_signal(signal.SIGHUP)"))  # six of steps 1 to 6, two to evaluate
    done = run(settings, script)
    assert "run the same command again with --init_from=resume" in done.stdout, "scratch would be refused"
    assert done.returncode == 128 + signal.SIGHUP and "step 00004 | interrupted | saved" in done.stdout, done.stdout
    assert not any("val_loss" in line for line in metrics(tmp_path / "out"))
    run(settings | dict(init_from="resume"))
    assert [line["step"] for line in metrics(tmp_path / "out") if "val_loss" in line] == [4, 8]


def test_a_run_whose_last_evaluation_a_signal_interrupted_makes_up_for_it(text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", keep_best=True)
    stopped = run(settings, wrapped(tmp_path, at_read(11, "signal.raise_signal(signal.SIGTERM)")))  # 8 + 2 to evaluate
    assert "step 00008 | interrupted | saved" in stopped.stdout, stopped.stdout
    resumed = run(settings).stdout
    assert "step 00008 | val loss" in resumed and "step_000008, the best so far" in resumed, resumed
    assert "next: python sample.py" in resumed and "nothing left to train" not in resumed
    assert "nothing left to train" in run(settings).stdout


def test_invalid_data_before_the_first_step_ends_the_run_with_code_1(train, capsys, monkeypatch):
    monkeypatch.setattr(Blocks, "read", mock.Mock(side_effect=ValueError("val.bin holds token 999: prepare it again")))
    message = error_of(train, capsys, init_from="scratch", eval_only=True)
    assert "rank 0: val.bin holds token 999: prepare it again\n" in message


def test_second_ctrl_c_ends_the_run_at_once_other_signals_do_not(monkeypatch):
    ended = []  # exit codes
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = Signals()
    signal.raise_signal(signal.SIGINT)
    assert ended == [130], "before listen() there is nothing to save"
    ended.clear()
    signals.listen()
    assert not signals.received_anywhere() and signals.exit_code == 0
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        signal.raise_signal(number)
    assert not ended and signals.received_anywhere()
    assert signals.exit_code == 128 + signal.SIGUSR1
    with monkeypatch.context() as under_torchrun:
        under_torchrun.setenv("RANK", "0")
        signal.raise_signal(signal.SIGINT)
        assert not ended, "torchrun sends it a second time"
    signal.raise_signal(signal.SIGINT)
    assert ended == [130]


def test_a_signal_to_one_rank_at_the_end_is_the_exit_code_of_all(tmp_path):
    """It came after the ranks asked each other for the last time."""
    script = tmp_path / "end.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\nfrom runtime import distributed\n"
        "distributed.init_distributed('cpu', 60.0)\ndistributed.end_together(143 * (os.environ['RANK'] == '1'))"
    )
    both = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [start({}, script, environment=both | dict(RANK=rank, LOCAL_RANK=rank)) for rank in "01"]
    assert [rank.wait(60) for rank in ranks] == [143, 143]


def test_ignored_sigint_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Signals().listen()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_message_that_an_ascii_log_cannot_hold_does_not_end_the_run(monkeypatch):
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log, encoding="ascii"))
    say("data in Übung")
    say("step 1")
    assert log.getvalue() == b"step 1\n"
