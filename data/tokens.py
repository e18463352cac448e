"""Token files: what every prepare.py writes and train.py reads. Only this file knows the format.

A dataset is a folder of

    train.bin, val.bin   token ids one after another, little-endian, uint16 where the vocabulary fits, else uint32;
                         a large dataset has shards: train_000000.bin, train_000001.bin, ...
    meta.json            tokenizer, vocab_size, dtype, end_of_text (its id), the documents, tokens, UTF-8 bytes and
                         SHA-256 of each split, and how many tokens each file holds

Every document ends with the end-of-text token. Files are written under another name, flushed and renamed, meta.json
last: a folder without meta.json is not a dataset, and a file that has its name is whole. Who writes holds .lock.

    from data.tokens import Tokens
    train = Tokens("data/pystdlib", "train")
    n_blocks = train.blocks(block_size)
    blocks = train.read([0, n_blocks - 1], block_size)  # int64 (2, block_size + 1): inputs and targets overlap
"""

import argparse
import errno
import fcntl
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from data.tokenizer import end_of_text

SPLITS = ("train", "val")
MOST_BLANKS = 25_000  # in a row, of a text that tiktoken cannot take whole
BATCH_CHARS = 2**20  # text handed to a worker at a time: enough to hide the hand-over, small enough to hold many

Document = tuple[str, str]  # (split, text)


# ---------------------------------------------------------------------------------------------------------------
# Writing


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 only where every id fits: Llama 3's 128000 would silently wrap to 62464."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def split_of(key: str, val_fraction: float) -> str:
    """'val' for about val_fraction of all keys: a key falls on the same side in every run, whatever the order."""
    digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
    return "val" if int.from_bytes(digest[:8], "big") < val_fraction * 2**64 else "train"


