"""Writing a dataset (data/tokens.py has the format): whole or in shards; data/encode.py tokenizes.

Files are written under a temporary name, flushed and renamed, meta.json last. The writer holds .lock.

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # in data/mine/prepare.py: import from the root
    documents = [("train", "some text"), ("val", "more text")]  # or an iterator
    if __name__ == "__main__":  # needed for several workers, which import the script
        write_dataset(Path("data/mine"), documents, get_tokenizer("bytes"), workers=8)
"""

import argparse
import gzip
import hashlib
import json
import lzma
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from data.encode import Document, Encode, encode_documents
from data.files import atomic_write, display_path, lock, open_to_write, say, write_json
from data.meta import FIELDS, SPLITS, check_meta
from data.tokenizer import NAMES, Tokenizer, get_tokenizer
from data.tokens import token_dtype

COUNTED = ("documents", "tokens", "bytes", "sha256")  # of a shard's split
COMPRESSED_BYTES = 2**26  # of validation text: xz -9 takes half a minute for it; a longer text is not compressed


def split_of(key: str, val_fraction: float) -> str:
    """'val' for about val_fraction of all keys. It depends on the key alone, not on the order or the run."""
    return "val" if int.from_bytes(hash_of(key)[:8], "big") < val_fraction * 2**64 else "train"


