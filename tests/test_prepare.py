"""The prepare.py scripts: pystdlib, shakespeare_char, text, fineweb_edu. No network."""

import base64
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys

import pytest

from data.fineweb_edu import prepare as fineweb_edu
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text
from data.tokens import Tokens
from data.write import prepare_once, split_of, write_lock
from tests.datasets import contents, documents_of
from tests.runs import ROOT


def texts_of(folder):
    """Of both splits, sorted."""
    return sorted(documents_of(folder, "train") + documents_of(folder, "val"))


def write_notes(folder, n):
    folder.mkdir(exist_ok=True)
    for i in range(n):
        (folder / f"{i}.txt").write_text(f"note {i}")


@pytest.fixture
def stdlib(tmp_path):
    """A small standard library, with everything that must stay out of the dataset."""
    root = tmp_path / "stdlib"
    for i in range(200):
        path = root / f"package{i % 5}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function_{i}():\n    return {i}\n")
    (root / "copy.py").write_text("def function_0():\n    return 0\n")
    (root / "empty.py").touch()
    (root / "latin1.py").write_bytes(b"# -*- coding: latin-1 -*-\n'\xe9'\n")
    (root / "dangling.py").symlink_to(root / "nowhere.py")
    for package in ("site-packages", "test", "encodings", "package1/tests"):
        (root / package).mkdir()
        (root / package / "unwanted.py").write_text(f"unwanted = {package!r}\n")
    return root


def test_pystdlib_splits_by_file_and_skips_copies_tests_and_generated_tables(stdlib, tmp_path, capsys):
    meta = pystdlib.prepare(tmp_path / "out", stdlib)
    val = documents_of(tmp_path / "out", "val")
    assert texts_of(tmp_path / "out") == sorted({f"def function_{i}():\n    return {i}\n" for i in range(200)})
    assert 1 <= len(val) <= 40
    assert meta["val_bytes"] == sum(map(len, val))
    assert meta["script"] == "data/pystdlib/prepare.py"
    assert meta["gzip_bits_per_byte"] > 0 and meta["xz_bits_per_byte"] > 0
    assert "200 files, skipped 2 unreadable, 2 empty or a copy" in capsys.readouterr().out


def test_pystdlib_is_reproducible_and_a_new_file_moves_no_other(stdlib, tmp_path):
    for out in ("a", "b"):
        pystdlib.prepare(tmp_path / out, stdlib)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    (stdlib / "aaa_new.py").write_text("new = True\n")
    pystdlib.prepare(tmp_path / "c", stdlib)
    for split in ("train", "val"):
        assert set(documents_of(tmp_path / "a", split)) <= set(documents_of(tmp_path / "c", split))


def test_pystdlib_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "data/pystdlib/prepare.py", "--out", "here"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "gzip -9" in run.stdout
    meta = Tokens(tmp_path / "here", "val").meta
    assert meta["train_bytes"] > 5e6, f"{meta['train_bytes']:,} bytes of training text: where is the standard library?"
    assert 2e5 < meta["val_bytes"] < 2e6
    assert 1.5 < meta["xz_bits_per_byte"] < meta["gzip_bits_per_byte"] < 2.5


def test_shakespeare_download_error_has_url_and_path_and_bad_input_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare_char, "URL", "http://localhost:9/input.txt")  # nobody listens on the discard port
    place = tmp_path / "input.txt"
    with pytest.raises(OSError, match=f"could not download http://localhost:9/input.txt .* put it at {place}"):
        shakespeare_char.prepare(tmp_path)
    assert not place.exists()
    place.write_bytes("Enter Citoyen Hébert".encode("latin-1"))
    with pytest.raises(ValueError, match=f"{place} is not UTF-8 text .*0xe9"):
        shakespeare_char.prepare(tmp_path)
    place.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{place} holds no text"):
        shakespeare_char.prepare(tmp_path)
    place.write_text("To be, or not to be. " * 100)
    meta = shakespeare_char.prepare(tmp_path)
    assert meta["script"] == "data/shakespeare_char/prepare.py"
    assert (meta["train_bytes"], meta["val_bytes"]) == (1890, 210)
    assert "".join(documents_of(tmp_path, "train") + documents_of(tmp_path, "val")) == place.read_text()


