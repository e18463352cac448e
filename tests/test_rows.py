"""Input of data/text: text and JSON, compressed, from folders and pipes, with broken rows; and what it rejects."""

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
import tracemalloc
from pathlib import Path

import pytest

from data import rows
from data.fineweb_edu import prepare as fineweb_edu
from data.rows import Bad, kind_of, open_input, read_array, text_size, whole_text
from data.text import prepare as text
from tests.datasets import contents, texts_of
from tests.runs import ROOT

zstandard = pytest.importorskip("zstandard")
zstd = zstandard.compress
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
    "a.JSONL": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstd(LINES[:100]) + zstd(LINES[100:]),  # two frames
    "a.ndjson.xz": lzma.compress(LINES),
    "a.json": LINES,
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "a.txt": LINES,  # one object per line, despite its name
    "marked.json": b"\xef\xbb\xbf" + LINES,  # with a byte order mark
    "spaced.json": b" \n" + LINES,
}


@pytest.mark.parametrize("name", FORMS)
def test_json_is_read_compressed_or_not_from_files_and_pipes(name, tmp_path, read):
    assert read({name: FORMS[name]}) == sorted(TEXTS)
    with subprocess.Popen(["cat", tmp_path / name], stdout=subprocess.PIPE) as cat:
        text.prepare([Path(f"/dev/fd/{cat.stdout.fileno()}")], tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


def test_files_folders_and_jsonl_are_read_together(tmp_path, read):
    deep = tmp_path / "deep"
    (deep / ".hidden").mkdir(parents=True)
    (deep / ".hidden" / "secret.txt").write_text("hidden")
    (deep / "picture.png").write_bytes(b"\x89PNG\0\0")
    for i in range(30):
        (deep / f"{i}.md").write_bytes(b"file %d\r\n" % i)
    rows = [json.dumps({"body": body, "id": i}) for i, body in enumerate(["line 1\r\nof jsonl", "", "\ud83e!"])]
    files = {"some.jsonl": "\n\n".join(rows), "named.txt": "\ufeffnamed\n"}  # with a byte order mark
    found = read(files, ["some.jsonl", "named.txt", "deep"], field="body", val_fraction=0.2)
    assert found == sorted([*(f"file {i}\r\n" for i in range(30)), "line 1\r\nof jsonl", "named\n", "?!"])


def test_text_that_begins_like_json_stays_text(read):
    files = {"a.txt": '[{"text": "in brackets"}]', "b.js": '{"a": 1,\n "b": 2}'}
    assert read(files, files) == sorted(files.values())


def test_the_size_of_a_text_is_known_unless_it_is_compressed_and_large_damaged_or_no_file(tmp_path):
    size, packed = len(LINES), gzip.compress(LINES)
    cases = (LINES, 0, size), (packed, size, size), (packed, size - 1, None), (packed[:-9], size, None)
    for content, most, found in cases:
        (tmp_path / "a").write_bytes(content)
        assert text_size(tmp_path / "a", most) == found
    assert text_size(tmp_path, size) is None


@pytest.mark.parametrize(
    "name, compress", [("a.jsonl.zst", zstd), ("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress)]
)
def test_files_cut_off_are_damaged_not_short(read, capsys, name, compress):
    content = compress(LINES)[:-9]
    with pytest.raises(ValueError, match=f"{name} is damaged, or cut off: "):
        read({name: content})
    assert read({name: content, "good.jsonl": LINES}, errors="skip")[-40:] == sorted(TEXTS)
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out


def test_json_in_folders_is_data_if_it_has_the_field_else_text(tmp_path, read, capsys):
    others = {"other.json": '{"name": "x"}\n{"name": "y"}\n', "package.json": '{\n "name": "x"\n}\n'}
    assert read({"rows.json": LINES} | others) == sorted([*TEXTS, *others.values()])
    files = f"2 ({tmp_path}/other.json, {tmp_path}/package.json)"
    assert f"JSON without the field 'text', or not in rows, read as text: {files}" in capsys.readouterr().out
    for name, message in (
        ("other.json", "other.json:1 is not an object with the field 'text' but one with 'name': set --field"),
        ("package.json", "package.json is JSON, but neither an array of objects nor one object per line"),
    ):
        with pytest.raises(ValueError, match=message):
            read({}, [name])
    with pytest.raises(ValueError, match="data.jsonl:1 is not an object with the field 'text'"):
        read({"data.jsonl": others["other.json"]})


BROKEN = {
    "null": "is not an object with the field 'text' but NoneType: set --field",
    "{broken": "is not JSON: Expecting property name enclosed in double quotes, at character 2",
    "[" * 100_000: "is not JSON: .* a JSON array",
    '{"text": null}': "has 'text' of type NoneType, expected a string",
    '{"title": 1, "messages": []}': "is not .* but one with 'title', 'messages': set --field.* data/chat/prepare.py",
    '{"text": "\xff"}': "is not UTF-8 text",
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
    with pytest.raises(ValueError, match=rf"b\.jsonl\.gz:1 {BROKEN[row]}"):  # recognized by its name
        read({"b.jsonl.gz": gzip.compress(broken + LINES)}, ["b.jsonl.gz"])


def test_a_file_that_is_not_utf8_ends_the_preparation_or_is_left_out_as_a_whole(tmp_path, read, capsys):
    files = {f"{i}.txt": f"text {i}" for i in range(50)}
    files |= {"0.txt": "\ufefftext 0", "latin1.txt": b"kept?\n" * 10_000 + b"caf\xe9"}  # far behind the first chunk
    with pytest.raises(ValueError, match=r"latin1\.txt is not UTF-8 text.*--errors skip"):
        read(files)
    assert read(files, errors="skip") == sorted(f"text {i}" for i in range(50))
    assert f"left out by --errors skip: 1, the first: {tmp_path}/latin1.txt is not UTF-8" in capsys.readouterr().out
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ValueError, match=f"--errors skip reads a file twice, but /dev/fd/{reading} is a pipe"):
        text.prepare([Path(f"/dev/fd/{reading}")], tmp_path / ".out", errors="skip")
    os.close(reading)


def test_end_of_text_lines_end_documents_and_other_special_tokens_stay_text_with_a_note(read, capsys):
    stories = [f"story {i}\n\nmore\n" for i in range(30)]
    assert read({"a.txt": "<|endoftext|>\n".join(stories) + "<|endoftext|>"}) == sorted(stories)
    assert "spelled out" not in capsys.readouterr().out
    files = {"b.txt": "<|endoftext|> inside\n" * 3 + "<|end_of_text|>\r\n<div>x</s>"}
    assert read(files, ["b.txt"]) == sorted(["<|endoftext|> inside\n" * 3, "<div>x</s>"])
    assert "special tokens spelled out, which stay text: <|endoftext|> (3). " in capsys.readouterr().out


def test_non_text_files_are_reported_with_their_command_and_skipped_in_folders(tmp_path, read, capsys):
    files = {"a.parquet": b"PAR1" + bytes(9), "b .txt": b"\xff\xfea\0", "c.bin": b"\0", "d.txt": "text", "e.txt": "t"}
    assert read(files) == ["t", "text"]
    said = f"binary or UTF-16 files left out: 3 ({tmp_path}/a.parquet, {tmp_path}/b .txt, ...)"
    assert said in capsys.readouterr().out
    for name, said in (
        ("a.parquet", "is parquet: python data/fineweb_edu/prepare.py --input"),
        ("b .txt", "is binary or UTF-16, with zero bytes: text is read as UTF-8"),
    ):
        with pytest.raises(ValueError, match=f"{name} {said}"):
            read({}, [name])
    with pytest.raises(ValueError, match="d.txt cannot be read as parquet.* data/text/prepare.py reads text and JSON"):
        fineweb_edu.prepare(tmp_path / "d.txt", tmp_path / ".out", tokenizer="bytes")


# ----------------------------------------------------------------------------------------------------------------------
# From slow pipes, in pieces of any size


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n_first", [1, 3, 30])
def test_a_slow_pipe_is_read_as_a_file_is(tmp_path, name, n_first):
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for part in (FORMS[name][:n_first], FORMS[name][n_first:]):
                pipe.write(part)
                time.sleep(0.05)

    thread = threading.Thread(target=write)
    thread.start()
    text.prepare([Path(f"/dev/fd/{reading}")], tmp_path)
    thread.join()
    os.close(reading)
    assert texts_of(tmp_path) == sorted(TEXTS)


VALUES = [{"text": 'a]}"\\', "n": -1.5e-7, "x": [[], {}, None, True]}, 12345, "é\U0001f999", [], {"": {"b": [1, 2]}}]


@pytest.mark.parametrize("indent", [None, 3])
@pytest.mark.parametrize("buffer", [1, 2, 5, 64])
def test_an_array_is_read_element_by_element_as_json_reads_it_whole(monkeypatch, indent, buffer):
    monkeypatch.setattr(rows, "BUFFER", buffer)
    content = json.dumps(VALUES * 3, indent=indent, ensure_ascii=False) + " \n"
    found = list(read_array(io.StringIO(content), Path("a.json"), Bad()))
    assert found == [(f"a.json[{i}]", value) for i, value in enumerate(json.loads(content))]


WRONG_ARRAYS = [
    "[{}",
    "[{},",
    "[{},]",
    "[{} {}]",
    "[{}]]",
    "[{}][{}]",
    "[{}}",
    "[{},,{}]",
    '[{}, "a',
    "[{}, nul]",
]
WRONG_ARRAYS += ["[{}, " + "[" * 100_000, "[{}, " + "9" * 5000 + "]", "[{}: 1]", "[{}, 'a']"]


@pytest.mark.parametrize("content", WRONG_ARRAYS, ids=lambda content: content[:20])
@pytest.mark.parametrize("buffer", [2, 2**16])
def test_a_broken_array_is_a_sentence_that_says_where(monkeypatch, content, buffer):
    with pytest.raises((ValueError, RecursionError)):
        json.loads(content)
    monkeypatch.setattr(rows, "BUFFER", buffer)
    with pytest.raises(ValueError, match=r"a\.json(\[[01]\] is not JSON| goes on after)"):
        list(read_array(io.StringIO(content), Path("a.json"), Bad()))
    bad = Bad("skip")
    assert list(read_array(io.StringIO(content), Path("a.json"), bad)) in ([], [("a.json[0]", {})])
    assert bad.n == 1


def test_json_nested_too_deeply_in_its_first_line_is_text_not_a_traceback():
    assert kind_of(b'{"a": ' + b"[" * 5000 + b"\n", Path("a.txt")) == "text"


# ----------------------------------------------------------------------------------------------------------------------
# Documents of a text file


@pytest.mark.parametrize("limit", [2**25, 40_000])
@pytest.mark.parametrize("form", [str.encode, lambda content: gzip.compress(content.encode())], ids=["plain", "gzip"])
def test_a_document_longer_than_a_chunk_stays_whole(tmp_path, read, monkeypatch, limit, form):
    monkeypatch.setattr(text, "ROW_BYTES", limit)
    lines = [f"line {i} of a long document\n" for i in range(1000)]
    documents = ["".join(lines), "short\n", "".join(lines[::-1]), "x" * 30_000 + "\n"]  # the first line is far behind
    assert read({"a.txt": form("<|endoftext|>\n".join(documents))}) == sorted(documents)


@pytest.mark.parametrize("position", [0, 1, 5, 12, 13, 14, 20])
@pytest.mark.parametrize("reach", [2**20, 8000])
def test_an_end_of_text_line_split_over_two_reads_is_found(read, position, reach):
    before = "a" * (reach - position - 1) + "\n"  # the line begins `position` characters before the end of a read
    assert read({"a.txt": f"first\n<|endoftext|>\n{before}<|endoftext|> \t\r\nlast\n"}) == sorted(
        ["first\n", before, "last\n"]
    )


def test_a_document_over_the_limit_is_a_sentence_or_left_out_alone(read, monkeypatch, capsys):
    monkeypatch.setattr(text, "ROW_BYTES", 5000)
    documents = ["one\n", "too long\n" * 1000, "x" * 20_000 + "\n", "two\n", "y" * 4000 + "\n"]
    files = {"a.txt": "<|endoftext|>\n".join(documents)}
    with pytest.raises(ValueError, match=r"a\.txt: document 2 has more than 5,000 characters"):
        read(files)
    assert read(files, errors="skip") == sorted([documents[0], documents[3], documents[4]])
    assert "left out by --errors skip: 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the text before the first end-of-text line has more than 5,000 bytes"):
        read({"a.txt": "<|endoftext|>\n".join(documents[1:])})


def test_text_without_end_of_text_lines_is_cut_as_before_whatever_its_length(read, monkeypatch):
    content = "".join(f"line {i}\n" for i in range(3000)) + "<|endoftext|> inside\n" + "z" * 9000
    whole = read({"a.txt": content})
    monkeypatch.setattr(text, "ROW_BYTES", 3000)
    assert read({"a.txt": content}) == whole
    assert len(whole) > 3 and sum(map(len, whole)) == len(content)


def test_a_million_copies_of_a_document_take_the_memory_of_one():
    def copies():
        for _ in range(100_000):
            yield "".join(["copy"] * 100)  # a new string each time
        yield "another"

    tracemalloc.start()
    n_documents = sum(1 for _ in text.split(copies(), 0.1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_documents == 100_001
    assert peak < 5e6


def test_a_git_lfs_pointer_is_named_as_such(tmp_path, read, capsys):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"
    for name in ("a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.parquet"):
        with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.* git lfs pull"):
            read({name: pointer}, [name])
    with pytest.raises(ValueError, match=r"a\.parquet is a git-lfs pointer"):
        fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / ".out", tokenizer="bytes")
    assert read({"b.txt": "one", "c.txt": "two"}) == ["one", "two"]
    assert (
        f"git-lfs pointers left out, whose files git lfs pull fetches: 5 ({tmp_path}/a.json, "
        in capsys.readouterr().out
    )


# ----------------------------------------------------------------------------------------------------------------------
# Bounded memory


MEASURE = """
import re, sys
from pathlib import Path
from data.rows import Bad, head_of, kind_of, open_input, read_rows, text_size, whole_text
from data.text.prepare import read_documents
path = Path(sys.argv[1])
text_size(path, 10**6)
read = {
    "rows": lambda: list(read_documents({path: None}, "text", 2**14, Bad("strict"))),
    "rest": lambda: print(list(read_documents({path: None}, "text", 2**14, Bad("skip")))),
    "whole": lambda: whole_text(open_input(path), path),
    "chunks": lambda: print(sum(map(len, read_documents({path: None}, "text", 2**14, Bad("strict"))))),
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
    """A line of LONG characters before a short one. One frame of zstd; many of others, whose compression is slow."""
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
    "a.jsonl.zst": (lambda: long_line(zstd), "rows", "a.jsonl.zst:1 is a line of more than 33,554,432 bytes"),
    "b.jsonl.gz": (lambda: long_line(gzip.compress), "rows", "b.jsonl.gz:1 is a line of more than"),
    "c.jsonl.xz": (lambda: long_line(lzma.compress), "rows", "c.jsonl.xz:1 is a line of more than"),
    "d.jsonl.bz2": (lambda: long_line(bz2.compress), "rows", "d.jsonl.bz2:1 is a line of more than"),
    "e.jsonl.gz": (lambda: long_line(gzip.compress), "rest", "['short']"),
    "f.json.zst": (lambda: zstd(b'[{"text": "' + b"a" * LONG + b'"}]'), "rows", "f.json.zst[0] has 33,554,432"),
    "g.json.zst": (lambda: zstd(b'[{"text": "short"}, ' + b" " * LONG + b"]"), "rows", "g.json.zst[1] has 33,554,432"),
    "h.txt.zst": (lambda: zstd(b"a" * LONG), "whole", "h.txt.zst has more than 33,554,432 bytes of text"),
    "i.txt.zst": (lambda: zstd(b"a" * LONG), "chunks", str(LONG)),
    "j.txt.zst": (
        lambda: zstd(b"a\n<|endoftext|>\n" + b"a" * LONG), "rows", "j.txt.zst: document 2 has more than 33,554,432"
    ),
    "k.txt.zst": (
        lambda: zstd(b"a\n" * (LONG // 2) + b"<|endoftext|>\n"), "chunks", "k.txt.zst: the text before the first"
    ),
    "l.jsonl.zst": (wide_window, "rows", "At most 128 MiB of memory"),
    "m.jsonl.xz": (wide_dictionary, "rows", "At most 128 MiB of memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_stays_bounded_whatever_the_input(tmp_path, name):
    make, how, expected = BOMBS[name]
    (tmp_path / name).write_bytes(make())
    command = [sys.executable, "-c", MEASURE, tmp_path / name, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    message, peak = done.stdout.splitlines()[-2:]
    assert expected in message
    assert int(peak) < 400, "MiB"


def test_ordinary_windows_are_read(tmp_path):
    content = b"text\n" * 10
    parameters = zstandard.ZstdCompressionParameters.from_level(22)  # the widest of the command's levels: 128 MiB
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    forms = {"a.zst": compressor.compress(content) + compressor.flush(), "a.xz": lzma.compress(content, preset=9)}
    for name, compressed in forms.items():
        (tmp_path / name).write_bytes(compressed)
        with open_input(tmp_path / name) as file:
            assert whole_text(file, tmp_path / name).encode() == content


@pytest.mark.parametrize("compress", [zstd, gzip.compress, lzma.compress, bz2.compress])
def test_a_file_cut_off_anywhere_is_never_taken_for_a_whole_one(tmp_path, compress):
    first, second = random.Random(0).randbytes(3000), b"second" * 1000
    whole = compress(first) + compress(second)
    (tmp_path / "a").write_bytes(whole)
    with open_input(tmp_path / "a") as file:
        assert file.read() == first + second
    for size in {7, 20, len(whole) // 2, len(whole) - 30, *range(len(whole) - 12, len(whole))}:
        (tmp_path / "a").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged, or cut off"), open_input(tmp_path / "a") as file:
            rows.read(file.read, tmp_path / "a")


def test_damage_after_the_first_stream_of_a_bz2_is_not_taken_for_its_end(tmp_path):
    first, second = (bz2.compress(part) for part in (LINES[:100], LINES[100:]))
    (tmp_path / "a.jsonl.bz2").write_bytes(first + second)
    with open_input(tmp_path / "a.jsonl.bz2") as file:
        assert file.read() == LINES
    (tmp_path / "b.jsonl.bz2").write_bytes(first + b"X" + second[1:])
    with pytest.raises((EOFError, OSError)), open_input(tmp_path / "b.jsonl.bz2") as file:
        file.read()


def test_a_zstd_file_may_begin_with_a_frame_to_skip(tmp_path):
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    (tmp_path / "a.jsonl.zst").write_bytes(skipped + zstd(LINES))
    with open_input(tmp_path / "a.jsonl.zst") as file:
        assert file.read() == LINES
