"""Which tokens a training step reads.

    train_data, val_data = open_dataset("pystdlib", block_size=1024, seed=1337)
    blocks = train_data.sequences(first, n)     # int64 (n, block_size + 1): sequences first .. first + n - 1 of the run
    blocks = val_data.read(indices)             # int64 (len(indices), block_size + 1)

A run reads an endless series of sequences: all blocks in a shuffled order, then all in another, and so on. Sequence i
depends on (seed, i) alone. So a step's batch is the same for any number of ranks and micro-batches, and a resumed
run needs no loader state.

Conversations are Packed into blocks: each number is a token's id with two mask bits above it; unpack() splits them.
A Mix reads several datasets, as "books:0.7,code:0.3" names them.
"""

import functools
import hashlib
import os
import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.meta import SPLITS
from data.pystdlib.prepare import HERE as PYSTDLIB
from data.pystdlib.prepare import prepare_once
from data.tokens import IS_DOC_START, IS_TARGET, Tokens

FOLDER = Path(__file__).resolve().parent
MASK_SHIFT = 32  # mask bits sit above the token's id


def dataset_folder(dataset: str) -> Path:
    """The folder of a dataset given as NAME or data/NAME, which lies under data/, or as any path."""
    path = Path(os.path.expanduser(dataset))
    named = FOLDER / str(path).removeprefix("data/")
    return path if path.exists() and not named.exists() else named


def dataset_parts(dataset: str | Path) -> dict[str, float]:
    """{name: weight} of a mix, "a:0.7,b:0.3". Any other dataset is its own only part: {dataset: 1.0}.

    ValueError for a name with a colon or comma that is neither a folder nor a mix.
    """
    if not re.search("[:,]", str(dataset)) or dataset_folder(dataset).exists():  # a path may have colons
        return {dataset: 1.0}
    texts = [text.strip() for text in str(dataset).split(",")]
    pieces = [re.fullmatch(r"(.+):(\d{0,9}\.?\d{1,9})", text, re.ASCII) for text in texts]
    weights = {piece[1]: float(piece[2]) for piece in pieces if piece}
    if len(weights) < len(texts) or not all(weights.values()):
        raise ValueError(
            f"dataset {dataset} is no folder, and a mix is a:0.7,b:0.3, with each name once and no weight 0"
        )
    return weights


def open_dataset(dataset: str, block_size: int, seed: int, vocab_size: int | None = None, mask_documents: bool = False):
    """The training and validation blocks of a dataset. OSError or ValueError if it cannot be read.

    vocab_size: the model's, at least the dataset's. None: the dataset's. mask_documents: True if attention
    stays within documents; conversations require it.
    """
    weights = dataset_parts(dataset)
    if dataset not in weights:
        parts = [open_dataset(name, block_size, seed, vocab_size, mask_documents) for name in weights]
        train, val = (Mix(of_split, weights) for of_split in zip(*parts, strict=True))
        return train, val
    folder = dataset_folder(dataset)
    if folder.resolve() == PYSTDLIB:  # needs nothing but Python. Not any folder of that name: it could hold any code
        prepare_once(folder)
    splits = [Tokens(folder, split) for split in SPLITS]
    kind = Packed if splits[0].masks else Blocks
    if kind is Packed and not mask_documents:
        raise ValueError(f"{folder} holds conversations, several in a block: add --mask_documents=true")
    train, val = (kind(tokens, block_size, vocab_size, seed) for tokens in splits)
    known = train.meta["vocab_size"]
    if train.vocab_size < known:
        raise ValueError(
            f"vocab_size is {vocab_size}, but {folder} was prepared with {known}: set it to that, or leave it out. "
            "Published weights need data made with their own tokenizer"
        )
    return train, val


def read_ahead(read: Callable[[int], Any], steps: Iterable[int]) -> Iterator[Any]:
    """Yield read(step) for each step, while a thread reads the next one."""
    thread = ThreadPoolExecutor(1)
    pending = []
    for step in steps:
        pending.append(thread.submit(read, step))
        if len(pending) == 2:
            yield pending.pop(0).result()
    for last in pending:
        yield last.result()


