"""The prepare.py scripts: pystdlib, shakespeare_char, text, fineweb_edu. No network."""

import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow.parquet
import pytest

from data.fineweb_edu import prepare as fineweb_edu
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text
from data.tokenizer import get_tokenizer, tokenizer_of
from data.tokens import Tokens
from data.write import run_script, split_of, write_dataset, write_lock
from tests.datasets import contents, documents_of, texts_of
from tests.runs import ROOT, start
from tests.test_tokenizer import write_llama3_model


def write_eight_notes(folder):
    folder.mkdir(exist_ok=True)
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"note {i}")


@pytest.fixture
def stdlib(tmp_path):
    """A small standard library, including everything that must stay out of the dataset."""
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


def test_pystdlib_splits_by_file_and_skips_copies_tests_and_generated_tables(stdlib, tmp_path):
    meta = pystdlib.prepare(tmp_path / "out", stdlib)
    val = documents_of(tmp_path / "out", "val")
    assert texts_of(tmp_path / "out") == sorted({f"def function_{i}():\n    return {i}\n" for i in range(200)})
    assert 1 <= len(val) <= 40
    assert meta["val_bytes"] == sum(map(len, val))
    assert meta["script"] == "data/pystdlib/prepare.py"
    pystdlib.prepare(tmp_path / "again", stdlib)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    (stdlib / "aaa_new.py").write_text("new = True\n")
    pystdlib.prepare(tmp_path / "more", stdlib)
    for split in ("train", "val"):  # a new file does not move the others
        assert set(documents_of(tmp_path / "out", split)) <= set(documents_of(tmp_path / "more", split))


def test_pystdlib_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "data/pystdlib/prepare.py", "--out", "here"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "gzip -9" in run.stdout
    meta = Tokens(tmp_path / "here", "val").meta
    assert meta["train_bytes"] > 5e6, f"{meta['train_bytes']:,} bytes of training text: where is the standard library?"
    assert 2e5 < meta["val_bytes"] < 2e6
    assert 1.5 < meta["xz_bits_per_byte"] < meta["gzip_bits_per_byte"] < 2.5


def test_shakespeare_download_error_has_url_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare_char, "URL", "http://localhost:9/input.txt")  # nothing listens on the discard port
    place = tmp_path / "input.txt"
    with pytest.raises(OSError, match=f"could not download http://localhost:9/input.txt .* put it at {place}"):
        shakespeare_char.prepare(tmp_path)
    cut_off = mock.MagicMock(side_effect=http.client.IncompleteRead(b"To be"))
    monkeypatch.setattr(shakespeare_char.urllib.request, "urlopen", cut_off)
    with pytest.raises(OSError, match=r"could not download .* \(IncompleteRead\(5 bytes read\)\): fetch it"):
        shakespeare_char.prepare(tmp_path)
    assert not place.exists()
    place.write_text("To be, or not to be. " * 100)
    meta = shakespeare_char.prepare(tmp_path)
    assert meta["script"] == "data/shakespeare_char/prepare.py"
    assert (meta["train_bytes"], meta["val_bytes"]) == (1890, 210)
    assert "".join(documents_of(tmp_path, "train") + documents_of(tmp_path, "val")) == place.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# text: which documents validate


@pytest.mark.parametrize("n, n_val", [(2, 1), (8, 1), (10, 1), (11, 2), (35, 4)])
def test_small_text_gets_its_share_of_validation_documents(tmp_path, n, n_val):
    (tmp_path / "notes").mkdir()
    for i in range(2 * n):  # two copies of each
        (tmp_path / "notes" / f"{i:02}.txt").write_text(f"note {i % n}")
    for out in ("a", "b"):
        meta = text.prepare([tmp_path / "notes"], tmp_path / out)
    assert (meta["train_documents"], meta["val_documents"]) == (2 * (n - n_val), 2 * n_val)
    assert {split for split, _ in text.split(["a", "b"], 0.9)} == {"train", "val"}
    train, val = (documents_of(tmp_path / "a", split) for split in ("train", "val"))
    assert not set(train) & set(val)
    for split in train, val:
        half = len(split) // 2
        assert split == sorted(split[:half], key=lambda note: int(note.split()[1])) * 2, "not in the input's order"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("n_bytes", [3_000, 20_000, 100_000, 600_000])
