"""Input of data/text: text and JSON, compressed or not, from files, folders and pipes, with broken rows."""

import bz2
import errno
import functools
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pytest

from data.rows import is_json
from data.text import prepare as text
from tests.datasets import LFS_POINTER, contents, texts_of
from tests.runs import ROOT

zstd = functools.partial(pyarrow.compress, codec="zstd", asbytes=True)
TEXTS = [f"row {i} é" for i in range(40)]
ROWS = [{"text": row} for row in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def read(tmp_path):
    """read(files, named, **options) writes files, {name: content}, and returns the texts of the dataset prepared from
    the named ones, or from their folder.
    """

    def read(files, named=(), **options):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        inputs = [tmp_path / name for name in named] or [tmp_path]
        text.prepare(inputs, tmp_path / ".out", **options)
        return texts_of(tmp_path / ".out")

    return read


FORMS = {
    "a.jsonl": LINES,
    "A.JSONL": b"\xef\xbb\xbf" + LINES,  # with a byte order mark
    "b.jsonl": b"\xef\xbb\xbf\r\n" + LINES.replace(b"\n", b"\r\n"),
    "a.jsonl.gz": gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]),
    "a.jsonl.zst": zstd(LINES[:100]) + zstd(LINES[100:]),
    "a.jsonl.bz2": bz2.compress(LINES),
    "a.ndjson.xz": lzma.compress(LINES),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "lines.json": LINES,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_files_name_tells_its_format_and_compression(name, read):
    assert read({name: FORMS[name]}) == sorted(TEXTS)


@pytest.mark.parametrize("name, format", [("a.jsonl", "jsonl"), ("array.json", "json")])
def test_a_slow_pipe_is_read_as_a_file_is(tmp_path, name, format):
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for part in (FORMS[name][:3], FORMS[name][3:]):
                pipe.write(part)
                time.sleep(0.05)

    thread = threading.Thread(target=write)
    thread.start()
    text.prepare([Path(f"/dev/fd/{reading}")], tmp_path, format=format)
    thread.join()
    os.close(reading)
    assert texts_of(tmp_path) == sorted(TEXTS)


