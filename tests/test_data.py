"""What the tokenizers, the token files and the prepare scripts promise. No network, no GPU."""

import base64
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

from data.fineweb_edu import prepare as fineweb_edu
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text
from data.tokenizer import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, NAMES, end_of_text, get_tokenizer
from data.tokens import (
    Progress,
    Tokens,
    encode_batch,
    only_writer,
    prepare_once,
    split_of,
    token_dtype,
    write_dataset,
    write_meta,
    write_tokens,
)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["", "hello", "x = 'é' # 漢字 🦙\r\n\tpass\x00", "<|endoftext|> is not special in text", "a" * 1000]


def write_llama3_model(path, extra_tokens):
    """A small tokenizer.model: every byte, then the tokens given."""
    tokens = [bytes([i]) for i in range(256)] + [token.encode() for token in extra_tokens]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def toy_dataset(folder, train=("first", "second"), val=("third",), **options):
    documents = [("train", document) for document in train] + [("val", document) for document in val]
    return write_dataset(folder, documents, get_tokenizer("bytes"), **options)


def documents_of(folder, split):
    """The texts of a dataset, read back."""
    tokens = Tokens(folder, split)
    tokenizer, ids = get_tokenizer(tokens.meta["tokenizer"]), np.concatenate(tokens.shards)
    ends = np.flatnonzero(ids == end_of_text(tokenizer))
    assert ends[-1] == len(ids) - 1, "the last document is not ended by end-of-text"
    return [tokenizer.decode(part[part < 256].tolist()) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_bytes_are_their_own_ids_and_any_bytes_round_trip():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.n_vocab == 257 and end_of_text(tokenizer) == 256
    for string in TEXTS:
        assert tokenizer.encode_ordinary(string) == list(string.encode())
        assert tokenizer.decode(list(string.encode())) == string
    assert tokenizer.decode_bytes(range(256)) == bytes(range(256))
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"


def test_llama3_special_tokens_have_the_published_ids():
    assert len(LLAMA3_SPECIAL_TOKENS) == len(set(LLAMA3_SPECIAL_TOKENS)) == 256
    published = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|reserved_special_token_0|>": 128002,
        "<|finetune_right_pad_id|>": 128004,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
        "<|reserved_special_token_247|>": 128255,
    }
    assert {token: 128000 + LLAMA3_SPECIAL_TOKENS.index(token) for token in published} == published


def test_llama3_reads_tokenizer_model_and_round_trips(tmp_path):
    model = write_llama3_model(tmp_path / "tokenizer.model", ["he", "ll", "hell", "hello"])
    for path in (model, str(model), tmp_path):  # the file, or the folder it is in
        tokenizer = get_tokenizer("llama3", path)
    assert tokenizer.n_vocab == 260 + 256
    assert end_of_text(tokenizer) == 261
    assert tokenizer.encode_ordinary("hello") == [259]
    assert tokenizer.encode("<|begin_of_text|>hello<|eot_id|>", allowed_special="all") == [260, 259, 269]
    for string in TEXTS:
        assert tokenizer.decode(tokenizer.encode_ordinary(string)) == string


@pytest.mark.parametrize(
    "string, pieces",
    [
        ("1234567", ["123", "456", "7"]),  # at most three digits
        ("I'll", ["I", "'ll"]),
        ("IT'Sx", ["IT", "'S", "x"]),  # whatever the case
        (" world (ok)", [" world", " (", "ok", ")"]),
        ("a\n\n  b", ["a", "\n\n", " ", " b"]),  # the last blank belongs to the word
        (");\n\nx", [");\n\n", "x"]),  # line ends belong to the punctuation before them
        ("été", ["été"]),
    ],
)
def test_llama3_never_merges_across_the_published_splits(tmp_path, string, pieces):
    # every substring is a token, so only the split pattern keeps the whole string from being one
    substrings = {string[i:j] for i in range(len(string)) for j in range(i + 1, len(string) + 1)}
    tokens = sorted((s for s in substrings if len(s.encode()) > 1), key=len)
    tokenizer = get_tokenizer("llama3", write_llama3_model(tmp_path / "tokenizer.model", tokens))
    assert [tokenizer.decode([token]) for token in tokenizer.encode_ordinary(string)] == pieces


