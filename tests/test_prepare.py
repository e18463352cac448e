"""The prepare.py scripts: pystdlib, shakespeare_char, text, fineweb_edu. No network."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet
import pytest
import transformers

from data.command import run_script
from data.fineweb_edu import prepare as fineweb_edu
from data.loader import open_dataset
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text
from data.tokenizer import tokenizer_of, train_tokenizer
from data.tokens import Tokens
from data.write import split_of, split_texts
from tests.datasets import TEXTS, contents, documents_of, texts_of
from tests.published import publish_chat_model
from tests.runs import ROOT, prose
from tests.test_tokenizer import write_llama3_model


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
    learned = train_tokenizer(documents_of(tmp_path / "out", "train"), pystdlib.N_VOCAB)
    assert meta["tokenizer"] == learned.name, "the tokenizer has seen the validation files"
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
    assert "xz -9" in run.stdout
    meta = Tokens(tmp_path / "here", "val").meta
    assert meta["train_bytes"] > 5e6, f"{meta['train_bytes']:,} bytes of training text: where is the standard library?"
    assert 2e5 < meta["val_bytes"] < 2e6
    assert meta["vocab_size"] == 2048
    assert meta["val_bytes"] > 3 * meta["val_tokens"]
    assert 1.5 < meta["xz_bits_per_byte"] < 2


def test_shakespeare_download_error_has_url_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare_char, "URL", "http://localhost:9/input.txt")  # nothing listens on the discard port
    place = tmp_path / "input.txt"
    with pytest.raises(OSError, match=f"could not download http://localhost:9/input.txt .* put it at {place}"):
        shakespeare_char.prepare(tmp_path)
    assert not place.exists()
    place.write_text("To be, or not to be. " * 100)
    meta = shakespeare_char.prepare(tmp_path)
    assert (meta["train_bytes"], meta["val_bytes"]) == (1890, 210)
    assert "".join(documents_of(tmp_path, "train") + documents_of(tmp_path, "val")) == place.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# text


@pytest.mark.parametrize("val_fraction", [1e-9, 0.1, 1 - 1e-9])
def test_copies_share_a_split_which_their_hash_decides_and_both_splits_get_some(val_fraction):
    texts = [f"document {i:03}" for i in range(400)]
    documents = list(split_texts([(text, text) for text in [*texts, *reversed(texts)]], val_fraction))
    assert [text for _, text in documents] == [*texts, *reversed(texts)]
    sides = dict(reversed(item) for item in documents)
    assert all(sides[text] == side for side, text in documents)
    assert {"train", "val"} == set(sides.values())
    assert sum(side != split_of(text, val_fraction) for text, side in sides.items()) <= 1
    for few in (["a", "b"], ["a", "a", "b"], [letter * 11 * 10**5 for letter in "abcdef"]):
        assert {side for side, _ in split_texts(zip(few, few, strict=True), val_fraction)} == {"train", "val"}


@pytest.mark.parametrize("n_bytes", [3_000, 20_000, 600_000])
def test_a_file_is_cut_at_line_ends_without_loss_and_a_small_one_gives_a_tenth_for_validation(tmp_path, n_bytes):
    book = "".join(f"line {i:06} é\n" for i in range(n_bytes // 15))
    (tmp_path / "a.txt").write_text(book, encoding="utf-8")
    meta = text.prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert 0.03 < meta["val_bytes"] / len(book.encode()) < 0.3, meta
    documents = texts_of(tmp_path / "out")
    assert len(documents) > 4 and all(document.endswith("\n") for document in documents)
    assert "".join(documents) == book  # sorted by number is the original order


def test_the_number_of_workers_does_not_change_a_dataset(tmp_path):
    rows = "".join(json.dumps({"text": f"row {i} " * (i % 70)}) + "\n" for i in range(10_000))
    (tmp_path / "a.jsonl").write_text(rows)
    for n in (1, 2):
        text.prepare([tmp_path / "a.jsonl"], tmp_path / str(n), workers=n)
        assert contents(tmp_path / "1") == contents(tmp_path / str(n))
    assert json.loads(contents(tmp_path / "1")["meta.json"])["train_bytes"] > 2 * 2**20, "several batches"


@pytest.mark.parametrize("out", ["data/mine", "."])
def test_text_never_reads_its_own_dataset_and_tokenizer_as_input(tmp_path, out):
    (tmp_path / "notes").mkdir()
    for i in range(8):
        (tmp_path / "notes" / f"{i}.txt").write_text(f"note {i}")
    tokenizer = str(write_llama3_model(tmp_path / ".model", []))
    first, second = (text.prepare([tmp_path], tmp_path / out, tokenizer) for _ in range(2))
    assert first == second and (tmp_path / out / "tokenizer.model").exists()
    assert first["train_documents"] + first["val_documents"] == 8


@pytest.mark.parametrize("words, message", [
    (["--val_fraction=nan"], "--val_fraction: nan is not above 0 and below 1"),
    (["--workers=-1"], "--workers: -1 is not above 0"),
    (["--input", "nothing"], "error: --input has no files: hidden ones and those directly in --out are not read"),
    (["--input", "nowhere"], "error: [Errno 2] No such file or directory: 'nowhere'"),
    (["--input", "empty.txt"], "error: 0 training and 0 validation documents"),
    (["--tokenizer=train:4k"], "expected a number of tokens, as in train:8192"),
])  # fmt: skip
def test_text_script_prints_user_errors_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    for name in ("a.txt", "b.txt", "empty.txt"):
        (tmp_path / name).write_text("the only one" if name != "empty.txt" else "")
    argv = ["prepare.py", "--out=out", "--workers=1", "--input", "a.txt", "b.txt", *map(str, words)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        run_script(text.main)
    assert message in f"{stopped.value.code}{capsys.readouterr().err}"


def test_the_next_command_runs_from_the_current_folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(name)
    folders = ["--input", tmp_path / "texts", "--out", tmp_path / "out"]
    command_of_prepare = [sys.executable, ROOT / "data/text/prepare.py", *folders]
    run = subprocess.run(command_of_prepare, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    command = f"next: python {ROOT}/train.py {ROOT}/config/baby_llama.py --dataset={tmp_path}/out --out_dir=out/out\n"
    assert run.stdout.endswith(command), "it does not run from this folder"
    publish_chat_model(tmp_path / "hf")
    done = subprocess.run([*command_of_prepare, "--tokenizer", tmp_path / "hf"], capture_output=True, text=True)
    assert f"train.py --init_from={tmp_path}/hf --learning_rate=2e-5 --dataset={tmp_path}/out " in done.stdout


def test_a_learned_tokenizer_stays_with_the_data_and_its_checkpoint_opens_in_transformers(train, tmp_path):
    words = prose(0, 300) + TEXTS[2]
    (tmp_path / "words.txt").write_text("\n".join(prose(i, 20) for i in range(99)))
    arguments = [tmp_path / "words.txt"], tmp_path / "data", "train:300"
    meta = text.prepare(*arguments)
    learned = tokenizer_of(tmp_path / "data")
    assert meta["vocab_size"] == learned.n_vocab == 300 and meta == text.prepare(*arguments), "it is not the same again"
    assert learned.decode(learned.encode(words)) == words, "a byte is lost"
    assert learned.end_of_text not in learned.encode("<|endoftext|>")
    train(dataset=tmp_path / "data", max_iters=2, eval_interval=2)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out/step_000002")
    assert theirs(words).input_ids == learned.encode(words) and theirs.eos_token_id == learned.end_of_text
    assert tokenizer_of(tmp_path / "out").encode(words) == learned.encode(words)


def test_a_tokenizer_is_learned_from_the_first_training_documents_of_a_pipe_that_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LEARNED_CHARS", 3000)
    rows = [json.dumps({"text": f"{i} {word}"}) for word in ("hestur " * 20, "kind " * 20) for i in range(40)]
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("\n".join(rows),))
    writer.start()
    text.prepare([tmp_path / "pipe"], tmp_path / "data", "train:400", format="jsonl", val_fraction=0.2)
    writer.join()
    learned = tokenizer_of(tmp_path / "data")
    assert len(learned.encode(" hestur")) == 1 and len(learned.encode(" kind")) > 1, "the end was read, too"
    n_documents = sum(Tokens(tmp_path / "data", split).meta[f"{split}_documents"] for split in ("train", "val"))
    assert n_documents == 80, "what the tokenizer was learned from is missing"


def test_a_dataset_never_replaces_a_models_tokenizer(tmp_path, stdlib):
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
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / "out").glob("train_*.bin"))]
    assert meta["train_sha256"] == hashlib.sha256("".join(digests).encode()).hexdigest() and len(digests) == 3
    _, val = open_dataset(tmp_path / "out", 100, 0)
    shards = val.tokens.shards
    per_shard = [(len(shard) - 1) // 100 for shard in shards]
    assert val.n_blocks == sum(per_shard)
    blocks = val.read(range(val.n_blocks)).numpy()
    assert (blocks[per_shard[0]] == shards[1][:101]).all()
    assert (blocks[-1] == shards[2][(per_shard[2] - 1) * 100 :][:101]).all()


@pytest.fixture
def files_read(monkeypatch):
    """The names of the parquet files that were read."""
    read = fineweb_edu.read_documents
    names = []
    counted = lambda path, *args: names.append(path.name) or read(path, *args)  # noqa: E731
    monkeypatch.setattr(fineweb_edu, "read_documents", counted)
    return names


def test_fineweb_from_the_hub_is_that_of_the_same_files_on_disk(parquets, tmp_path, monkeypatch):
    names = [f"sample/10BT/{path.name}" for path in parquets.iterdir()] + ["sample/100BT/000.parquet", "README.md"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, repo_type: names)
    fetch = lambda repo, name, repo_type: parquets / Path(name).name  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    meta = fineweb_edu.prepare(folder=tmp_path / "out", max_files=2, **OPTIONS)
    assert meta == fineweb_edu.prepare(parquets, tmp_path / "local", max_files=2, **OPTIONS)
    with pytest.raises(FileNotFoundError, match="sample/1T holds no .parquet files"):
        fineweb_edu.prepare(folder=tmp_path / "out", sample="1T", **OPTIONS)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, repo_type: 1 / 0)  # as without a network
    with pytest.raises(OSError, match="does not list HuggingFaceFW/fineweb-edu .*--input"):
        fineweb_edu.prepare(folder=tmp_path / "out", **OPTIONS)


def test_fineweb_reads_the_links_of_the_hubs_cache_and_no_folder_that_is_named_as_a_file(parquets, tmp_path):
    links = tmp_path / "snapshot"
    (links / "spark.parquet").mkdir(parents=True)
    for number, path in enumerate(sorted(parquets.iterdir())):
        (links / "spark.parquet" / path.name).symlink_to(path.rename(parquets / f"0123abcd{number}"))
    assert fineweb_edu.prepare(links, tmp_path / "out", **OPTIONS)["train_documents"] > 700
    one = fineweb_edu.prepare(links / "spark.parquet" / "001.parquet", tmp_path / "one", **OPTIONS)
    assert one["train_documents"] + one["val_documents"] == 300


def test_fineweb_rewrites_only_damaged_or_outdated_shards(parquets, tmp_path, files_read):
    out = tmp_path / "out"
    for damage, rewritten in (
        (lambda: None, ["000.parquet", "001.parquet"]),
        (lambda: None, []),
        (lambda: os.truncate(out / "val_000001.bin", 2), ["001.parquet"]),
        (lambda: os.truncate(out / "shard_000001.json", 30), ["001.parquet"]),
        (lambda: (out / "shard_000001.json").write_text("{}"), ["001.parquet"]),
        (lambda: os.utime(parquets / "001.parquet", (0, 0)), ["001.parquet"]),
    ):
        damage()
        files_read.clear()
        fineweb_edu.prepare(parquets, out, max_files=2, **OPTIONS)
        assert files_read == rewritten
        fineweb_edu.prepare(parquets, tmp_path / "new", max_files=2, **OPTIONS)
        assert contents(out) == contents(tmp_path / "new")


def test_fineweb_interrupted_and_restarted_writes_the_same_files(parquets, tmp_path, monkeypatch, files_read):
    monkeypatch.setattr("data.encode.BATCH_CHARS", 10_000)
    fineweb_edu.prepare(parquets, tmp_path / "whole", **OPTIONS)
    counted = fineweb_edu.read_documents

    def interrupted(path, *args):
        for i, document in enumerate(counted(path, *args)):
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
    for name, options, message in (
        ("002.parquet", dict(field="body"), "no column 'body' but id, text: set --field"),
        ("000.parquet", {}, r"000\.parquet cannot be read"),
        ("001.parquet", {}, r"001\.parquet cannot be read"),
        ("002.parquet", dict(val_fraction=1e-9), "more files, or a larger --val_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            fineweb_edu.prepare(parquets / name, tmp_path / "out", **OPTIONS | options)


def test_fineweb_stops_at_a_row_without_text_or_counts_it(tmp_path, capsys):
    path = write_parquet(tmp_path / "some.parquet", text=[None if i == 1500 else f"text {i}" for i in range(2000)])
    with pytest.raises(ValueError, match="some.parquet row 1501 has 'text' of type NoneType, expected a string"):
        fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS)
    meta = fineweb_edu.prepare(path, tmp_path / "out", errors="skip", **OPTIONS)
    assert meta["train_documents"] + meta["val_documents"] == 1999
    assert "left out by --errors skip: 1, the first: " in capsys.readouterr().out
    assert fineweb_edu.prepare(path, tmp_path / "out", errors="skip", **OPTIONS) == meta
    assert "left out" not in capsys.readouterr().out, "the finished shard was made again"
    with pytest.raises(ValueError, match="row 1501"):
        fineweb_edu.prepare(path, tmp_path / "out", **OPTIONS)
