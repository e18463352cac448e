"""Input of data/text: text and JSON, compressed or not, from files, folders and pipes, with broken rows."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data import rows
from data.rows import Bad, open_input, read_array, whole_text
from data.text import prepare as text
from tests.datasets import contents, texts_of
from tests.runs import ROOT

zstandard = pytest.importorskip("zstandard")
zstd = zstandard.compress
TEXTS = [f"row {i} é" for i in range(40)]
ROWS = [{"text": row} for row in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"


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


@pytest.mark.parametrize("name, format", [("a.jsonl", "jsonl"), ("array.json", "json"), ("lines.json", "json")])
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


def test_json_is_text_if_that_is_stated(read):
    files = {"package.json": '{\n "name": "x"\n}\n', "a.jsonl": '{"a": 1}\n'}
    assert read(files, format="text") == sorted(files.values())
    with pytest.raises(
        ValueError, match=r"package\.json\[0\] has no field 'text' but 'name': set --field, or --format"
    ):
        read(files, ["package.json"])


BROKEN = {
    "null": "is of type NoneType, expected an object with the field 'text'",
    "{broken": "is not JSON: Expecting property name enclosed in double quotes",
    "[" * 100_000: "is not JSON: .* a JSON array",
    "9" * 5000: "is not JSON: ",
    '{"text": null}': "has 'text' of type NoneType, expected a string",
    '{"title": 1, "messages": []}': "has no field 'text' but 'title', 'messages': set --field",
    '{"text": "\xff"}': "is not JSON: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row[:20])
def test_a_broken_row_ends_the_preparation_or_is_counted(row, read, tmp_path, capsys):
    broken = row.encode("latin-1") + b"\n"
    files = {"a.jsonl": LINES + broken + LINES.replace(b"row", b"line") + broken}
    with pytest.raises(ValueError, match=rf"a\.jsonl:41 {BROKEN[row]}.*\. --errors skip leaves it out"):
        read(files)
    assert not contents(tmp_path / ".out")
    assert len(read(files, errors="skip")) == 80
    assert f"left out by --errors skip: 2, the first: {tmp_path}/a.jsonl:41 " in capsys.readouterr().out


NOT_TEXT = {
    "latin1.txt": (b"caf\xe9", "is not UTF-8 text"),
    "utf16.txt": ("text".encode("utf-16"), "is binary or UTF-16"),
    "pointer.txt": (LFS_POINTER, "git lfs pull"),
    "pointer.jsonl": (LFS_POINTER, "git lfs pull"),
    "a.zst": (b"text", "is damaged"),
    "empty.gz": (b"", "is cut off"),
}


def test_what_is_not_text_ends_the_preparation_or_is_left_out(read, capsys):
    for name, (content, message) in NOT_TEXT.items():
        with pytest.raises(ValueError, match=f"{name} {message}|{name} .*{message}"):
            read({name: content}, [name])
    assert read({"one.txt": "one", "two.txt": "two"}, errors="skip") == ["one", "two"]
    assert f"left out by --errors skip: {len(NOT_TEXT)}, the first: " in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Arrays


VALUES = [{"text": 'a]}"\\', "n": -1.5e-7, "x": [[], {}, None, True]}, {}, {"é\U0001f999": ","}, {"": {"b": [1, 2]}}]


@pytest.mark.parametrize("indent", [None, 3])
@pytest.mark.parametrize("row_bytes", [80, 100, 2**25])
def test_an_array_is_read_element_by_element_as_json_reads_it_whole(monkeypatch, indent, row_bytes):
    monkeypatch.setattr(rows, "ROW_BYTES", row_bytes + 200 * bool(indent))
    content = json.dumps(VALUES * 3, indent=indent, ensure_ascii=False) + " \n"
    found = list(read_array(io.StringIO(content), Path("a.json"), Bad()))
    assert found == [(f"a.json[{i}]", value) for i, value in enumerate(json.loads(content))]


WRONG_ARRAYS = ["[{}", "[{},", "[{}]]", "[{}][{}]", "[{}: 1]", "[{}, " + "[" * 100_000, "{}]", "{} {"]


@pytest.mark.parametrize("content", WRONG_ARRAYS, ids=lambda content: content[:20])
@pytest.mark.parametrize("row_bytes", [20, 2**25])
def test_a_broken_array_is_a_sentence_that_says_where(monkeypatch, content, row_bytes):
    monkeypatch.setattr(rows, "ROW_BYTES", row_bytes)
    with pytest.raises(ValueError, match=r"a\.json(\[[01]\] is not JSON| goes on after)"):
        list(read_array(io.StringIO(content), Path("a.json"), Bad()))
    bad = Bad("skip")
    assert list(read_array(io.StringIO(content), Path("a.json"), bad)) == [("a.json[0]", {})]
    assert bad.n == 1


# ----------------------------------------------------------------------------------------------------------------------
# Documents of a text file


def test_end_of_text_lines_end_documents(read):
    stories = [f"story {i}\n\nmore\n" for i in range(30)]
    assert read({"a.txt": "<|endoftext|>\n".join(stories) + "<|endoftext|>"}) == sorted(stories)
    files = {"b.txt": "<|endoftext|> inside\n" * 3 + "<|end_of_text|>\r\n<div>x</s>"}
    assert read(files, ["b.txt"]) == sorted(["<|endoftext|> inside\n" * 3, "<div>x</s>"])


@pytest.mark.parametrize("limit", [2**25, 40_000])
@pytest.mark.parametrize("name, form", [("a.txt", bytes), ("a.txt.gz", gzip.compress)])
def test_a_document_longer_than_a_chunk_stays_whole(read, monkeypatch, limit, name, form):
    monkeypatch.setattr(text, "ROW_BYTES", limit)
    lines = [f"line {i} of a long document\n" for i in range(1000)]
    documents = ["".join(lines), "short\n", "".join(lines[::-1]), "x" * 30_000 + "\n"]  # the first line is far behind
    assert read({name: form("<|endoftext|>\n".join(documents).encode())}) == sorted(documents)


@pytest.mark.parametrize("position", [0, 1, 13, 20])
@pytest.mark.parametrize("reach", [2**20, 8000])
def test_an_end_of_text_line_split_over_two_reads_is_found(read, position, reach):
    before = "a" * (reach - position - 1) + "\n"  # the line begins `position` characters before the end of a read
    assert read({"a.txt": f"first\n<|endoftext|>\n{before}<|endoftext|> \t\r\nlast\n"}) == sorted(
        ["first\n", before, "last\n"]
    )


def test_text_without_end_of_text_lines_is_cut_alike_whatever_its_length(read, monkeypatch):
    content = "".join(f"line {i}\n" for i in range(3000)) + "<|endoftext|> inside\n" + "z" * 9000
    whole = read({"a.txt": content})
    monkeypatch.setattr(text, "ROW_BYTES", 3000)
    assert read({"a.txt": content}) == whole
    assert len(whole) > 3 and sum(map(len, whole)) == len(content)


# ----------------------------------------------------------------------------------------------------------------------
# Bounded memory


MEASURE = """
import re, sys
from pathlib import Path
from data.rows import Bad, whole_text
from data.text.prepare import read_documents
path = Path(sys.argv[1])
documents = lambda errors: read_documents([path], None, "text", 2**14, Bad(errors))
read = {
    "strict": lambda: list(documents("strict")),
    "skip": lambda: print(list(documents("skip"))),
    "whole": lambda: whole_text(path),
}
try:
    read[sys.argv[2]]()
