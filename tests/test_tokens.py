"""Token files: they read back as written; damage is reported; writers do not disturb each other."""

import errno
import functools
import hashlib
import json
import lzma
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import write
from data.files import read_small
from data.loader import FOLDER, Blocks, dataset_folder, open_dataset
from data.meta import FIELDS, REQUIRED, read_meta
from data.pystdlib import prepare as pystdlib
from data.pystdlib.prepare import prepare_once
from data.tokenizer import get_tokenizer, tokenizer_of
from data.tokens import Tokens, token_dtype
from data.write import write_dataset, write_lock, write_meta, write_tokens
from model import document_starts
from runtime.checkpoint import digest_of_run, read_run
from tests.datasets import LFS_POINTER, TEXTS, byte_tokenizer, contents, documents_of, encode_digit, toy_dataset
from tests.runs import ROOT, alive, prose, wait_until


def test_written_dataset_reads_back_with_counts_digests_and_its_size_in_xz(tmp_path, monkeypatch):
    texts = {"train": TEXTS[1:], "val": ["val é", prose(0, 4000)]}
    meta = toy_dataset(tmp_path, **texts)
    assert {split: documents_of(tmp_path, split) for split in texts} == texts
    train, val = ("".join(each).encode() for each in texts.values())
    expected = dict(
        tokenizer="bytes", vocab_size=257, dtype="uint16", end_of_text=256,
        train_documents=4, train_bytes=len(train), train_tokens=len(train) + 4,
        val_documents=2, val_bytes=len(val), val_tokens=len(val) + 2,
        xz_bits_per_byte=8 * len(lzma.compress(val, preset=9)) / len(val),
    )  # fmt: skip
    assert json.loads((tmp_path / "meta.json").read_text()) == meta
    for split in texts:
        expected[f"{split}_sha256"] = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
    assert meta.items() >= expected.items()
    assert (tmp_path / "val.bin").read_bytes() == np.array([*val[:6], 256, *val[6:], 256], dtype="<u2").tobytes()
    monkeypatch.setattr(write, "XZ_BYTES", len(val) - 1)
    assert "xz_bits_per_byte" not in toy_dataset(tmp_path, **texts), "it is too long for that"


def test_token_ids_above_65535_round_trip_and_those_below_take_uint16(tmp_path):
    assert [token_dtype(size).name for size in (65536, 65537)] == ["uint16", "uint32"]
    tokenizer = byte_tokenizer(r"w\d+|(?s:.)", ["<|endoftext|>"], [f"w{i}".encode() for i in range(70_000)])
    meta = write_dataset(tmp_path, [("train", "w0w65280w69999"), ("val", "w1")], tokenizer)
    assert meta["dtype"] == "uint32"
    assert Tokens(tmp_path, "train").shards[0][:].tolist() == [256, 65_536, 70_255, 70_256]


def test_blocks_overlap_by_one_token_and_stay_in_bounds(tmp_path):
    toy_dataset(tmp_path, train=["abcdefghi"], val=["abcdefghi"])  # 10 tokens with the end of text
    train, val = open_dataset(tmp_path, 3, 0)
    assert (train.n_blocks, val.n_blocks) == (2, 3)
    blocks = val.read([2, 0])
    assert blocks.dtype == torch.int64 and blocks.tolist() == [[*b"ghi", 256], [*b"abcd"]]
    assert train.read(np.array([1]), shift=1).tolist() == [[*b"efgh"]]
    for split, block_size, n in (("val", 10, 11), ("train", 6, 12)):
        assert Blocks(Tokens(tmp_path, split), block_size - 1, None, 0).n_blocks == 1
        with pytest.raises(ValueError, match=f"10 {split} tokens in a file, fewer than the {n} that"):
            Blocks(Tokens(tmp_path, split), block_size, None, 0)