def test_standard_input_needs_a_format(tmp_path):
    assert is_json(Path("/dev/shm/a.jsonl")), "a file, not a pipe"
    command = [sys.executable, ROOT / "data/text/prepare.py", "--out", tmp_path / "out", "--input", "-"]
    lines = "one\n<|endoftext|>\ntwo\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "/dev/stdin is a pipe" in done.stderr and "--format" in done.stderr, done.stderr
    done = subprocess.run([*command, "--format=text"], input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert texts_of(tmp_path / "out") == ["one\n", "two\n"]


def test_files_and_folders_are_read_together_without_hidden_files_links_to_folders_and_pipes(tmp_path, read):
    deep = tmp_path / "deep"
    (deep / ".hidden").mkdir(parents=True)
    (deep / ".hidden" / "secret.txt").write_text("hidden")
    os.mkfifo(deep / "pipe")
    (deep / "loop").symlink_to(".")
    (deep / "dangling.md").symlink_to("nowhere")
    (deep / "link.md").symlink_to(tmp_path / "named.txt")
    for i in range(30):
        (deep / f"{i}.md").write_bytes(b"file %d\r\n" % i)
    rows = [json.dumps({"body": body, "id": i}) for i, body in enumerate(["line 1\r\nof jsonl", "", "\ud83e!"])]
    files = {"some.jsonl": "\n\n".join(rows), "named.txt": "\ufeffnamed\n"}  # with a byte order mark
    found = read(files, ["some.jsonl", "deep"], field="body", val_fraction=0.2)
    assert found == sorted([*(f"file {i}\r\n" for i in range(30)), "line 1\r\nof jsonl", "named\n", "?!"])


def test_a_folder_that_cannot_be_listed_ends_the_preparation_or_is_counted(read, tmp_path, monkeypatch, capsys):
    for name in ("open", "locked", ".hidden"):
        (tmp_path / name).mkdir()
    files = {"a.txt": "one", "open/b.txt": "two", "locked/c.txt": "three", ".hidden/d.txt": "four"}
    list_folder = os.scandir

    def scandir(path):  # chmod does not stop root
        if Path(path).name in ("locked", ".hidden"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"Permission denied: .*locked'\. --errors skip leaves it out"):
        read(files)
    assert read(files, errors="skip") == ["one", "two"]
    printed = capsys.readouterr().out
    assert f"left out by --errors skip: 1, the first: [Errno 13] Permission denied: '{tmp_path}/locked'" in printed


def test_json_is_text_if_that_is_stated(read):
    files = {"package.json": '{"name": "x"}\n', "a.jsonl": '{"a": 1}\n'}
    assert read(files, format="text") == sorted(files.values())
    with pytest.raises(ValueError, match=r"package\.json:1 has no field 'text' but 'name': set --field, or --format"):
        read(files, ["package.json"])


BROKEN = {
    "null": "is of type NoneType, expected an object with the field 'text'",
    "{broken": "is not a line of JSON: Expecting property name enclosed in double quotes",
    "9" * 5000: "is not a line of JSON: ",
    '{"text": null}': "has 'text' of type NoneType, expected a string",
    '{"title": 1, "messages": []}': "has no field 'text' but 'title', 'messages': set --field",
    '{"text": "\xff"}': "is not a line of JSON: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row[:20])
def test_a_broken_row_ends_the_preparation_or_is_counted(row, read, tmp_path, capsys):
    broken = row.encode("latin-1") + b"\n"
    files = {"a.jsonl": LINES + broken + LINES.replace(b"row", b"line") + broken}
    with pytest.raises(ValueError, match=rf"a\.jsonl:41 {BROKEN[row]}.*\. --errors skip leaves it out"):
        read(files)
    assert not contents(tmp_path / ".out")
    with pytest.raises(ValueError, match="0 training and 0 validation documents"):
        read({"b.jsonl": broken}, ["b.jsonl"], errors="skip")
    assert f"left out by --errors skip: 1, the first: {tmp_path}/b.jsonl:1 " in capsys.readouterr().out
    assert len(read(files, ["a.jsonl"], errors="skip")) == 80
    printed = capsys.readouterr().out
    assert f"left out by --errors skip: 2, the first: {tmp_path}/a.jsonl:41 " in printed
    assert f"\n{tmp_path}/a.jsonl:82 " in printed


NOT_TEXT = {
    "latin1.txt": (b"caf\xe9", "cannot be read, .*utf-8"),
    "utf16.txt": ("text".encode("utf-16-le"), "is binary or UTF-16"),
    "pointer.txt": (LFS_POINTER, "git lfs pull"),
    "a.zst": (b"text", "cannot be read"),
    "short.gz": (b"\x1f\x8b", "cannot be read"),
    "broken.json": (b"[{}]]", "cannot be read"),
    "arrays.jsonl": (b"[1]\n[2]\n", "has to be one array of objects: Extra data: line 2"),
}


def test_what_is_not_text_ends_the_preparation_or_is_left_out(read, capsys):
    for name, (content, message) in NOT_TEXT.items():
        with pytest.raises(ValueError, match=f"{name} {message}|{name} .*{message}"):
            read({name: content}, [name])
    assert read({"one.txt": "one", "two.txt": "two"}, errors="skip") == ["one", "two"]
    assert f"left out by --errors skip: {len(NOT_TEXT)}, the first: " in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Documents of a text file


def test_end_of_text_lines_end_documents(read):
    stories = [f"story {i}\n\nmore\n" for i in range(30)]
    assert read({"a.txt": "<|endoftext|>\n".join(stories) + "<|endoftext|>"}) == sorted(stories)
    files = {"b.txt": "<|endoftext|> inside\n" * 3 + "<|end_of_text|>\r\n<div>x</s>"}
    assert read(files, ["b.txt"]) == sorted(["<|endoftext|> inside\n" * 3, "<div>x</s>"])


@pytest.mark.parametrize("name, form", [("a.txt", bytes), ("a.txt.gz", gzip.compress)])
def test_a_document_longer_than_a_chunk_stays_whole(read, monkeypatch, name, form):
    monkeypatch.setattr(text, "HEAD_BYTES", 40_000)
    lines = [f"line {i} of a long document\n" for i in range(1000)]
    documents = ["".join(lines), "short\n", "".join(lines[::-1]), "x" * 50_000 + "\n"]  # the first line is far behind
    assert read({name: form("<|endoftext|>\n".join(documents).encode())}) == sorted(documents)


@pytest.mark.parametrize("position", [0, 1, 13])
def test_an_end_of_text_line_split_over_two_reads_is_found(read, position):
    before = "a" * (2**20 - position - 1) + "\n"  # the line begins `position` characters before the end of a read
    assert read({"a.txt": f"first\n<|endoftext|>\n{before}<|endoftext|> \t\r\nlast\n"}) == sorted(
        ["first\n", before, "last\n"]
    )


def test_text_without_end_of_text_lines_is_cut_alike_whatever_its_length(read, monkeypatch):
    content = "".join(f"line {i}\n" for i in range(3000)) + "<|endoftext|> inside\n" + "z" * 9000
    whole = read({"a.txt": content})
    monkeypatch.setattr(text, "HEAD_BYTES", 3000)
    assert read({"a.txt": content}) == whole
    assert len(whole) > 3 and sum(map(len, whole)) == len(content)
    with pytest.raises(ValueError, match="more than 3,000 bytes before its first end-of-text line"):
        read({"a.txt": content + "\n<|endoftext|>\n"})


@pytest.mark.parametrize("suffix, compress", [(".zst", zstd), (".gz", gzip.compress), (".xz", lzma.compress),
                                              (".bz2", bz2.compress)])  # fmt: skip
def test_a_compressed_file_cut_off_is_one_error_never_a_whole_file(read, capsys, suffix, compress):
    whole = compress(LINES[:700]) + compress(LINES[700:])
    name = f"a.jsonl{suffix}"
    for n_bytes in (20, len(compress(LINES[:700])) + 7, len(whole) - 9, len(whole) - 1):
        with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix} cannot be read, .*: .*end"):
            read({name: whole[:n_bytes]})
    assert set(read({name: whole[:-9], "good.jsonl": LINES}, errors="skip")) == set(TEXTS)
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out
