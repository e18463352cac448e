"""What data/text reads: JSON in lines and arrays, compressed, through pipes, with broken rows; what it refuses."""

import gzip
import json
import lzma
import subprocess
import sys

import pytest

from data.fineweb_edu import prepare as fineweb_edu
from data.text import prepare as text
from tests.datasets import texts_of
from tests.runs import ROOT

ROWS = [{"text": f"row {i} é"} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content):
    return pytest.importorskip("zstandard").compress(content)


FORMS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": LINES,  # compressed in the test, where zstandard is installed
    "a.ndjson.xz": lzma.compress(LINES),
    "a.json": LINES,
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "a.txt": LINES,  # one object a line, whatever its name
}


@pytest.mark.parametrize("pipe", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize("name", FORMS)
def test_json_is_read_compressed_or_not_from_files_and_pipes(name, pipe, tmp_path):
    content = zstd(LINES) if name.endswith(".zst") else FORMS[name]
    (tmp_path / name).write_bytes(content)
    if pipe:
        script = f"from data.text.prepare import prepare; prepare(['/dev/stdin'], {str(tmp_path / 'out')!r})"
        subprocess.run([sys.executable, "-c", script], input=content, cwd=ROOT, check=True, timeout=60)
    else:
        text.prepare([tmp_path / name], tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(row["text"] for row in ROWS)


def test_two_zstd_frames_are_read_and_files_cut_off_are_damaged_not_short(tmp_path, capsys):
    half = len(LINES.splitlines(keepends=True)[0]) * 10
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(LINES[:half]) + zstd(LINES[half:]))
    text.prepare([tmp_path / "a.jsonl.zst"], tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(row["text"] for row in ROWS)
    for name, content in (
        ("a.jsonl.zst", zstd(LINES)),
        ("a.txt.gz", gzip.compress(LINES)),
        ("a.txt.xz", lzma.compress(LINES)),
    ):
        (tmp_path / name).write_bytes(content[:-9])
        with pytest.raises(ValueError, match=f"{name} is damaged, or cut off: "):
            text.prepare([tmp_path / name], tmp_path / "out")
    (tmp_path / "good.jsonl").write_bytes(LINES)
    text.prepare([tmp_path / "a.txt.gz", tmp_path / "good.jsonl"], tmp_path / "out", errors="skip")
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out


def test_json_in_folders_is_data_if_it_has_the_field_else_text(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows.json").write_bytes(LINES)
    (folder / "other.json").write_text('{"name": "x"}\n{"name": "y"}\n')
    (folder / "package.json").write_text('{\n "name": "x"\n}\n')
    text.prepare([folder], tmp_path / "out")
    others = ['{"name": "x"}\n{"name": "y"}\n', '{\n "name": "x"\n}\n']
    assert texts_of(tmp_path / "out") == sorted([*(row["text"] for row in ROWS), *others])
    assert f"JSON without the field 'text' read as text: 1 ({folder}/other.json)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="other.json:1 is not an object with the field 'text': set --field"):
        text.prepare([folder / "other.json"], tmp_path / "out")
    with pytest.raises(ValueError, match="package.json is JSON, but neither an array of objects nor one object a line"):
        text.prepare([folder / "package.json"], tmp_path / "out")


BROKEN = ["null", "{broken", '{"text": null}', '{"title": 1}', '{"text": "\\udcff"}'.replace("\\udcff", "\xff")]


@pytest.mark.parametrize("row", BROKEN)
def test_a_broken_row_ends_the_preparation_or_is_counted(row, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES + row.encode("latin-1") + b"\n" + LINES.replace(b"row", b"line"))
    with pytest.raises(ValueError, match=r"a\.jsonl:41 .*\. --errors skip leaves such out"):
        text.prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    meta = text.prepare([tmp_path / "a.jsonl"], tmp_path / "out", errors="skip")
    assert meta["train_documents"] + meta["val_documents"] == 80
    assert f"left out by --errors skip: 1, the first: {tmp_path}/a.jsonl:41 " in capsys.readouterr().out


def test_lines_of_end_of_text_end_documents_and_other_special_tokens_stay_text_and_are_said(tmp_path, capsys):
    stories = [f"story {i}\n\nmore\n" for i in range(30)]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(stories) + "<|endoftext|>")
    text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(stories) and "spelled out" not in capsys.readouterr().out
    (tmp_path / "b.txt").write_text("<|endoftext|> inside\n" * 3 + "<|end_of_text|>\r\n<div>x</s>")
    text.prepare([tmp_path / "b.txt"], tmp_path / "out")
    assert texts_of(tmp_path / "out") == sorted(["<|endoftext|> inside\n" * 3, "<div>x</s>"])
    assert "special tokens spelled out, which stay text: <|endoftext|> (3). " in capsys.readouterr().out


def test_what_is_no_text_is_named_with_the_command_for_it(tmp_path, capsys):
    contents = {
        "a.parquet": b"PAR1" + bytes(9),
        "b.txt": b"\xff\xfea\0",
        "c.bin": b"ab\0",
        "d.txt": b"text",
        "e.txt": b"t",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, said in (
        ("a.parquet", "is parquet: python data/fineweb_edu/prepare.py --input"),
        ("b.txt", "is UTF-16: text is read as UTF-8. iconv -f UTF-16 -t UTF-8"),
        ("c.bin", "is binary, with zero bytes"),
    ):
        with pytest.raises(ValueError, match=f"{name} {said}"):
            text.prepare([tmp_path / name], tmp_path / "out")
    text.prepare([tmp_path], tmp_path / "out")
    out = capsys.readouterr().out
    assert "left out: 3 (" in out and "python data/fineweb_edu/prepare.py reads parquet files" in out
    with pytest.raises(ValueError, match="d.txt cannot be read as parquet.* data/text/prepare.py reads text and JSON"):
        fineweb_edu.prepare(tmp_path / "d.txt", tmp_path / "out", tokenizer="bytes")