def test_training_blocks_leave_room_for_the_shift_and_documents_begin_with_their_bos(tmp_path):
    toy_dataset(tmp_path, train=["a" + 7 * "b", "a" + 2 * "b"], val=["a" + 11 * "b"], extra={"bos": ord("a")})
    train, val = open_dataset(str(tmp_path), 4, 0, None, True)
    assert [train.n_blocks, val.n_blocks] == [2, 3], "of 13 tokens each"
    assert train.read([1], shift=3).tolist() == [[*b"b", 256, *b"abb"]]
    _, _, marks = val.unpack(val.read([0, 1]))
    assert document_starts(marks, val.doc_start).tolist() == [[0] * 4] * 2
    _, _, marks = train.unpack(train.read([1], shift=3))
    assert document_starts(marks, train.doc_start).tolist() == [[0, 0, 2, 2]]


def test_shifted_blocks_cover_all_shards_equally(tmp_path):
    """Ten shards of 24 bytes, each of its own letter: at any shift, each gives the same number of blocks of 5."""
    counts = {}
    for i in range(10):
        with write_lock(tmp_path):
            texts = [("train", chr(97 + i) * 23), ("val", "abc")]
            counts[f"_{i}"] = write_tokens(tmp_path, texts, get_tokenizer("bytes"), shard=f"_{i}")
    write_meta(tmp_path, get_tokenizer("bytes"), counts)
    train = Blocks(Tokens(tmp_path, "train"), 5, None, 0)
    for shift in range(5):
        first = train.read(range(train.n_blocks), shift)[:, 0]
        assert np.bincount(first)[97:107].tolist() == [train.n_blocks / 10] * 10, shift


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
    with pytest.raises(FileNotFoundError, match="not a finished dataset.*: run a prepare.py, such as .* --out"):
        Tokens(tmp_path / "mine", "train")
    (tmp_path / "prepare.py").touch()
    with pytest.raises(FileNotFoundError, match=f"not a finished dataset.*: run python {tmp_path}/prepare.py"):
        Tokens(tmp_path, "train")
    toy_dataset(tmp_path, train=["0123456789"])
    for n_bytes in (8, 24):
        os.truncate(tmp_path / "train.bin", n_bytes)
        with pytest.raises(ValueError, match=rf"train\.bin has {n_bytes} bytes, but the 11 uint16 tokens"):
            Tokens(tmp_path, "train")
    (tmp_path / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.bin is missing, .*: prepare the data again"):
        Tokens(tmp_path, "val")


# ----------------------------------------------------------------------------------------------------------------------
# A dataset from a stranger


WRONG_VALUES = ["null", "true", "-1", "1.5", "1e400", "NaN", "-Infinity", "9" * 5000, '""', '"a\\u0000/../b"', "[]"]
WRONG_VALUES += ["[null]", "{}", '{"a": {}}', '{"train": null}', '"\\ud800"']
VALID = {  # of the wrong values, some are right for some fields
    '""': [], "[]": ["eos"], "{}": ["tokenizer_files"], "1.5": ["xz_bits_per_byte"],
}  # fmt: skip


@pytest.fixture
def strangers(tmp_path):
    """strangers(**changes) changes fields of a dataset's meta.json, given as JSON, None: gone. Returns the folder."""
    folder = tmp_path / "strangers"
    tokenizer = get_tokenizer("bytes")
    tokenizer.files = {"tokenizer.json": b"{}"}
    extra = {"eos": [256], "train_targets": 1, "val_targets": 1, "bos": 255}
    documents = [("train", "0123456789"), ("val", "0123456789")]
    meta = write_dataset(folder, documents, tokenizer, extra)
    for split in ("train", "val"):
        (folder / f"{split}.mask").write_bytes(bytes([3] + [1] * 10))
    assert meta.keys() == FIELDS.keys(), "the table names other fields than are written"

    def change(**changes):
        fields = {name: json.dumps(value) for name, value in meta.items()} | changes
        fields = [f"{json.dumps(name)}: {value}" for name, value in fields.items() if value is not None]
        (folder / "meta.json").write_text("{" + ", ".join(fields) + "}")
        return folder

    return change


def test_every_field_of_meta_json_is_read_back_as_written(strangers):
    folder = strangers(mine='{"a": [1]}')
    assert read_meta(folder).keys() == FIELDS.keys(), "fields that are not in the table are not read"
    assert open_dataset(str(folder), 4, 0, mask_documents=True)[0].n_blocks == 1


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_or_mistyped_field_of_meta_json_is_a_sentence(strangers, name):
    for value in WRONG_VALUES:
        folder = strangers(**{name: value})
        if name in VALID.get(value, ()):
            read_meta(folder)
            continue
        with pytest.raises(ValueError, match=rf"meta\.json .*{name}|meta\.json is damaged"):
            open_dataset(str(folder), 4, 0, mask_documents=True)
        with pytest.raises(ValueError):
            tokenizer_of(folder)
    folder = strangers(**{name: None})
    if name in REQUIRED:
        with pytest.raises(ValueError, match=f"lacks {name}"):
            read_meta(folder)
        with pytest.raises(ValueError, match=f"lacks {name}"):
            tokenizer_of(folder)


OTHERS = {
    "a name outside": {"tokenizer_files": '{"../../../matplotlib.py": "%s"}' % ("a" * 64)},
    "a name within": {"tokenizer_files": '{"original/tokenizer.model": "%s"}' % ("a" * 64)},
    "no digest": {"tokenizer_files": '{"tokenizer.json": "zz"}'},
    "a file outside": {"files": '{"train": {"../train.bin": 11}, "val": {"val.bin": 11}}'},
    "another kind of file": {"files": '{"train": {"train.mask": 11}, "val": {"val.bin": 11}}'},
    "no tokens": {"files": '{"train": {"train.bin": 0}, "val": {"val.bin": 11}}'},
    "very many tokens": {"files": '{"train": {"train.bin": 1%s}, "val": {"val.bin": 11}}' % ("0" * 30)},
    "no training": {"files": '{"train": {}, "val": {"val.bin": 11}}'},
    "another split": {"files": '{"train": {"train.bin": 11}, "val": {"val.bin": 11}, "test": {"test.bin": 1}}'},
    "objects": {"dtype": '"O"'},
    "an end beyond the vocabulary": {"end_of_text": "257"},
    "a vocabulary of tebibytes": {"vocab_size": str(2**40)},
    "the second of duplicates": {"bos": '1, "bos": "x"'},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_no_name_type_or_number_of_meta_json_and_run_json_is_used_unchecked(strangers, tmp_path, changes):
    folder = strangers(**changes)
    with pytest.raises(ValueError, match=r"meta\.json (has|names) ") as raised:
        open_dataset(str(folder), 4, 0, mask_documents=True)
    assert len(str(raised.value)) < 500
    with pytest.raises(ValueError):
        tokenizer_of(folder)
    dataset = json.loads((folder / "meta.json").read_text())
    run = {"step": 1, "dataset": dataset, "digests": {}}
    (tmp_path / "run.json").write_text(json.dumps(run | {"digest": digest_of_run(run)}))
    with pytest.raises(ValueError, match=r"run\.json (has|names) "):
        read_run(tmp_path)


def test_what_is_no_meta_json_is_a_sentence(strangers):
    folder = strangers()
    for content in (b"", b"\xff\xfe\0", b"{", b"[]", b'"x"', b"9" * 5000):
        (folder / "meta.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"meta\.json "):
            read_meta(folder)


@pytest.mark.parametrize("dtype, token", [("uint16", 65535), ("uint32", 2**32 - 1), ("uint32", 257)])
@pytest.mark.parametrize("targets", [True, False])
def test_a_token_beyond_the_vocabulary_is_a_sentence_however_large(strangers, dtype, token, targets):
    masked = {} if targets else {"train_targets": None, "val_targets": None}
    folder = strangers(dtype=f'"{dtype}"', **masked)
    for split in ("train", "val"):
        np.array([*range(10), token], dtype).tofile(folder / f"{split}.bin")
    block_size = 10 if targets else 5
    # the model may have more rows than the data has tokens
    _, val = open_dataset(str(folder), block_size, 0, vocab_size=512, mask_documents=targets)
    with pytest.raises(ValueError, match=rf"\.bin holds token {token}, but vocab_size is 257"):
        val.read(range(val.n_blocks))


@pytest.mark.parametrize("name", ["train.bin", "train.mask"])
def test_a_file_cut_while_training_is_a_sentence(strangers, name):
    folder = strangers()
    train, _ = open_dataset(str(folder), 10, 0, mask_documents=True)
    train.sequences(0, 1)
    os.truncate(folder / name, 5)
    with pytest.raises(ValueError, match=rf"{name} has been cut since it was opened"):
        train.sequences(0, 1)


def test_a_small_file_is_read_and_a_large_one_a_pipe_a_device_or_an_lfs_pointer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.MOST_BYTES", 1000)
    (tmp_path / "a.json").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to("a.json")
    assert read_small(tmp_path / "a.json") == read_small(tmp_path / "link") == bytes(1000)
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"a\.json has more than 1,000 bytes"):
        read_small(tmp_path / "a.json")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_small(tmp_path / name)
    (tmp_path / "tokenizer.json").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match="git lfs pull"):
        read_small(tmp_path / "tokenizer.json")


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, flags):
        raise OSError(errno.ENOSYS, "Function not implemented")  # as of a Lustre mounted without flock

    monkeypatch.setattr("fcntl.flock", flock)
    toy_dataset(tmp_path)
    assert f"{tmp_path}/.lock cannot be locked (Function not implemented)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin.partial", ".lock"])
