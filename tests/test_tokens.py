"""Token files: they read back as written; damage is reported; writers do not disturb each other."""

import errno
import gzip
import hashlib
import json
import lzma
import multiprocessing.util
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken

from data import write
from data.files import open_to_write
from data.loader import FOLDER, dataset_folder, open_dataset
from data.tokenizer import Tiktoken, get_tokenizer
from data.tokens import Tokens, token_dtype
from data.write import Progress, prepare_once, write_dataset, write_lock, write_meta, write_tokens
from model import document_starts
from runtime.watchdog import _alive as alive
from tests.datasets import TEXTS, contents, documents_of, toy_dataset
from tests.runs import ROOT, prose, wait_until


def test_written_dataset_reads_back_with_counts_digests_and_compressed_sizes(tmp_path, monkeypatch):
    texts = {"train": TEXTS[1:], "val": ["val é", prose(0, 4000)]}
    meta = toy_dataset(tmp_path, **texts)
    assert {split: documents_of(tmp_path, split) for split in texts} == texts
    train, val = ("".join(each).encode() for each in texts.values())
    expected = dict(
        tokenizer="bytes", vocab_size=257, dtype="uint16", end_of_text=256,
        train_documents=4, train_bytes=len(train), train_tokens=len(train) + 4,
        val_documents=2, val_bytes=len(val), val_tokens=len(val) + 2,
        gzip_bits_per_byte=8 * len(gzip.compress(val, 9)) / len(val),
        xz_bits_per_byte=8 * len(lzma.compress(val, preset=9)) / len(val),
    )  # fmt: skip
    assert json.loads((tmp_path / "meta.json").read_text()) == meta
    for split in texts:
        expected[f"{split}_sha256"] = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
    assert meta.items() >= expected.items()
    assert (tmp_path / "val.bin").read_bytes() == np.array([*val[:6], 256, *val[6:], 256], dtype="<u2").tobytes()
    monkeypatch.setattr(write, "COMPRESSED_BYTES", len(val) - 1)
    assert "xz_bits_per_byte" not in toy_dataset(tmp_path, **texts), "it is too long for that"


def test_token_ids_above_65535_round_trip_and_those_below_take_uint16(tmp_path):
    assert [token_dtype(size).name for size in (65536, 65537)] == ["uint16", "uint32"]
    words = {f"w{i}".encode(): 256 + i for i in range(70_000)}
    ranks, special = {bytes([i]): i for i in range(256)} | words, {"<|endoftext|>": 70_256}
    words = tiktoken.Encoding("words", pat_str=r"w\d+|(?s:.)", mergeable_ranks=ranks, special_tokens=special)
    meta = write_dataset(tmp_path, [("train", "w0w65280w69999"), ("val", "w1")], Tiktoken(words))
    assert meta["dtype"] == "uint32"
    assert Tokens(tmp_path, "train").read([0], 3).tolist() == [[256, 65_536, 70_255, 70_256]]


def test_blocks_overlap_by_one_token_and_stay_in_bounds(tmp_path):
    toy_dataset(tmp_path, train=["abcdefghi"])  # 10 tokens with the end of text
    tokens = Tokens(tmp_path, "train")
    assert [tokens.blocks(3), tokens.blocks(3, shifted=True), tokens.blocks(9)] == [3, 2, 1]
    blocks = tokens.read([2, 0], 3)
    assert blocks.dtype == np.int64 and blocks.tolist() == [[*b"ghi", 256], [*b"abcd"]]
    assert tokens.read(np.array([1]), 3, shift=1).tolist() == [[*b"efgh"]]
    for block_size, shifted, n in ((10, False, 11), (6, True, 12)):
        with pytest.raises(ValueError, match=f"10 train tokens, fewer than the {n} that block_size {block_size} needs"):
            tokens.blocks(block_size, shifted)


def test_training_blocks_leave_room_for_the_shift_and_documents_begin_with_their_bos(tmp_path):
    toy_dataset(tmp_path, train=["a" + 7 * "b", "a" + 2 * "b"], val=["a" + 11 * "b"], extra={"bos": ord("a")})
    train, val = open_dataset(str(tmp_path), 4, 0, None, True)
    assert [train.n_blocks, val.n_blocks] == [2, 3], "of 13 tokens each"
    assert train.read([1], shift=3).tolist() == [[*b"b", 256, *b"abb"]]
    _, _, marks = val.unpack(val.read([0, 1]))
    assert document_starts(marks, val.first_mark).tolist() == [[0] * 4] * 2
    _, _, marks = train.unpack(train.read([1], shift=3))
    assert document_starts(marks, train.first_mark).tolist() == [[0, 0, 2, 2]]