except ValueError as error:
    print(error)
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""
MIB = 2**20
LONG = 400 * MIB  # characters of a line


def long_line(compress):
    """A line of LONG characters before a short one, in one frame of zstd or many of gzip."""
    end = b'"}\n{"text": "short"}\n'
    if compress is zstd:
        return zstd(b'{"text": "' + b"a" * LONG + end)
    return compress(b'{"text": "') + compress(b"a" * MIB) * (LONG // MIB) + compress(end)


def wide_window():
    """Little text whose frame asks for a window of 2 GiB."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=31, enable_ldm=False, strategy=1, hash_log=6, chain_log=6
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(b'{"text": "short"}\n' * 9) + compressor.flush()


def wide_dictionary():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**28}]
    return lzma.compress(b'{"text": "short"}\n', filters=filters)


BOMBS = {
    "a.jsonl.zst": (lambda: long_line(zstd), "strict", "a.jsonl.zst:1 is a line of more than 33,554,432 bytes"),
    "e.jsonl.gz": (lambda: long_line(gzip.compress), "skip", "['short']"),
    "f.json.zst": (
        lambda: zstd(b'[{"text": "' + b"a" * LONG + b'"}]'),
        "strict",
        "[0] is not JSON, ends early",
    ),
    "h.txt.zst": (lambda: zstd(b"a" * LONG), "whole", "h.txt.zst has more than 33,554,432 bytes of text"),
    "j.txt.zst": (lambda: zstd(b"a\n<|endoftext|>\n" + b"a" * LONG), "strict", "a document of more than 33,554,432"),
    "l.jsonl.zst": (wide_window, "strict", "l.jsonl.zst is damaged, or needs too much memory"),
    "m.jsonl.xz": (wide_dictionary, "strict", "m.jsonl.xz is damaged, or needs too much memory"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_stays_bounded_whatever_the_input(tmp_path, name):
    make, how, expected = BOMBS[name]
    (tmp_path / name).write_bytes(make())
    command = [sys.executable, "-c", MEASURE, tmp_path / name, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    message, peak = done.stdout.splitlines()[-2:]
    assert expected in message
    assert int(peak) < 400, "MiB"


def test_the_widest_windows_of_the_command_line_tools_are_read(tmp_path):
    content = b"text\n" * 10
    parameters = zstandard.ZstdCompressionParameters.from_level(22)  # 128 MiB
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    forms = {"a.zst": compressor.compress(content) + compressor.flush(), "a.xz": lzma.compress(content, preset=9)}
    for name, compressed in forms.items():
        (tmp_path / name).write_bytes(compressed)
        assert whole_text(tmp_path / name).encode() == content


# ----------------------------------------------------------------------------------------------------------------------
# Compressed files, whole and damaged


def content_of(path, compressed):
    path.write_bytes(compressed)
    with open_input(path) as file:
        return file.read()


COMPRESS = {"a.zst": zstd, "a.gz": gzip.compress, "a.xz": lzma.compress, "a.bz2": bz2.compress}


@pytest.mark.parametrize("name", COMPRESS)
def test_a_file_cut_off_or_damaged_anywhere_is_never_taken_for_a_whole_one(tmp_path, name):
    compress = COMPRESS[name]
    first = random.Random(0).randbytes(3000)
    second = b"second" * 1000
    whole = compress(first) + compress(second)
    assert content_of(tmp_path / name, whole) == first + second
    for size in {0, 7, 20, len(whole) // 2, len(whole) - 30, *range(len(whole) - 12, len(whole))}:
        with pytest.raises(ValueError, match="cut off"):
            content_of(tmp_path / name, whole[:size])
    with pytest.raises(ValueError, match="damaged"):  # where the second frame begins
        content_of(tmp_path / name, compress(first) + b"X" + compress(second)[1:])


def test_the_rows_before_the_end_of_a_file_cut_off_are_counted_as_one_error(read, capsys):
    content = zstd(LINES)[:-9]
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is cut off"):
        read({"a.jsonl.zst": content})
    assert read({"a.jsonl.zst": content, "good.jsonl": LINES}, errors="skip")[-40:] == sorted(TEXTS)
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out


@pytest.mark.parametrize("n_zeros", [4, 2048])
def test_zeros_between_the_streams_of_an_xz_file_and_at_its_end_are_padding(tmp_path, n_zeros):
    zeros = bytes(n_zeros)
    padded = lzma.compress(LINES) + zeros + lzma.compress(LINES) + zeros
    assert content_of(tmp_path / "a.xz", padded) == LINES + LINES
