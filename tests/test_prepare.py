"""The prepare.py scripts: pystdlib, shakespeare_char, text, fineweb_edu. No network."""

import contextlib
import errno
import hashlib
import http.client
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow.parquet
import pytest

from data.command import run_script
from data.fineweb_edu import prepare as fineweb_edu
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text
from data.tokenizer import tokenizer_of
from data.tokens import Tokens
from data.write import split_of, split_texts, write_lock
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
# text


@pytest.mark.parametrize("val_fraction", [1e-9, 0.1, 1 - 1e-9])
def test_copies_share_a_split_which_their_hash_decides_and_both_splits_get_some(val_fraction):
    texts = [f"document {i:03}" for i in range(400)]
    documents = list(split_texts([*texts, *reversed(texts)], val_fraction))
    assert [text for _, text in documents] == [*texts, *reversed(texts)]
    sides = dict(reversed(item) for item in documents)
    assert all(sides[text] == side for side, text in documents)
    assert {"train", "val"} == set(sides.values())
    assert sum(side != split_of(text, val_fraction) for text, side in sides.items()) <= 1
    for few in (["a", "b"], ["a", "a", "b"]):
        assert {side for side, _ in split_texts(few, val_fraction)} == {"train", "val"}
    with pytest.raises(ValueError, match="only one distinct document"):
        list(split_texts(["a", "a"], val_fraction))


def test_the_first_document_trains_if_it_is_huge():
    assert next(split_texts(["huge " * 10**6, "small"], 1e-9))[0] == "train"


def test_books_give_both_splits_a_document():
    books = [letter * 11 * 10**5 for letter in "abcdef"]
    assert {side for side, _ in split_texts(books, 1e-9)} == {"train", "val"}


