"""Files from strangers: what is read has a limit, what is written follows no links."""

import os

import pytest

from data.files import read_small
from tests.datasets import LFS_POINTER, documents_of, toy_dataset


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
def test_writing_a_dataset_never_follows_a_link_but_its_folder_may_be_one(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "strangers"
    folder.symlink_to(tmp_path / "disk")
    (folder / name).symlink_to(victim)
    if name in (".lock", "val.bin.partial"):
        with pytest.raises(OSError, match=name):
            toy_dataset(folder)
    else:
        toy_dataset(folder)
        assert documents_of(tmp_path / "disk", "val") == ["third"]
    assert victim.read_text() == "mine"
