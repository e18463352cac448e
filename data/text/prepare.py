"""Your own text: any files, folders or JSON, with any tokenizer.

    python data/text/prepare.py --input book.txt
    python data/text/prepare.py --input src/ notes/ --tokenizer gpt2 --out data/mine
    python data/text/prepare.py --input corpus.jsonl --field text --tokenizer Llama-3.2-1B
    python data/text/prepare.py --input corpus.jsonl.zst <(zcat more/*.gz) --tokenizer gpt2

Makes train.bin, val.bin and meta.json in --out (this folder by default), tokenizing on every CPU core. The input may be
larger than memory. Files may be compressed: gzip, zstd, xz, bzip2. A document is a JSON object, one per line or in an
array, or a text file. In a text file, lines of only <|endoftext|> separate documents of at most 32 MiB; without them, a
large file is cut at line ends. Folders are searched recursively, skipping --out, links to folders, hidden and
binary files. A document goes to validation if the hash of its text is below a threshold, so all copies of a document go
to the same split. In the first megabyte the documents with the smallest hashes validate: a threshold could select none
of them, or most.
"""

import heapq
import io
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.files import LfsPointer, display_path, say
from data.meta import FILES
from data.rows import (
    ROW_BYTES,
    Bad,
    Unreadable,
    field_of,
    head_of,
    is_jsonl,
    kind_of,
    open_input,
    read,
    read_rows,
    text_size,
)
from data.vocabulary import END_OF_TEXT_NAMES
from data.write import (
    Document,
    Progress,
    add_text_options,
    hash_of,
    input_argument,
    make_parser,
    print_summary,
    run_script,
    split_of,
    tokenizer_for_data,
    write_dataset,
)

# A whole line. re searches for "<", then checks that it starts a line, at 1.3 GB/s; for "^" at 0.13.
SEPARATOR = re.compile(
    "<(?<=^<)(?:" + "|".join(re.escape(name[1:]) for name in END_OF_TEXT_NAMES) + r")[ \t\r]*(?:\n|\Z)", re.MULTILINE
)
SPECIAL = re.compile(r"<\|\w+\|>|</?s>")  # as today's models spell them
HERE = Path(__file__).resolve().parent
SMALL = 10**6  # bytes of documents that are split by the rank of their hashes


def find_files(inputs: list[Path], out: Path, field: str, bad: Bad) -> dict[Path, str | None]:
    """The format of each file: "text", JSON "lines" or "array"; None: a pipe, whose format is detected when it is read.

    Folders are searched in a fixed order for all files that are not hidden, binary or the dataset's.
    """
    files, binary, json_as_text, links, broken, pointers = {}, [], [], [], [], []
    for path in inputs:
        for file in files_inside(path, out) if path.is_dir() else [path]:
            if file.is_dir():
                links.append(file)
                continue
            if file != path and not file.is_file():  # nor a link to a pipe, which would wait for a writer
                broken.append(file)
                continue
            if file.exists() and not file.is_file():
                files[file] = None
                continue
            try:
                with open_input(file) as opened:
                    head = head_of(opened, file)
            except Unreadable as error:
                bad(str(error))
                continue
            except ValueError as error:
                if file == path:
                    raise
                left_out = pointers if isinstance(error, LfsPointer) else binary
                left_out.append(file)
                continue
            kind = kind_of(head, file)
            if file != path and kind != "text" and not is_jsonl(file) and f'"{field}"'.encode() not in head:
                kind = "text"  # such as a configuration in a source tree
                json_as_text.append(file)
            elif kind == "text" and file.suffix.lower() == ".json":
                if file == path:
                    raise ValueError(f"{path} is JSON, but neither an array of objects nor one object per line")
                json_as_text.append(file)
            files[file] = kind
    say_files("binary or UTF-16 files left out", binary)
    say_files("git-lfs pointers left out, whose files git lfs pull fetches", pointers)
    say_files("links to folders left out", links)
    say_files("links to no file left out", broken)
    say_files(f"JSON without the field {field!r}, or not in rows, read as text", json_as_text)
    return files


