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

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.command import (
    Progress,
    add_text_options,
    make_parser,
    path_argument,
    print_summary,
    run_script,
    tokenizer_for_data,
)
from data.files import read_json, refuse_lfs_pointer, write_json
from data.meta import SPLITS
from data.rows import ROW_BYTES, Bad, field_of
from data.tokenizer import Tokenizer
from data.tokens import token_dtype
from data.write import Document, split_of, write_lock, write_meta, write_tokens

ROWS = 16  # in memory at a time: each may have ROW_BYTES
PARQUET_BYTES = 2**30  # of memory for a file, of which 100 KB may grow to any size; FineWeb-Edu's take 100 MB
HERE = Path(__file__).resolve().parent
REPO = "HuggingFaceFW/fineweb-edu"


def ask_hub(function: str, *arguments):
    """Call a function of huggingface_hub on REPO."""
    import huggingface_hub

    try:
        return getattr(huggingface_hub, function)(REPO, *arguments, repo_type="dataset")
    except Exception as error:  # the type depends on its HTTP client
        raise OSError(
            f"https://huggingface.co/datasets/{REPO} could not be read ({error}). "
            "Without a network: fetch its parquet files elsewhere and name their folder with --input"
        ) from error


def list_hub(sample: str) -> list[str]:
    files = ask_hub("list_repo_files")
    names = sorted(name for name in files if name.startswith(f"sample/{sample}/") and name.endswith(".parquet"))
    if not names:
        samples = sorted({name.split("/")[1] for name in files if name.startswith("sample/")})
        raise ValueError(f"{REPO} has no sample {sample}; it has {', '.join(samples)}")
    return names