def test_shifted_blocks_cover_all_shards_equally(tmp_path):
    """Ten shards of 24 bytes, each of its own letter: at any shift, each gives the same number of blocks of 5."""
    counts = {}
    for i in range(10):
        with write_lock(tmp_path):
            texts = [("train", chr(97 + i) * 23), ("val", "abc")]
            counts[f"_{i}"] = write_tokens(tmp_path, texts, get_tokenizer("bytes"), shard=f"_{i}")
    write_meta(tmp_path, get_tokenizer("bytes"), counts)
    tokens = Tokens(tmp_path, "train")
    n_blocks = tokens.blocks(5, shifted=True)
    for shift in range(5):
        first = tokens.read(range(n_blocks), 5, shift)[:, 0]
        assert np.bincount(first)[97:107].tolist() == [n_blocks / 10] * 10, shift


def test_an_interrupted_shard_leaves_no_record_of_another(tmp_path, monkeypatch):
    """The shards have the same length: only the record tells them apart."""
    write.write_shard(tmp_path, 0, [("train", "ab"), ("val", "ab")], get_tokenizer("bytes"), source={"file": 1})
    monkeypatch.setattr(write, "write_json", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write.write_shard(tmp_path, 0, [("train", "ba"), ("val", "ba")], get_tokenizer("bytes"), source={"file": 2})
    assert write.finished_shard(tmp_path, 0, get_tokenizer("bytes"), source={"file": 1}) is None


def test_a_dataset_is_found_by_its_name_under_data_and_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "text"):
        (tmp_path / folder).mkdir()
    for given, expected in {"mine": "mine", "./mine": "mine", str(tmp_path / "mine"): tmp_path / "mine"}.items():
        assert dataset_folder(given) == Path(expected)
    for given in ("text", "./data/text", "data/text"):  # names come first
        assert dataset_folder(given) == FOLDER / "text"
    assert dataset_folder("nowhere") == FOLDER / "nowhere"


def test_missing_or_incomplete_dataset_error_has_the_prepare_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: run python data/text/prepare.py --input .* --out"):
        Tokens(tmp_path / "mine", "train")
    with pytest.raises(
        FileNotFoundError, match="tokens.py is a file, but a dataset is a folder: make it with data/text/prepare"
    ):
        Tokens(Path(write.__file__).parent / "tokens.py", "train")
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Did you mean fineweb_edu\? Else run python "):
        Tokens(Path(write.__file__).parent / "fineweb", "train")
    (tmp_path / "prepare.py").touch()
    with pytest.raises(FileNotFoundError, match=f"not a finished dataset: run python {tmp_path}/prepare.py"):
        Tokens(tmp_path, "train")
    (tmp_path / "meta.json").touch()
    with pytest.raises(ValueError, match=f"meta.json is not JSON .*: run python {tmp_path}/prepare.py"):
        Tokens(tmp_path, "train")
    for of_another_program in ("[]", '{"name": "a"}'):
        (tmp_path / "meta.json").write_text(of_another_program)
        with pytest.raises(ValueError, match=f"does not describe a dataset: run python {tmp_path}/prepare.py"):
            Tokens(tmp_path, "train")
    (tmp_path / "prepare.py").unlink()
    toy_dataset(tmp_path, train=["0123456789"], extra={"script": "data/fineweb_edu/prepare.py"})
    os.truncate(tmp_path / "train.bin", 8)
    with pytest.raises(ValueError, match=r"train\.bin has 8 bytes, but .* 11 uint16 tokens, which are 22 bytes: run "):
        Tokens(tmp_path, "train")
    os.truncate(tmp_path / "train.bin", 24)
    with pytest.raises(ValueError, match=r"train\.bin has 24 bytes, but "):
        Tokens(tmp_path, "train")
    (tmp_path / "val.bin").unlink()
    command = f"run python data/fineweb_edu/prepare.py --out {tmp_path}, other opt"
    with pytest.raises(FileNotFoundError, match=rf"val\.bin is missing.*{command}"):
        Tokens(tmp_path, "val")