def test_llama3_follows_the_file_when_it_changes(tmp_path):
    path = tmp_path / "tokenizer.model"
    assert get_tokenizer("llama3", write_llama3_model(path, ["ab"])).n_vocab == 257 + 256
    assert get_tokenizer("llama3", write_llama3_model(path, ["ab", "cd"])).n_vocab == 258 + 256


def test_llama3_without_its_file_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"huggingface\.co/meta-llama.*hf download"):
        get_tokenizer("llama3", tmp_path / "tokenizer.model")


@pytest.mark.parametrize("content", [b"\x0a\x0b sentencepiece \xff", b"aGVsbG8= 0\n", b"AA== 0\nAQ== 7\n"])
def test_llama3_refuses_a_file_that_is_not_its_vocabulary(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.model(:\d+)? is "):
        get_tokenizer("llama3", tmp_path)


@pytest.mark.parametrize("name, nearest", [("lama3", "llama3"), ("gpt-2", "gpt2"), ("cl100k", "cl100k_base")])
def test_an_unknown_tokenizer_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"Unknown tokenizer {name}. Did you mean {nearest}?"):
        get_tokenizer(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bytes", "llama3")])
def test_a_tokenizer_that_cannot_be_downloaded_says_the_address_and_the_place(name, tmp_path, monkeypatch):
    def no_network(url):
        raise requests.ConnectionError("no network", request=requests.Request("GET", url).prepare())

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(FileNotFoundError, match="TIKTOKEN_CACHE_DIR") as error:
        get_tokenizer(name)
    address = re.search(r"https://\S+\.(bpe|tiktoken)", str(error.value)).group()
    assert hashlib.sha1(address.encode()).hexdigest() in str(error.value)  # the name that tiktoken looks for


def test_a_download_that_breaks_off_is_said(monkeypatch):
    def get_encoding(name):
        raise requests.exceptions.ChunkedEncodingError("Connection broken")  # it has no request

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    with pytest.raises(OSError, match="the download of tokenizer gpt2 failed: Connection broken"):
        get_tokenizer("gpt2")


@pytest.mark.parametrize("text", ["a" + " " * 1_500_000 + "b\n c", "\t" * 1_200_000 + "d" * 30_000])
def test_a_million_blanks_are_tokenized_too(text):
    ranks = {bytes([i]): i for i in range(256)}
    tokenizer = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={"<|end_of_text|>": 256}
    )
    with pytest.raises(ValueError):
        tokenizer.encode(text)
    tokens, n_documents, n_bytes = encode_batch([("train", text)], tokenizer)["train"]
    assert (n_documents, n_bytes) == (1, len(text)) and tokenizer.decode(tokens[:-1]) == text and tokens[-1] == 256


# ---------------------------------------------------------------------------------------------------------------
# Token files


def test_what_is_written_is_what_is_read(tmp_path):
    meta = toy_dataset(tmp_path, train=TEXTS[1:], val=["val é"])
    assert documents_of(tmp_path, "train") == TEXTS[1:]
    assert documents_of(tmp_path, "val") == ["val é"]
    n_bytes = sum(len(string.encode()) for string in TEXTS[1:])
    expected = dict(
        tokenizer="bytes", vocab_size=257, dtype="uint16", end_of_text=256,
        train_documents=4, train_bytes=n_bytes, train_tokens=n_bytes + 4,
        val_documents=1, val_bytes=6, val_tokens=7,
    )  # fmt: skip
    assert json.loads((tmp_path / "meta.json").read_text()) == meta
    for split in ("train", "val"):
        expected[f"{split}_sha256"] = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
    assert meta.items() >= expected.items()
    assert (tmp_path / "val.bin").read_bytes() == np.array([*b"val \xc3\xa9", 256], dtype="<u2").tobytes()


def test_uint16_only_where_the_vocabulary_fits():
    assert [token_dtype(size).name for size in (257, 65536, 65537, 128256)] == ["uint16", "uint16", "uint32", "uint32"]


