"""Writing a dataset (data/tokens.py has the format), whole or in shards; data/encode.py tokenizes.

Files are written under a temporary name, flushed and renamed, meta.json last. The writer holds .lock.

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # in data/mine/prepare.py: import from the root
    documents = [("train", "some text"), ("val", "more text")]  # or an iterator
    if __name__ == "__main__":  # needed for several workers, which import the script
        write_dataset(Path("data/mine"), documents, get_tokenizer("bytes"), workers=8)
"""

import hashlib
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from data.encode import Document, Encode, encode_documents, encode_text
from data.files import atomic_write, lock, open_to_write, write_json
from data.meta import SPLITS
from data.tokenizer import Tokenizer
from data.tokens import token_dtype

FIRST_CHARS = 10**6  # of the first documents: one validates and one trains, whatever val_fraction is
XZ_BYTES = 2**26  # of validation text: xz -9 takes half a minute for it; a longer text is not compressed


# ----------------------------------------------------------------------------------------------------------------------
# Which documents validate


def hash_of(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(key: str, val_fraction: float) -> str:
    """'val' for about val_fraction of all keys. It depends on the key alone, not on the order or the run."""
    return "val" if hash_of(key) < val_fraction * 2**64 else "train"


def split_texts(texts: Iterable[tuple[str, str]], val_fraction: float) -> Iterator[Document]:
    """Split (key, text) by the key's hash. Of the first keys the one with the smallest hash validates, and the one with
    the largest trains, so that neither split is empty.
    """
    texts = iter(texts)
    first = []
    n_chars = 0
    for key, text in texts:
        first.append((key, text))
        n_chars += len(text)
        if n_chars >= FIRST_CHARS and len(first) > 1:
            break
    splits = {}
    if first:
        keys = [key for key, _ in first]
        splits[min(keys, key=hash_of)] = "val"
        splits[max(keys, key=hash_of)] = "train"
    for key, text in chain(first, texts):
        yield splits.get(key) or split_of(key, val_fraction), text


# ----------------------------------------------------------------------------------------------------------------------
# The folder


@contextmanager
def write_lock(folder: Path):
    """Make the folder and lock it against other writers. Raises BlockingIOError if another process writes to it."""
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a model, and a dataset would replace its tokenizer: name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with open_to_write(folder / ".lock", "a") as file:  # NFS cannot lock a file opened for reading only
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
    encode: Encode = encode_text,
    **options,  # workers and progress, for write_tokens
) -> dict:
    """Write a dataset of one train.bin and one val.bin; return its meta.json, which includes `extra`, FIELDS of
    data/meta.py. If the validation text is short enough, it includes the bits per byte that xz -9 needs for it.
    """
    val_text = bytearray()
    with write_lock(folder):
        counts = write_tokens(folder, keep_val_text(documents, val_text), tokenizer, encode=encode, **options)
        extra = dict(extra or {})
        if encode is encode_text and 0 < len(val_text) <= XZ_BYTES:  # of conversations not every byte is learned
            extra["xz_bits_per_byte"] = 8 * len(lzma.compress(val_text, preset=9)) / len(val_text)
        return write_meta(folder, tokenizer, {"": counts}, **extra)


def keep_val_text(documents: Iterable[Document], val_text: bytearray) -> Iterator[Document]:
    """Yield the documents; append validation text to val_text until it is too long to compress."""
    for split, text in documents:
        if split == "val" and len(val_text) <= XZ_BYTES:
            val_text += text.encode()
        yield split, text


def write_tokens(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    shard: str = "",
    workers: int = 1,
    progress: Callable[[dict], None] | None = None,
    encode: Encode = encode_text,
) -> dict:
    """Tokenize documents into train{shard}.bin and val{shard}.bin. Return {split: counts}: documents, tokens, bytes and
    the SHA-256 of what was written.

    encode: of conversations: its masks go to train{shard}.mask and val{shard}.mask, and the counts include targets.
    Streams: memory does not grow with the documents. `progress` is called with the counts so far. Raises ValueError if
    a split of an unsharded dataset would be empty; an older dataset is then left unchanged.
    """
    counts = {split: Counter(documents=0, tokens=0, bytes=0) for split in SPLITS}
    digests = {split: hashlib.sha256() for split in SPLITS}
    suffixes = (".bin",) if encode is encode_text else (".bin", ".mask")
    with ExitStack() as stack:
        files = {split: [] for split in SPLITS}
        for split in SPLITS:
            for suffix in suffixes:
                files[split].append(stack.enter_context(atomic_write(folder / f"{split}{shard}{suffix}")))
        for encoded in encode_documents(documents, tokenizer, workers, encode):
            for split in SPLITS:
                tokens, mask, batch_counts = encoded[split]
                for file, content in zip(files[split], (tokens, mask), strict=False):  # text has no mask
                    file.write(content)
                    digests[split].update(content)
                counts[split].update(batch_counts)
            if progress:
                progress(counts)
        n_train, n_val = (counts[split]["documents"] for split in SPLITS)
        if not shard and (n_train == 0 or n_val == 0):
            raise ValueError(
                f"{n_train:,} training and {n_val:,} validation documents: both need at least one. "
                "Give more text (copies count once), or change --val_fraction"
            )
        (folder / "meta.json").unlink(missing_ok=True)  # it described the files now being replaced
    return {split: dict(counts[split], sha256=digests[split].hexdigest()) for split in SPLITS}


def write_meta(folder: Path, tokenizer: Tokenizer, shards: dict[str, dict], **extra) -> dict:
    """Write meta.json for the shards, {suffix: counts}, and return its content."""
    for name, content in tokenizer.files.items():
        with atomic_write(folder / name) as file:
            file.write(content)
    meta = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.n_vocab,
        "dtype": token_dtype(tokenizer.n_vocab).name,
        "end_of_text": tokenizer.end_of_text,
    }
    if tokenizer.bos is not None:
        meta["bos"] = tokenizer.bos
    if tokenizer.files:
        meta["tokenizer_files"] = {name: sha256(content) for name, content in tokenizer.files.items()}
    files = {split: {} for split in SPLITS}
    for split in SPLITS:
        total = Counter()
        digests = []
        for shard, counts in shards.items():
            numbers = dict(counts[split])
            digests.append(numbers.pop("sha256"))
            total.update(numbers)
            if numbers["tokens"]:
                files[split][f"{split}{shard}.bin"] = numbers["tokens"]
        meta |= {f"{split}_{name}": n for name, n in total.items()}
        # of several files: a digest of their digests
        meta[f"{split}_sha256"] = digests[0] if len(digests) == 1 else sha256("".join(digests).encode())
    meta |= extra | {"files": files}
    write_json(folder / "meta.json", meta)
    return meta


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
