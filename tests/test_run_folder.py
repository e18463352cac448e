"""The folder of a run: claimed, shared, listed."""

import errno
import fcntl
import shutil
from unittest import mock

import pytest
import torch

from runtime import checkpoint, run_folder
from tests.datasets import toy_dataset
from tests.runs import error_of, step_losses, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_machines_that_do_not_share_out_dir_are_refused_before_training(train_on_ranks, tmp_path):
    """Each would keep only its part of a checkpoint, and report it as saved."""
    for rank in range(2):
        (tmp_path / f"machine{rank}").mkdir()
    place = f"os.chdir({str(tmp_path)!r} + '/machine' + os.environ['RANK'])"
    script = wrapped(tmp_path, f"os.environ['LOCAL_WORLD_SIZE'] = '1'\n{place}")
    said = train_on_ranks(2, script, code=1, out_dir="out").stderr
    assert "out must be one folder that all machines share" in said, said
    assert not list(tmp_path.glob("machine*/out/step_*"))


@pytest.mark.parametrize("hidden", ["from the list", "altogether"])
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees_or_refuse(train_on_ranks, alone, tmp_path, hidden):
    """As if a network file system showed rank 1 a new folder late: no rank may take the newest one for damaged."""
    shutil.copytree(alone, tmp_path / "out")
    script = wrapped(
        tmp_path,
        "import pathlib\nis_dir, glob = pathlib.Path.is_dir, pathlib.Path.glob\n"
        "late = lambda path: os.environ['RANK'] == '1' and path.name == 'step_000020'\n"
        "pathlib.Path.glob = lambda self, pattern: [path for path in glob(self, pattern) if not late(path)]\n"
        + "pathlib.Path.is_dir = lambda self: is_dir(self) and not late(self)\n"
        * (hidden == "altogether"),
    )
    done = train_on_ranks(2, script, code=int(hidden == "altogether"), max_iters=21, lr_decay_iters=20)
    names = {path.name for path in (tmp_path / "out").glob("step_*")}
    if hidden == "altogether":
        assert "some machines do not see" in done.stderr and names == {"step_000010", "step_000020"}, done.stderr
    else:
        assert f"resumes   {tmp_path}/out/step_000020" in done.stdout and "step_000021" in names, done.stdout


def test_a_home_folder_is_found_and_a_checkpoint_is_no_folder_for_a_run(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train(out_dir="~/run")
    assert f"next: python sample.py --out_dir={tmp_path}/run" in capsys.readouterr().out
    message = error_of(train, capsys, out_dir=tmp_path / "run/step_000008")
    assert f"step_000008 is a checkpoint: --out_dir={tmp_path}/run resumes from the newest one there" in message


def test_a_run_has_its_folder_for_itself(train, tmp_path, capsys):
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text("{}")
    assert "published holds published weights, which" in error_of(train, capsys, out_dir=tmp_path / "published")
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is writing to" in error_of(train, capsys)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_lock_that_is_a_link_is_refused_and_left_alone(train, tmp_path, capsys, dangling):
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").symlink_to(victim)
    assert ".lock is a link" in error_of(train, capsys)
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_the_folder_of_a_run_may_be_a_link(train, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    train()
    assert run_folder.newest(tmp_path / "disk").name == "step_000008" and (tmp_path / "disk/metrics.jsonl").exists()


def test_a_relocated_checkpoint_is_left_alone(train, tmp_path, capsys):
    train()
    (tmp_path / "out/step_000004").rename(tmp_path / "kept")
    (tmp_path / "out/step_000004").symlink_to(tmp_path / "kept")
    train(max_iters=16, lr_decay_iters=8)
    said = capsys.readouterr()
    assert "NOT SAVED" not in said.out and not said.err, said
    assert {path.name for path in (tmp_path / "out").glob("step_*")} == {"step_000012", "step_000016"}
    assert checkpoint.load_model(tmp_path / "kept", "cpu", torch.float32)
    (tmp_path / "out/step_000016").rename(tmp_path / "gone")
    (tmp_path / "out/step_000016").symlink_to(tmp_path / "unmounted")
    train(max_iters=16, lr_decay_iters=8)
    assert "NOT SAVED" not in capsys.readouterr().out and not (tmp_path / "out/step_000016").is_symlink()


@pytest.mark.parametrize("file", ["out_dir", "dataset"])
def test_a_file_system_without_locks_gets_a_warning_and_training_continues(train, tmp_path, capsys, monkeypatch, file):
    no_locks = mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    if file == "out_dir":
        train()
        assert len(step_losses(tmp_path / "out")) == 8
    else:
        toy_dataset(tmp_path / "data", ["abc"], ["abc"])
    assert ".lock cannot be locked (Function not implemented)" in capsys.readouterr().err


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in ("step_999999", "step_1000000", "step_2000000.partial"):
        (tmp_path / step).mkdir()
    assert run_folder.newest(tmp_path).name == "step_1000000"


def test_an_impossible_folder_name_is_reported(train, tmp_path, capsys):
    assert "File name too long" in error_of(train, capsys, out_dir="o" * 300)
    message = error_of(train, capsys, init_from="meta-llama/" + "i" * 300)  # a name on Hugging Face's hub, and long
    assert "is not a folder: init_from is auto, " in message and "hf download NAME --local-dir FOLDER" in message
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "runs")
    message = error_of(train, capsys, out_dir=tmp_path / "link")
    assert message == f"cannot write to out_dir {tmp_path}/link: File exists\n"