def test_a_file_is_cut_at_line_ends_without_loss_and_a_small_one_gives_a_tenth_for_validation(tmp_path, n_bytes):
    book = "".join(f"line {i:06} é\n" for i in range(n_bytes // 15))
    (tmp_path / "a.txt").write_text(book, encoding="utf-8")
    meta = text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert 0.05 < meta["val_bytes"] / len(book.encode()) < 0.2, meta
    documents = texts_of(tmp_path / "out")
    assert len(documents) > 4 and all(document.endswith("\n") for document in documents)
    assert "".join(documents) == book  # sorted by number is the original order


def test_text_reads_a_pipe_with_one_percent_for_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SMALL", 400_000)
    book = "".join(f"{i:06}\n" for i in range(500_000))
    (tmp_path / "book").write_text(book)
    with subprocess.Popen(["cat", tmp_path / "book"], stdout=subprocess.PIPE) as cat:
        text.prepare([Path(f"/dev/fd/{cat.stdout.fileno()}")], tmp_path / "out")
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    documents = sorted(train + val)
    assert "".join(documents) == book
    n_first = next(n for n in range(len(documents)) if len("".join(documents[:n])) >= 400_000)
    assert set(val) & set(documents[:n_first]), "of the first bytes some, whatever their hashes"
    later = [document for document in documents[n_first:] if document in set(val)]
    assert later and later == [document for document in documents[n_first:] if split_of(document, 0.01) == "val"]


@pytest.mark.parametrize("line", ["\u4e2d\u6587 {}\n", "{} "], ids=["Chinese", "one line"])
def test_text_over_a_megabyte_has_validation_documents_whatever_their_hashes(tmp_path, monkeypatch, line):
    (tmp_path / "book.txt").write_text("".join(line.format(i) for i in range(200_000)), encoding="utf-8")
    monkeypatch.setattr(text, "split_of", lambda *_: "train")
    meta = text.prepare([tmp_path / "book.txt"], tmp_path / "out")
    assert meta["val_documents"] >= 2 and meta["val_bytes"] < 0.2 * meta["train_bytes"], meta


def test_huge_document_is_never_picked_for_validation():
    for seed in range(8):
        small = [f"small document {seed} {i}" for i in range(3000)]
        texts = [small[0], f"huge {seed} " * 200_000, *small[1:]]
        sizes = {"train": 0, "val": 0}
        for side, document in text.split(texts, 0.05):
            sizes[side] += len(document)
        assert 0 < sizes["val"] < 0.01 * sizes["train"], sizes


def test_a_small_file_is_prepared_alike_compressed_and_plain(tmp_path):
    content = "\n".join(f"line {i}" for i in range(1500)).encode()
    for name, written in (("a.txt", content), ("b.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        text.prepare([tmp_path / name], tmp_path / name[0])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_document_that_is_most_of_a_small_input_never_validates():
    for i in range(20):
        texts = [f"{i}{'long' * 1000}", *(f"{i} {n}" for n in range(6))]
        assert ("train", texts[0]) in text.split(texts, 0.01)


def test_a_split_of_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a document's split is train or val, not 'valid'"):
        write_dataset(tmp_path, [("train", "a"), ("valid", "b")], get_tokenizer("bytes"))


def test_copies_of_a_document_are_in_the_same_split(monkeypatch):
    monkeypatch.setattr(text, "SMALL", 100)
    texts = [f"document {i:03}" for i in range(20)]
    found = list(text.split([*texts, *reversed(texts)], 0.2))
    sides = {}
    for side, document in found:
        assert sides.setdefault(document, side) == side, document
    assert [document for _, document in found] == [*texts, *reversed(texts)]
    assert "val" in {side for side, _ in found[:9]}
    for val_fraction in (0.01, 0.99):  # both splits get some
        assert {side for side, _ in text.split(["a", "a", "b"], val_fraction)} == {"train", "val"}


def test_a_tenth_of_a_small_input_validates_also_where_its_size_is_known_only_when_it_is_read():
    sides = [side for side, _ in text.split(map(str, range(50)), None)]
    assert sides.count("val") == 5 and len(sides) == 50


@pytest.mark.parametrize("source, out", [(".", "data/mine"), (".", "."), ("notes", ".")])
def test_text_never_reads_its_own_dataset_and_tokenizer_as_input(tmp_path, source, out, capsys):
    write_eight_notes(tmp_path / "notes")
    tokenizer = write_llama3_model(tmp_path / ".model", [])
    first, second = (text.prepare([tmp_path / source], tmp_path / out, tokenizer) for _ in range(2))
    assert first == second and (tmp_path / out / "tokenizer.model").exists()
    assert (first["train_documents"], first["val_documents"]) == (7, 1)
    assert "left out" not in capsys.readouterr().out or out == source  # then it is one of the input's binary files


# ----------------------------------------------------------------------------------------------------------------------
# text: the script, and its messages


def test_text_script_expands_tildes_and_prints_the_training_command(tmp_path, monkeypatch, capsys):
    write_eight_notes(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(text, "HERE", tmp_path / "data" / "text")
    expected = {
        "data/text": "next: python train.py config/baby_llama.py --dataset=text --out_dir=out/text",
        "data/my notes": "next: python train.py config/baby_llama.py '--dataset=my notes' '--out_dir=out/my notes'",
        "~/far": f"next: python train.py config/baby_llama.py --dataset={tmp_path}/far --out_dir=out/far",
    }
    for out, line in expected.items():
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", "~/0.txt", "1.txt", f"--out={out}", "--workers=1"])
        text.main()
        assert capsys.readouterr().out.splitlines()[-1] == line
        assert (tmp_path / out.removeprefix("~/") / "meta.json").exists()


def test_text_script_prints_user_errors_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "empty.txt"):
        (tmp_path / name).write_text("the only one" if name != "empty.txt" else "")
    empty, share = "it is empty: name a file or folder", "expected a share above 0 and below 1"
    processes = "expected a whole number, at least 1"
    one = "only one distinct document, but training and validation need one each: give more text, or another file"
    for words, message in (
        *((words, empty) for words in (["--out", ""], ["--out="], ["--input", ""])),
        *(([f"--workers={x}"], processes) for x in ("0", "-1", "two")),
        *(([f"--val_fraction={x}"], share) for x in ("10", "1", "0.0", "-1", "nan")),
        (["--input", "nowhere"], "error: nowhere cannot be read: No such file or directory"),
        (["--input", "empty.txt"], "error: no documents: the input holds no text"),
        ([], f"error: {one}"),
        (["--field=x"], "error: --field is x, but no input holds JSON objects, one per line or in an array"),
        (["--bos"], "error: --bos: tokenizer bytes does not begin texts with a bos"),
    ):
        argv = ["prepare.py", "--out=out", "--workers=1", "--input", "a.txt", "b.txt", *words]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stopped:
            run_script(text.main)
        said, of_argparse = f"{stopped.value.code}{capsys.readouterr().err}", message in (empty, share, processes)
        assert message in said if of_argparse else said == message
        assert not (of_argparse and Path("out").exists())


@pytest.mark.parametrize("max_files", ["0", "-1", "1.5"])
def test_fineweb_edu_takes_a_whole_number_of_files(tmp_path, monkeypatch, capsys, max_files):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={tmp_path}", f"--max_files={max_files}"])
    with pytest.raises(SystemExit):
        run_script(fineweb_edu.main)
    assert f"--max_files: it is {max_files}, expected a whole number, at least 1" in capsys.readouterr().err


def test_text_reads_standard_input_and_reports_skipped_links(tmp_path):
    write_eight_notes(tmp_path / "notes")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("notes", "loop", "dangling", "pipe"):
        (tmp_path / "folder" / name).symlink_to({"loop": "."}.get(name, f"../{name}"))
    command = [sys.executable, ROOT / "data/text/prepare.py", "--out", tmp_path / "out", "--input", tmp_path / "folder"]
    said = "one\n<|endoftext|>\ntwo\n"
    done = subprocess.run([*command, "-"], input=said, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"links to folders left out: 2 ({tmp_path}/folder/loop, {tmp_path}/folder/notes)" in done.stdout, done.stdout
    assert f"links to no file left out: 2 ({tmp_path}/folder/dangling, {tmp_path}/folder/pipe)" in done.stdout
    assert texts_of(tmp_path / "out") == ["one\n", "two\n"]


def test_a_json_array_is_recognised_on_standard_input_from_a_file(tmp_path):
    (tmp_path / "texts").write_text(json.dumps([{"text": "one\n"}, {"text": "two\n"}], indent=1))
    command = [sys.executable, ROOT / "data/text/prepare.py", "--out", tmp_path / "out", "--input", "-"]
    with open(tmp_path / "texts") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert texts_of(tmp_path / "out") == ["one\n", "two\n"]


def test_unprintable_messages_do_not_stop_preparation(tmp_path, monkeypatch):
    write_eight_notes(tmp_path / "é")
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, open(writing, "w") as closed:
        for name, stdout in (("full", full), ("closed", closed)):
            words = ["--input", tmp_path / "é", "--out", tmp_path / "é" / name, "--workers=1"]
            process = start(words, "data/text/prepare.py", stdout=stdout)
            assert process.communicate() == ("", "") and process.returncode == 0
            assert (tmp_path / "é" / name / "meta.json").exists()
    in_ascii = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", in_ascii)
    text.prepare([tmp_path / "é"], tmp_path / "é/ascii")
    assert b"\\xe9/ascii: tokenizer bytes" in in_ascii.detach().getvalue()


def test_an_unwritable_folder_gets_a_message_with_a_fix(tmp_path, stdlib):
    (tmp_path / "file").touch()  # like a read-only clone, even for root
    for prepare, *more in ((pystdlib.prepare, stdlib), (shakespeare_char.prepare,), (pystdlib.prepare_once,)):
        with pytest.raises(OSError, match="file/data cannot be written .*: prepare the data in another folder, with"):
            prepare(tmp_path / "file/data", *more)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model, and a dataset would replace its tokenizer"):
        pystdlib.prepare(tmp_path, stdlib)


# ----------------------------------------------------------------------------------------------------------------------
# fineweb_edu


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture
def parquets(tmp_path):
    folder = tmp_path / "parquets"
    folder.mkdir()
    for number in range(3):
        rows = [f"Document {number}.{i} " + "says something. " * (i % 50) for i in range(300)] + [""]
        write_parquet(folder / f"{number:03d}.parquet", id=range(301), text=rows)
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
    assert (blocks[per_shard[0]] == tokens.shards[1][:101]).all()
    assert (blocks[-1] == tokens.shards[2][(per_shard[2] - 1) * 100 :][:101]).all()
    longest, half = max(map(len, tokens.shards)), len(tokens) // 2
    message = f"has {longest:,} train tokens in the longest of its 3 shards, fewer than the {half + 1:,} that"
    with pytest.raises(ValueError, match=message):
        tokens.blocks(half)


@pytest.fixture
def files_read(monkeypatch):
    """The names of the parquet files that were read."""
    read, names = fineweb_edu.read_documents, []
    counted = lambda parquet, path, *args: names.append(path.name) or read(parquet, path, *args)  # noqa: E731
    monkeypatch.setattr(fineweb_edu, "read_documents", counted)
    return names


def test_fineweb_comes_from_the_hub_or_says_how_to_go_without(parquets, tmp_path, monkeypatch):
    def fetch(repo, name, repo_type):
        return parquets / Path(name).name

    names = [f"sample/10BT/{path.name}" for path in parquets.iterdir()] + ["sample/100BT/000.parquet", "README.md"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, repo_type: names)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    meta = fineweb_edu.prepare(folder=tmp_path / "out", max_files=2, **OPTIONS)
    local = fineweb_edu.prepare(parquets, tmp_path / "local", max_files=2, **OPTIONS)
    assert meta == local
    with pytest.raises(ValueError, match="has no sample 1T; it has 100BT, 10BT"):
        fineweb_edu.prepare(folder=tmp_path / "out", sample="1T", **OPTIONS)
    said = r"huggingface.co/datasets/HuggingFaceFW/fineweb-edu could not be read \(offline\)\. Without a network: fetch"
    for function, sample in (("hf_hub_download", "100BT"), ("list_repo_files", "10BT")):
        monkeypatch.setattr(f"huggingface_hub.{function}", mock.Mock(side_effect=RuntimeError("offline")))
        with pytest.raises(OSError, match=said):
            fineweb_edu.prepare(folder=tmp_path / "out", sample=sample, **OPTIONS)


def test_fineweb_rewrites_only_damaged_or_outdated_shards(parquets, tmp_path, files_read):
    out = tmp_path / "out"
    for damage, rewritten in (
        (lambda: None, ["000.parquet", "001.parquet"]),
        (lambda: None, []),
        (lambda: os.truncate(out / "val_000001.bin", 2), ["001.parquet"]),
        (lambda: os.truncate(out / "shard_000001.json", 30), ["001.parquet"]),
        (lambda: os.utime(parquets / "001.parquet", (0, 0)), ["001.parquet"]),
    ):
        damage()
        files_read.clear()
        fineweb_edu.prepare(parquets, out, max_files=2, **OPTIONS)
        assert files_read == rewritten
        fineweb_edu.prepare(parquets, tmp_path / "new", max_files=2, **OPTIONS)
        assert contents(out) == contents(tmp_path / "new")


def test_a_full_disk_gets_a_message_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(SystemExit, match=r"^error: /.*/out/\w+\.bin: No space left on device$"):
        run_script(lambda: text.prepare([ROOT / "README.md"], tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_fineweb_interrupted_and_restarted_writes_the_same_files(parquets, tmp_path, monkeypatch, files_read):
    monkeypatch.setattr("data.encode.BATCH_CHARS", 10_000)
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
        (parquets / "002.parquet", dict(field="id"), ValueError, "002.parquet row 1 has 'id' of type int, expected a"),
        (parquets / "000.parquet", {}, ValueError, r"000\.parquet cannot be read as parquet"),
        (parquets / "001.parquet", {}, ValueError, r"001\.parquet cannot be read as parquet"),
        (tmp_path / "empty", {}, FileNotFoundError, "holds no .parquet files"),
    ):
        with pytest.raises(error, match=message):
            fineweb_edu.prepare(source, tmp_path / "out", **OPTIONS | options)
    with write_lock(tmp_path / "out"), pytest.raises(BlockingIOError, match="another prepare.py is writing to"):
        fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)


def test_fineweb_reads_all_string_types_and_stops_at_a_row_without_text_or_counts_it(tmp_path, capsys):
    rows = [f"text {i}" for i in range(2000)]
    rows[1500] = None
    strings = pyarrow.array(rows)
    for column in (strings, strings.cast("large_string"), strings.dictionary_encode()):
        path = write_parquet(tmp_path / "some.parquet", text=column)
        with pytest.raises(ValueError, match="some.parquet row 1501 has 'text' of type NoneType, expected a string"):
            fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS)
        meta = fineweb_edu.prepare(path, tmp_path / "out", errors="skip", **OPTIONS)
        assert meta["train_documents"] + meta["val_documents"] == 1999
        assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out


def test_fineweb_writes_shards_again_that_lack_the_bos(parquets, tmp_path, files_read):
    out = tmp_path / "out"
    options = dict(tokenizer=write_llama3_model(tmp_path / "tokenizer.model", []), val_fraction=0.1, max_files=1)
    without = fineweb_edu.prepare(parquets, out, bos=False, **options)
    assert tokenizer_of(out).bos is None
    meta = fineweb_edu.prepare(parquets, out, **options)
    assert files_read == ["000.parquet"] * 2 and meta["bos"] == 256 and "bos" not in without
    assert meta["train_tokens"] == without["train_tokens"] + meta["train_documents"]


@pytest.mark.parametrize("values", [["a" * 2**28], ["b"] * 999 + ["c" * 2**28]], ids=["one row", "one of a thousand"])
def test_fineweb_refuses_a_small_file_that_grows_beyond_any_text(tmp_path, values):
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"a\.parquet has .* bytes, of which row group 1 grows to 268,"):
        fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / "out", tokenizer="bytes")


def test_fineweb_refuses_a_row_over_the_limit_or_leaves_it_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fineweb_edu, "ROW_BYTES", 1000)
    write_parquet(tmp_path / "a.parquet", text=[f"row {i}" for i in range(100)] + ["x" * 1001])
    options = dict(tokenizer="bytes", val_fraction=0.2)
    with pytest.raises(ValueError, match=r"a\.parquet row 101 has more than 1,000 characters"):
        fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / "out", **options)
    fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / "out", errors="skip", **options)
    assert "left out by --errors skip: 1" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    lambda saved: saved["counts"]["train"].update(tokens=1), lambda saved: saved["counts"].pop("val"),
    lambda saved: saved["counts"]["val"].update(sha256=1), lambda saved: saved["counts"]["val"].pop("documents"),
    lambda saved: saved["counts"]["train"].update(bytes=-1), lambda saved: saved.update(counts=[1]),
    lambda saved: saved["counts"]["train"].update(bytes="1" * 10), lambda saved: saved.clear(),
])  # fmt: skip
def test_fineweb_writes_a_shard_again_whose_record_is_damaged(parquets, tmp_path, files_read, change):
    options = dict(tokenizer="bytes", val_fraction=0.1)
    fineweb_edu.prepare(parquets, tmp_path / "out", **options)
    whole = contents(tmp_path / "out")
    record = tmp_path / "out/shard_000001.json"
    saved = json.loads(record.read_text())
    change(saved)
    record.write_text(json.dumps(saved))
    n_read = len(files_read)
    fineweb_edu.prepare(parquets, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == whole and len(files_read) == n_read + 1


@pytest.mark.parametrize("name", ["train_000000.bin", "shard_000001.json", "meta.json", ".lock"])
def test_fineweb_and_shakespeare_and_pystdlib_write_through_no_link(parquets, stdlib, tmp_path, monkeypatch, name):
    victim, folder = tmp_path / "victim", tmp_path / "strangers"
    victim.write_text("mine")
    folder.mkdir()
    answer = io.BytesIO(b"To be, or not to be\n" * 20)
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: contextlib.nullcontext(answer))
    monkeypatch.setattr(pystdlib, "prepare", pytest.fail)
    for link in (name, f"{name}.partial", "input.txt.partial", ".once.lock"):
        (folder / link).symlink_to(victim)
    for prepare in (lambda: fineweb_edu.prepare(parquets, folder, **OPTIONS), lambda: shakespeare_char.prepare(folder)):
        with pytest.raises(OSError, match="is a link") if name == ".lock" else contextlib.nullcontext():
            prepare()
    (folder / "meta.json").unlink(missing_ok=True)
    with pytest.raises(OSError, match=r"\.once\.lock is a link"):
        pystdlib.prepare_once(folder)
    assert victim.read_text() == "mine"