def files_inside(folder: Path, out: Path) -> Iterator[Path]:
    """All files and links in a folder, recursively, except hidden ones and those of the dataset in `out`."""
    root, out = folder.resolve(), out.resolve()
    ours = {out} if root in out.parents else {out / name for name in ("meta.json", "tokenizer.model", *FILES)}
    for file in sorted(folder.rglob("*")):
        place = root / file.relative_to(folder)
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        taken = file.is_file() or file.is_symlink()
        if taken and not hidden and ours.isdisjoint([place, *place.parents]):
            yield file


def say_files(what: str, files: list[Path]) -> None:
    if files:
        say(f"{what}: {len(files):,} ({', '.join(map(display_path, files[:2])) + ', ...' * (len(files) > 2)})")


def read_documents(files: dict[Path, str | None], field: str, max_chars: int, bad: Bad) -> Iterator[str]:
    for path, kind in files.items():
        try:
            with open_input(path) as file:
                kind = kind or kind_of(head_of(file, path), path)
                if kind == "text":
                    yield from read_text(file, path, max_chars, bad)
                    continue
                for where, row in read_rows(file, path, kind, bad):
                    if text := field_of(row, field, where, bad):
                        yield text
        except Unreadable as error:
            bad(str(error))


def read_text(file: BinaryIO, path: Path, max_chars: int, bad: Bad) -> Iterator[str]:
    """Yield the documents between end-of-text lines. A text that has none in its first ROW_BYTES is cut."""
    try:
        if not bad.strict:
            check_utf8(path)
        file = io.BufferedReader(file, ROW_BYTES)
        head = read(file.peek, path)
        # newline="\n" leaves \r\n alone; utf-8-sig drops a byte order mark
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
        yield from read_separated(text, path, bad) if has_separator(head) else cut(text, path, max_chars, bad)
    except UnicodeDecodeError as error:
        bad(f"{path} is not UTF-8 text ({error})")


def has_separator(head: bytes) -> bool:
    lines = head.decode("utf-8-sig", "replace")
    if len(head) == ROW_BYTES:  # the last line may go on
        lines = lines[: lines.rfind("\n") + 1]
    return SEPARATOR.search(lines) is not None


def read_separated(text: TextIO, path: Path, bad: Bad) -> Iterator[str]:
    """Yield the documents between end-of-text lines, whole, without blank ones."""
    document, number, left_out = "", 1, False
    while lines := read(lambda: text.read(2**20) + text.readline(ROW_BYTES), path):
        for i, piece in enumerate(SEPARATOR.split(lines)):
            if i > 0:  # an end-of-text line stands before it
                if document.strip():
                    yield document
                document, left_out = "", False
                number += 1
            document += "" if left_out else piece
            if len(document) > ROW_BYTES:
                bad(f"{path}: document {number:,} has more than {ROW_BYTES:,} characters")
                document, left_out = "", True
    if document.strip():
        yield document


def cut(text: TextIO, path: Path, max_chars: int, bad: Bad) -> Iterator[str]:
    """Yield max_chars at a time and up to as many more, to the end of the line."""
    starts_line = True
    while chunk := read(lambda: text.read(max_chars) + text.readline(max_chars), path):
        if SEPARATOR.search(chunk, 0 if starts_line else 1):
            bad(f"{path}: the text before the first end-of-text line has more than {ROW_BYTES:,} bytes")
            return
        yield chunk
        starts_line = chunk.endswith("\n")


def check_utf8(path: Path) -> None:
    """Read the whole file before any of it is used. Raises UnicodeDecodeError; ValueError for a pipe."""
    if not path.is_file():
        raise ValueError(f"--errors skip reads a file twice, but {path} is a pipe: use --errors strict")
    with open_input(path) as file:
        file = io.TextIOWrapper(file, encoding="utf-8")
        while read(lambda: file.read(2**20), path):
            pass


def count_special(texts: Iterable[str], special_tokens: set[str], found: Counter) -> Iterator[str]:
    """Yield the texts, counting in `found` the special tokens that they spell out."""
    for text in texts:
        found.update(token for token in SPECIAL.findall(text) if token in special_tokens)
        yield text


def default_fraction(n_bytes: int) -> float:
    """1%, or 100 KB of a small input, but at most 10%. n_bytes: 0 if unknown."""
    return min(max(0.01, 1e5 / n_bytes), 0.1) if n_bytes else 0.01