@pytest.mark.parametrize("n_bytes", [3_000, 20_000, 100_000, 600_000])
def test_a_file_is_cut_at_line_ends_without_loss_and_a_small_one_gives_a_tenth_for_validation(tmp_path, n_bytes):
    book = "".join(f"line {i:06} é\n" for i in range(n_bytes // 15))
    (tmp_path / "a.txt").write_text(book, encoding="utf-8")
    meta = text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert 0.03 < meta["val_bytes"] / len(book.encode()) < 0.3, meta
    documents = texts_of(tmp_path / "out")
    assert len(documents) > 4 and all(document.endswith("\n") for document in documents)
    assert "".join(documents) == book  # sorted by number is the original order


def test_the_number_of_workers_does_not_change_a_dataset(tmp_path):
    rows = "".join(json.dumps({"text": f"row {i} " * (i % 70)}) + "\n" for i in range(20_000))
    (tmp_path / "a.jsonl").write_text(rows)
    for n in (1, 2, 3):
        text.prepare([tmp_path / "a.jsonl"], tmp_path / str(n), workers=n)
        assert contents(tmp_path / "1") == contents(tmp_path / str(n))
    assert json.loads(contents(tmp_path / "1")["meta.json"])["train_bytes"] > 5 * 2**20, "several batches"


@pytest.mark.parametrize("source, out", [(".", "data/mine"), (".", "."), ("notes", ".")])
def test_text_never_reads_its_own_dataset_and_tokenizer_as_input(tmp_path, source, out):
    write_eight_notes(tmp_path / "notes")
    tokenizer = write_llama3_model(tmp_path / ".model", [])
    first, second = (text.prepare([tmp_path / source], tmp_path / out, tokenizer) for _ in range(2))
    assert first == second and (tmp_path / out / "tokenizer.model").exists()
    assert first["train_documents"] + first["val_documents"] == 8


@pytest.mark.parametrize("words, message", [
    (["--out", ""], "it is empty: name a file or folder"), (["--input", ""], "it is empty: name a file or folder"),
    (["--val_fraction=10"], "expected a share above 0 and"), (["--workers=two"], "invalid int value: 'two'"),
    (["--input", "nowhere"], "error: nowhere cannot be read: No such file or directory"),
    (["--input", "empty.txt"], "error: no documents: the input holds no text"),
    ([], "error: only one distinct document"), (["--bos"], "error: --bos: tokenizer bytes does not begin"),
])  # fmt: skip
def test_text_script_prints_user_errors_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "empty.txt"):
        (tmp_path / name).write_text("the only one" if name != "empty.txt" else "")
    argv = ["prepare.py", "--out=out", "--workers=1", "--input", "a.txt", "b.txt", *words]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        run_script(text.main)
    assert message in f"{stopped.value.code}{capsys.readouterr().err}"


def test_unprintable_messages_do_not_stop_preparation(tmp_path, monkeypatch):
    write_eight_notes(tmp_path / "é")
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, open(writing, "w") as closed:
        for name, stdout in (("full", full), ("closed", closed)):
            words = ["--input", tmp_path / "é", "--out", tmp_path / name, "--workers=1"]
            process = start(words, "data/text/prepare.py", stdout=stdout)
            assert process.communicate() == ("", "") and process.returncode == 0
            assert (tmp_path / name / "meta.json").exists()
    in_ascii = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", in_ascii)
    text.prepare([tmp_path / "é"], tmp_path / "ascii-é")
    assert b"ascii-\\xe9: tokenizer bytes" in in_ascii.detach().getvalue()


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
    longest = max(map(len, tokens.shards))
    half = len(tokens) // 2
    message = f"has {longest:,} train tokens in the longest of its 3 shards, fewer than the {half + 1:,} that"
    with pytest.raises(ValueError, match=message):
        tokens.blocks(half)


@pytest.fixture
def files_read(monkeypatch):
    """The names of the parquet files that were read."""
    read = fineweb_edu.read_documents
    names = []
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
        (lambda: (out / "shard_000001.json").write_text('{"source": 1, "counts": [1]}'), ["001.parquet"]),
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


def varint(n):
    """A number in the footer of a parquet file."""
    n *= 2
    digits = []
    while n >= 128:
        digits.append(n % 128 + 128)
        n //= 128
    return bytes([*digits, n])


def lie_about_sizes(path):
    """Change the footer: it says that the row group grows to one byte."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:]
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    for n_bytes in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        number = varint(n_bytes)
        footer = footer.replace(number, b"\x82" + b"\x80" * (len(number) - 2) + b"\0")
    path.write_bytes(content[:start] + footer)
    assert pyarrow.parquet.ParquetFile(path).metadata.row_group(0).total_byte_size == 1


SMALL_MEMORY = """
import re, sys
from pathlib import Path
from data.fineweb_edu import prepare
prepare.PARQUET_BYTES = 2**26
try:
    prepare.prepare(Path(sys.argv[1]), Path(sys.argv[2]), tokenizer="bytes")
except ValueError as error:
    print(error)
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


def test_a_small_parquet_file_takes_bounded_memory_whatever_its_footer_says(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 2**28]}), tmp_path / "a.parquet", compression="zstd")
    lie_about_sizes(tmp_path / "a.parquet")
    command = [sys.executable, "-c", SMALL_MEMORY, tmp_path / "a.parquet", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    message, peak = done.stdout.splitlines()
    assert "a.parquet cannot be read as parquet, within 64 MiB: malloc of size 268" in message
    assert int(peak) < 250, "MiB"


def test_only_reading_parquet_is_limited_in_memory(parquets, tmp_path, monkeypatch):
    """A tokenizer in Rust aborts the process at a limit, and worker processes would inherit it."""
    limits = []
    encoded = fineweb_edu.write_tokens

    def write_tokens(folder, documents, *arguments, **options):
        def watched():
            for document in documents:
                limits.append(resource.getrlimit(resource.RLIMIT_DATA))
                yield document

        return encoded(folder, watched(), *arguments, **options)

    monkeypatch.setattr(fineweb_edu, "write_tokens", write_tokens)
    fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)
    assert set(limits) == {resource.getrlimit(resource.RLIMIT_DATA)}


@pytest.mark.parametrize("kind", [pyarrow.int64(), pyarrow.timestamp("us")])
def test_a_column_of_another_type_is_a_sentence_and_other_columns_are_not_read(tmp_path, kind):
    values = pyarrow.array([0, 2**62]).cast(kind)  # a date beyond Python's
    path = write_parquet(tmp_path / "a.parquet", other=values, text=["a", "b"])
    with pytest.raises(ValueError, match=r"a\.parquet has 'other' of type .*, expected strings: set --field"):
        fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS | {"field": "other", "val_fraction": 0.5})
    fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS | {"val_fraction": 0.5})
    assert texts_of(tmp_path / "out") == ["a", "b"]


def test_fineweb_refuses_a_row_over_the_limit_or_leaves_it_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fineweb_edu, "ROW_BYTES", 1000)
    write_parquet(tmp_path / "a.parquet", text=[f"row {i}" for i in range(100)] + ["é" * 501])
    options = dict(tokenizer="bytes", val_fraction=0.2)
    with pytest.raises(ValueError, match=r"a\.parquet row 101 has more than 1,000 bytes"):
        fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / "out", **options)
    fineweb_edu.prepare(tmp_path / "a.parquet", tmp_path / "out", errors="skip", **options)
    assert "left out by --errors skip: 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train_000000.bin", "shard_000001.json", "meta.json", ".lock"])
def test_fineweb_and_shakespeare_and_pystdlib_write_through_no_link(parquets, stdlib, tmp_path, monkeypatch, name):
    victim = tmp_path / "victim"
    folder = tmp_path / "strangers"
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
