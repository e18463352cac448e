"""Files from strangers: what is read has a limit, what is written follows no links."""

import os

import pytest

from data.files import read_small


def test_a_small_file_is_read_and_a_large_one_a_pipe_a_device_or_a_folder_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a.json")
    assert read_small(tmp_path / "a.json", 5) == read_small(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match=r"a\.json has more than 4 bytes"):
        read_small(tmp_path / "a.json", 4)
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"a\.json has more than 1,000,000 bytes"):
        read_small(tmp_path / "a.json", 1_000_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros", "."):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_small(tmp_path / name, 5)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "missing", 5)


def test_a_git_lfs_pointer_is_not_read_as_the_file(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"
    (tmp_path / "tokenizer.json").write_bytes(pointer)
    with pytest.raises(ValueError, match="git lfs pull"):
        read_small(tmp_path / "tokenizer.json", 1000)