def test_writing_a_dataset_never_follows_a_link_but_its_folder_may_be_one(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "strangers"
    folder.symlink_to(tmp_path / "disk")
    (folder / name).symlink_to(victim)
    if name in (".lock", "val.bin.partial"):
        with pytest.raises(OSError, match=name):
            toy_dataset(folder)
    else:
        toy_dataset(folder)
        assert documents_of(tmp_path / "disk", "val") == ["third"]
    assert victim.read_text() == "mine"


def test_error_while_writing_keeps_the_older_dataset(tmp_path):
    toy_dataset(tmp_path)
    before = contents(tmp_path)

    def documents():
        yield "train", "x" * 2**21  # more than a batch: some of it has been written by now
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_dataset(tmp_path, documents(), get_tokenizer("bytes"))
    with pytest.raises(ValueError, match="2 training and 0 validation documents.*change --val_fraction"):
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


def test_a_strangers_folder_called_pystdlib_runs_nothing_and_ours_is_prepared_once(tmp_path, monkeypatch):
    folder = tmp_path / "pystdlib"
    folder.mkdir()
    (folder / "prepare.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w')\ndef prepare(folder): pass")
    (tmp_path / "data").symlink_to(tmp_path)
    for name in (folder, f"{folder}/", tmp_path / "data/pystdlib", folder / ".." / "pystdlib"):
        with pytest.raises(FileNotFoundError, match="not a finished dataset"):
            open_dataset(str(name), 4, 0)
    texts = ["0123456789"]
    calls = []
    monkeypatch.setattr(pystdlib, "prepare", lambda folder: calls.append(toy_dataset(folder, texts, texts)))
    for _ in range(2):
        prepare_once(folder)  # even there only our own script runs
    assert open_dataset(str(folder), 4, 0)[1].n_blocks == 2 and len(calls) == 1
    assert not (tmp_path / "has run").exists()


def start_writer(tmp_path, workers=2):
    """A prepare.py with so many workers, in a process group of its own."""
    (tmp_path / "long.txt").write_text("a line of text\n" * 5_000_000)
    words = ["--input", tmp_path / "long.txt", "--out", tmp_path / "out", f"--workers={workers}"]
    command = [sys.executable, ROOT / "data/text/prepare.py", *words]
    heed_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background ignore it
    users = os.environ | {"OMP_NUM_THREADS": "2"}  # a user's process has threads of NumPy's beside the main one
    more = {"text": True, "start_new_session": True, "env": users, "preexec_fn": heed_ctrl_c}
    return subprocess.Popen(command, stderr=subprocess.PIPE, **more)


def children_of(writer):
    """The processes that it has started: two workers and multiprocessing's tracker."""
    tasks = Path(f"/proc/{writer.pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_a_killed_writer_or_worker_and_sigterm_leave_no_dataset_and_no_workers(tmp_path):
    def kill_worker(writer, children):
        is_worker = lambda pid: "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()  # noqa: E731
        os.kill(next(filter(is_worker, children)), signal.SIGKILL)

    died = "error: a worker process died, perhaps out of memory: try fewer --workers\n"
    for end, said, code in (
        (lambda writer, children: writer.kill(), "", -signal.SIGKILL),
        (lambda writer, children: writer.terminate(), "\ninterrupted: nothing half-written is left\n", 1),
        (kill_worker, died, 1),
    ):
        writer = start_writer(tmp_path)
        wait_until(lambda: any(file.stat().st_size for file in tmp_path.glob("out/train.bin.partial")))
        children = children_of(writer)
        assert len(children) == 3
        end(writer, children)
        assert writer.communicate(timeout=120)[1].endswith(said) and writer.returncode == code
        assert not list((tmp_path / "out").glob("*.bin"))
        assert code < 0 or [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
        with pytest.raises(FileNotFoundError, match="not a finished dataset"):
            Tokens(tmp_path / "out", "train")
        wait_until(lambda children=children: not any(map(alive, children)))  # no worker outlives its parent
        shutil.rmtree(tmp_path / "out")


def test_a_worker_that_fails_ends_the_writing_with_its_traceback_and_leaves_no_dataset(tmp_path):
    documents = [("train", "1" * 2**20)] * 6 + [("val", "fail")]
    with pytest.raises(ValueError, match="invalid literal for int.*'f'") as raised:
        write_dataset(tmp_path, documents, get_tokenizer("bytes"), encode=encode_digit, workers=2)
    assert "in encode_digit" in raised.value.__notes__[0]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_ctrl_c_while_workers_start_is_one_sentence(tmp_path):
    writer = start_writer(tmp_path)
    wait_until(lambda: any("numpy" in Path(f"/proc/{child}/maps").read_text() for child in children_of(writer)))
    os.killpg(writer.pid, signal.SIGINT)
    assert writer.communicate(timeout=120)[1] == "\ninterrupted: nothing half-written is left\n"


def test_sigterm_while_workers_start_is_one_sentence(tmp_path):
    writer = start_writer(tmp_path, workers=12)
    while len(children_of(writer)) < 6:
        pass  # no pause: a worker has half started when the signal comes
    writer.terminate()
    assert writer.communicate(timeout=120)[1] == "\ninterrupted: nothing half-written is left\n"


def test_a_dataset_may_have_more_shards_than_the_open_file_limit(tmp_path):
    files = {split: {f"{split}_{i:06d}.bin": 8 for i in range(600)} for split in ("train", "val")}
    for name in (*files["train"], *files["val"]):
        (tmp_path / name).write_bytes(bytes(16))
    meta = dict(tokenizer="bytes", vocab_size=257, dtype="uint16", end_of_text=256, files=files)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        assert [data.n_blocks for data in open_dataset(str(tmp_path), 4, 0)] == [600, 600]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