def check_tokens(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """ValueError for a token beyond the vocabulary, which would index outside the embedding."""
    if tokens.max() >= vocab_size:
        raise ValueError(f"{path} holds token {tokens.max()}, but vocab_size is {vocab_size}: prepare the data again")


class Blocks:
    """One split of a dataset, cut into blocks of T + 1 tokens, where T is block_size: T inputs and their T targets.

    Block i of a shard holds its tokens iT .. iT + T. The target of a block's last input is the first input of the next
    block, so every token of a shard is a target once, except the first one and the remainder after the last whole
    block. Training shifts the blocks, in each epoch by a different number of tokens below T, and skips the tokens
    before the first block. Each shard has as many blocks as fit after any shift. ValueError if none has one.
    """

    packing = ""  # for the log: a sentence about Packed blocks

    def __init__(self, tokens: Tokens, block_size: int, vocab_size: int | None, seed: int):
        self.tokens = tokens
        self.meta = tokens.meta
        self.block_size = block_size
        self.vocab_size = vocab_size or tokens.meta["vocab_size"]
        self.seed = seed
        self.parts = [self]  # of a Mix: the Blocks of each dataset
        self.shares = {str(tokens.folder): 1.0}  # of the run's sequences
        self.epoch_order = functools.lru_cache(maxsize=2)(epoch_order)  # two: a step may span two epochs
        self._cut_into_blocks()

    def _cut_into_blocks(self) -> None:
        shards = self.tokens.shards
        largest_shift = self.block_size - 1 if self.tokens.split == "train" else 0
        self.ends = np.cumsum([max(0, (len(shard) - 1 - largest_shift) // self.block_size) for shard in shards])
        self.n_blocks = int(self.ends[-1])
        if self.n_blocks == 0:
            raise ValueError(
                f"{self.tokens.folder} has {max(map(len, shards)):,} {self.tokens.split} tokens in a file, fewer than "
                f"the {self.block_size + 1 + largest_shift:,} that block_size {self.block_size:,} needs: use more text "
                "or a smaller block_size"
            )
        self.doc_start = self.meta.get("bos", self.meta["end_of_text"])

    def read(self, indices: Sequence[int], shift: int = 0) -> torch.Tensor:
        """Blocks (len(indices), T + 1) int64; shift: where the first block of each shard starts.

        ValueError for a token beyond the vocabulary, and for a file that has been cut.
        """
        blocks = np.empty((len(indices), self.block_size + 1), np.int64)
        shards = np.searchsorted(self.ends, indices, side="right")
        for row, index, i in zip(blocks, indices, shards, strict=True):
            shard = self.tokens.shards[i]
            first = self.ends[i - 1] if i else 0  # the shard's first block
            start = int(index - first) * self.block_size + shift
            row[:] = shard[start : start + self.block_size + 1]
            check_tokens(row, self.meta["vocab_size"], shard.path)
        return torch.from_numpy(blocks)

    def sequences(self, first: int, n: int) -> torch.Tensor:
        """Sequences first .. first + n - 1 of the run, (n, T + 1) int64."""
        return torch.cat([self.read(indices, shift) for indices, shift in self._blocks_of(first, n)])

    def _blocks_of(self, first: int, n: int):
        """Yield (block indices, shift) of these sequences, one pair per epoch; shift: where its first block starts."""
        epochs, positions = np.divmod(np.arange(first, first + n), self.n_blocks)
        for epoch in np.unique(epochs):
            order, shift = self.epoch_order(self.seed, int(epoch), self.n_blocks, self.block_size)
            yield order[positions[epochs == epoch]], shift

    def read_evenly(self, rows: Iterable[int], n: int) -> torch.Tensor:
        """Of n blocks spread evenly over all, those with these numbers (from n on: again the first ones)."""
        return self.read([row % n * self.n_blocks // n for row in rows])

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split blocks into tokens, targets and marks, all (B, T). A document begins where the mark is doc_start."""
        return blocks[:, :-1], blocks[:, 1:], blocks[:, :-1]

    def loss_weights(self, first: int, n_micro: int, batch_size: int) -> torch.Tensor:
        """The weights (n_micro,) of the micro-batches' mean losses, in the step that starts at sequence `first`.

        A weight is the micro-batch's number of targets over the average micro-batch's. So the mean of weight times
        mean loss is the step's loss per target, however the step is split into micro-batches.
        """
        n_targets = self.count_targets(first, n_micro * batch_size).view(n_micro, batch_size).sum(1).double()
        return (n_targets / n_targets.mean()).float()

    def count_targets(self, first: int, n: int) -> torch.Tensor:
        """The number of targets (n,) int64 in each of the run's sequences first .. first + n - 1."""
        return torch.full((n,), self.block_size)  # every token is one


def epoch_order(seed: int, epoch: int, n_blocks: int, block_size: int) -> tuple[np.ndarray, int]:
    """A shuffle of all blocks, and where the first block starts: each epoch cuts the text at different places."""
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(n_blocks), int(rng.integers(block_size))


# ----------------------------------------------------------------------------------------------------------------------
# Conversations


class Packed(Blocks):
    """One split of conversations, packed into blocks of block_size + 1 tokens.

    Best fit, longest conversations first. The same conversations share a block in every epoch. That does not matter:
    attention stays within a conversation, and positions need not restart, since RoPE depends only on their differences.
    Conversations longer than a block are cut off, and dropped if no answer is left. ValueError if all are dropped.
    """

    def _cut_into_blocks(self) -> None:
        (shard,) = self.tokens.masks
        mask = np.fromfile(shard.path, np.uint8)
        room = self.block_size + 1
        starts = np.flatnonzero(mask & IS_DOC_START)
        whole_lengths = np.diff(starts, append=len(mask))
        lengths = np.minimum(whole_lengths, room)
        n_before = np.append(0, np.cumsum(mask & IS_TARGET, dtype=np.int64))  # targets before each token
        targets = n_before[starts + lengths] - n_before[starts]
        has_targets = targets > 0
        if not has_targets.any():
            raise ValueError(
                f"{self.tokens.folder}: no {self.tokens.split} conversation reaches an answer within block_size "
                f"{self.block_size:,}"
            )
        order = np.random.default_rng(self.seed).permutation(np.flatnonzero(has_targets))
        order = order[np.argsort(-lengths[order], kind="stable")]
        self.starts = starts[order]
        self.lengths = lengths[order]
        targets = targets[order]
        self.blocks = pack(self.lengths.tolist(), room)
        self.n_blocks = len(self.blocks)
        self.n_targets = np.array([targets[block].sum() for block in self.blocks])
        self.doc_start = IS_DOC_START
        full = self.lengths.sum() / (self.n_blocks * room)
        learned = targets.sum() / self.lengths.sum()
        n_cut = (whole_lengths > room).sum()
        self.packing = (
            f"{len(order):,} conversations, {learned:.1%} of their tokens targets; blocks {full:.1%} full; "
            f"{n_cut:,} longer than block_size are cut, {(~has_targets).sum():,} of them left out: no answer remains"
        )

    def read(self, indices: Sequence[int], shift: int = 0) -> torch.Tensor:
        """Blocks (len(indices), T + 1) int64, for unpack(). ValueError for a token beyond the vocabulary."""
        blocks = np.full((len(indices), self.block_size + 1), self.meta["end_of_text"])  # padding is not a target
        (tokens,) = self.tokens.shards
        (mask,) = self.tokens.masks
        for row, index in zip(blocks, indices, strict=True):
            n = 0  # tokens of the row that are filled
            for i in self.blocks[index]:
                start = self.starts[i]
                stop = start + self.lengths[i]
                ids = tokens[start:stop].astype(np.int64)
                check_tokens(ids, self.meta["vocab_size"], tokens.path)
                row[n : n + len(ids)] = ids | mask[start:stop].astype(np.int64) << MASK_SHIFT
                n += len(ids)
            row[n : n + 1] |= IS_DOC_START << MASK_SHIFT  # padding is a document of its own
        return torch.from_numpy(blocks)

    def unpack(self, blocks):
        """As in Blocks; the targets to ignore are -100."""
        tokens = blocks & (2**MASK_SHIFT - 1)
        mask = blocks >> MASK_SHIFT
        targets = torch.where((mask[:, 1:] & IS_TARGET) > 0, tokens[:, 1:], -100)
        return tokens[:, :-1], targets, mask[:, :-1] & IS_DOC_START

    def count_targets(self, first: int, n: int) -> torch.Tensor:
        indices = np.concatenate([indices for indices, _ in self._blocks_of(first, n)])
        return torch.from_numpy(self.n_targets[indices])


def pack(lengths: list[int], room: int) -> list[list[int]]:
    """The indices of the lengths in each block: each length goes, in order, into the fullest block with room for it."""
    blocks = []
    by_space = defaultdict(list)  # {room left: blocks}
    spaces = []  # its keys, sorted
    for i, length in enumerate(lengths):
        smallest = bisect_left(spaces, length)
        if smallest == len(spaces):
            block = len(blocks)
            space = room
            blocks.append([])
        else:
            space = spaces[smallest]
            block = by_space[space].pop()
            if not by_space[space]:
                del spaces[smallest]
        blocks[block].append(i)
        if not by_space[space - length]:
            insort(spaces, space - length)
        by_space[space - length].append(block)
    return blocks


# ----------------------------------------------------------------------------------------------------------------------
# Mixes of datasets

SAME_FIELDS = ("tokenizer", "vocab_size", "dtype", "end_of_text", "bos", "eos", "tokenizer_files")  # in all parts


class Mix(Blocks):
    """One split of several datasets, each with its share of the run's sequences.

    The parts take turns by the fixed schedule of turns(), so sequence i of the run still depends on (seed, i) alone.
    Each part shuffles its own blocks, as often as its share needs. ValueError if the parts differ in their tokenizer,
    or if some hold conversations and others text.
    """

    def __init__(self, parts: Sequence[Blocks], weights: dict[str, float]):
        first = parts[0]
        first_name = next(iter(weights))
        for name, part in zip(weights, parts, strict=True):
            if bool(part.tokens.masks) != bool(first.tokens.masks):
                raise ValueError(f"{name} and {first_name}: one holds conversations, one text: mix one kind")
            for field in SAME_FIELDS:
                if part.meta.get(field) != first.meta.get(field):
                    advice = "prepare both with the same --tokenizer; if train:N made one, its folder is the other's"
                    raise ValueError(f"{name} and {first_name} differ in {field} (meta.json): {advice}")
        self.parts = parts
        self.millionths = [max(1, round(1e6 * weight / sum(weights.values()))) for weight in weights.values()]
        total = sum(self.millionths)
        self.shares = {name: share / total for name, share in zip(weights, self.millionths, strict=True)}
        self.vocab_size = first.vocab_size
        self.doc_start = first.doc_start
        self.tokens = first.tokens
        self.unpack = first.unpack
        self.n_blocks = sum(part.n_blocks for part in parts)
        self.meta = describe_mix([part.meta for part in parts])

    def sequences(self, first: int, n: int) -> torch.Tensor:
        return self._of_parts(first, n, lambda part, start, count: part.sequences(start, count))

    def count_targets(self, first: int, n: int) -> torch.Tensor:
        return self._of_parts(first, n, lambda part, start, count: part.count_targets(start, count))

    def _of_parts(self, first: int, n: int, read: Callable[[Blocks, int, int], torch.Tensor]) -> torch.Tensor:
        """read(part, start, count) of every part, in the order of the run's sequences first .. first + n - 1."""
        part_of, number_of = turns(np.arange(first, first + n), self.millionths)
        rows = []
        places = []  # of the rows, among the n
        for i, part in enumerate(self.parts):
            taken = np.flatnonzero(part_of == i)
            if len(taken):
                rows.append(read(part, int(number_of[taken[0]]), len(taken)))
                places.append(taken)
        return torch.cat(rows)[np.argsort(np.concatenate(places))]


def describe_mix(metas: list[dict]) -> dict:
    """The meta.json of one dataset with all these in it. A change to any part changes the digests."""
    meta = {name: metas[0][name] for name in SAME_FIELDS if name in metas[0]} | {"files": {}}
    for split in SPLITS:
        meta["files"][split] = {f"{split}.bin": sum(sum(each["files"][split].values()) for each in metas)}
        digests = "".join(each.get(f"{split}_sha256", "") for each in metas)
        meta[f"{split}_sha256"] = hashlib.sha256(digests.encode()).hexdigest()
        if f"{split}_targets" in metas[0]:
            meta[f"{split}_targets"] = sum(each.get(f"{split}_targets", 0) for each in metas)
    return meta


def turns(sequences: np.ndarray, shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which part each of the run's sequences comes from, and its number among that part's sequences.

    turns(np.arange(8), (1, 3))  # parts 1 1 1 0 1 1 1 0, numbers 0 1 2 0 3 4 5 1

    Each part takes its share of the sequences that the parts before it leave. Of those, it takes number n if
    n * share // left grows there; that is also how many it has taken before. left: the sum of the shares from this one
    on. Whole numbers are the same on every machine.
    """
    part_of = np.empty_like(sequences)
    number_of = np.empty_like(sequences)
    places = np.arange(len(sequences))  # in both results, of the sequences that are left
    n = sequences  # their numbers among all that are left
    left = sum(shares)
    for part, share in enumerate(shares):
        n_before = n * share // left
        takes = (n + 1) * share // left > n_before
        part_of[places[takes]] = part
        number_of[places[takes]] = n_before[takes]
        places = places[~takes]
        n = (n - n_before)[~takes]
        left -= share
    return part_of, number_of
