"""offload_dir: the optimizer's state in a file on a drive. Always the same numbers as in CPU memory."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import disk, runner, timing
from model import Llama, LlamaConfig
from optimizers import on_disk
from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit
from optimizers.on_disk import OnDisk
from optimizers.state_file import StateFile, page_aligned
from runtime import memory_advice
from runtime.checkpoint import newest
from runtime.memory import RunShape, state_bytes
from tests.runs import SHORT, SMALL, error_of, finish, losses, run, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
IN_8_BITS = dict(n_embd=256, ffn_dim=1536, optimizer_bits=8)


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """A folder, with pieces so small that each matrix has several."""
    monkeypatch.setattr(on_disk, "PIECE", 2**10)
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def weights(checkpoint):
    """The bytes of a checkpoint's tensors."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.fixture
def same_as_in_memory(train, tmp_path, drive):
    """same_as_in_memory(**settings) trains with the state in memory and on the drive: equal losses and checkpoints."""

    def compare(**settings):
        train(**settings, out_dir=tmp_path / "memory")
        optimizer = train(**settings, offload_dir=drive)["optimizer"]
        assert isinstance(optimizer, OnDisk) and len(optimizer.pieces) > 1.2 * len(optimizer.parameters), "cut by rows"
        assert losses(tmp_path / "out") == losses(tmp_path / "memory")
        for checkpoint in (tmp_path / "memory").glob("step_*"):
            assert weights(tmp_path / "out" / checkpoint.name) == weights(checkpoint), checkpoint.name
        return optimizer

    return compare


# ----------------------------------------------------------------------------------------------------------------------
# The same run


@pytest.mark.parametrize("settings", [
    dict(offload="optimizer", dtype="float16"),
    dict(offload="all", gradient_accumulation_steps=2, dtype="bfloat16", tie_embeddings=False),
    dict(offload="all", dtype="bfloat16") | IN_8_BITS,
], ids=str)  # fmt: skip
def test_losses_and_checkpoints_equal_those_in_cpu_memory_bit_for_bit(same_as_in_memory, settings):
    same_as_in_memory(**settings)


def test_two_ranks_each_have_a_file(text_data, tmp_path, drive):
    settings = SMALL | SHORT | dict(dataset=text_data, gradient_accumulation_steps=2)
    settings |= dict(offload="optimizer", n_embd=24, ffn_dim=19)
    for name, more in (("memory", {}), ("disk", {"offload_dir": drive})):
        done = finish(settings | more | {"out_dir": tmp_path / name}, ranks=2)
    assert losses(tmp_path / "disk") == losses(tmp_path / "memory")
    assert weights(tmp_path / "disk/step_000008") == weights(tmp_path / "memory/step_000008")
    assert "of each rank's state in" in done.stdout and not list(drive.iterdir())


@pytest.mark.parametrize("settings", [dict(dtype="bfloat16"), IN_8_BITS], ids=str)
def test_resume_repeats_the_run_bit_for_bit_and_may_move_between_memory_and_disk(train, tmp_path, drive, settings):
    settings = dict(offload="optimizer", max_iters=12, keep_last=5) | settings
    train(**settings, offload_dir=drive)
    whole = losses(tmp_path / "out")
    for more in (dict(offload_dir=drive), {}, dict(offload_dir=drive)):
        shutil.rmtree(tmp_path / "out/step_000012")
        shutil.rmtree(tmp_path / "out/step_000008", ignore_errors=not more)
        train(**settings, **more)
        assert losses(tmp_path / "out") == whole


# ----------------------------------------------------------------------------------------------------------------------
# What may happen to a run


@pytest.mark.parametrize("fault, code, said", [
    ("os.kill(os.getpid(), 9)", -signal.SIGKILL, "step 00005/8"),
    ("raise OSError(28, 'No space left on device')", 1,
     "No space left on device"),
], ids=["killed", "full"])  # fmt: skip
def test_after_a_fault_in_the_middle_of_an_update_a_run_resumes_from_the_checkpoint(
    train, text_data, tmp_path, drive, fault, code, said
):
    settings = SMALL | SHORT | dict(dataset=text_data, offload="optimizer", dtype="bfloat16", offload_dir=drive)
    script = wrapped(
        tmp_path,
        "true, written = os.pwritev, []\n"
        "def pwritev(fd, *args):\n"
        f"    written.append(os.readlink('/proc/self/fd/' + str(fd)).startswith({str(drive)!r}))\n"
        f"    if sum(written) >= 5 * 42 + 20: {fault}\n"  # in step 6
        "    return true(fd, *args)\n"
        "os.pwritev = pwritev",
    )
    done = run(settings | {"out_dir": tmp_path / "out"}, script)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert not list(drive.iterdir()), "the file of a run that ended is left over"
    assert newest(tmp_path / "out").name == "step_000004", "another was saved after the drive had failed"
    for name in ("out", "whole"):
        train(**settings | {"out_dir": tmp_path / name})
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_slow_drive_changes_no_number(same_as_in_memory, monkeypatch):
    """Reads and writes that finish in another order than they started."""
    move = StateFile._move
    turns = iter(range(10**9))
    monkeypatch.setattr(StateFile, "_move", lambda *args: (time.sleep(next(turns) * 7 % 5 / 2000), move(*args)))
    write = StateFile.write
    let_go = StateFile.let_go
    emptied = []
    monkeypatch.setattr(StateFile, "write", lambda *args: (time.sleep(0.03), write(*args)))  # longer than a forward
    monkeypatch.setattr(StateFile, "let_go", lambda self: emptied.append(1) or let_go(self))
    optimizer = same_as_in_memory(offload="all", dtype="bfloat16", max_iters=3, eval_interval=2)
    assert not optimizer.moving, "the last checkpoint was written before the file was"
    once_for_each_master = len(optimizer.masters)
    assert len(emptied) == once_for_each_master + 2, "before the first update, and after the checkpoint in the middle"