def test_text_reads_files_folders_and_jsonl(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    expected = {f"line {i}\r\nof jsonl" for i in range(30)} | {f"file {i}\r\n" for i in range(30)} | {"named\n"}
    with open(folder / "some.jsonl", "w") as file:
        for i in range(30):
            file.write(json.dumps({"body": f"line {i}\r\nof jsonl", "id": i}) + "\n\n")
        file.write('{"body": ""}\n')
    for i in range(30):
        (folder / "deep" / f"{i}.md").write_bytes(b"file %d\r\n" % i)
    (folder / "deep" / ".hidden" / "secret.txt").write_text("hidden")
    (folder / "deep" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "named.txt").write_text("\ufeffnamed\n", encoding="utf-8")  # with a byte order mark
    meta = text.prepare([folder, tmp_path / "named.txt"], tmp_path / "out", field="body", val_fraction=0.2)
    train, val = (set(documents_of(tmp_path / "out", split)) for split in ("train", "val"))
    assert train | val == expected and not train & val
    assert meta["train_documents"] + meta["val_documents"] == len(expected)


@pytest.mark.parametrize("n, n_val", [(2, 1), (3, 1), (8, 1), (10, 1), (11, 2), (35, 4)])
def test_small_text_gets_its_share_of_validation_documents(tmp_path, n, n_val):
    (tmp_path / "notes").mkdir()
    for i in range(2 * n):  # two copies of each
        (tmp_path / "notes" / f"{i:02}.txt").write_text(f"note {i % n}")
    for out in ("a", "b"):
        meta = text.prepare([tmp_path / "notes"], tmp_path / out)
    assert (meta["train_documents"], meta["val_documents"]) == (2 * (n - n_val), 2 * n_val)
    train, val = (documents_of(tmp_path / "a", split) for split in ("train", "val"))
    assert not set(train) & set(val)
    for split in train, val:
        half = len(split) // 2
        assert split == sorted(split[:half], key=lambda note: int(note.split()[1])) * 2, "not in the input's order"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("n_bytes", [3_000, 20_000, 100_000])
def test_small_file_gets_a_tenth_for_validation(tmp_path, n_bytes):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(n_bytes))[:n_bytes])
    meta = text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert 0.05 < meta["val_bytes"] / n_bytes < 0.2, meta


