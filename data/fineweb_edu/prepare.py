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

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.files import refuse_lfs_pointer
from data.rows import ROW_BYTES, Bad, field_of
from data.write import (
    Document,
    Progress,
    add_text_options,
    count_argument,
    finished_shard,
    make_parser,
    path_argument,
    print_summary,
    run_script,
    shard_suffix,
    split_of,
    tokenizer_for_data,
    write_lock,
    write_meta,
    write_shard,
)

ROWS = 16  # in memory at a time: each may have ROW_BYTES
MOST_GROWTH = 100  # of a file by decompression: text grows threefold
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


def open_parquet(path: Path):
    import pyarrow.parquet

    with open(path, "rb") as file:
        refuse_lfs_pointer(file.read(100), path)
    try:
        parquet = pyarrow.parquet.ParquetFile(path)
        list(parquet.schema_arrow.names)  # a damaged one is not UTF-8
        return parquet
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        hint = "" if path.suffix == ".parquet" else f"data/text/prepare.py reads text and JSON: --input {path}"
        raise ValueError(f"{path} cannot be read as parquet: {error} {hint}".strip()) from error


def read_documents(parquet, path: Path, field: str, val_fraction: float, bad: Bad) -> Iterator[Document]:
    """Yield (split, text) from an open ParquetFile, ROWS in memory at a time."""
    import pyarrow

    if field not in parquet.schema_arrow.names:
        names = ", ".join(parquet.schema_arrow.names)
        raise ValueError(f"{path} has no column {field!r} but {names:.200}: set --field")
    check_growth(parquet, path)
    try:
        columns = (batch.column(0) for batch in parquet.iter_batches(batch_size=ROWS, columns=[field]))
        for row, value in enumerate(chain.from_iterable(columns), start=1):
            where, text = f"{path} row {row}", None
            try:
                text = field_of({field: value.as_py()}, field, where, bad)
            except UnicodeDecodeError as error:
                bad(f"{where} is not UTF-8 text ({error})")
            if text and len(text) > ROW_BYTES:
                bad(f"{where} has more than {ROW_BYTES:,} characters")
            elif text:
                yield split_of(text, val_fraction), text
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def check_growth(parquet, path: Path) -> None:
    """Raises ValueError for a file that would grow beyond any text in memory: its pages are decompressed whole."""
    file_bytes = path.stat().st_size
    for number in range(parquet.metadata.num_row_groups):
        n_bytes = parquet.metadata.row_group(number).total_byte_size
        if n_bytes > max(4 * ROW_BYTES, MOST_GROWTH * file_bytes):
            raise ValueError(
                f"{path} has {file_bytes:,} bytes, of which row group {number + 1} grows to {n_bytes:,}: "
                "text grows far less. If it is text, write it again in smaller row groups"
            )


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
    if input is None:
        names = list_hub(sample)
    elif input.is_file():
        input, names = input.parent, [input.name]
    else:
        names = sorted(str(path.relative_to(input)) for path in input.rglob("*.parquet") if path.is_file())
        if not names:
            raise FileNotFoundError(f"--input {input} holds no .parquet files")
    names, origin = names[:max_files], str(input.resolve()) if input else REPO
    shards, bad = {}, Bad(errors)
    with write_lock(folder):
        for number, name in enumerate(names):
            source = dict(input=origin, name=name, tokenizer=ids, field=field, val_fraction=val_fraction)
            if input is not None:
                stat = (input / name).stat()
                source |= dict(size=stat.st_size, mtime_ns=stat.st_mtime_ns)
            counts = finished_shard(folder, number, encoding, source)
            if counts is None:
                path = Path(ask_hub("hf_hub_download", name)) if input is None else input / name
                with open_parquet(path) as parquet:
                    prefix = f"{number + 1}/{len(names)} {name} "
                    progress = Progress(parquet.metadata.num_rows, "documents", prefix, len(names) - number)
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
    parser.add_argument("--max_files", type=count_argument, help="read only this many parquet files")
    parser.add_argument("--field", help="the column that has the text (default: text)")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    run_script(main)