def test_ids_past_65536_survive(tmp_path):
    words = {f"w{i}".encode(): 256 + i for i in range(70_000)}
    tokenizer = tiktoken.Encoding(
        "words",
        pat_str=r"w\d+|(?s:.)",
        mergeable_ranks={bytes([i]): i for i in range(256)} | words,
        special_tokens={"<|endoftext|>": 70_256},
    )
    meta = write_dataset(tmp_path, [("train", "w0w65280w69999"), ("val", "w1")], tokenizer)
    assert meta["dtype"] == "uint32"
    assert Tokens(tmp_path, "train").read([0], 3).tolist() == [[256, 65_536, 70_255, 70_256]]


def test_blocks_overlap_by_the_target_and_stay_inside(tmp_path):
    toy_dataset(tmp_path, train=["abcdefghi"])  # 10 tokens with the end of text
    tokens = Tokens(tmp_path, "train")
    assert len(tokens) == 10
    assert [tokens.blocks(3), tokens.blocks(3, shifted=True), tokens.blocks(9)] == [3, 2, 1]
    blocks = tokens.read([2, 0], 3)
    assert blocks.dtype == np.int64
    assert blocks.tolist() == [[*b"ghi", 256], [*b"abcd"]]
    assert tokens.read(np.array([1]), 3, shift=1).tolist() == [[*b"efgh"]]
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"3 train blocks of 3, asked for {index}"):
            tokens.read([index], 3)
    with pytest.raises(IndexError, match="2 train blocks of 3, asked for 2"):
        tokens.read([2], 3, shift=0)
    with pytest.raises(ValueError, match=r"10 train tokens, fewer than the 11 that block_size 10 needs"):
        tokens.blocks(10)
    with pytest.raises(ValueError, match=r"10 train tokens, fewer than the 12 that block_size 6 needs"):
        tokens.blocks(6, shifted=True)


def test_shifted_or_not_every_shard_is_read(tmp_path):
    """Ten shards of 24 bytes, each of its own letter: at any shift as many blocks of 5 from each."""
    counts = {}
    for i in range(10):
        with only_writer(tmp_path):
            texts = [("train", chr(97 + i) * 23), ("val", "abc")]
            counts[f"_{i}"] = write_tokens(tmp_path, texts, get_tokenizer("bytes"), shard=f"_{i}")
    write_meta(tmp_path, get_tokenizer("bytes"), counts)
    tokens = Tokens(tmp_path, "train")
    n_blocks = tokens.blocks(5, shifted=True)
    for shift in range(5):
        first = tokens.read(range(n_blocks), 5, shift)[:, 0]
        assert np.bincount(first)[97:107].tolist() == [n_blocks / 10] * 10, shift


def test_a_missing_dataset_says_the_command_that_makes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: run python data/text/prepare.py --input .* --out"):
        Tokens(tmp_path / "mine", "train")
    (tmp_path / "prepare.py").touch()
    with pytest.raises(FileNotFoundError, match=f"not a finished dataset: run python {tmp_path}/prepare.py"):
        Tokens(tmp_path, "train")