def list_folder(path: Path) -> list[str]:
    """The absolute names of the parquet files in a folder, or of the file itself."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*.parquet") if file.is_file())
    if not files:
        raise FileNotFoundError(f"--input {path} holds no .parquet files")
    return [str(file.resolve()) for file in files]


@contextmanager
def limited_memory(n_bytes: int):
    """Let this process allocate at most n_bytes more. Allocations beyond raise MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    n_pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data, as the limit counts it
    resource.setrlimit(resource.RLIMIT_DATA, (n_pages * resource.getpagesize() + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def open_parquet(path: Path):
    import pyarrow.parquet

    with open(path, "rb") as file:
        refuse_lfs_pointer(file.read(100), path)
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # which stops at a limit cleanly
    try:
        with limited_memory(PARQUET_BYTES):
            parquet = pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)  # not a whole row group
            list(parquet.schema_arrow.names)  # a damaged one is not UTF-8
        return parquet
    except (OSError, UnicodeDecodeError, MemoryError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def read_column(parquet, field: str) -> Iterator:
    """Yield a column's values, ROWS in memory at a time. Only reading is limited: not all tokenizers can raise
    MemoryError.
    """
    batches = parquet.iter_batches(ROWS, columns=[field], use_threads=False)
    while True:
        with limited_memory(PARQUET_BYTES):
            batch = next(batches, None)
        if batch is None:
            return
        yield from batch.column(0)


def read_documents(parquet, path: Path, field: str, val_fraction: float, bad: Bad) -> Iterator[Document]:
    """Yield (split, text) from an open ParquetFile."""
    import pyarrow

    require_text(parquet.schema_arrow, path, field)
    try:
        for number, value in enumerate(read_column(parquet, field), start=1):
            where = f"{path} row {number}"
            try:
                text = field_of({field: value.as_py()}, field, where, bad)
            except UnicodeDecodeError as error:
                bad(f"{where} is not UTF-8 text ({error})")
                continue
            if text and 4 * len(text) > ROW_BYTES and len(text.encode()) > ROW_BYTES:
                bad(f"{where} has more than {ROW_BYTES:,} bytes")
            elif text:
                yield split_of(text, val_fraction), text
    except (OSError, MemoryError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet, within {PARQUET_BYTES >> 20:,} MiB: {error}") from error


def require_text(schema, path: Path, field: str) -> None:
    """Raises ValueError if a file has no such column, or one of another type."""
    from pyarrow import types

    if schema.names.count(field) != 1:
        names = ", ".join(schema.names)
        raise ValueError(f"{path} has no column {field!r} but {names:.200}: set --field")
    kind = schema.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise ValueError(f"{path} has {field!r} of type {kind}, expected strings: set --field")


# ----------------------------------------------------------------------------------------------------------------------
# One shard a file, beside it a record of its source and counts


def shard_suffix(number: int) -> str:
    return f"_{number:06d}"


def write_shard(
    folder: Path, number: int, documents: Iterable[Document], tokenizer: Tokenizer, source: dict, **options
) -> dict:
    record = folder / f"shard{shard_suffix(number)}.json"
    record.unlink(missing_ok=True)
    counts = write_tokens(folder, documents, tokenizer, shard=shard_suffix(number), **options)
    write_json(record, {"source": source, "counts": counts})
    return counts


def finished_shard(folder: Path, number: int, tokenizer: Tokenizer, source: dict) -> dict | None:
    """Return the counts of a shard that an earlier run completed from the same `source`, else None."""
    suffix = shard_suffix(number)
    itemsize = token_dtype(tokenizer.n_vocab).itemsize
    try:
        record = read_json(folder / f"shard{suffix}.json", 10_000)
        counts = record["counts"]
        is_whole = all(
            (folder / f"{split}{suffix}.bin").stat().st_size == counts[split]["tokens"] * itemsize for split in SPLITS
        )
        return counts if is_whole and record["source"] == source else None
    except (OSError, ValueError, TypeError, KeyError):  # a file is missing, or the record is damaged
        return None


def prepare(
    input: Path | None = None,
    folder: Path = HERE,
    tokenizer: str = "gpt2",
    bos: bool | None = None,
    sample: str = "10BT",
    max_files: int | None = None,
    field: str = "text",
    val_fraction: float = 0.001,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder` from a .parquet file, a folder of them or the hub; return its meta.json."""
    encoding = tokenizer_for_data(tokenizer, bos)
    ids = encoding.name + (" with bos" if encoding.bos is not None else "")
    names = list_hub(sample) if input is None else list_folder(input)
    names = names[:max_files]
    shards = {}
    bad = Bad(errors)
    with write_lock(folder):
        for number, name in enumerate(names):
            source = {"name": name, "tokenizer": ids, "field": field, "val_fraction": val_fraction}
            if input is None:
                source["input"] = REPO
            else:
                stat = Path(name).stat()
                source |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            counts = finished_shard(folder, number, encoding, source)
            if counts is None:
                path = Path(ask_hub("hf_hub_download", name) if input is None else name)
                with open_parquet(path) as parquet:
                    progress = Progress(parquet.metadata.num_rows, f"{number + 1}/{len(names)} {path.name} ")
                    documents = read_documents(parquet, path, field, val_fraction, bad)
                    counts = write_shard(
                        folder, number, documents, encoding, source, workers=workers, progress=progress
                    )
            shards[shard_suffix(number)] = counts
        meta = write_meta(folder, encoding, shards, script="data/fineweb_edu/prepare.py")
    bad.report()
    print_summary(folder, meta)
    return meta


def main():
    parser = make_parser(__doc__, HERE)
    parser.add_argument("--input", type=path_argument, help="a .parquet file or a folder of them (default: the hub's)")
    add_text_options(parser, tokenizer="gpt2", val_fraction="0.001")
    parser.add_argument("--sample", help="which hub sample: 10BT, 100BT or 350BT (default: 10BT)")
    parser.add_argument("--max_files", type=int, help="read only this many parquet files")
    parser.add_argument("--field", help="the column that has the text (default: text)")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    run_script(main)
