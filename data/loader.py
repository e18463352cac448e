"""Which tokens a step reads.

    train_data, val_data = open_dataset("pystdlib", block_size=1024, seed=1337)
    blocks = train_data.sequences(first, n)     # int64 (n, block_size + 1): sequences first .. first + n - 1 of the run
    blocks = val_data.read(indices)             # int64 (len(indices), block_size + 1)

A run reads one endless row of sequences: all blocks in a shuffled order, then all in another, and so on. Sequence i is
a function of (seed, i) alone. So a step's batch is the same for any number of ranks and micro-batches, and a resumed
run needs no loader state.
"""

import functools
import os
from pathlib import Path

import numpy as np
import torch

from data.tokens import Tokens
from data.write import prepare_once

FOLDER = Path(__file__).resolve().parent


def dataset_folder(dataset: str) -> Path:
    """The folder of a dataset given by its name under data/, as data/NAME, or by any absolute path."""
    return FOLDER / os.path.expanduser(dataset).removeprefix("./").removeprefix("data/")


def open_dataset(dataset: str, block_size: int, seed: int, vocab_size: int | None = None):
    """The training and the validation blocks of a dataset. OSError or ValueError if it cannot be read.

    vocab_size: of the model; a token beyond it is an error. None: the dataset's.
    """
    folder = dataset_folder(dataset)
    if folder.name == "pystdlib":  # the one dataset that needs nothing but Python
        prepare_once(folder)
    train, val = (Blocks(Tokens(folder, split), block_size, vocab_size, seed, split) for split in ("train", "val"))
    known = train.meta["vocab_size"]
    if train.vocab_size < known:
        raise ValueError(
            f"vocab_size is {vocab_size}, but {folder} was prepared with {known}: set it to that, or leave it out"
        )
    return train, val


class Blocks:
    """One split of a dataset, cut into blocks of block_size tokens and the one that follows them."""

    def __init__(self, tokens: Tokens, block_size: int, vocab_size: int | None, seed: int, split: str):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.meta, self.vocab_size = tokens.meta, vocab_size or tokens.meta["vocab_size"]
        self.n_blocks = tokens.blocks(block_size, shifted=split == "train")

    def read(self, indices, shift: int | None = None) -> torch.Tensor:
        """Blocks (len(indices), T + 1) int64. ValueError if one holds a token that the embedding does not have."""
        return torch.from_numpy(self.tokens.read(indices, self.block_size, shift, self.vocab_size))

    def sequences(self, first: int, n: int) -> torch.Tensor:
        """Sequences first .. first + n - 1 of the run, (n, T + 1) int64."""
        epochs, positions = np.divmod(np.arange(first, first + n), self.n_blocks)
        blocks = []
        for epoch in np.unique(epochs):
            order, shift = epoch_order(self.seed, int(epoch), self.n_blocks, self.block_size)
            blocks.append(self.read(order[positions[epochs == epoch]], shift))
        return torch.cat(blocks)


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_blocks: int, block_size: int) -> tuple[np.ndarray, int]:
    """A shuffle of all blocks, and where the first one starts: each epoch cuts the text at other places."""
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(n_blocks), int(rng.integers(block_size))