# ----------------------------------------------------------------------------------------------------------------------
# The file


def test_a_file_system_without_direct_io_is_refused(drive, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", mock.Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    with pytest.raises(OSError, match="its file system has no direct I/O"):
        StateFile(drive, 2**16)


def test_new_masters_do_not_stay_in_memory(drive):
    model = Llama(LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=256, ffn_dim=512, vocab_size=512, block_size=8))
    model.init_weights(1)
    file = StateFile(drive, 2**24)
    optimizer = OnDisk(model.bfloat16(), AdamW(), file=file)
    assert resident_bytes(file) == 0
    assert all(torch.equal(optimizer.masters[name], p.float()) for name, p in model.named_parameters())
    assert resident_bytes(file) >= sum(4 * p.numel() for p in model.parameters())


def resident_bytes(file):
    """Bytes of the file's mapping that are in memory, according to Linux."""
    mappings = Path("/proc/self/smaps").read_text()
    of_file = mappings[mappings.index(f"\n{file.bytes.data_ptr():x}-") :]
    return 1024 * int(re.search(r"Rss: +(\d+) kB", of_file)[1])


def test_tensors_and_transfers_see_the_same_bytes(drive):
    file = StateFile(drive, 2**16)
    beside = file.zeros((3, 5), torch.bfloat16)
    x = file.zeros((300, 1000), torch.float32)  # more than is reserved
    assert file.holds(x) and not file.holds(torch.zeros(3)) and not x.any()
    memory = page_aligned(x.nbytes)
    values = memory[: x.nbytes].view(torch.float32).view(x.shape)
    for i in range(3):
        x.copy_(torch.randn(x.shape))
        expected = x.clone()
        file.let_go()
        file.read(x, memory)
        assert torch.equal(values, expected), "a transfer does not see what a tensor was given"
        values.mul_(2)
        file.write(x, memory)
        assert torch.equal(x, 2 * expected), f"a tensor does not see what was transferred, in round {i}"
        rows = x[256:]  # 4 bytes x 1000 x 256 is a multiple of 4096
        file.let_go()
        file.read(rows, memory)
        assert torch.equal(memory[: rows.nbytes].view(torch.float32).view(rows.shape), 2 * expected[256:])
    assert not beside.any() and file.zeros((0, 4), torch.float32).shape == (0, 4)


# ----------------------------------------------------------------------------------------------------------------------
# Before the run


def test_impossible_offload_dirs_are_refused(train, tmp_path, drive, capsys, monkeypatch):
    def message(**settings):
        return error_of(train, capsys, offload="all", **settings)

    assert "nowhere cannot take the state" in message(offload_dir=tmp_path / "nowhere")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    assert "cannot take the state, 0.0 GiB: No space left on device" in message(offload_dir=drive)
    assert not (tmp_path / "out/metrics.jsonl").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Estimates and speed


@pytest.mark.parametrize("rule", [AdamW(), AdamW8bit()], ids=lambda rule: type(rule).__name__)
def test_the_file_and_its_buffers_are_what_the_estimate_counts(tmp_path, rule):
    config = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=256, ffn_dim=512, vocab_size=40_000, block_size=8)
    run = RunShape(1, offload="all", rule=rule, offload_dir="there")
    model = Llama(config).bfloat16()
    optimizer = OnDisk(model, rule, file=StateFile(tmp_path, 2**27))
    expected = memory_advice.disk_bytes(config, run)
    assert expected == sum(state_bytes(name, p, optimizer.rows[name], run) for name, p in optimizer.parameters.items())
    assert expected <= optimizer.file.end <= expected + 4096 * 5 * len(optimizer.parameters)
    parts = {part.name: part.bytes for part in memory_advice.cpu_parts(config, run)}
    assert parts.keys() == {"buffers of offload_dir", "gradients", "compute weights"}
    assert sum(map(len, optimizer.buffers)) == pytest.approx(parts["buffers of offload_dir"], rel=0.02)


def test_the_drive_benchmark_counts_the_bytes_of_an_update(drive, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk, "UPDATES", 1)
    monkeypatch.setattr(runner, "call", lambda function: timing.card())  # a process of its own takes seconds to start
    small = {name: value for name, value in SMALL.items() if name.startswith("n_") or name == "ffn_dim"}
    flags = [f"--{name}={value}" for name, value in (small | {"vocab_size": 257}).items()]
    disk.main([f"--offload_dir={drive}", f"--out={tmp_path / 'disk.json'}", "--", *flags])
    (result,) = json.loads((tmp_path / "disk.json").read_text())["drives"]
    assert f"{result['ratio']:.2f} |" in capsys.readouterr().out
    assert 24 * result["n_params"] <= result["bytes"] <= 24 * result["n_params"] + 2 * 4096 * 3 * 20
    assert result["ratio"] > 0 and result["plain_threads"] == disk.PLAIN_THREADS