def test_token_id_beyond_the_vocabulary_is_an_error(tmp_path):
    toy_dataset(tmp_path, train=["0123456789"])
    np.array([*range(10), 50256], dtype="<u2").tofile(tmp_path / "train.bin")
    tokens = Tokens(tmp_path, "train")
    message = r"train\.bin holds token 50256, but vocab_size is 257: prepare the data again or set vocab_size"
    with pytest.raises(ValueError, match=message):
        tokens.read([0], 10)
    assert tokens.read([0], 9).max() == 9
    with pytest.raises(ValueError, match="holds token 9, but vocab_size is 9"):
        tokens.read([0], 9, vocab_size=9)


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin", ".lock"])
@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("dangling", [False, True])
def test_writing_a_dataset_never_follows_a_link(tmp_path, name, suffix, dangling):
    victim, folder = tmp_path / "victim", tmp_path / "strangers"
    folder.mkdir()
    (folder / (name + suffix)).symlink_to(victim)
    if not dangling:
        victim.write_text("mine")
    if (name, suffix) == (".lock", ""):
        with pytest.raises(OSError, match=r"\.lock is a link"):
            toy_dataset(folder)
    else:
        toy_dataset(folder)
        assert documents_of(folder, "val") == ["third"]
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "mine"


def test_a_pipe_in_place_of_the_lock_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match=r"\.lock is no regular file"):
        toy_dataset(tmp_path)


def test_a_dataset_folder_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    toy_dataset(tmp_path / "data")
    assert documents_of(tmp_path / "disk", "val") == ["third"]


@pytest.mark.parametrize("mode", ["w", "a", "wb", "a+"])
def test_open_to_write_opens_plain_files_as_open_does(tmp_path, mode):
    outcomes = []
    for opens in (open, open_to_write):
        path = tmp_path / opens.__name__
        path.write_text("before")
        with opens(path, mode) as file:
            file.write(b"after" if "b" in mode else "after")
        outcomes.append((path.read_text(), path.stat().st_mode))
    assert outcomes[0] == outcomes[1]


def test_error_while_writing_keeps_the_older_dataset(tmp_path):
    toy_dataset(tmp_path)
    before = contents(tmp_path)

    def documents():
        yield "train", "x" * 2**21  # more than a batch: some of it has been written by now
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_dataset(tmp_path, documents(), get_tokenizer("bytes"))
    with pytest.raises(ValueError, match="2 training and 0 validation documents.*raise --val_fraction"):
        toy_dataset(tmp_path, val=[])
    assert contents(tmp_path) == before


def test_second_writer_in_a_folder_is_rejected_and_the_first_completes(tmp_path):
    def documents():
        yield "train", "first"
        with pytest.raises(BlockingIOError, match=f"another prepare.py is writing to {tmp_path}: wait for it, or"):
            toy_dataset(tmp_path)
        yield "val", "second"

    for _ in range(2):  # the lock is free again
        write_dataset(tmp_path, documents(), get_tokenizer("bytes"))
    assert [documents_of(tmp_path, split) for split in ("train", "val")] == [["first"], ["second"]]


def test_prepare_once_runs_once(tmp_path):
    script = "from tests.datasets import toy_dataset as prepare\nopen(__file__, 'a').write('# has run')\n"
    (tmp_path / "prepare.py").write_text(script)
    for _ in range(2):
        prepare_once(tmp_path)
    assert documents_of(tmp_path, "val") == ["third"]
    assert (tmp_path / "prepare.py").read_text() == script + "# has run"


@pytest.mark.parametrize(
    "total, line", [(40, " 50.0% | 2 docs/s | 5 tok/s | eta 0h04m"), (None, "20 bytes | 2 docs/s | 5 tok/s")]
)
def test_progress_with_unknown_total_shows_no_share_and_no_eta(total, line, monkeypatch, capsys):
    progress, start = Progress(total, "bytes", repeats=61), time.time()
    progress.start, progress.every = start - 2, 0
    monkeypatch.setattr(time, "time", lambda: start)
    progress({split: dict(documents=2, tokens=5, bytes=10) for split in ("train", "val")})
    assert capsys.readouterr().out.rstrip() == line


