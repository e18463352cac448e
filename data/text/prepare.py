"""Your own text: any files, folders or .jsonl, with any tokenizer.

    python data/text/prepare.py --input book.txt
    python data/text/prepare.py --input src/ notes/ --tokenizer gpt2 --out data/mine
    python data/text/prepare.py --input corpus.jsonl --field text --tokenizer Llama-3.2-1B
    python data/text/prepare.py --input <(zcat corpus.txt.gz) --tokenizer gpt2

Makes train.bin, val.bin and meta.json in --out (this folder by default); the input may be larger than the memory, and
every CPU core tokenizes. A document is a line of a .jsonl or .ndjson, or a file; a large file is cut at line ends into
several. Folders are searched to the bottom, except for --out and for hidden and binary files. A document goes to
validation if the hash of its text is below a bound, so copies of one document are all on the same side. Of the first
megabyte, where that could be none or most, those with the smallest hashes go there.
"""

import argparse
import hashlib
import heapq
import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.files import display_path
from data.write import (
    Document,
    Progress,
    add_tokenizer_options,
    check_val_fraction,
    cpu_cores,
    path_argument,
    print_summary,
    run_script,
    split_of,
    tokenizer_for_data,
    write_dataset,
)

HERE = Path(__file__).resolve().parent
SMALL = 10**6  # bytes of documents that are split by rank


def find_files(inputs: list[Path], out: Path) -> list[Path]:
    """Return the files named, and in folders all that are not hidden, binary or the dataset's, in a fixed order."""
    files, binary = [], []
    for path in inputs:
        if path.is_dir():
            ours = out.resolve() if path.resolve() in out.resolve().parents else out.resolve() / "meta.json"
            inside = (p for p in sorted(path.rglob("*")) if p.is_file() and not is_hidden(p.relative_to(path)))
            for file in inside:
                if not file.resolve().is_relative_to(ours):
                    (binary if is_binary(file) else files).append(file)
        elif path.is_file() and is_binary(path):
            raise ValueError(f"--input {path} is binary or UTF-16: text is read as UTF-8")
        elif path.exists():
            files.append(path)
        else:
            raise FileNotFoundError(f"--input {path} does not exist")
    if binary:
        examples = ", ".join(map(display_path, binary[:2])) + ", ..." * (len(binary) > 2)
        print(f"binary or UTF-16 files left out: {len(binary):,} ({examples})")
    return files


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_binary(path: Path) -> bool:
    """git's rule: a zero byte near the start."""
    with open(path, "rb") as file:
        return b"\0" in file.read(8000)


def is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson")


def read_documents(files: list[Path], field: str, max_chars: int, errors: str) -> Iterator[str]:
    for path in files:
        # newline="\n" leaves \r\n alone; utf-8-sig drops the mark that Windows editors put first
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            try:
                if errors == "skip":
                    check_utf8(file, path)
                yield from read_jsonl(file, path, field) if is_jsonl(path) else read_chunks(file, max_chars)
            except UnicodeDecodeError as error:
                if errors == "strict":
                    raise ValueError(f"{path} is not UTF-8 text ({error}): --errors skip leaves it out") from error
                print(f"skipped {display_path(path)}: not UTF-8 text")


def check_utf8(file, path: Path) -> None:
    """Read all of a file, before any of it is used, and go back to its start. Raises UnicodeDecodeError."""
    if not file.seekable():
        raise ValueError(f"--errors skip reads a file twice, but {path} is a pipe: use --errors strict")
    while file.read(2**20):
        pass
    file.seek(0)


def read_chunks(file, max_chars: int) -> Iterator[str]:
    """The whole file, or max_chars at a time and up to as many more, to the end of the line."""
    while text := file.read(max_chars) + file.readline(max_chars):
        yield text


def read_jsonl(file, path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets in brackets
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        except (KeyError, TypeError):
            raise ValueError(f"{path}:{number} is not an object with the field {field!r}: set --field") from None
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number} has {field!r} of type {type(text).__name__}, expected a string")
        if text:
            yield text


