"""Files from strangers: what is read has a limit, what is written follows no links."""

import os

import pytest

from data.files import open_to_write, read_small
from tests.datasets import documents_of, toy_dataset

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"


def test_a_small_file_is_read_and_a_large_one_a_pipe_a_device_or_an_lfs_pointer_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a.json")
    assert read_small(tmp_path / "a.json", 5) == read_small(tmp_path / "link", 5) == b"12345"
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"a\.json has more than 1,000,000 bytes"):
        read_small(tmp_path / "a.json", 1_000_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_small(tmp_path / name, 5)
    (tmp_path / "tokenizer.json").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match="git lfs pull"):
        read_small(tmp_path / "tokenizer.json", 1000)


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin.partial", ".lock"])
@pytest.mark.parametrize("dangling", [False, True])
def test_writing_a_dataset_never_follows_a_link_but_its_folder_may_be_one(tmp_path, name, dangling):
    victim = tmp_path / "victim"
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "strangers"
    folder.symlink_to(tmp_path / "disk")
    (folder / name).symlink_to(victim)
    if not dangling:
        victim.write_text("mine")
    if name == ".lock":
        with pytest.raises(OSError, match=r"\.lock is a link"):
            toy_dataset(folder)
    else:
        toy_dataset(folder)
        assert documents_of(tmp_path / "disk", "val") == ["third"]
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "mine"


@pytest.mark.parametrize("mode", ["w", "a", "wb", "a+"])
def test_open_to_write_opens_plain_files_as_open_does(tmp_path, mode):
    outcomes = []
    for opens in (open, open_to_write):
        path = tmp_path / opens.__name__
        path.write_text("before")
        with opens(path, mode) as file:
            file.write(b"after" if "b" in mode else "after")
        outcomes.append((path.read_text(), path.stat().st_mode))
    assert outcomes[0] == outcomes[1]