def test_a_truncated_file_is_reported_with_both_sizes(tmp_path):
    toy_dataset(tmp_path, train=["0123456789"])
    os.truncate(tmp_path / "train.bin", 8)
    with pytest.raises(ValueError, match=r"train\.bin has 8 bytes, but .* 11 uint16 tokens, which are 22 bytes: run "):
        Tokens(tmp_path, "train")
    (tmp_path / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.bin is missing"):
        Tokens(tmp_path, "val")


def test_a_dataset_elsewhere_names_the_script_that_made_it(tmp_path):
    toy_dataset(tmp_path, extra={"script": "data/fineweb_edu/prepare.py"})
    (tmp_path / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=f"run python data/fineweb_edu/prepare.py --out {tmp_path}, other opt"):
        Tokens(tmp_path, "val")


@pytest.mark.parametrize("content", ["", "[]", '{"tokenizer": "bytes"}'])
def test_a_broken_meta_json_is_reported(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta\.json (lacks|is not).*: run python"):
        Tokens(tmp_path, "train")


@pytest.mark.parametrize(
    "damage",
    [
        {"files": [{"train.bin": 13}]},
        {"files": {"train": {"train.bin": 13}}},
        {"files": {"train": {"train.bin": 13}, "val": {}}},
        {"files": {"train": 13, "val": 6}},
        {"files": {"train": [13], "val": [6]}},
        *({"files": {"train": {"train.bin": n}, "val": {"val.bin": 6}}} for n in (-1, 0, 1.5, "13", None, True)),
        {"vocab_size": "257"},
        {"val_bytes": -1},
        {"dtype": ["uint16"]},
        *({"end_of_text": token} for token in (None, "256", -1, 257)),
    ],
    ids=str,
)
def test_a_meta_json_with_other_values_than_were_written_is_damaged(tmp_path, damage):
    meta = toy_dataset(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(meta | damage))
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"meta\.json is damaged: run python"):
        Tokens(tmp_path, "train")


def test_a_token_beyond_the_vocabulary_is_reported(tmp_path):
    toy_dataset(tmp_path, train=["0123456789"])
    np.array([*range(10), 50256], dtype="<u2").tofile(tmp_path / "train.bin")
    tokens = Tokens(tmp_path, "train")
    message = r"train\.bin holds token 50256, but vocab_size is 257: prepare the data again or set vocab_size"
    with pytest.raises(ValueError, match=message):
        tokens.read([0], 10)
    assert tokens.read([0], 9).max() == 9
    with pytest.raises(ValueError, match="holds token 9, but vocab_size is 9"):
        tokens.read([0], 9, vocab_size=9)


def test_many_workers_write_what_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokens.BATCH_CHARS", 100)
    documents = [f"document {i} " * (i % 7 + 1) for i in range(200)]
    for workers in (1, 2):
        toy_dataset(tmp_path / str(workers), train=documents[:150], val=documents[150:], workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    with pytest.raises(ValueError, match="workers is 0: it must be at least 1"):
        toy_dataset(tmp_path / "0", train=documents, val=documents, workers=0)


def test_an_error_leaves_the_older_dataset_as_it_was(tmp_path):
    toy_dataset(tmp_path)
    before = contents(tmp_path)

    def documents():
        yield "train", "x" * 2**21  # more than a batch: some of it has been written by now
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_dataset(tmp_path, documents(), get_tokenizer("bytes"))
    with pytest.raises(ValueError, match="no documents"):
        toy_dataset(tmp_path, train=[], val=[])
    with pytest.raises(ValueError, match="2 training and 0 validation documents.*raise --val_fraction"):
        toy_dataset(tmp_path, val=[])
    assert contents(tmp_path) == before


def test_a_second_writer_in_a_folder_is_refused_and_the_first_goes_on(tmp_path):
    def documents():
        yield "train", "first"
        with pytest.raises(BlockingIOError, match=f"another prepare.py is writing to {tmp_path}: wait for it, or"):
            toy_dataset(tmp_path)
        yield "val", "second"

    for _ in range(2):  # the lock is free again
        write_dataset(tmp_path, documents(), get_tokenizer("bytes"))
    assert [documents_of(tmp_path, split) for split in ("train", "val")] == [["first"], ["second"]]


def test_a_folder_prepares_itself_once_also_where_only_files_open_for_writing_can_be_locked(tmp_path, monkeypatch):
    def flock_of_nfs(file, operation, flock=fcntl.flock):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError("Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    script = "from tests.test_data import toy_dataset as prepare\nopen(__file__, 'a').write('# has run')\n"
    (tmp_path / "prepare.py").write_text(script)
    for _ in range(2):
        prepare_once(tmp_path)
    assert documents_of(tmp_path, "val") == ["third"]
    assert (tmp_path / "prepare.py").read_text() == script + "# has run"


@pytest.mark.parametrize(
    "total, line", [(40, " 50.0% | 2 docs/s | 5 tok/s | eta 0h00m"), (None, "20 bytes | 2 docs/s | 5 tok/s")]
)
def test_progress_of_an_unknown_total_shows_no_share_and_no_time_left(total, line, monkeypatch, capsys):
    progress, start = Progress(total, "bytes"), time.time()
    progress.start, progress.every = start - 2, 0
    monkeypatch.setattr(time, "time", lambda: start)
    progress({split: dict(documents=2, tokens=5, bytes=10) for split in ("train", "val")})
    assert capsys.readouterr().out.rstrip() == line


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_kill_in_the_middle_leaves_no_dataset_and_no_workers(tmp_path):
    script = f"""
import multiprocessing, os, signal
from data.tokens import write_dataset
from data.tokenizer import get_tokenizer

def documents():
    for i in range(20):
        yield "train", "x" * 2**20
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    write_dataset({tmp_path!r}, documents(), get_tokenizer("bytes"), workers=2)
""".replace("PosixPath", "__import__('pathlib').Path")
    script_path = tmp_path / "script.py"
    script_path.write_text(script)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, script_path], env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*.bin"))
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(tmp_path, "train")
    workers = [int(pid) for pid in run.stdout.split()]
    deadline = time.time() + 10
    while any(map(is_running, workers)) and time.time() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(map(is_running, workers)), "workers outlived their parent"


# ---------------------------------------------------------------------------------------------------------------
# data/pystdlib


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


def test_pystdlib_splits_by_file_without_overlap_and_leaves_out_what_it_should(stdlib, tmp_path, capsys):
    meta = pystdlib.prepare(tmp_path / "out", stdlib)
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted({f"def function_{i}():\n    return {i}\n" for i in range(200)})
    assert 1 <= len(val) <= 40
    assert meta["val_bytes"] == sum(map(len, val))
    assert meta["script"] == "data/pystdlib/prepare.py"
    assert meta["gzip_bits_per_byte"] > 0 and meta["xz_bits_per_byte"] > 0
    assert "200 files, skipped 2 unreadable, 2 empty or a copy" in capsys.readouterr().out


def test_pystdlib_repeats_and_a_new_file_moves_no_other(stdlib, tmp_path):
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


# ---------------------------------------------------------------------------------------------------------------
# data/shakespeare_char


def test_shakespeare_without_a_network_says_the_address_and_the_place(tmp_path, monkeypatch):
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


# ---------------------------------------------------------------------------------------------------------------
# data/text


def test_text_takes_files_folders_and_jsonl(tmp_path):
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
def test_a_small_text_has_its_share_of_validation_however_few_documents(tmp_path, n, n_val):
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
def test_of_a_small_file_a_tenth_validates(tmp_path, n_bytes):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(n_bytes))[:n_bytes])
    meta = text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert 0.05 < meta["val_bytes"] / n_bytes < 0.2, meta


