"""FineWeb-Edu, educational web pages to pretrain a real model on; or any folder of parquet files.

    pip install pyarrow huggingface_hub
    python data/fineweb_edu/prepare.py                         # sample-10BT from the hub, gpt2 tokens
    python data/fineweb_edu/prepare.py --tokenizer Llama-3.2-1B # a published folder, or its tokenizer's file
    python data/fineweb_edu/prepare.py --max_files 1           # one file of 14, enough for a first run
    python data/fineweb_edu/prepare.py --input my_parquets/    # no network; a file or a folder

Makes one train_*.bin and one val_*.bin for each parquet file. sample-10BT is 14 files of 2 GB and 10 billion gpt2
tokens: 20 GB as uint16; vocabularies above 65,536 take uint32, 4 bytes per token. You can stop the script at any
time: the same command continues with the first unfinished file.

A hash of a document's text decides its split, so all copies of a page go to the same one: the web is full of copies.
"""

import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import command
from data.files import read_json, write_json
from data.meta import SPLITS
from data.rows import Bad, field_of, files_below, reading
from data.tokens import token_dtype
from data.write import Document, split_of, write_lock, write_meta, write_tokens

ROWS_IN_MEMORY = 1024
HERE = Path(__file__).resolve().parent
REPO = "HuggingFaceFW/fineweb-edu"


def list_files(input: Path | None, sample: str, bad: Bad) -> list[str]:
    """The names of the hub's parquet files, or the paths of those in a folder. A file is its only one."""
    if input is None:
        from huggingface_hub import list_repo_files

        try:
            names = list_repo_files(REPO, repo_type="dataset")
        except Exception as error:  # also of the library that it asks by
            raise OSError(f"huggingface.co does not list {REPO} ({error}): fetch it elsewhere, see --input") from error
        files = [name for name in names if name.startswith(f"sample/{sample}/")]
    else:
        # not resolve(): in the hub's cache, a .parquet file is a link to one that is named by a hash
        files = [os.path.abspath(file) for file in (files_below(input, bad) if input.is_dir() else [input])]
    files = sorted(name for name in files if name.endswith(".parquet"))
    if not files:
        raise FileNotFoundError(f"{input or f'{REPO}/sample/{sample}'} holds no .parquet files")
    return files


def download(name: str) -> str:
    """The path of a file of the hub in its cache."""
    from huggingface_hub import hf_hub_download

    return hf_hub_download(REPO, name, repo_type="dataset")


def read_documents(path: Path, field: str, val_fraction: float, bad: Bad) -> Iterator[Document]:
    """Yield (split, text) from a parquet file, of which ROWS_IN_MEMORY are read at a time."""
    import pyarrow.parquet

    with reading(path, bad):
        parquet = pyarrow.parquet.ParquetFile(path, pre_buffer=False)  # not a whole row group in memory
        names = parquet.schema_arrow.names
        if field not in names:
            raise ValueError(f"no column {field!r} but {', '.join(names):.200}: set --field")
        batches = parquet.iter_batches(ROWS_IN_MEMORY, columns=[field])
        values = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for number, value in enumerate(values, start=1):
            if text := field_of({field: value}, field, f"{path} row {number}", bad):
                yield split_of(text, val_fraction), text


def finished_shard(folder: Path, suffix: str, source: dict, itemsize: int, strict: bool) -> dict | None:
    """Return the counts of a shard that an earlier run completed from the same `source`, else None.

    strict: not of one that --errors skip left something out of.
    """
    try:
        record = read_json(folder / f"shard{suffix}.json")
        sizes = {split: (folder / f"{split}{suffix}.bin").stat().st_size for split in SPLITS}
    except (OSError, ValueError):
        return None
    is_same = record.get("source") == source and not (strict and record.get("left_out"))
    is_whole = is_same and all(sizes[split] == record["counts"][split]["tokens"] * itemsize for split in SPLITS)
    return record["counts"] if is_whole else None


def prepare(
    input: Path | None = None,
    folder: Path = HERE,
    tokenizer: str = "gpt2",
    sample: str = "10BT",
    max_files: int | None = None,
    field: str = "text",
    val_fraction: float = 0.001,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder` from a .parquet file, a folder of them or the hub; return its meta.json.

    Each file makes a shard, and beside it a record of its source and counts, with which a later run continues.
    """
    encoding = command.tokenizer_for_data(tokenizer)
    bad = Bad(errors)
    files = list_files(input, sample, bad)[:max_files]
    shards = {}
    with write_lock(folder), bad:
        for number, name in enumerate(files):
            suffix = f"_{number:06d}"
            source = {"name": name, "field": field, "val_fraction": val_fraction}
            source |= {"tokenizer": encoding.name, "bos": encoding.bos}
            if input is not None:  # it may have been changed since
                source["mtime_ns"] = Path(name).stat().st_mtime_ns
            counts = finished_shard(folder, suffix, source, token_dtype(encoding.n_vocab).itemsize, bad.strict)
            if counts is None:
                record = folder / f"shard{suffix}.json"
                record.unlink(missing_ok=True)
                path = Path(name if input else download(name))
                n_before = bad.n
                documents = read_documents(path, field, val_fraction, bad)
                progress = command.Progress(f"{number + 1}/{len(files)} {path.name} ")
                counts = write_tokens(folder, documents, encoding, suffix, workers, progress)
                write_json(record, {"source": source, "counts": counts, "left_out": bad.n - n_before})
            shards[suffix] = counts
        if not any(counts["val"]["documents"] for counts in shards.values()):
            raise ValueError("no document is for validation: give more files, or a larger --val_fraction")
        meta = write_meta(folder, encoding, shards)
    command.print_summary(folder, meta)
    return meta


def main():
    parser = command.make_parser(__doc__, HERE)
    input_help = "a .parquet file or a folder of them (default: the hub's)"
    parser.add_argument("--input", type=command.path_argument, help=input_help)
    command.add_text_options(parser, tokenizer="gpt2", val_fraction="0.001")
    parser.add_argument("--sample", help="which hub sample: 10BT, 100BT or 350BT (default: 10BT)")
    parser.add_argument("--max_files", type=int, help="read only this many parquet files")
    parser.add_argument("--field", help="the column that has the text (default: text)")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    command.run_script(main)
