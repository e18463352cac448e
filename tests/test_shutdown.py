"""Signals, kills, hanging ranks, full disks: how a run reacts to them."""

import array
import fcntl
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
import torch.distributed as dist

from data.tokens import Tokens
from runtime import distributed, run_folder, watchdog
from runtime.shutdown import ShutdownHandler
from runtime.watchdog import _alive as alive
from tests.runs import (
    LONGER,
    ROOT,
    SHORT,
    SMALL,
    assert_close,
    at_read,
    error_of,
    finish,
    hang,
    losses,
    metrics,
    run,
    run_torchrun,
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


@pytest.mark.parametrize(
    "where", ["model.Llama.forward", "model.Llama.init_weights", "optimizers.optimizer.Optimizer.__init__"]
)
def test_out_of_memory_error_names_the_three_settings_that_save_most(text_data, tmp_path, where):
    script = wrapped(
        tmp_path,
        "import model, optimizers.optimizer\n"
        "def full(*args, **options): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        f"{where} = full",
    )
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", activation_checkpointing="selective")
    done = run(settings, script)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    doing = {"forward": "step 1: .*", "init_weights": "building the model", "__init__": "allocating"}
    assert re.search(rf"rank 0, {doing[where.rpartition('.')[2]]}: out of memory", done.stderr), done.stderr
    helpful = re.findall(r"^  --(\w+)=\S+.*about [\d.]+ GiB instead of [\d.]+", done.stderr, re.MULTILINE)
    assert len(helpful) == 3 and "offload" in helpful, done.stderr


def test_a_bug_that_resembles_a_lost_rank_keeps_its_traceback(text_data, tmp_path):
    script = wrapped(
        tmp_path, "import model\ndef fail(*_): raise RuntimeError('Timed out')\nmodel.Llama.forward = fail"
    )
    done = run(SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out"), script)
    assert done.returncode == 1 and "Traceback" in done.stderr and "RuntimeError: Timed out" in done.stderr, done.stderr


def test_watchdog_outlives_slow_answers_of_the_store_and_ends_with_it(monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT", 0.001)
    for outcomes, looks in (("slow ok slow slow ok over", 6), ("ok slow slow slow ok", 4)):
        watch, looked, rest = watchdog.Watchdog(timeout=10), [], iter(outcomes.split())
        watch.store = mock.Mock(**{"get.return_value": b"machine 1"})

        def look(processes, watch=watch, looked=looked, rest=rest):
            looked.append(next(rest))
            if looked[-1] == "slow":
                raise dist.DistStoreError("it took too long")
            if looked[-1] == "over":
                watch.stop()

        monkeypatch.setattr(watch, "_look", look)
        watch._watch()
        assert len(looked) == looks, f"{outcomes}: {looked}"


@pytest.mark.parametrize("local_rank, ends, signals", [(0, [0], 1), (1, [0, 1], 0), (1, [0, 0], 1)])
def test_local_rank_0_is_the_first_to_end_a_run_without_its_torchrun(monkeypatch, local_rank, ends, signals):
    """The other ranks act only if the run has not ended a while later."""
    monkeypatch.setattr(watchdog, "local_rank", local_rank)
    monkeypatch.setattr(os, "kill", kill := mock.Mock())
    watch = watchdog.Watchdog(timeout=10)
    watch.launcher, watch.over = 0, mock.Mock(**{"wait.side_effect": ends})
    watch._watch()
    assert kill.mock_calls == [mock.call(os.getpid(), signal.SIGTERM)] * signals


def test_watchdog_names_the_rank_that_died_first_or_is_silent_but_none_while_it_saves(monkeypatch):
    watch, said, gone = watchdog.Watchdog(timeout=0), [], [subprocess.Popen("true") for _ in range(2)]
    monkeypatch.setattr(watchdog, "world_size", 4)
    monkeypatch.setattr(watchdog, "BEAT", 0.001)
    monkeypatch.setattr(watchdog, "GRACE", 1000)
    monkeypatch.setattr(watch, "_end", said.append)
    watch.store, watch.lost = dist.HashStore(), {3: time.monotonic() - 1}
    for other in range(1, 4):
        watch.store.set(f"at_{other}", f"{other} 1 step {other}: update")
    gone[0].wait()
    os.waitid(os.P_PID, gone[1].pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    here, other_machine = watchdog._machine(), [f"elsewhere {gone[0].pid}".split()]
    processes = [[here, str(os.getpid())], *other_machine, [here, str(gone[1].pid)], [here, str(gone[0].pid)]]
    watch.pause("saving")
    watch._look(processes)
    assert not said and watch.lost.keys() == {2, 3}, "within GRACE they are noted, also a zombie; nobody hangs"
    monkeypatch.setattr(watchdog, "GRACE", 0)
    watch._look(processes)
    watch.lost.clear()
    watch.progress("step 4: update")
    watch._look(processes[:2] * 2)
    assert said == [
        "rank 3 has ended, last at step 3: update: see its output",
        "rank 0, step 4: update, has waited for 0 seconds: rank 1 no longer answers; it was at step 1: update",
    ]


def test_a_save_may_take_longer_than_the_timeout(train, monkeypatch):
    paused, pause = [], watchdog.Watchdog.pause
    monkeypatch.setattr(watchdog.Watchdog, "pause", lambda self, doing: paused.append(doing) or pause(self, doing))
    train()
    assert paused == ["step 4: saving", "step 8: saving", "ending"]


@pytest.mark.parametrize("n_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_run_repeats_losses_bit_for_bit(train, text_data, tmp_path, n_kills):
    """kill -9 at random moments, many of them during a save: there is one after every step."""
    settings = SMALL | SHORT | dict(dataset=text_data, max_iters=10 * n_kills, eval_interval=1, eval_iters=1)
    train(**settings, out_dir=tmp_path / "whole")
    rng, partial = random.Random(0), 0
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


def noting_its_pid(folder, before):
    """A script for torchrun in which each rank leaves a file named after its process id."""
    return wrapped(folder, f"open(f'{folder}/rank{{os.getpid()}}', 'w').close()\n{before}")


def ranks_in(folder):
    return [int(path.name[4:]) for path in folder.glob("rank*")]


@pytest.mark.parametrize("restarts", [0, 1])
def test_killed_rank_ends_or_restarts_all_ranks(text_data, alone, tmp_path, restarts):
    """Without restarts all processes end, and a run on one rank resumes; with a restart torchrun resumes by itself."""
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", init_from=["auto", "scratch"][restarts])
    kill = at_read(30, "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), signal.SIGKILL)", "1")
    done = run_torchrun(2, settings, noting_its_pid(tmp_path, kill), [f"--max-restarts={restarts}"])
    pids = ranks_in(tmp_path)
    assert len(pids) == 2 + 2 * restarts and not any(map(alive, pids)), "a rank was left behind"
    assert done.returncode == (0 if restarts else 1), done.stderr
    assert re.search(r"rank 0, step \d+: .*, lost another rank", done.stderr), done.stderr
    assert 'train.py", line' not in done.stderr, done.stderr
    if not restarts:
        finish(settings)
    assert_close(step_losses(alone), step_losses(tmp_path / "out"), 1e-5)


def test_ranks_save_and_end_when_torchrun_dies(text_data, tmp_path):
    """Rank 1 notices it and says so: rank 0 has not looked yet."""
    blind = "import runtime.watchdog as m\nm.GRACE, m.BEAT = 0.1, 0.1 if os.environ['RANK'] == '1' else 1000"
    script = noting_its_pid(tmp_path, blind)
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=10**6, eval_interval=10**5)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(torchrun(2, settings, script), cwd=ROOT, stdout=log, stderr=log)
    wait_until(lambda: "step 00015/" in (tmp_path / "log").read_text(), "it does not begin")
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, ranks_in(tmp_path))), "a rank was left behind")
    said = (tmp_path / "log").read_text()
    assert said.count("rank 1: torchrun has gone\n") == said.count("torchrun has gone") == 1, said
    assert said.count("rank 1: SIGTERM: stopping after this step\n") == said.count("SIGTERM") == 1, said
    assert run_folder.newest(tmp_path / "out") is not None, said


@pytest.mark.parametrize("ranks, told", [("1", "rank 1: SIGTERM"), ("012", " SIGTERM"), ("12", "rank 1: SIGTERM")])
def test_the_lowest_rank_that_gets_a_signal_reports_it_once(train_on_ranks, tmp_path, ranks, told):
    script = wrapped(tmp_path, at_read(5, "signal.raise_signal(signal.SIGTERM)", ranks))
    done = train_on_ranks(3, script, code=128 + signal.SIGTERM, gradient_accumulation_steps=3)
    until_saved = done.stdout.partition("run the same command again")[0]
    assert until_saved.count("SIGTERM") == 1 and f"{told}: stopping after this step\n" in until_saved, done.stdout
    assert "step 00003 | interrupted | saved" in until_saved, done.stdout


@pytest.mark.parametrize("how, told", [
    pytest.param(
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "rank 0, step .*, has waited for 2 seconds: rank 1 no longer answers; it was at step ",
        marks=pytest.mark.slow,  # it has 30 seconds to end
    ),
    # Its watchdog is awake: it notices the hang itself, and may be the first to report it.
    (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(1000)",
        r"rank 1 (hangs|no longer answers; it was) at step \d+: reading data",
    ),
], ids=["stopped", "asleep"])  # fmt: skip
def test_hanging_rank_is_named_and_ends_the_run(train_on_ranks, tmp_path, how, told):
    script = wrapped(tmp_path, hang(tmp_path, how) + at_read(100, "hang()", "1"))
    said = train_on_ranks(2, script, code=1, max_iters=1000, eval_interval=1000, timeout=2).stderr
    assert re.search(told, said), said


@pytest.mark.parametrize("parts, n_reads, step", [(1, 5, 3), (2, 10, 3), (1, 9, 8)])
def test_invalid_token_stops_all_ranks_with_a_checkpoint(train_on_ranks, tmp_path, parts, n_reads, step):
    """On one of two ranks, in step 5, whose data is read two steps ahead, or in the evaluation after step 8. Once the
    token is repaired, the run equals one without the error.
    """
    bad = wrapped(tmp_path, at_read(n_reads, "raise ValueError('train.bin holds token 999')", "1"))
    settings = dict(max_iters=8, eval_interval=100, gradient_accumulation_steps=2 * parts)
    done = train_on_ranks(2, bad, code=1, **settings)
    assert done.stderr.count("rank 1: train.bin holds token 999") == 1, done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stderr, done.stderr
    assert "saved" in done.stdout and f"step_{step:06d}" in done.stdout, done.stdout
    assert not any("val_loss" in line for line in metrics(tmp_path / "out"))
    for out_dir in (tmp_path / "out", tmp_path / "whole"):
        train_on_ranks(2, out_dir=out_dir, **settings)
    assert_close(step_losses(tmp_path / "out"), step_losses(tmp_path / "whole"), 1e-6)


def test_broken_stdout_does_not_stop_training(text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out")
    with open("/dev/full", "w") as full:
        errors = start(settings, stdout=full).communicate()[1]
    assert "Traceback" not in errors, errors
    assert run_folder.newest(tmp_path / "out").name == "step_000008"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_during_evaluation_stops_it_and_saves(text_data, tmp_path, number):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", eval_iters=100)
    script = wrapped(tmp_path, at_read(8, f"signal.raise_signal({number:d})"))  # six of steps 1 to 6, two to evaluate
    done = run(settings, script)
    assert done.returncode == 128 + number and "step 00004 | interrupted | saved" in done.stdout, done.stdout
    assert not any("val_loss" in line for line in metrics(tmp_path / "out"))


@pytest.mark.parametrize("eval_only", [True, False])
def test_invalid_data_before_the_first_step_ends_the_run_with_code_1(train, capsys, monkeypatch, eval_only):
    monkeypatch.setattr(Tokens, "read", mock.Mock(side_effect=ValueError("val.bin holds token 999: prepare it again")))
    assert error_of(train, capsys, eval_only=eval_only) == "rank 0: val.bin holds token 999: prepare it again\n"


@pytest.fixture
def ended(monkeypatch):
    """The exit codes passed to os._exit."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_second_ctrl_c_ends_the_run_at_once_other_signals_do_not(monkeypatch, ended):
    shutdown = ShutdownHandler()
    signal.raise_signal(signal.SIGINT)
    assert ended == [130], "before listen() there is nothing to save"
    ended.clear()
    shutdown.listen()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        signal.raise_signal(number)
    assert not ended and shutdown.requested and shutdown.requested_anywhere("cpu")
    assert shutdown.exit_code == 128 + signal.SIGUSR1
    with monkeypatch.context() as under_torchrun:
        under_torchrun.setenv("RANK", "0")
        signal.raise_signal(signal.SIGINT)
        assert not ended, "torchrun sends it a second time"
    signal.raise_signal(signal.SIGINT)
    assert ended == [130]


def test_first_ctrl_c_after_invalid_data_does_not_interrupt_the_save(ended):
    shutdown = ShutdownHandler()
    shutdown.listen()
    with shutdown.on_data_error():
        raise ValueError("train.bin holds token 999")
    signal.raise_signal(signal.SIGINT)
    assert not ended and shutdown.exit_code == 1


def test_a_rank_that_cannot_print_its_last_message_still_exits(monkeypatch, ended):
    full = mock.Mock(**{"write.side_effect": OSError("No space left on device")})
    monkeypatch.setattr(sys, "stderr", full)
    watchdog.Watchdog(timeout=10)._end("rank 1 hangs")
    assert ended == [1]
    shutdown = ShutdownHandler()
    with shutdown.on_data_error():
        raise ValueError("train.bin holds token 999")
    with pytest.raises(SystemExit):
        distributed.stop("nobody can read this")
    assert shutdown.exit_code == 1 and full.write.call_count == 3


def test_ignored_sigint_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ShutdownHandler().listen()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