def test_a_single_small_document_is_refused_whatever_its_copies(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the only one")
    with pytest.raises(ValueError, match="one document, but training and validation need one each: give more text"):
        text.prepare([tmp_path], tmp_path / "out", val_fraction=0.5)


def test_a_large_text_is_split_by_each_document_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SMALL", 100)
    (tmp_path / "large.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(300)))
    text.prepare([tmp_path / "large.jsonl"], tmp_path / "out", val_fraction=0.1)
    first = [f"line {i}" for i in range(15)]  # the first 100 bytes, split by rank
    expected = [f"line {i}" for i in range(15, 300) if split_of(f"line {i}", 0.1) == "val"]
    assert [line for line in documents_of(tmp_path / "out", "val") if line not in first] == expected


@pytest.mark.parametrize("val_fraction", [10, 1, 0, -1, float("nan")])
@pytest.mark.parametrize("prepare", [text.prepare, fineweb_edu.prepare])
def test_a_share_of_validation_outside_0_to_1_is_refused(tmp_path, prepare, val_fraction):
    (tmp_path / "notes.txt").write_text("a note")
    message = f"--val_fraction is {val_fraction}, expected a share above 0 and below 1"
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path] if prepare is text.prepare else tmp_path, tmp_path / "out", val_fraction=val_fraction)