def check_val_fraction(val_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val_fraction is {val_fraction}, expected a share above 0 and below 1")


def lock(file, flags: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Keeps other processes from an open file until it is closed. Raises BlockingIOError where one has it.

    Some network file systems know no locks: there it says so, and goes on.
    """
    try:
        fcntl.flock(file, flags)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"{file.name} cannot be locked there ({error.strerror}): let no other run write to its folder",
              file=sys.stderr)  # fmt: skip


@contextmanager
def only_writer(folder: Path):
    """Make the folder and keep other writers out of it. Raises BlockingIOError where one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            lock(file)
        except BlockingIOError:
            message = f"another prepare.py is writing to {folder}: wait for it, or name another --out"
            raise BlockingIOError(message) from None
        yield


@contextmanager
def whole_file(path: Path):
    """Open a file for writing bytes that gets its name only once all of it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # only still there after an error


def write_json(path: Path, content: dict) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def write_dataset(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: tiktoken.Encoding,
    extra: dict | None = None,
    **options,  # of write_tokens
) -> dict:
    """Write a dataset of one train.bin and one val.bin; return its meta.json, to which `extra` is added."""
    with only_writer(folder):
        counts = write_tokens(folder, documents, tokenizer, **options)
        return write_meta(folder, tokenizer, {"": counts}, **(extra or {}))


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: tiktoken.Encoding,
    shard: str = "",
    workers: int = 1,
    progress: Callable[[dict], None] | None = None,
) -> dict:
    """Tokenize documents into train{shard}.bin and val{shard}.bin, and return {split: counts}: documents, tokens, bytes
    and the SHA-256 of the file.

    Streams: memory does not grow with the documents. `progress` is called with the counts so far. Raises ValueError,
    leaving an older dataset as it was, if a split of an unsharded dataset would be empty.
    """
    dtype = token_dtype(tokenizer.n_vocab)
    counts = {split: dict(documents=0, tokens=0, bytes=0) for split in SPLITS}
    digests = {split: hashlib.sha256() for split in SPLITS}
    with whole_file(folder / f"train{shard}.bin") as train, whole_file(folder / f"val{shard}.bin") as val:
        for encoded in encode_documents(documents, tokenizer, workers):
            for file, split in (train, "train"), (val, "val"):
                tokens, n_documents, n_bytes = encoded[split]
                tokens = tokens.astype(dtype)
                file.write(tokens)
                digests[split].update(tokens)
                counts[split]["documents"] += n_documents
                counts[split]["tokens"] += len(tokens)
                counts[split]["bytes"] += n_bytes
            if progress:
                progress(counts)
        if not shard:
            require_both_splits(counts)
        (folder / "meta.json").unlink(missing_ok=True)  # it described the files that are replaced now
    return {split: counts[split] | {"sha256": digests[split].hexdigest()} for split in SPLITS}


def require_both_splits(counts: dict) -> None:
    train, val = counts["train"]["documents"], counts["val"]["documents"]
    if train + val == 0:
        raise ValueError("no documents: the input holds no text")
    if train == 0 or val == 0:
        raise ValueError(
            f"{train:,} training and {val:,} validation documents: both must have some. "
            f"Give more text (copies count once), or {'raise' if val == 0 else 'lower'} --val_fraction"
        )


def write_meta(folder: Path, tokenizer: tiktoken.Encoding, shards: dict[str, dict], **extra) -> dict:
    """Turn the written shards, {suffix: their counts}, into a dataset; return what meta.json holds."""
    counts = {s: {k: sum(c[s][k] for c in shards.values()) for k in ("documents", "tokens", "bytes")} for s in SPLITS}
    require_both_splits(counts)
    digests = {split: digest_of([c[split].get("sha256") for c in shards.values()]) for split in SPLITS}
    meta = dict(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.n_vocab,
        dtype=token_dtype(tokenizer.n_vocab).name,
        end_of_text=end_of_text(tokenizer),
        **{f"{split}_{what}": number for split in SPLITS for what, number in counts[split].items()},
        **{f"{split}_sha256": digest for split, digest in digests.items() if digest},
        **extra,
        files={s: {f"{s}{shard}.bin": c[s]["tokens"] for shard, c in shards.items() if c[s]["tokens"]} for s in SPLITS},
    )
    write_json(folder / "meta.json", meta)
    return meta


def digest_of(digests: list[str | None]) -> str | None:
    """That of one file, or one of those of several; None where a record of an older version lacks its own."""
    if None in digests:
        return None
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def write_shard(
    folder: Path, number: int, documents: Iterable[Document], tokenizer: tiktoken.Encoding, source: dict, **options
) -> dict:
    """Write one shard as write_tokens does, and beside it, last, a record of its `source` and counts."""
    record = folder / f"shard{shard_suffix(number)}.json"
    record.unlink(missing_ok=True)
    counts = write_tokens(folder, documents, tokenizer, shard=shard_suffix(number), **options)
    write_json(record, dict(source=source, counts=counts))
    return counts


def finished_shard(folder: Path, number: int, tokenizer: tiktoken.Encoding, source: dict) -> dict | None:
    """Return the counts of a shard that an earlier run finished from the same `source`, else None."""
    suffix, itemsize = shard_suffix(number), token_dtype(tokenizer.n_vocab).itemsize
    try:
        saved = json.loads((folder / f"shard{suffix}.json").read_text())
        sizes = {split: (folder / f"{split}{suffix}.bin").stat().st_size for split in SPLITS}
        whole = all(sizes[split] == saved["counts"][split]["tokens"] * itemsize for split in SPLITS)
        same = saved["source"].items() <= source.items()  # a record of an older version may know less
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a file is missing, or the record cut short
        return None
    return saved["counts"] if whole and same else None


def shard_suffix(number: int) -> str:
    return f"_{number:06d}"


def compressed_bits_per_byte(text: bytes) -> dict[str, float]:
    """What gzip -9 and xz -9 need for the text: a language model should need less."""
    return dict(
        gzip_bits_per_byte=8 * len(gzip.compress(text, 9)) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=9)) / len(text),
    )


# ---------------------------------------------------------------------------------------------------------------
# Tokenizing, in this process or in many


def encode_documents(documents: Iterable[Document], tokenizer: tiktoken.Encoding, workers: int = 1) -> Iterator[dict]:
    """Yield {split: (tokens uint32 (n,), documents, bytes)}, one batch of documents after another, in their order."""
    if workers < 1:
        raise ValueError(f"workers is {workers}: it must be at least 1")
    if workers == 1:
        for batch in batches(documents):
            yield encode_batch(batch, tokenizer)
        return
    # spawn: a fork would copy the threads' locks of whatever library reads the documents
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(tokenizer,)) as pool:
        pending = deque()
        try:
            for batch in batches(documents):
                pending.append(pool.submit(encode_in_worker, batch))
                if len(pending) > 2 * workers:  # bounds the memory: the input may be far larger
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, chars = [], 0
    for split, text in documents:
        batch.append((split, text))
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_batch(batch: list[Document], tokenizer: tiktoken.Encoding) -> dict:
    eot = np.array([end_of_text(tokenizer)], dtype=np.uint32)
    pieces, n_documents, n_bytes = ({split: zero() for split in SPLITS} for zero in (list, int, int))
    for split, text in batch:
        utf8 = text.encode("utf-8", "replace")  # a lone surrogate, which JSON can hold, becomes a question mark
        pieces[split] += [*encode(utf8.decode(), tokenizer), eot]
        n_documents[split] += 1
        n_bytes[split] += len(utf8)
    empty = np.empty(0, dtype=np.uint32)
    return {split: (np.concatenate([empty, *pieces[split]]), n_documents[split], n_bytes[split]) for split in SPLITS}


def encode(text: str, tokenizer: tiktoken.Encoding) -> list[np.ndarray]:
    """The tokens of a text, in one array or several. No special token is recognised: <|endoftext|> is spelled out."""
    try:
        return [tokenizer.encode_to_numpy(text, disallowed_special=())]
    except ValueError:  # tiktoken's pattern cannot match a million blanks in a row: cut them, as Meta's tokenizer does
        cuts = [0]
        for blanks in re.finditer(rf"\s{{{MOST_BLANKS + 1},}}", text):
            cuts += range(blanks.start() + MOST_BLANKS, blanks.end(), MOST_BLANKS)
        pieces = [text[start:end] for start, end in pairwise([*cuts, len(text)])]
        return [tokenizer.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]


def cpu_cores() -> int:
    """That this process may use, perhaps fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_worker(tokenizer: tiktoken.Encoding) -> None:
    global worker_tokenizer
    worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    multiprocessing.parent_process().join()  # a parent that was killed cannot stop its workers
    os._exit(1)


def encode_in_worker(batch: list[Document]) -> dict:
    return encode_batch(batch, worker_tokenizer)


# ---------------------------------------------------------------------------------------------------------------
# What a prepare.py shows


class Progress:
    """One line that rewrites itself: share done, documents and tokens per second, time left.

    `total` counts the `unit`, "documents" or "bytes"; none: unknown, which shows the count so far, no share, no eta.
    `repeats`: how many inputs of this size are left, this one included.
    """

    def __init__(self, total: int | None, unit: str, prefix: str = "", repeats: int = 1):
        self.total, self.unit, self.prefix, self.repeats = total, unit, prefix, repeats
        self.start = self.shown = time.time()
        # a log file gets a line now and then
        self.every, self.end = (0.5, "\r") if sys.stdout.isatty() else (30, "\n")

    def __call__(self, counts: dict) -> None:
        now = time.time()
        if now - self.shown < self.every:
            return
        self.shown, seconds = now, now - self.start
        done = {what: sum(counts[split][what] for split in SPLITS) for what in ("documents", "tokens", "bytes")}
        share, eta = f"{done[self.unit]:,} {self.unit}", ""
        if self.total:
            fraction = min(done[self.unit] / self.total, 1)
            minutes = int(seconds * (self.repeats / fraction - 1) / 60)
            share, eta = f"{fraction:6.1%}", f" | eta {minutes // 60}h{minutes % 60:02}m"
        rates = f"{done['documents'] / seconds:,.0f} docs/s | {done['tokens'] / seconds:,.0f} tok/s"
        print(f"{self.prefix + share + ' | ' + rates + eta:<100}", end=self.end, flush=True)


def prepare_once(folder: Path) -> None:
    """Runs a folder's prepare.py where it has not been; waits for another process that is at it."""
    script = folder / "prepare.py"
    if (folder / "meta.json").exists():
        return
    # not only_writer's, which the script takes; NFS locks only what is open for writing
    with open(folder / ".once.lock", "w") as file:
        lock(file, fcntl.LOCK_EX)
        if not (folder / "meta.json").exists():
            runpy.run_path(str(script))["prepare"](folder)


def print_summary(folder: Path, meta: dict) -> None:
    """Print what a finished dataset holds."""
    title = f"{shown(folder)}: tokenizer {meta['tokenizer']}, vocab_size {meta['vocab_size']:,}, {meta['dtype']} tokens"
    print(f"{title:<100}")  # as wide as the progress line it covers
    compressed = "gzip_bits_per_byte" in meta
    print(f"{'split':<6}{'documents':>12}{'bytes':>18}{'tokens':>18}" + "  gzip -9   xz -9, bits per byte" * compressed)
    for split in SPLITS:
        documents, n_bytes, tokens = (meta[f"{split}_{what}"] for what in ("documents", "bytes", "tokens"))
        line = f"{split:<6}{documents:>12,}{n_bytes:>18,}{tokens:>18,}"
        if split == "val" and compressed:
            line += f"{meta['gzip_bits_per_byte']:>9.3f}{meta['xz_bits_per_byte']:>8.3f}"
        print(line)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main: a user's slip ends in one line, Ctrl-C quietly."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: nothing half-written is left")


def named_path(text: str) -> Path:
    """The type of a script's argument: an empty one would mean the current folder, and a shell leaves --out=~/x."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or folder")
    return Path(text).expanduser()


def shown(path: Path) -> str:
    """The path as a person in the current folder would type it; what is not UTF-8 in it is replaced."""
    path = Path(path).absolute()
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return os.fsencode(path).decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------
# Reading


class Tokens:
    """One split of a dataset, memory-mapped; `meta` is the content of its meta.json.

    Block i of length T holds the tokens iT .. iT + T, T + 1 of them: the T inputs and, one further, their targets. The
    target of a block's last input is the first input of the next block, so every token of a shard is a target once,
    except its first and what is left after its last whole block.

    Raises FileNotFoundError where the dataset or one of its files is missing, ValueError where a file's size is not
    what meta.json promises; both say how to make the dataset.
    """

    def __init__(self, folder: str | Path, split: str):
        self.folder, self.split = Path(folder), split
        self.meta = read_meta(self.folder)
        n_tokens = self.meta["files"][split]  # {file name: tokens}
        self.paths = [self.folder / name for name in n_tokens]
        self.shards = [self._map(path, n_tokens[path.name]) for path in self.paths]

    def _map(self, path: Path, n_tokens: int) -> np.memmap:
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing, but meta.json lists it: {how_to_prepare(self.folder, self.meta)}"
            )
        expected, found = n_tokens * dtype.itemsize, path.stat().st_size
        if found != expected:
            raise ValueError(
                f"{path} has {found:,} bytes, but meta.json says {n_tokens:,} {dtype.name} tokens, which are "
                f"{expected:,} bytes: {how_to_prepare(self.folder, self.meta)}"
            )
        return np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def _blocks_per_shard(self, block_size: int, shifted: bool) -> list[int]:
        shift = block_size - 1 if shifted else 0  # the largest: the blocks are as many for each
        return [max(0, (len(shard) - 1 - shift) // block_size) for shard in self.shards]

    def blocks(self, block_size: int, shifted: bool = False) -> int:
        """How many blocks there are; shifted: where those of each shard begin up to block_size - 1 tokens late. Raises
        ValueError if not even one.
        """
        n_blocks = sum(self._blocks_per_shard(block_size, shifted))
        if n_blocks == 0:
            where = f" in the longest of its {len(self.shards)} shards" if len(self.shards) > 1 else ""
            needed = 2 * block_size if shifted else block_size + 1
            raise ValueError(
                f"{self.folder} has {max(map(len, self.shards)):,} {self.split} tokens{where}, fewer than the "
                f"{needed:,} that block_size {block_size:,} needs here: use more text or a smaller "
                "block_size"
            )
        return n_blocks

    def read(
        self, indices: Sequence[int], block_size: int, shift: int | None = None, vocab_size: int | None = None
    ) -> np.ndarray:
        """Return blocks `indices`, 0 <= index < blocks(block_size), as int64 (len(indices), block_size + 1).

        shift: where those of each shard begin, 0 <= shift < block_size; then index < blocks(block_size, shifted=True).
        Raises IndexError for a block that is not there, ValueError for a token of `vocab_size` or above (default: the
        dataset's own), which would index outside the embedding.
        """
        indices = np.asarray(indices)
        per_shard = self._blocks_per_shard(block_size, shift is not None)
        ends = np.cumsum(per_shard)  # (shards,), the first block after each shard
        wrong = indices[(indices < 0) | (indices >= ends[-1])]
        if wrong.size:
            raise IndexError(f"{self.folder} has {ends[-1]} {self.split} blocks of {block_size}, asked for {wrong[0]}")
        shards = np.searchsorted(ends, indices, side="right")
        tokens = np.empty((len(indices), block_size + 1), dtype=np.int64)
        for row, (index, shard) in enumerate(zip(indices, shards, strict=True)):
            first = ends[shard - 1] if shard else 0
            start = int(index - first) * block_size + (shift or 0)
            tokens[row] = self.shards[shard][start : start + block_size + 1]
        vocab_size = vocab_size or self.meta["vocab_size"]
        if tokens.size and tokens.max() >= vocab_size:
            path = self.paths[shards[tokens.max(axis=1).argmax()]]
            raise ValueError(
                f"{path} holds token {tokens.max()}, but vocab_size is {vocab_size}: "
                "prepare the data again or set vocab_size"
            )
        return tokens


def read_meta(folder: str | Path) -> dict:
    """Return the content of a dataset's meta.json. Raises FileNotFoundError or ValueError saying how to make it."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        what = "has no meta.json, so it is not a finished dataset" if path.parent.is_dir() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}: {how_to_prepare(folder)}")
    try:
        meta = json.loads(path.read_text())
        missing = {"tokenizer", "vocab_size", "dtype", "end_of_text", "val_bytes", "files"} - meta.keys()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}): {how_to_prepare(folder)}") from error
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: {how_to_prepare(folder, meta)}")
    try:
        counts = [list(meta["files"][split].values()) for split in SPLITS]
        numbers = [meta["vocab_size"], meta["val_bytes"], *sum(counts, [])]
        sound = all(counts) and all(type(n) is int and n > 0 for n in numbers)  # an empty file is never listed
        sound = sound and type(meta["end_of_text"]) is int and 0 <= meta["end_of_text"] < meta["vocab_size"]
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound or meta["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"{path} is damaged: {how_to_prepare(folder, meta)}")
    return meta


def how_to_prepare(folder: str | Path, meta: dict | None = None) -> str:
    script = Path(folder) / "prepare.py"
    if script.exists():
        return f"run python {shown(script)}" + " --input YOUR_TEXT" * (Path(folder).name == "text")
    if meta and "script" in meta:
        return f"run python {meta['script']} --out {folder}, other options as before"
    return f"run python data/text/prepare.py --input YOUR_TEXT --tokenizer NAME --out {folder}"