def hash_of(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def open_lock(path: Path):
    """Open a lock file, and make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_to_write(path, "a")  # NFS cannot lock a file opened for reading only
    except OSError as error:
        how = "prepare the data in another folder, with prepare.py --out FOLDER, and train with --dataset=FOLDER"
        raise OSError(f"{path.parent} cannot be written ({error.strerror}): {how}") from error


@contextmanager
def write_lock(folder: Path):
    """Make the folder and lock it against other writers. Raises BlockingIOError if another process writes to it."""
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a model, and a dataset would replace its tokenizer: name another --out")
    with open_lock(folder / ".lock") as file:
        try:
            lock(file)
        except BlockingIOError:
            message = f"another prepare.py is writing to {folder}: wait for it, or name another --out"
            raise BlockingIOError(message) from None
        yield


def write_dataset(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    extra: dict | None = None,
    **options,  # for write_tokens
) -> dict:
    """Write a dataset of one train.bin and one val.bin; return its meta.json, which includes `extra`, FIELDS of
    data/meta.py.
    """
    val_text = bytearray()
    if not options.get("encode"):
        documents = keep_val_text(documents, val_text)
    with write_lock(folder):
        counts = write_tokens(folder, documents, tokenizer, **options)
        extra = (extra or {}) | compressed_bits_per_byte(val_text)
        return write_meta(folder, tokenizer, {"": counts}, **extra)


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    shard: str = "",
    workers: int = 1,
    progress: Callable[[dict], None] | None = None,
    encode: Encode | None = None,
) -> dict:
    """Tokenize documents into train{shard}.bin and val{shard}.bin. Return {split: counts}: documents, tokens, bytes and
    the SHA-256 of what was written.

    encode: used instead of encode_text; its masks go to train{shard}.mask and val{shard}.mask, and the counts include
    targets.

    Streams: memory does not grow with the documents. `progress` is called with the counts so far. Raises ValueError if
    a split of an unsharded dataset would be empty; an older dataset is then left unchanged.
    """
    counts = {split: Counter(documents=0, tokens=0, bytes=0) for split in SPLITS}
    digests = {split: hashlib.sha256() for split in SPLITS}
    with ExitStack() as stack:
        kinds = (".bin", ".mask") if encode else (".bin",)
        files = {
            split: [stack.enter_context(atomic_write(folder / f"{split}{shard}{kind}")) for kind in kinds]
            for split in SPLITS
        }
        for encoded in encode_documents(documents, tokenizer, workers, encode):
            for split in SPLITS:
                tokens, mask, found = encoded[split]
                for file, content in zip(files[split], (tokens, mask), strict=False):
                    file.write(content)
                    digests[split].update(content)
                counts[split].update(found)
            if progress:
                progress(counts)
        if not shard:
            require_both_splits(counts)
        (folder / "meta.json").unlink(missing_ok=True)  # it described the files now being replaced
    return {split: dict(counts[split], sha256=digests[split].hexdigest()) for split in SPLITS}


def require_both_splits(counts: dict) -> None:
    train, val = counts["train"]["documents"], counts["val"]["documents"]
    if train + val == 0:
        raise ValueError("no documents: the input holds no text")
    if train == 0 or val == 0:
        raise ValueError(
            f"{train:,} training and {val:,} validation documents: both need at least one. "
            f"Give more text (copies count once), or {'raise' if val == 0 else 'lower'} --val_fraction"
        )


def write_meta(folder: Path, tokenizer: Tokenizer, shards: dict[str, dict], **extra) -> dict:
    """Write meta.json for the shards, {suffix: counts}, and return its content."""
    names = [name for name in next(iter(shards.values()))["train"] if name != "sha256"]
    counts = {s: {name: sum(c[s][name] for c in shards.values()) for name in names} for s in SPLITS}
    require_both_splits(counts)
    digests = {split: "".join(c[split]["sha256"] for c in shards.values()) for split in SPLITS}
    if len(shards) > 1:  # several files: a digest of their digests
        digests = {split: hashlib.sha256(each.encode()).hexdigest() for split, each in digests.items()}
    for name, content in tokenizer.files.items():
        with atomic_write(folder / name) as file:
            file.write(content)
    kept = {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()}
    meta = dict(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.n_vocab,
        dtype=token_dtype(tokenizer.n_vocab).name,
        end_of_text=tokenizer.end_of_text,
        **({} if tokenizer.bos is None else {"bos": tokenizer.bos}),
        **({"tokenizer_files": kept} if kept else {}),
        **{f"{split}_{what}": number for split in SPLITS for what, number in counts[split].items()},
        **{f"{split}_sha256": digest for split, digest in digests.items()},
        **extra,
        files={s: {f"{s}{shard}.bin": c[s]["tokens"] for shard, c in shards.items() if c[s]["tokens"]} for s in SPLITS},
    )
    check_meta(meta, folder / "meta.json")  # train.py will
    write_json(folder / "meta.json", meta)
    return meta


def write_shard(
    folder: Path, number: int, documents: Iterable[Document], tokenizer: Tokenizer, source: dict, **options
) -> dict:
    """Write one shard with write_tokens, then next to it a record of its `source` and counts."""
    record = folder / f"shard{shard_suffix(number)}.json"
    record.unlink(missing_ok=True)
    counts = write_tokens(folder, documents, tokenizer, shard=shard_suffix(number), **options)
    write_json(record, dict(source=source, counts=counts))
    return counts


def finished_shard(folder: Path, number: int, tokenizer: Tokenizer, source: dict) -> dict | None:
    """Return the counts of a shard that an earlier run completed from the same `source`, else None."""
    suffix, itemsize = shard_suffix(number), token_dtype(tokenizer.n_vocab).itemsize
    try:
        saved = json.loads((folder / f"shard{suffix}.json").read_text())
        sizes = {split: (folder / f"{split}{suffix}.bin").stat().st_size for split in SPLITS}
        counts = {split: {name: saved["counts"][split][name] for name in COUNTED} for split in SPLITS}
        whole = all(sizes[split] == counts[split]["tokens"] * itemsize for split in SPLITS)
        valid = all(FIELDS[f"{s}_{name}"].is_valid(n) for s in SPLITS for name, n in counts[s].items())
        return counts if whole and valid and saved["source"] == source else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # a file is missing, or the record is damaged
        return None


def shard_suffix(number: int) -> str:
    return f"_{number:06d}"


def keep_val_text(documents: Iterable[Document], val_text: bytearray) -> Iterator[Document]:
    """Yield the documents; append validation text to val_text until it is too long to compress."""
    for split, text in documents:
        if split == "val" and len(val_text) <= COMPRESSED_BYTES:
            val_text += text.encode("utf-8", "replace")
        yield split, text


def compressed_bits_per_byte(text: bytearray) -> dict[str, float]:
    """Bits per byte of a text after gzip -9 and xz -9, unless it is empty or too long. A model should need fewer."""
    if not 0 < len(text) <= COMPRESSED_BYTES:
        return {}
    return dict(
        gzip_bits_per_byte=8 * len(gzip.compress(text, 9)) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=9)) / len(text),
    )


# ---------------------------------------------------------------------------------------------------------------
# For prepare.py scripts: progress, summary, errors


class Progress:
    """A progress line that overwrites itself: share done, documents and tokens per second, time left.

    total: the number of `unit` ("documents" or "bytes"); None if unknown: the line then has a count, no share and no
    eta. repeats: the number of inputs of this size that are left, including this one.
    """

    def __init__(self, total: int | None, unit: str, prefix: str = "", repeats: int = 1):
        self.total, self.unit, self.prefix, self.repeats = total, unit, prefix, repeats
        self.start = self.shown = time.time()
        # a log file gets a line every 30 seconds
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
        say(f"{self.prefix + share + ' | ' + rates + eta:<100}", end=self.end)


def print_summary(folder: Path, meta: dict) -> None:
    """Print what a finished dataset holds."""
    what = f"tokenizer {meta['tokenizer']}, vocab_size {meta['vocab_size']:,}, {meta['dtype']} tokens"
    say(f"{f'{display_path(folder)}: {what}':<100}")  # as wide as the progress line it covers
    compressed = "gzip_bits_per_byte" in meta
    say(f"{'split':<6}{'documents':>12}{'bytes':>18}{'tokens':>18}" + "  gzip -9   xz -9, bits per byte" * compressed)
    for split in SPLITS:
        documents, n_bytes, tokens = (meta[f"{split}_{what}"] for what in ("documents", "bytes", "tokens"))
        line = f"{split:<6}{documents:>12,}{n_bytes:>18,}{tokens:>18,}"
        if split == "val" and compressed:
            line += f"{meta['gzip_bits_per_byte']:>9.3f}{meta['xz_bits_per_byte']:>8.3f}"
        say(line)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main: a user error prints one line, Ctrl-C and SIGTERM print no traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        of_a_file = isinstance(error, OSError) and error.filename and error.strerror
        sys.exit(f"error: {error.filename}: {error.strerror}" if of_a_file else f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: nothing half-written is left")


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_parser(doc: str, folder: Path) -> argparse.ArgumentParser:
    """A script's argument parser: its docstring is the help, --out its one option. Options that are not given are left
    out of the result: the defaults are those of the script's prepare().
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    said = "folder for the dataset (default: the script's)"
    parser.add_argument("--out", dest="folder", type=path_argument, default=folder, help=said)
    return parser


def add_text_options(parser: argparse.ArgumentParser, tokenizer: str, val_fraction: str, bos: bool = True) -> None:
    """Add the options for text and tokens. tokenizer, val_fraction: their defaults, as --help shows them."""
    said = f"one of {', '.join(NAMES)}, or a Hugging Face or Meta folder or file (default: {tokenizer})"
    parser.add_argument("--tokenizer", help=said)
    parser.add_argument("--val_fraction", type=share, help=f"validation share (default: {val_fraction})")
    said = "broken rows and files: stop at the first one, or skip and count them (default: strict)"
    parser.add_argument("--errors", choices=["strict", "skip"], help=said)
    said = "processes (default: one per CPU core)"
    parser.add_argument("--workers", type=count_argument, default=cpu_cores(), help=said)
    if bos:
        said = "begin each document with the tokenizer's bos (default: if it has one)"
        parser.add_argument("--bos", action=argparse.BooleanOptionalAction, help=said)


def tokenizer_for_data(name: str, bos: bool | None = None) -> Tokenizer:
    """The tokenizer that a script's options name."""
    tokenizer = get_tokenizer(name if name in NAMES else os.path.expanduser(name))
    if bos is False or tokenizer.bos == tokenizer.end_of_text:  # a document starts after the end of another anyway
        tokenizer.bos = None
    if bos and tokenizer.bos is None:
        raise ValueError(f"--bos: tokenizer {tokenizer.name} does not begin texts with a bos")
    return tokenizer


def path_argument(text: str) -> Path:
    """An argparse type: an empty path would mean the current folder, and a shell does not expand --out=~/x."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or folder")
    return Path(text).expanduser()


def count_argument(text: str) -> int:
    """An argparse type: a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}, expected a whole number, at least 1")
    return int(text)


def share(text: str) -> float:
    """An argparse type: a number above 0 and below 1."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}, expected a share above 0 and below 1")
    return float(text)


def input_argument(text: str) -> Path:
    """An argparse type: a file, a folder, or - for standard input."""
    return Path("/dev/stdin") if text == "-" else path_argument(text)
