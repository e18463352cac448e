"""Small datasets for tests, written and read back."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data.tokenizer import get_tokenizer, tokenizer_of
from data.tokens import Tokens
from data.vocabulary import Tiktoken
from data.write import write_dataset

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"
TEXTS = ["", "hello", "x = 'é' # 漢字 🦙\r\n\tpass\x00", "<|endoftext|> is not special in text", "a" * 1000]


def toy_dataset(folder, train=("first", "second"), val=("third",), **options):
    documents = [("train", document) for document in train] + [("val", document) for document in val]
    return write_dataset(folder, documents, get_tokenizer("bytes"), **options)


def byte_tokenizer(pattern, special_tokens, merges=(), template="", name="small"):
    """A token for each byte, each merge, each special token."""
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    tokenizer = Tiktoken(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder, backend, **config):
    """Write a tokenizer of the package `tokenizers` as a published folder; returns how we read it."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return get_tokenizer(folder)


def documents_of(folder, split):
    """The texts of a dataset, read back."""
    tokens = Tokens(folder, split)
    ids = np.concatenate([shard[:] for shard in tokens.shards])
    ends = np.flatnonzero(ids == tokens.meta["end_of_text"])
    assert ends[-1] == len(ids) - 1, "the last document is not ended by end-of-text"
    decode = tokenizer_of(folder).decode
    return [decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def texts_of(folder):
    """The texts of both splits, sorted."""
    return sorted(documents_of(folder, "train") + documents_of(folder, "val"))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def encode_digit(text, tokenizer):
    """An encode that fails at any other text."""
    return [int(text[0])], [0], len(text)


def package_file(package, *path):
    """A file that a package ships; skips the test if the package is not installed."""
    spec = importlib.util.find_spec(package)
    return pytest.skip(f"pip install {package}") if spec is None else Path(spec.submodule_search_locations[0], *path)
