"""The dataset format that every prepare.py writes and train.py reads, and its reader.

A dataset is a folder of

    train.bin, val.bin   token ids one after another, little-endian, uint16 if the vocabulary fits, else uint32;
                         a large dataset has shards: train_000000.bin, train_000001.bin, ...
    train.mask, val.mask   for conversations: a byte per token with the bits IS_TARGET and IS_DOC_START
    meta.json            tokenizer, vocab_size, dtype, end_of_text (its id), bos (its id) if documents begin with one,
                         documents, tokens, UTF-8 bytes and SHA-256 of each split, tokens of each file; data/meta.py
    tokenizer.json, ...  the tokenizer's files, if its name is not enough; meta.json has their SHA-256

Every document ends with the end-of-text token, a conversation as its template ends it. meta.json is written last: a
folder without it is not a dataset.

    train = Tokens(Path("data/pystdlib"), "train")
    train.meta["vocab_size"]
    train.shards[0][:1000]  # the first tokens of its first file
"""

import os
import resource
from pathlib import Path

import numpy as np

from data.meta import read_meta

IS_TARGET = 1  # mask bit: the token is a target
IS_DOC_START = 2  # mask bit: the token starts a conversation


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if every id fits, else uint32. (Llama 3's 128000 would silently wrap to 62464 in uint16.)"""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class TokenFile:
    """The numbers in a file: shard[start:stop] reads them. ValueError if the file has been cut meanwhile.

    Raises FileNotFoundError if the file is missing, ValueError if it has another size than meta.json says.

    Not a memory map: where another program has cut a mapped file, reading ends the process by SIGBUS, without a word.
    A block takes 5 microseconds longer so.
    """

    def __init__(self, path: Path, n_numbers: int, dtype: np.dtype):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, but meta.json lists it: prepare the data again")
        n_bytes = path.stat().st_size
        expected = n_numbers * dtype.itemsize
        if n_bytes != expected:
            needed = f"the {n_numbers:,} {dtype.name} tokens of meta.json need {expected:,}"
            raise ValueError(f"{path} has {n_bytes:,} bytes, but {needed}: prepare the data again")
        self.path = path
        self.n_numbers = n_numbers
        self.dtype = dtype
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return self.n_numbers

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self.n_numbers)
        n_bytes = (stop - start) * self.dtype.itemsize
        content = os.pread(self.file.fileno(), n_bytes, start * self.dtype.itemsize)
        if len(content) < n_bytes:
            raise ValueError(f"{self.path} has been cut since it was opened: prepare the data again")
        return np.frombuffer(content, self.dtype)


class Tokens:
    """The files of one split of a dataset.

    meta     the content of meta.json
    shards   the tokens, a TokenFile for each file
    masks    the masks, one per shard, if the dataset holds conversations; else empty

    Raises FileNotFoundError if the dataset or one of its files is missing, ValueError if one is damaged.
    """

    def __init__(self, folder: Path, split: str):
        self.folder = folder
        self.split = split
        self.meta = read_meta(folder)
        files = {folder / name: n_tokens for name, n_tokens in self.meta["files"][split].items()}
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each shard stays open
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        self.shards = [TokenFile(path, n_tokens, dtype) for path, n_tokens in files.items()]
        self.masks = []
        if "train_targets" in self.meta:
            self.masks = [TokenFile(path.with_suffix(".mask"), n, np.dtype("u1")) for path, n in files.items()]

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)