def test_text_says_which_binary_files_it_left_out(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
        (tmp_path / f"{i}.utf16").write_text(f"text {i}", encoding="utf-16")
    text.prepare([tmp_path], tmp_path / "out")
    left_out = f"binary or UTF-16 files left out: 3 ({tmp_path}/0.utf16, {tmp_path}/1.utf16, ...)"
    assert left_out in capsys.readouterr().out.splitlines()


def test_text_refuses_a_binary_file_that_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("a note", encoding="utf-16-le")
    with pytest.raises(ValueError, match="--input .*notes.txt is binary or UTF-16: text is read as UTF-8"):
        text.prepare([tmp_path / "notes.txt"], tmp_path / "out")


@pytest.mark.parametrize("source, out", [(".", "data/mine"), (".", "."), ("notes", ".")])
def test_text_never_takes_its_own_dataset_for_input(tmp_path, source, out, capsys):
    (tmp_path / "notes").mkdir()
    for i in range(8):
        (tmp_path / "notes" / f"{i}.txt").write_text(f"note {i}")
    first, second = (text.prepare([tmp_path / source], tmp_path / out) for _ in range(2))
    assert first == second
    assert (first["train_documents"], first["val_documents"]) == (7, 1)
    assert "left out" not in capsys.readouterr().out or out == source  # there it is among the input's binary files


@pytest.mark.parametrize("name", ["some.jsonl", "some.JSONL", "some.ndjson"])
def test_text_knows_json_lines_by_any_of_their_names(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    text.prepare([tmp_path / name], tmp_path / "out")
    assert sorted(documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")) == ["one", "two"]


def test_text_reads_a_pipe_and_keeps_a_hundredth_for_validation(tmp_path):
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
def test_text_of_more_than_a_megabyte_validates_whatever_its_hashes_are(tmp_path, monkeypatch, line):
    (tmp_path / "book.txt").write_text("".join(line.format(i) for i in range(200_000)), encoding="utf-8")
    monkeypatch.setattr(text, "split_of", lambda *_: "train")
    meta = text.prepare([tmp_path / "book.txt"], tmp_path / "out")
    assert meta["val_documents"] >= 2 and meta["val_bytes"] < 0.2 * meta["train_bytes"], meta


def test_of_a_large_text_no_huge_document_validates_only_to_have_one(tmp_path):
    for seed in range(4):
        texts = [f"huge {seed} " * 200_000, *(f"small document {seed} {i}" for i in range(3000))]
        sizes = {"train": 0, "val": 0}
        for side, document in text.split(texts, 0.05):
            sizes[side] += len(document)
        assert 0 < sizes["val"] < 0.01 * sizes["train"], sizes


def test_copies_of_what_the_first_megabyte_validates_do_too(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SMALL", 100)
    texts = [f"document {i:03}" for i in range(20)]
    found = list(text.split([*texts, *reversed(texts)], 0.2))
    sides = {}
    for side, document in found:
        assert sides.setdefault(document, side) == side, document
    assert [document for _, document in found] == [*texts, *reversed(texts)]
    assert "val" in {side for side, _ in found[:9]} and len({side for side, _ in text.split(["a", "a", "b"], 0.1)}) == 2


def test_text_script_ends_with_the_command_that_trains_on_it(tmp_path, monkeypatch, capsys):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"note {i}")
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
def test_an_empty_path_is_not_the_current_folder(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--input", "x.txt"] if script is text else []
    for empty in (["--out", ""], ["--out="], *([["--input", ""]] if "--input" in words else [])):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *words, *empty])
        with pytest.raises(SystemExit):
            script.main()
        assert "it is empty: name a file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_home_folder_that_the_shell_left_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n" * 2000)
    (tmp_path / "b.txt").write_text("two\n" * 2000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", "~/a.txt", "b.txt", "--out=~/new", "--workers=1"])
    text.main()
    assert (tmp_path / "new" / "meta.json").exists() and not (tmp_path / "~").exists()


def test_a_tokenizer_path_that_nothing_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only the tokenizer llama3 is read from a file, not gpt2"):
        get_tokenizer("gpt2", tmp_path / "tokenizer.model")


def test_text_survives_half_a_surrogate_pair(tmp_path):
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps({"text": f"{i} \ud83e!"}) + "\n" for i in range(60)))
    text.prepare([tmp_path / "odd.jsonl"], tmp_path / "out")
    assert "1 ?!" in documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")