def split(texts: Iterable[str], val_fraction: float | None) -> Iterator[Document]:
    """Split the first SMALL bytes, or as many texts, by rank: of n distinct texts the ceil(val_fraction n) with the
    smallest hashes validate, but not all n, and no text of more than half of these bytes (a tenth if the input is
    larger). Copies go where the first one went; split_of decides the rest. val_fraction: None for the default if the
    size is unknown.
    """
    texts = iter(texts)
    first, sizes, n_bytes, is_small = [], {}, 0, True
    same = {}  # of copies one is kept: there may be millions
    for text in texts:
        first.append(same.setdefault(text, text))
        if text not in sizes:
            sizes[text] = len(text.encode("utf-8", "replace"))
            n_bytes += sizes[text]
        if n_bytes >= SMALL or len(first) >= SMALL:
            is_small = False
            break
    if is_small and len(sizes) == 1:
        raise ValueError(
            "only one distinct document, but training and validation need one each: give more text, or another file"
        )
    if val_fraction is None:
        val_fraction = default_fraction(n_bytes if is_small else 0)
    n = len(sizes)
    may = [text for text in sizes if (2 if is_small else 10) * sizes[text] <= n_bytes]
    val = set(heapq.nsmallest(min(math.ceil(val_fraction * n), n - 1), may, key=hash_of))
    known = {text: "val" if text in val else "train" for text in sizes} if may else {}
    for text in chain(first, texts):
        yield known.get(text) or split_of(text, val_fraction), text


def prepare(
    inputs: list[Path],
    folder: Path = HERE,
    tokenizer: str = "bytes",
    bos: bool | None = None,
    field: str | None = None,
    val_fraction: float | None = None,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder`; return its meta.json. field: of the JSON objects; None: "text"."""
    bad, spelled_out = Bad(errors), Counter()
    files = find_files(inputs, folder, field or "text", bad)
    if field is not None and set(files.values()) == {"text"}:
        raise ValueError(f"--field is {field}, but no input holds JSON objects, one per line or in an array")
    sizes = [text_size(path, SMALL) for path in files]
    n_bytes = 0 if None in sizes else sum(sizes)  # 0: unknown
    if val_fraction is None and n_bytes:
        val_fraction = default_fraction(n_bytes)
    # Cut a single file into enough documents for the hash to pick some for validation: about eight chunks of ASCII.
    # Chunks below 16,384 characters would teach the model to stop early, by their end-of-text tokens. Only if that is
    # more than the whole validation share are they smaller.
    least = min(2**14, max(int(n_bytes * val_fraction), 256)) if 0 < n_bytes < SMALL else 2**14
    max_chars = min(max(int(n_bytes * (val_fraction or 0) / 8), least), 2**20)
    tokenizer = tokenizer_for_data(tokenizer, bos)
    texts = read_documents(files, field or "text", max_chars, bad)
    texts = count_special(texts, tokenizer.special_tokens | set(END_OF_TEXT_NAMES), spelled_out)
    progress = Progress(n_bytes or None, "bytes")
    meta = write_dataset(folder, split(texts, val_fraction), tokenizer, workers=workers, progress=progress)
    bad.report()
    if spelled_out:
        found = ", ".join(f"{token} ({n:,})" for token, n in spelled_out.most_common(5))
        say(f"special tokens spelled out, which stay text: {found}. On a line of its own <|endoftext|> ends a document")
    print_summary(folder, meta)
    return meta


def main():
    parser = make_parser(__doc__, HERE)
    said = "files, folders, pipes: text or JSON, compressed or not"
    parser.add_argument("--input", dest="inputs", type=input_argument, nargs="+", required=True, help=said)
    add_text_options(parser, tokenizer="bytes", val_fraction="0.01, more for small inputs")
    parser.add_argument("--field", help="field of JSON objects that has the text (default: text)")
    args = parser.parse_args()
    prepare(**vars(args))
    data, folder = HERE.parent, args.folder.resolve()
    script, config = (display_path(data.parent / path) for path in ("train.py", "config/baby_llama.py"))
    dataset = folder.name if folder.parent == data else folder
    # no vocab_size: the config has none either, so the model takes the dataset's
    say("next: " + shlex.join(["python", script, config, f"--dataset={dataset}", f"--out_dir=out/{folder.name}"]))


if __name__ == "__main__":
    run_script(main)