def test_single_document_is_rejected_even_with_copies(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the only one")
    with pytest.raises(ValueError, match="one document, but training and validation need one each: give more text"):
        text.prepare([tmp_path], tmp_path / "out", val_fraction=0.5)


def test_large_text_is_split_by_the_hash_of_each_document(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SMALL", 100)
    (tmp_path / "large.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(300)))
    text.prepare([tmp_path / "large.jsonl"], tmp_path / "out", val_fraction=0.1)
    first = [f"line {i}" for i in range(15)]  # the first 100 bytes, split by rank
    expected = [f"line {i}" for i in range(15, 300) if split_of(f"line {i}", 0.1) == "val"]
    assert [line for line in documents_of(tmp_path / "out", "val") if line not in first] == expected


@pytest.mark.parametrize("val_fraction", [10, 1, 0, -1, float("nan")])
@pytest.mark.parametrize("prepare", [text.prepare, fineweb_edu.prepare])
def test_val_fraction_outside_0_to_1_is_rejected(tmp_path, prepare, val_fraction):
    (tmp_path / "notes.txt").write_text("a note")
    message = f"--val_fraction is {val_fraction}, expected a share above 0 and below 1"
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path] if prepare is text.prepare else tmp_path, tmp_path / "out", val_fraction=val_fraction)


def test_text_lists_skipped_binary_files_and_rejects_named_ones(tmp_path, capsys):
    write_notes(tmp_path, 3)
    for i in range(3):
        (tmp_path / f"{i}.utf16").write_text(f"text {i}", encoding="utf-16")
    text.prepare([tmp_path], tmp_path / "out")
    left_out = f"binary or UTF-16 files left out: 3 ({tmp_path}/0.utf16, {tmp_path}/1.utf16, ...)"
    assert left_out in capsys.readouterr().out.splitlines()
    with pytest.raises(ValueError, match="1.utf16 is UTF-16: text is read as UTF-8. iconv "):
        text.prepare([tmp_path / "1.utf16"], tmp_path / "out")


@pytest.mark.parametrize("source, out", [(".", "data/mine"), (".", "."), ("notes", ".")])
def test_text_never_reads_its_own_dataset_as_input(tmp_path, source, out, capsys):
    write_notes(tmp_path / "notes", 8)
    first, second = (text.prepare([tmp_path / source], tmp_path / out) for _ in range(2))
    assert first == second
    assert (first["train_documents"], first["val_documents"]) == (7, 1)
    assert "left out" not in capsys.readouterr().out or out == source  # there it is among the input's binary files


@pytest.mark.parametrize("name", ["some.jsonl", "some.JSONL", "some.ndjson"])
def test_text_recognises_jsonl_suffixes_in_any_case(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    text.prepare([tmp_path / name], tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["one", "two"]


def test_text_reads_a_pipe_with_one_percent_for_validation(tmp_path):
    book = "".join(f"line {i} é\n" for i in range(600_000))
    script = f"from data.text.prepare import prepare; prepare(['/dev/stdin'], {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], input=book.encode(), cwd=ROOT, check=True, timeout=60)
    train, val = (documents_of(tmp_path, split) for split in ("train", "val"))
    assert sorted("".join(train + val).splitlines()) == sorted(book.splitlines())
    documents = sorted(train + val, key=book.index)
    n_first = next(n for n in range(len(documents)) if len("".join(documents[:n]).encode()) >= 10**6)
    assert set(val) & set(documents[:n_first]), "of the first megabyte some, whatever their hashes"
    later = documents[n_first:]
    assert [d for d in later if d in set(val)] == [d for d in later if split_of(d, 0.01) == "val"]


@pytest.mark.parametrize("line", ["\u4e2d\u6587 {}\n", "{} "], ids=["Chinese", "one line"])
def test_text_over_a_megabyte_has_validation_documents_whatever_their_hashes(tmp_path, monkeypatch, line):
    (tmp_path / "book.txt").write_text("".join(line.format(i) for i in range(200_000)), encoding="utf-8")
    monkeypatch.setattr(text, "split_of", lambda *_: "train")
    meta = text.prepare([tmp_path / "book.txt"], tmp_path / "out")
    assert meta["val_documents"] >= 2 and meta["val_bytes"] < 0.2 * meta["train_bytes"], meta


def test_huge_document_is_never_picked_for_validation(tmp_path):
    for seed in range(4):
        texts = [f"huge {seed} " * 200_000, *(f"small document {seed} {i}" for i in range(3000))]
        sizes = {"train": 0, "val": 0}
        for side, document in text.split(texts, 0.05):
            sizes[side] += len(document)
        assert 0 < sizes["val"] < 0.01 * sizes["train"], sizes


def test_copies_of_a_document_are_in_the_same_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SMALL", 100)
    texts = [f"document {i:03}" for i in range(20)]
    found = list(text.split([*texts, *reversed(texts)], 0.2))
    sides = {}
    for side, document in found:
        assert sides.setdefault(document, side) == side, document
    assert [document for _, document in found] == [*texts, *reversed(texts)]
    assert "val" in {side for side, _ in found[:9]} and len({side for side, _ in text.split(["a", "a", "b"], 0.1)}) == 2


def test_text_script_prints_the_training_command(tmp_path, monkeypatch, capsys):
    write_notes(tmp_path, 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "HERE", tmp_path / "data" / "text")
    expected = {
        "data/text": "next: python train.py config/baby_llama.py --dataset=text --out_dir=out/text",
        "data/my notes": "next: python train.py config/baby_llama.py '--dataset=my notes' '--out_dir=out/my notes'",
        "elsewhere": None,  # train.py has no name for it
    }
    for out, line in expected.items():
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", "0.txt", "1.txt", "--out", out, "--workers=1"])
        text.main()
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == line if line else not last.startswith("next:"), last


@pytest.mark.parametrize("script", [text, pystdlib, shakespeare_char, fineweb_edu], ids=lambda script: script.__name__)
def test_empty_path_argument_is_rejected(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--input", "x.txt"] if script is text else []
    for empty in (["--out", ""], ["--out="], *([["--input", ""]] if "--input" in words else [])):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *words, *empty])
        with pytest.raises(SystemExit):
            script.main()
        assert "it is empty: name a file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tilde_in_paths_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n" * 2000)
    (tmp_path / "b.txt").write_text("two\n" * 2000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", "~/a.txt", "b.txt", "--out=~/new", "--workers=1"])
    text.main()
    assert (tmp_path / "new" / "meta.json").exists() and not (tmp_path / "~").exists()


def test_text_replaces_a_lone_surrogate(tmp_path):
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps({"text": f"{i} \ud83e!"}) + "\n" for i in range(60)))
    text.prepare([tmp_path / "odd.jsonl"], tmp_path / "out")
    assert "1 ?!" in texts_of(tmp_path / "out")


