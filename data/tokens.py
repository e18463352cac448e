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

    from data.tokens import Tokens
    train = Tokens("data/pystdlib", "train")
    n_blocks = train.blocks(block_size)
    blocks = train.read([0, n_blocks - 1], block_size)  # int64 (2, block_size + 1): inputs and targets overlap
"""

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.meta import read_meta

IS_TARGET = 1  # mask bit: the token is a target
IS_DOC_START = 2  # mask bit: the token starts a conversation


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if every id fits, else uint32. (Llama 3's 128000 would silently wrap to 62464 in uint16.)"""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Shard:
    """The numbers in a file: shard[start:stop] reads them. ValueError if the file has been cut meanwhile.

    Not a memory map: where another program has cut a mapped file, reading ends the process by SIGBUS, without a word.
    A block takes 5 microseconds longer so.
    """

    def __init__(self, path: Path, n_numbers: int, dtype: np.dtype):
        self.path = path
        self.n_numbers = n_numbers
        self.dtype = dtype
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return self.n_numbers

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(self.n_numbers)
        n_bytes = max(stop - start, 0) * self.dtype.itemsize
        content = os.pread(self.file.fileno(), n_bytes, start * self.dtype.itemsize)
        if len(content) < n_bytes:
            raise ValueError(f"{self.path} has been cut since it was opened: prepare the data again")
        return np.frombuffer(content, self.dtype)


class Tokens:
    """One split of a dataset; `meta` is the content of its meta.json.

    Block i of length T holds the T + 1 tokens iT .. iT + T: T inputs and, shifted by one, their T targets. The target
    of a block's last input is the first input of the next block, so every token of a shard is a target once, except
    the first one and the remainder after the last whole block. Training shifts the blocks, in each epoch by a
    different number of tokens below T, and skips the tokens before the first block.

    Raises FileNotFoundError if the dataset or one of its files is missing, ValueError if a file's size differs from
    meta.json's.
    """

    def __init__(self, folder: str | Path, split: str):
        self.folder = Path(folder)
        self.split = split
        self.meta = read_meta(self.folder)
        n_tokens = self.meta["files"][split]  # {file name: tokens}
        self.paths = [self.folder / name for name in n_tokens]
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each shard stays open
        self.shards = [self._open(path, n_tokens[path.name], dtype) for path in self.paths]
        self.masks = []  # one per shard, if the dataset holds conversations
        if f"{split}_targets" in self.meta:
            self.masks = [
                self._open(path.with_suffix(".mask"), n_tokens[path.name], np.dtype("u1")) for path in self.paths
            ]

    def _open(self, path: Path, n_tokens: int, dtype: np.dtype) -> Shard:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, but meta.json lists it: prepare the data again")
        n_bytes = path.stat().st_size
        expected = n_tokens * dtype.itemsize
        if n_bytes != expected:
            needed = f"the {n_tokens:,} {dtype.name} tokens of meta.json need {expected:,}"
            raise ValueError(f"{path} has {n_bytes:,} bytes, but {needed}: prepare the data again")
        return Shard(path, n_tokens, dtype)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def _blocks_per_shard(self, block_size: int, shifted: bool) -> list[int]:
        shift = block_size - 1 if shifted else 0  # the largest shift, so that every shift has the same number of blocks
        return [max(0, (len(shard) - 1 - shift) // block_size) for shard in self.shards]

    def blocks(self, block_size: int, shifted: bool = False) -> int:
        """The number of blocks; shifted: the number that fits after any shift, of up to block_size - 1 tokens in each
        shard. Raises ValueError if there are none.
        """
        n_blocks = sum(self._blocks_per_shard(block_size, shifted))
        if n_blocks == 0:
            needed = 2 * block_size if shifted else block_size + 1
            raise ValueError(
                f"{self.folder} has {max(map(len, self.shards)):,} {self.split} tokens in a file, fewer than the "
                f"{needed:,} that block_size {block_size:,} needs: use more text or a smaller block_size"
            )
        return n_blocks

    def read(self, indices: Sequence[int], block_size: int, shift: int | None = None) -> np.ndarray:
        """Return blocks `indices`, 0 <= index < blocks(block_size), as int64 (len(indices), block_size + 1).

        shift: where the first block of each shard starts, 0 <= shift < block_size; then the indices must be below
        blocks(block_size, shifted=True). Raises ValueError for a token beyond the vocabulary, which would index outside
        the embedding, and for a file that has been cut.
        """
        ends = np.cumsum(self._blocks_per_shard(block_size, shift is not None))  # the first block after each shard
        shards = np.searchsorted(ends, indices, side="right")
        tokens = np.empty((len(indices), block_size + 1), dtype=np.int64)
        for row, index, shard in zip(tokens, indices, shards, strict=True):
            first = ends[shard - 1] if shard else 0
            start = int(index - first) * block_size + (shift or 0)
            row[:] = self.shards[shard][start : start + block_size + 1]
            check_tokens(row, self.meta["vocab_size"], self.paths[shard])
        return tokens


def check_tokens(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """Raises ValueError for a token beyond the vocabulary."""
    if tokens.max() >= vocab_size:
        raise ValueError(f"{path} holds token {tokens.max()}, but vocab_size is {vocab_size}: prepare the data again")
