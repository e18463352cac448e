"""Input of data/text: text and JSON, compressed, from folders and pipes, with broken rows; and what it rejects."""

import gzip
import json
import lzma
import os
import subprocess
from pathlib import Path

import pytest
from zstandard import compress as zstd

from data.fineweb_edu import prepare as fineweb_edu
from data.rows import text_size
from data.text import prepare as text
from tests.datasets import contents, texts_of

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
        ("other.json", "other.json:1 is not an object with the field 'text' but one with name: set --field"),
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
    '{"title": 1, "messages": []}': "is not .* 'text' but one with title, messages: set --field.* data/chat/prepare.py",
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
