"""meta.json, the description of a dataset: every value read from it passes the table FIELDS.

    meta = read_meta("data/pystdlib")
    meta = check_meta(run["dataset"], "run.json")  # a checkpoint keeps the description of its data

A dataset or a checkpoint may come from a stranger, and its values name files, size arrays and index embeddings.
"""

import json
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from configurator import did_you_mean
from data.files import display_path, refuse_lfs_pointer

SPLITS = ("train", "val")
FILES = (  # that belong to a tokenizer in Hugging Face's format
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
META_BYTES = 2**24  # of meta.json: a hundred thousand shards need 10 MB
Check = Callable[[Any], bool]


def is_text(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


def is_one_of(*names: str) -> Check:
    return lambda value: isinstance(value, str) and value in names


def is_whole(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most  # isinstance would admit true and false


def is_number(least: float, most: float) -> Check:
    return lambda value: type(value) in (int, float) and least <= value <= most  # nan is neither


def is_list(of: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(of, value))


def is_dict(keys: Check, values: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(keys(key) and values(value[key]) for key in value)


class Field(NamedTuple):
    is_valid: Check
    expected: str
    required: bool = False


ID = Field(is_whole(0, 2**31 - 1), "a token's id")
COUNT = Field(is_whole(0, 2**53), "a whole number")
SHA256 = is_text("[0-9a-f]{1,64}")
RATE = Field(is_number(0, 10_000), "a number of bits")
TOKEN_FILES = is_dict(is_text(r"(train|val)(_\d{1,12})?\.bin"), is_whole(1, 2**53))
FIELDS = {
    "tokenizer": Field(is_text(r"[\w.-]{1,80}"), "a tokenizer's name", required=True),
    "vocab_size": Field(is_whole(1, 2**31), "a number of tokens", required=True),
    "dtype": Field(is_one_of("uint16", "uint32"), "uint16 or uint32", required=True),
    "end_of_text": ID._replace(required=True),
    "bos": ID,
    "eos": Field(is_list(ID.is_valid), "a list of tokens' ids"),
    "tokenizer_files": Field(is_dict(is_one_of(*FILES, "tokenizer.model"), SHA256), "tokenizer files with SHA-256"),
    **{f"{split}_{unit}": COUNT for split in SPLITS for unit in ("documents", "tokens", "bytes", "targets")},
    **{f"{split}_sha256": Field(SHA256, "a SHA-256") for split in SPLITS},
    "gzip_bits_per_byte": RATE,
    "xz_bits_per_byte": RATE,
    "script": Field(is_text(r"data/\w{1,80}/prepare\.py"), "data/NAME/prepare.py"),
    "python": Field(is_text(r"[\w.+-]{1,40}"), "a version"),
    "files": Field(is_dict(is_one_of(*SPLITS), TOKEN_FILES), "train and val with their .bin files", required=True),
}
NEEDS = {  # a field is of use only with these
    "train_targets": ["val_targets"], "val_targets": ["train_targets"],
    "gzip_bits_per_byte": ["xz_bits_per_byte", "val_bytes"],
}  # fmt: skip


def check_meta(content: Any, where: str | Path) -> dict:
    """The FIELDS of a dataset's description, without any others. Raises ValueError for one that is missing or wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} does not describe a dataset: it holds {reprlib.repr(content):.60}")
    missing = [name for name, field in FIELDS.items() if field.required and name not in content]
    if missing:
        raise ValueError(f"{where} does not describe a dataset: it lacks {', '.join(missing)}")
    meta = {name: content[name] for name in content if name in FIELDS}
    for name, value in meta.items():
        if not FIELDS[name].is_valid(value):
            found = f"{reprlib.repr(value):.60}"
            raise ValueError(f"{where} has {name} {found}, expected {FIELDS[name].expected}")
        lacks = [other for other in NEEDS.get(name, ()) if not meta.get(other)]
        if lacks:
            raise ValueError(f"{where} has {name}, but no {lacks[0]}")
    largest = max(meta["end_of_text"], meta.get("bos", 0), *meta.get("eos", []))
    if largest >= meta["vocab_size"]:
        raise ValueError(f"{where} has the special token {largest}, but vocab_size is {meta['vocab_size']}")
    for split in SPLITS:
        n_files = len(meta["files"].get(split, ()))
        if n_files == 0:
            raise ValueError(f"{where} names no {split} files")
        if n_files > 1 and "train_targets" in meta:
            raise ValueError(f"{where} names {n_files} {split} files, but conversations have one")
    return meta


def read_meta(folder: str | Path) -> dict:
    """Return the content of a dataset's meta.json. Raises FileNotFoundError or ValueError, saying how to make it."""
    path = Path(folder) / "meta.json"
    if Path(folder).is_file():
        made = "a folder: make it with data/text/prepare.py or data/chat/prepare.py"
        raise FileNotFoundError(f"{folder} is a file, but a dataset is {made}")
    if not path.is_file():
        beside = Path(folder).parent
        made = [file.parent.name for file in (*beside.glob("*/meta.json"), *beside.glob("*/prepare.py"))]
        near = did_you_mean(path.parent.name, {name: name for name in made})
        what = f"does not exist{near + ' Else' if near else ':'}"
        what = "has no meta.json, so it is not a finished dataset:" if path.parent.is_dir() else what
        raise FileNotFoundError(f"{folder} {what} {how_to_prepare(folder)}")
    with open(path, "rb") as file:
        content = file.read(META_BYTES + 1)
    refuse_lfs_pointer(content, path)
    try:
        if len(content) > META_BYTES:
            raise ValueError(f"{path} has more than {META_BYTES:,} bytes")
        return check_meta(parse(content, path), path)
    except ValueError as error:
        raise ValueError(f"{error}: {how_to_prepare(folder)}") from error


def parse(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path} is not JSON ({error})") from error


def how_to_prepare(folder: str | Path, meta: dict | None = None) -> str:
    script = Path(folder) / "prepare.py"
    if script.exists():
        options = {"text": " --input YOUR_TEXT", "chat": " --input YOUR.jsonl --tokenizer FOLDER"}
        return f"run python {quote(display_path(script))}{options.get(Path(folder).name, '')}"
    if meta and "script" in meta:
        return f"run python {meta['script']} --out {quote(str(folder))}, other options as before"
    return f"run python data/text/prepare.py --input YOUR_TEXT --tokenizer NAME --out {quote(str(folder))}"