def test_text_splits_a_large_file_at_line_ends_without_loss(tmp_path):
    book = "".join(f"line {i} é\n" for i in range(60_000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    text.prepare([tmp_path / "book.txt"], tmp_path / "out")
    documents = texts_of(tmp_path / "out")
    assert all(document.endswith("\n") for document in documents)
    assert sorted("".join(documents).splitlines()) == sorted(book.splitlines())


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", r"bad\.jsonl:2 is not JSON"),
        ('{"title": "no text"}', r"bad\.jsonl:2 is not an object with the field 'text'"),
        ("[1, 2]", r"bad\.jsonl:2 is not an object with the field 'text'"),
        ('{"text": 7}', r"bad\.jsonl:2 has 'text' of type int, expected a string"),
        ("[" * 100_000, r"bad\.jsonl:2 is not JSON: .* a JSON array"),
        ("1" * 5000, r"bad\.jsonl:2 is not JSON: Exceeds the limit"),
    ],
)
def test_text_error_has_the_line_of_bad_jsonl(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        text.prepare([tmp_path / "bad.jsonl"], tmp_path / "out")
    assert not contents(tmp_path / "out")


def test_text_rejects_field_without_json_input(tmp_path):
    (tmp_path / "a.txt").write_text("body")
    with pytest.raises(ValueError, match="--field is body, but no input holds JSON objects, one a line or in an array"):
        text.prepare([tmp_path / "a.txt"], tmp_path / "out", field="body")


def test_text_stops_at_or_skips_a_file_that_is_not_utf8(tmp_path, capsys):
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "0.txt").write_text("\ufefftext 0", encoding="utf-8")  # its mark is read twice too
    (tmp_path / "latin1.txt").write_bytes(b"kept?\n" * 10_000 + b"caf\xe9")  # far behind the first chunk
    with pytest.raises(ValueError, match=r"latin1\.txt is not UTF-8 text.*--errors skip"):
        text.prepare([tmp_path], tmp_path / ".out")
    meta = text.prepare([tmp_path], tmp_path / ".out", errors="skip")
    assert meta["train_documents"] + meta["val_documents"] == 50
    assert set(texts_of(tmp_path / ".out")) == {f"text {i}" for i in range(50)}
    assert f"left out by --errors skip: 1, the first: {tmp_path}/latin1.txt is not UTF-8" in capsys.readouterr().out


