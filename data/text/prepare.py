"""Your own text: files or folders of text and JSON, with any tokenizer.

    python data/text/prepare.py --input book.txt
    python data/text/prepare.py --input src/ notes/ --format text --tokenizer gpt2 --out data/mine
    python data/text/prepare.py --input corpus.jsonl.zst --field text --tokenizer Llama-3.2-1B
    python data/text/prepare.py --input islenska/ --tokenizer train:8192
    zcat more/*.gz | python data/text/prepare.py --input - --format jsonl --tokenizer gpt2

Makes train.bin, val.bin and meta.json in --out (this folder by default), tokenizing on every CPU core. The input may be
larger than memory. A file's name tells its format: .jsonl and .json have an object a line or an array of objects, all
else is text; .gz, .zst, .xz and .bz2 are decompressed. --format states another, and that of a pipe. A document is an
object's field, or a text file. In a text file, lines of only <|endoftext|> separate documents; without them, a large
file is cut at line ends. Other special tokens in a text stay text. Folders are searched recursively, without hidden
files, links to folders and the files directly in --out.

train:8192 learns a tokenizer of 8,192 tokens from the first 32 million characters of the training documents and keeps
its tokenizer.json with the data; fewer if the text repeats no more pairs. In languages other than English a text is
fewer such tokens than gpt2's. More data with the same tokenizer, as for a mix: --tokenizer with this data's folder.

A document goes to validation if the hash of its text is below a threshold, so all its copies go to the same split.
"""

import io
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import command
from data.encode import Document
from data.rows import Bad, field_of, files_below, is_json, json_rows, open_input, reading
from data.tokenizer import train_tokenizer
from data.vocabulary import SEPARATOR
from data.write import split_texts, write_dataset

HERE = Path(__file__).resolve().parent
HEAD_BYTES = 2**25  # of a text file, in which its first end-of-text line is looked for
LEARNED_CHARS = 2**25  # of text that a tokenizer is learned from: ten seconds, 0.3 GB


def files_in(path: Path, out: Path, bad: Bad) -> list[Path]:
    """The path itself, or the files inside if it is a folder: all but hidden ones, and those directly in `out`."""
    if not path.is_dir():
        return [path]
    return [file for file in files_below(path, bad) if file.is_file() and file.parent.resolve() != out.resolve()]


def read_documents(files: list[Path], format: str | None, field: str, chunk_chars: int, bad: Bad) -> Iterator[str]:
    for path in files:
        if format == "text" or (format is None and not is_json(path)):
            yield from read_text(path, chunk_chars, bad)
            continue
        for where, row in json_rows(path, bad):
            if text := field_of(row, field, where, bad):
                yield text


def read_text(path: Path, chunk_chars: int, bad: Bad) -> Iterator[str]:
    """Yield the documents of a text file. If it has no end-of-text line in its first HEAD_BYTES, it is cut."""
    with reading(path, bad), open_input(path) as opened:
        file = io.BufferedReader(opened, HEAD_BYTES)
        head = file.peek()  # as much as the buffer holds, also from a slow pipe
        if b"\0" in head[:8000]:  # git's rule
            raise ValueError("it is binary or UTF-16, with zero bytes: text is read as UTF-8")
        is_separated = SEPARATOR.search(head.decode("utf-8-sig", "replace"))
        # newline="\n" leaves \r\n alone; utf-8-sig drops a byte order mark
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
        yield from read_separated(text) if is_separated else read_chunks(text, chunk_chars)


def read_separated(text: TextIO) -> Iterator[str]:
    """Yield the documents between end-of-text lines, whole, without blank ones."""
    document = ""
    while lines := text.read(2**20) + text.readline():
        *ended, begun = SEPARATOR.split(lines)
        for part in ended:
            document += part
            if document.strip():
                yield document
            document = ""
        document += begun
    if document.strip():
        yield document


def read_chunks(text: TextIO, chunk_chars: int) -> Iterator[str]:
    """Yield chunk_chars at a time and up to as many more, to the end of the line."""
    while chunk := text.read(chunk_chars) + text.readline(chunk_chars):
        if SEPARATOR.search(chunk):
            raise ValueError(f"it has more than {HEAD_BYTES:,} bytes before its first end-of-text line")
        yield chunk


def first_documents(documents: Iterator[Document], n_chars: int) -> Iterator[Document]:
    """Yield documents until they have n_chars characters together; leave the others in the iterator."""
    for split, text in documents:
        yield split, text
        n_chars -= len(text)
        if n_chars <= 0:
            return


def prepare(
    inputs: list[Path],
    folder: Path = HERE,
    tokenizer: str = "bytes",
    format: str | None = None,
    field: str = "text",
    val_fraction: float | None = None,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder`; return its meta.json. field: of the JSON objects."""
    bad = Bad(errors)
    files = [file for path in inputs for file in files_in(path, folder, bad)]
    if not files:
        raise ValueError("--input has no files: hidden ones and those directly in --out are not read")
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if val_fraction is None:
        val_fraction = min(max(0.01, 1e5 / n_bytes), 0.1) if n_bytes else 0.01  # 0.01 of a pipe
    # Small enough for the hash to pick about eight chunks of a single file for validation. Chunks below 16,384
    # characters would teach the model to stop early, by their end-of-text tokens: only the smallest files get them.
    chunk_chars = min(max(int(n_bytes * val_fraction / 8), 2**14), 2**20)
    if 0 < n_bytes < 20 * chunk_chars:
        chunk_chars = max(n_bytes // 20, 256)
    texts = read_documents(files, format, field, chunk_chars, bad)
    documents = split_texts(((text, text) for text in texts), val_fraction)
    if tokenizer.startswith("train:"):
        n_vocab = tokenizer.removeprefix("train:")
        if not n_vocab.isdecimal():
            raise ValueError(f"--tokenizer {tokenizer}: expected a number of tokens, as in train:8192")
        first = list(first_documents(documents, LEARNED_CHARS))  # a pipe can be read only once
        documents = chain(first, documents)
        encoding = train_tokenizer((text for split, text in first if split == "train"), int(n_vocab))
    else:
        encoding = command.tokenizer_for_data(tokenizer)
    with bad:
        meta = write_dataset(folder, documents, encoding, workers=workers, progress=command.Progress())
    command.print_summary(folder, meta)
    return meta


def main():
    parser = command.make_parser(__doc__, HERE)
    command.add_input_option(parser)
    format_help = "the format of every input (default: by the name of each; a pipe needs it)"
    parser.add_argument("--format", choices=["text", "jsonl", "json"], help=format_help)
    command.add_text_options(parser, tokenizer="bytes", val_fraction="0.01, up to 0.1 for inputs below 10 MB")
    parser.add_argument("--field", help="the field of JSON objects that has the text (default: text)")
    args = parser.parse_args()
    prepare(**vars(args))
    folder = args.folder.resolve()
    flags = [f"--dataset={folder}", f"--out_dir=out/{folder.name}"]
    weights = Path(vars(args).get("tokenizer", "bytes")).expanduser()
    if (weights / "config.json").exists():
        command.print_next(f"--init_from={weights.resolve()}", "--learning_rate=2e-5", *flags)
    else:
        command.print_next("config/baby_llama.py", *flags)  # without a vocab_size: the model takes the dataset's


if __name__ == "__main__":
    command.run_script(main)