def test_text_cuts_one_large_file_at_line_ends_and_loses_nothing(tmp_path):
    book = "".join(f"line {i} é\n" for i in range(60_000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    text.prepare([tmp_path / "book.txt"], tmp_path / "out")
    documents = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
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
def test_text_names_the_bad_jsonl_line(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        text.prepare([tmp_path / "bad.jsonl"], tmp_path / "out")
    assert not contents(tmp_path / "out")


def test_text_refuses_a_field_that_nothing_has(tmp_path):
    (tmp_path / "a.txt").write_text('{"body": "raw"}')
    with pytest.raises(ValueError, match="--field is body, but no input is a .jsonl or .ndjson file"):
        text.prepare([tmp_path / "a.txt"], tmp_path / "out", field="body")


def test_text_names_the_file_that_is_not_utf8_or_skips_it(tmp_path, capsys):
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "0.txt").write_text("\ufefftext 0", encoding="utf-8")  # its mark is read twice too
    (tmp_path / "latin1.txt").write_bytes(b"kept?\n" * 10_000 + b"caf\xe9")  # far behind the first chunk
    with pytest.raises(ValueError, match=r"latin1\.txt is not UTF-8 text.*--errors skip"):
        text.prepare([tmp_path], tmp_path / ".out")
    meta = text.prepare([tmp_path], tmp_path / ".out", errors="skip")
    assert meta["train_documents"] + meta["val_documents"] == 50
    documents = documents_of(tmp_path / ".out", "train") + documents_of(tmp_path / ".out", "val")
    assert set(documents) == {f"text {i}" for i in range(50)}
    assert "latin1.txt: not UTF-8" in capsys.readouterr().out


def test_text_cannot_skip_a_pipe(tmp_path):
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ValueError, match=f"--errors skip reads a file twice, but /dev/fd/{reading} is a pipe"):
        text.prepare([f"/dev/fd/{reading}"], tmp_path, errors="skip")
    os.close(reading)


def test_text_prints_names_that_are_not_utf8(tmp_path, capsys):
    name, content = os.fsdecode(b"caf\xe9"), {"a": b"one", "b": b"two", "bad": b"\xe9", "binary": b"\0"}
    for suffix in content:
        (tmp_path / f"{name}.{suffix}").write_bytes(content[suffix])
    for _ in range(2):
        text.prepare([tmp_path], tmp_path / f".{name}", errors="skip")
    out = capsys.readouterr().out  # strict, as of a terminal
    for line in (
        "left out: 1 ({}/caf\ufffd.binary)",
        "skipped {}/caf\ufffd.bad:",
        "replaced the dataset in {}/.caf\ufffd",
    ):
        assert line.format(tmp_path) in out, out


def test_text_script_ends_a_slip_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "data/text/prepare.py", "--out", tmp_path / "out", "--input"]
    run = subprocess.run([*command, tmp_path / "nowhere"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, f"error: --input {tmp_path}/nowhere does not exist\n")
    (tmp_path / "empty.txt").touch()
    run = subprocess.run([*command, tmp_path / "empty.txt"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, "error: no documents: the input holds no text\n")


# ---------------------------------------------------------------------------------------------------------------
# data/fineweb_edu


@pytest.fixture
def parquets(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "parquets"
    folder.mkdir()
    for number in range(3):
        rows = [f"Document {number}.{i} " + "says something. " * (i % 50) for i in range(300)] + ["", None]
        parquet.write_table(pyarrow.table({"id": range(302), "text": rows}), folder / f"{number:03d}.parquet")
    return folder


OPTIONS = dict(tokenizer="bytes", val_fraction=0.1)


def test_fineweb_writes_a_shard_a_file_and_reads_across_them(parquets, tmp_path):
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
def test_fineweb_run_again_makes_the_shards_that_are_damaged_or_of_another_input(
    parquets, tmp_path, files_read, damage
):
    fineweb_edu.prepare(parquets, tmp_path / "out", max_files=2, **OPTIONS)
    files_read.clear()
    damage(parquets, tmp_path / "out")
    fineweb_edu.prepare(parquets, tmp_path / "out", max_files=2, **OPTIONS)
    assert files_read == ([] if damage is DAMAGE["nothing"] else ["001.parquet"])
    fineweb_edu.prepare(parquets, tmp_path / "new", max_files=2, **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_fineweb_keeps_the_shards_of_a_version_that_did_not_note_the_input_s_size(parquets, tmp_path, files_read):
    fineweb_edu.prepare(parquets / "001.parquet", tmp_path, **OPTIONS)
    record = json.loads((tmp_path / "shard_000000.json").read_text())
    del record["source"]["size"], record["source"]["mtime_ns"]
    (tmp_path / "shard_000000.json").write_text(json.dumps(record))
    fineweb_edu.prepare(parquets / "001.parquet", tmp_path, **OPTIONS)
    assert files_read == ["001.parquet"]


def test_fineweb_refuses_a_folder_that_is_written_to(parquets, tmp_path):
    with only_writer(tmp_path / "out"), pytest.raises(BlockingIOError, match="another prepare.py is writing to"):
        fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)


def test_fineweb_interrupted_and_restarted_gives_what_an_uninterrupted_run_gives(parquets, tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokens.BATCH_CHARS", 10_000)
    fineweb_edu.prepare(parquets, tmp_path / "whole", **OPTIONS)

    read_documents, read = fineweb_edu.read_documents, []

    def interrupted(parquet, path, *args):
        for i, document in enumerate(read_documents(parquet, path, *args)):
            if path.name == "001.parquet" and i == 200:
                raise KeyboardInterrupt
            yield document

    def counted(parquet, path, *args):
        read.append(path.name)
        return read_documents(parquet, path, *args)

    out = tmp_path / "out"
    monkeypatch.setattr(fineweb_edu, "read_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fineweb_edu.prepare(parquets, out, workers=2, **OPTIONS)
    assert sorted(contents(out)) == ["shard_000000.json", "train_000000.bin", "val_000000.bin"]
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(out, "train")

    monkeypatch.setattr(fineweb_edu, "read_documents", counted)
    fineweb_edu.prepare(parquets, out, workers=2, **OPTIONS)
    assert read == ["001.parquet", "002.parquet"], "a finished shard was made again, or one was left out"
    assert contents(out) == contents(tmp_path / "whole")

    monkeypatch.setattr(fineweb_edu, "read_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fineweb_edu.prepare(parquets, out, **OPTIONS | {"val_fraction": 0.2})  # other settings: every shard again
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(out, "train")  # one shard is new, two are old


def test_fineweb_says_what_is_wrong_with_the_input(parquets, tmp_path):
    with pytest.raises(ValueError, match="has no column 'body' but id, text: set --field"):
        fineweb_edu.prepare(parquets, tmp_path / "out", field="body", **OPTIONS)
    os.truncate(parquets / "000.parquet", 1000)
    with pytest.raises(ValueError, match=r"000\.parquet cannot be read as parquet"):
        fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)
    content = (parquets / "001.parquet").read_bytes()
    (parquets / "001.parquet").write_bytes(content[:1000] + bytes(2000) + content[3000:])  # the footer is whole
    with pytest.raises(ValueError, match=r"001\.parquet cannot be read as parquet"):
        fineweb_edu.prepare(parquets / "001.parquet", tmp_path / "out", **OPTIONS)
    for max_files in (0, -1):
        with pytest.raises(ValueError, match=f"--max_files is {max_files}, expected 1 or more"):
            fineweb_edu.prepare(parquets, tmp_path / "out", max_files=max_files, **OPTIONS)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        fineweb_edu.prepare(tmp_path / "nowhere", tmp_path / "out", **OPTIONS)
    with pytest.raises(FileNotFoundError, match="holds no .parquet files"):
        fineweb_edu.prepare(tmp_path / "out", tmp_path / "out", **OPTIONS)


def test_fineweb_takes_any_strings_and_refuses_other_columns(tmp_path):
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


def test_fineweb_without_its_packages_says_the_pip_line(parquets, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow huggingface_hub"):
        fineweb_edu.prepare(parquets, tmp_path / "out", **OPTIONS)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install pyarrow huggingface_hub"):
        fineweb_edu.prepare(None, tmp_path / "out", **OPTIONS)