def test_text_rejects_errors_skip_for_a_pipe(tmp_path):
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ValueError, match=f"--errors skip reads a file twice, but /dev/fd/{reading} is a pipe"):
        text.prepare([f"/dev/fd/{reading}"], tmp_path, errors="skip")
    os.close(reading)


def test_text_prints_file_names_that_are_not_utf8(tmp_path, capsys):
    name, content = os.fsdecode(b"caf\xe9"), {"a": b"one", "b": b"two", "bad": b"\xe9", "binary": b"\0"}
    for suffix in content:
        (tmp_path / f"{name}.{suffix}").write_bytes(content[suffix])
    for _ in range(2):
        text.prepare([tmp_path], tmp_path / f".{name}", errors="skip")
    out = capsys.readouterr().out  # strict, as of a terminal
    for line in (
        "left out: 1 ({}/caf\ufffd.binary)",
        "left out by --errors skip: 1, the first: {}/caf\ufffd.bad is not UTF-8",
        "replaced the dataset in {}/.caf\ufffd",
    ):
        assert line.format(tmp_path) in out, out


def test_text_script_prints_user_errors_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "data/text/prepare.py", "--out", tmp_path / "out", "--input"]
    run = subprocess.run([*command, tmp_path / "nowhere"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, f"error: --input {tmp_path}/nowhere does not exist\n")
    (tmp_path / "empty.txt").touch()
    run = subprocess.run([*command, tmp_path / "empty.txt"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, "error: no documents: the input holds no text\n")


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
        fineweb_edu.prepare(tmp_path / "d.txt", tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("stdout", ["ascii", "closed", "full"])
def test_messages_that_cannot_be_printed_end_no_preparation(stdout, tmp_path):
    write_notes(tmp_path / "é", 8)
    command = [sys.executable, ROOT / "data/text/prepare.py", "--input", tmp_path / "é", "--out", tmp_path / "é/out"]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, open(writing, "w") as closed:
        where = {"ascii": subprocess.PIPE, "closed": closed, "full": full}[stdout]
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, stdout=where, stderr=subprocess.PIPE, env=environment, timeout=60)
        closed.close()
    assert (done.returncode, done.stderr) == (0, b"") and (tmp_path / "é/out/meta.json").exists()


def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # a read-only clone, also for root
    for prepare in (pystdlib.prepare, shakespeare_char.prepare, prepare_once):
        with pytest.raises(OSError, match="file/data cannot be written .*: prepare the data in another folder, with"):
            prepare(tmp_path / "file/data")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model, whose tokenizer's files a dataset would replace"):
        pystdlib.prepare(tmp_path)


@pytest.fixture
def parquets(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "parquets"
    folder.mkdir()
    for number in range(3):
        rows = [f"Document {number}.{i} " + "says something. " * (i % 50) for i in range(300)] + [""]
        parquet.write_table(pyarrow.table({"id": range(301), "text": rows}), folder / f"{number:03d}.parquet")
    return folder


OPTIONS = dict(tokenizer="bytes", val_fraction=0.1)


def test_fineweb_writes_one_shard_per_file_and_blocks_span_all_shards(parquets, tmp_path):
    meta = fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)
    assert list(meta["files"]["train"]) == ["train_000000.bin", "train_000001.bin", "train_000002.bin"]
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    assert len(train) + len(val) == len(set(train + val)) == 900
    assert 50 < len(val) < 150
    assert meta["script"] == "data/fineweb_edu/prepare.py"
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / "out").glob("train_*.bin"))]
    assert meta["train_sha256"] == hashlib.sha256("".join(digests).encode()).hexdigest() and len(digests) == 3
    tokens = Tokens(tmp_path / "out", "train")
    per_shard = [(len(shard) - 1) // 100 for shard in tokens.shards]
    assert tokens.blocks(100) == sum(per_shard)
    blocks = tokens.read(range(sum(per_shard)), 100)
    first_of_second = tokens.read([per_shard[0]], 100)
    assert (first_of_second == tokens.shards[1][:101]).all()
    assert (blocks[-1] == tokens.shards[2][(per_shard[2] - 1) * 100 :][:101]).all()
    longest, half = max(map(len, tokens.shards)), len(tokens) // 2
    message = f"has {longest:,} train tokens in the longest of its 3 shards, fewer than the {half + 1:,} that"
    with pytest.raises(ValueError, match=message):
        tokens.blocks(half)


@pytest.fixture
def files_read(monkeypatch):
    """The names of the parquet files that were read."""
    read_documents, names = fineweb_edu.read_documents, []

    def counted(parquet, path, *args):
        names.append(path.name)
        return read_documents(parquet, path, *args)

    monkeypatch.setattr(fineweb_edu, "read_documents", counted)
    return names


DAMAGE = {
    "nothing": lambda parquets, out: None,
    "tokens cut short": lambda parquets, out: os.truncate(out / "val_000001.bin", 2),
    "a record cut short": lambda parquets, out: os.truncate(out / "shard_000001.json", 30),
    "an empty record": lambda parquets, out: os.truncate(out / "shard_000001.json", 0),
    "another input": lambda parquets, out: os.replace(parquets / "002.parquet", parquets / "001.parquet"),
    "a newer input": lambda parquets, out: os.utime(parquets / "001.parquet", (0, 0)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_fineweb_rewrites_only_damaged_or_outdated_shards(parquets, tmp_path, files_read, damage):
    fineweb_edu.prepare(parquets, tmp_path / "out", max_files=2, **OPTIONS)
    files_read.clear()
    damage(parquets, tmp_path / "out")
    fineweb_edu.prepare(parquets, tmp_path / "out", max_files=2, **OPTIONS)
    assert files_read == ([] if damage is DAMAGE["nothing"] else ["001.parquet"])
    fineweb_edu.prepare(parquets, tmp_path / "new", max_files=2, **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_fineweb_keeps_shards_whose_record_lacks_the_input_size(parquets, tmp_path, files_read):
    fineweb_edu.prepare(parquets / "001.parquet", tmp_path, **OPTIONS)
    record = json.loads((tmp_path / "shard_000000.json").read_text())
    del record["source"]["size"], record["source"]["mtime_ns"]
    (tmp_path / "shard_000000.json").write_text(json.dumps(record))
    fineweb_edu.prepare(parquets / "001.parquet", tmp_path, **OPTIONS)
    assert files_read == ["001.parquet"]


def test_fineweb_rejects_a_folder_with_another_writer(parquets, tmp_path):
    with write_lock(tmp_path / "out"), pytest.raises(BlockingIOError, match="another prepare.py is writing to"):
        fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)


def test_fineweb_interrupted_and_restarted_writes_the_same_files(parquets, tmp_path, monkeypatch, files_read):
    monkeypatch.setattr("data.write.BATCH_CHARS", 10_000)
    fineweb_edu.prepare(parquets, tmp_path / "whole", **OPTIONS)
    counted = fineweb_edu.read_documents

    def interrupted(parquet, path, *args):
        for i, document in enumerate(counted(parquet, path, *args)):
            if path.name == "001.parquet" and i == 200:
                raise KeyboardInterrupt
            yield document

    out = tmp_path / "out"
    monkeypatch.setattr(fineweb_edu, "read_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fineweb_edu.prepare(parquets, out, workers=2, **OPTIONS)
    assert sorted(contents(out)) == ["shard_000000.json", "train_000000.bin", "val_000000.bin"]
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(out, "train")

    monkeypatch.setattr(fineweb_edu, "read_documents", counted)
    files_read.clear()
    fineweb_edu.prepare(parquets, out, workers=2, **OPTIONS)
    assert files_read == ["001.parquet", "002.parquet"], "a finished shard was made again, or one was left out"
    assert contents(out) == contents(tmp_path / "whole")

    monkeypatch.setattr(fineweb_edu, "read_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fineweb_edu.prepare(parquets, out, **OPTIONS | {"val_fraction": 0.2})  # other settings: every shard again
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(out, "train")  # one shard is new, two are old


def test_fineweb_errors_say_what_is_wrong_with_the_input(parquets, tmp_path):
    os.truncate(parquets / "000.parquet", 1000)
    content = (parquets / "001.parquet").read_bytes()
    (parquets / "001.parquet").write_bytes(content[:1000] + bytes(2000) + content[3000:])  # the footer is whole
    (tmp_path / "empty").mkdir()
    for source, options, error, message in (
        (parquets / "002.parquet", dict(field="body"), ValueError, "has no column 'body' but id, text: set --field"),
        (parquets / "000.parquet", {}, ValueError, r"000\.parquet cannot be read as parquet"),
        (parquets / "001.parquet", {}, ValueError, r"001\.parquet cannot be read as parquet"),
        (parquets, dict(max_files=0), ValueError, "--max_files is 0, expected 1 or more"),
        (parquets, dict(max_files=-1), ValueError, "--max_files is -1, expected 1 or more"),
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere does not exist"),
        (tmp_path / "empty", {}, FileNotFoundError, "holds no .parquet files"),
    ):
        with pytest.raises(error, match=message):
            fineweb_edu.prepare(source, tmp_path / "out", **options, **OPTIONS)


def test_fineweb_reads_all_string_types_and_rejects_other_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, strings = tmp_path / "some.parquet", pyarrow.array([f"text {i}" for i in range(100)])
    for column in (strings, strings.cast("large_string"), strings.dictionary_encode()):
        parquet.write_table(pyarrow.table({"text": column}), path)
        meta = fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS)
        assert meta["train_documents"] + meta["val_documents"] == 100
    for column, name in ([1, 2], "int64"), ([b"a", b"b"], "binary"), ([["a"], ["b"]], "list<"):
        parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(ValueError, match=rf"some\.parquet has {name}.* in its column 'text', expected strings"):
            fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("module, source", [("pyarrow", "parquets"), ("huggingface_hub", None)])
def test_fineweb_without_its_packages_says_the_pip_command(parquets, tmp_path, monkeypatch, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install pyarrow huggingface_hub"):
        fineweb_edu.prepare(source and tmp_path / source, tmp_path / "out", **OPTIONS)


def test_fineweb_stops_at_a_null_row_or_counts_it(tmp_path, capsys):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"text {i}" for i in range(2000)]
    rows[1500] = None
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "some.parquet")
    with pytest.raises(ValueError, match=r"some.parquet row 1501 has null for 'text', .*--errors skip leaves such out"):
        fineweb_edu.prepare(tmp_path / "some.parquet", tmp_path / "out", **OPTIONS)
    meta = fineweb_edu.prepare(tmp_path / "some.parquet", tmp_path / "out", errors="skip", **OPTIONS)
    assert meta["train_documents"] + meta["val_documents"] == 1999
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out


def test_fineweb_writes_shards_again_that_lack_the_bos(parquets, tmp_path, files_read):
    model, out = tmp_path / "tokenizer.model", tmp_path / "out"
    model.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    options = dict(tokenizer=str(model), val_fraction=0.1, max_files=1)
    without = fineweb_edu.prepare(parquets, out, bos=False, **options)
    meta = fineweb_edu.prepare(parquets, out, **options)
    assert files_read == ["000.parquet"] * 2 and meta["bos"] == 256 and "bos" not in without
    assert meta["train_tokens"] == without["train_tokens"] + meta["train_documents"]