def split(texts: Iterable[str], val_fraction: float) -> Iterator[Document]:
    """The first SMALL bytes are split by rank: of n distinct texts the ceil(val_fraction n) with the smallest hashes
    validate, but not all; of a larger input none that takes a tenth of them. Copies go where the first one is, what
    else comes where split_of says.
    """
    texts, first, sizes, n_bytes = iter(texts), [], {}, 0
    for text in texts:
        first.append(text)
        if text not in sizes:
            sizes[text] = len(text.encode("utf-8", "replace"))
            n_bytes += sizes[text]
        if n_bytes >= SMALL:
            break
    else:
        if len(sizes) == 1:
            raise ValueError("one document, but training and validation need one each: give more text, or another file")
    n = len(sizes)
    may = [text for text in sizes if n_bytes < SMALL or 10 * sizes[text] < n_bytes]
    val = set(heapq.nsmallest(min(math.ceil(val_fraction * n), n - 1), may, key=hash_of))
    known = {text: "val" if text in val else "train" for text in sizes} if may else {}
    for text in chain(first, texts):
        yield known.get(text) or split_of(text, val_fraction), text


def hash_of(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def prepare(
    inputs: list[Path],
    folder: Path = HERE,
    tokenizer: str = "bytes",
    tokenizer_path: Path | None = None,
    bos: bool | None = None,
    field: str | None = None,
    val_fraction: float | None = None,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder`; return its meta.json. field: of the lines of .jsonl files; none: "text"."""
    files = find_files([Path(path) for path in inputs], Path(folder))
    if field is not None and not any(map(is_jsonl, files)):
        raise ValueError(f"--field is {field}, but no input is a .jsonl or .ndjson file (a pipe is read as plain text)")
    replaces = (Path(folder) / "meta.json").exists()
    # 0: unknown, as of a pipe
    n_bytes = sum(path.stat().st_size for path in files) if all(path.is_file() for path in files) else 0
    if val_fraction is None:
        val_fraction = min(max(0.01, 1e5 / n_bytes), 0.1) if n_bytes else 0.01  # 1%, but 100 KB or 10% of a small input
    check_val_fraction(val_fraction)
    # A single file should still be enough documents for the hash to find some for validation: about eight chunks of
    # ASCII, but none so small that its end-of-text tokens would teach the model to stop early, unless that were more
    # than all that is to validate.
    least = min(2**14, max(int(n_bytes * val_fraction), 256)) if 0 < n_bytes < SMALL else 2**14
    max_chars = min(max(int(n_bytes * val_fraction / 8), least), 2**20)
    meta = write_dataset(
        Path(folder),
        split(read_documents(files, field or "text", max_chars, errors), val_fraction),
        tokenizer_for_data(tokenizer, tokenizer_path, bos),
        workers=workers,
        progress=Progress(n_bytes or None, "bytes"),
    )
    if replaces:
        print(f"{f'replaced the dataset in {display_path(folder)}':<100}")  # as wide as the progress line it covers
    print_summary(folder, meta)
    return meta


def print_next(folder: Path) -> None:
    """Print the command that trains on the dataset, where train.py finds it by name."""
    data, name = HERE.parent, folder.resolve().name
    if folder.resolve().parent == data:
        script, config = (display_path(data.parent / path) for path in ("train.py", "config/baby_llama.py"))
        # no vocab_size: the config has none either, so the model takes the dataset's
        print("next:", shlex.join(["python", script, config, f"--dataset={name}", f"--out_dir=out/{name}"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=path_argument, nargs="+", required=True, help="files, folders, .jsonl, pipes")
    add_tokenizer_options(parser, default="bytes")
    parser.add_argument(
        "--out", type=path_argument, default=HERE, help="folder for the dataset (default: the script's)"
    )
    parser.add_argument("--field", help="where a .jsonl line has its text (default: text)")
    parser.add_argument("--val_fraction", type=float, help="validation share (default: 0.01, more for small inputs)")
    parser.add_argument("--errors", choices=["strict", "skip"], default="strict", help="for a file that is not UTF-8")
    parser.add_argument("--workers", type=int, default=cpu_cores(), help="processes (default: one per CPU core)")
    args = vars(parser.parse_args())
    out = args.pop("out")
    prepare(args.pop("input"), out, **args)
    print_next(out)


if __name__ == "__main__":
    run_script(main)