def start_writer(tmp_path):
    """A running prepare.py, and the processes it has started: two workers and multiprocessing's tracker."""
    (tmp_path / "long.txt").write_text("a line of text\n" * 5_000_000)
    words = ["--input", tmp_path / "long.txt", "--out", tmp_path / "out", "--workers=2"]
    command = [sys.executable, ROOT / "data/text/prepare.py", *words]
    writer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any(file.stat().st_size for file in tmp_path.glob("out/train.bin.partial")))
    tasks = Path(f"/proc/{writer.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    assert len(children) == 3, "two, and the tracker of multiprocessing"
    return writer, [int(child) for child in children]


def test_killed_writer_leaves_no_dataset_and_no_workers(tmp_path):
    writer, children = start_writer(tmp_path)
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    assert not list(tmp_path.glob("out/*.bin"))
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        Tokens(tmp_path / "out", "train")
    wait_until(lambda: not any(map(alive, children)), "workers outlived their parent")


def test_sigterm_or_a_killed_worker_ends_a_writer_with_a_message_and_leaves_no_partial_files(tmp_path):
    for worker_dies, said in (
        (False, "\ninterrupted: nothing half-written is left\n"),
        (True, "error: a worker process died, perhaps out of memory: try fewer --workers\n"),
    ):
        writer, children = start_writer(tmp_path)
        is_worker = lambda pid: "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()  # noqa: E731
        if worker_dies:
            os.kill(next(filter(is_worker, children)), signal.SIGKILL)
        else:
            writer.terminate()
        assert (writer.communicate(timeout=60)[1], writer.returncode) == (said, 1)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def die_in_the_midst_of_a_result(text, tokenizer):
    """Instead of encoding: die after sending a message 4 bytes shorter than its header announces."""

    def send(pipe, content):
        os.write(pipe.fileno(), struct.pack("!i", 8) + bytes(4))
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send_bytes = send
    return [0], [], 1


def test_a_worker_killed_while_sending_a_result_is_reported(tmp_path):
    texts = [("train", "text"), ("val", "text")]
    with pytest.raises(OSError, match="a worker process died"):
        write_dataset(tmp_path, texts, get_tokenizer("bytes"), workers=2, encode=die_in_the_midst_of_a_result)


def fail_to_spawn(pid):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("fault", [lambda pid: os.kill(pid, signal.SIGKILL), fail_to_spawn], ids=["killed", "none"])
def test_a_worker_that_dies_at_startup_or_cannot_start_is_reported(tmp_path, monkeypatch, fault):
    """The tokenizer and the batches are larger than a pipe's buffer, so sending them waits for the reader."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_with_fault(path, words, fds):
        pid = spawn(path, words, fds)
        if "spawn_main" in str(words):  # not multiprocessing's tracker
            fault(pid)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawn_with_fault)
    tokenizer = get_tokenizer("bytes")
    tokenizer.files = {"tokenizer.json": bytes(2**20)}
    with pytest.raises(OSError, match="a worker process died"):
        write_dataset(tmp_path, [("train", "x" * 2**20)] * 8, tokenizer, workers=2)


def fail(text, tokenizer):
    raise {"mine": ValueError, "ours": ZeroDivisionError}[text](f"{text}: told")


@pytest.mark.parametrize("text, error", [("mine", ValueError), ("ours", ZeroDivisionError)])
def test_a_workers_exception_is_raised_with_its_traceback(tmp_path, text, error):
    with pytest.raises(error, match=f"{text}: told") as raised:
        write_dataset(tmp_path, [("train", text)], get_tokenizer("bytes"), workers=2, encode=fail)
    assert "in fail" in raised.value.__notes__[0]


def test_a_dataset_may_have_more_shards_than_the_open_file_limit(tmp_path):
    files = {split: {f"{split}_{i:06d}.bin": 8 for i in range(600)} for split in ("train", "val")}
    for name in (*files["train"], *files["val"]):
        (tmp_path / name).write_bytes(bytes(16))
    meta = dict(vocab_size=257, dtype="uint16", end_of_text=256, files=files)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        assert [data.n_blocks for data in open_dataset(str(tmp_path), 4, 0)] == [600, 600]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
