"""meta.json, the description of a dataset: every value read from it passes the table FIELDS.

    meta = read_meta("data/pystdlib")
    meta = check_meta(run["dataset"], "run.json")  # a checkpoint keeps the description of its data

A dataset or a checkpoint may come from a stranger, and its values name files, size arrays and index embeddings.
"""

import re
import reprlib
from pathlib import Path
from shlex import quote
from typing import Any

from data.files import display_path, read_json

SPLITS = ("train", "val")
FILES = (  # that belong to a tokenizer in Hugging Face's format
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
FILE_NAME = "|".join(map(re.escape, (*FILES, "tokenizer.model")))
SHA256 = "[0-9a-f]{1,64}"
TOKEN_ID = range(2**31)
REQUIRED = ("tokenizer", "vocab_size", "dtype", "end_of_text", "files")
FIELDS = {  # name: what fits() accepts as its value
    "tokenizer": r"[\w.-]{1,80}",
    "vocab_size": range(1, 2**31 + 1),
    "dtype": "uint16|uint32",
    "end_of_text": TOKEN_ID,
    "bos": TOKEN_ID,
    "eos": [TOKEN_ID],
    "tokenizer_files": {FILE_NAME: SHA256},
    "xz_bits_per_byte": float,
    "files": {"train|val": {r"(train|val)(_\d{1,12})?\.bin": range(1, 2**53)}},
}
for split in SPLITS:
    FIELDS[f"{split}_sha256"] = SHA256
    for unit in ("documents", "tokens", "bytes", "targets"):
        FIELDS[f"{split}_{unit}"] = range(2**53)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind: a pattern for texts, a range for whole numbers, float, [kind] or {kind: kind}."""
    match kind:
        case str():
            return isinstance(value, str) and re.fullmatch(kind, value, re.ASCII) is not None
        case range():
            return type(value) is int and value in kind  # isinstance would admit true and false
        case [of_element]:
            return isinstance(value, list) and all(fits(element, of_element) for element in value)
        case dict():
            [(of_key, of_value)] = kind.items()
            return isinstance(value, dict) and all(fits(key, of_key) and fits(value[key], of_value) for key in value)
        case _:
            return type(value) in (int, float) and 0 <= value <= 10_000  # nan is not


def check_meta(content: Any, where: str | Path) -> dict:
    """The FIELDS of a dataset's description, without any others. Raises ValueError for one that is missing or wrong."""
    missing = [name for name in REQUIRED if not isinstance(content, dict) or name not in content]
    if missing:
        raise ValueError(f"{where} does not describe a dataset: it lacks {', '.join(missing)}")
    meta = {name: value for name, value in content.items() if name in FIELDS}
    for name, value in meta.items():
        if not fits(value, FIELDS[name]):
            raise ValueError(f"{where} has {name} {reprlib.repr(value):.60}: no valid value of this field")
    largest = max(meta["end_of_text"], meta.get("bos", 0), *meta.get("eos", []))
    if largest >= meta["vocab_size"]:
        raise ValueError(f"{where} has the special token {largest}, but vocab_size is {meta['vocab_size']}")
    for split in SPLITS:
        if not meta["files"].get(split):
            raise ValueError(f"{where} names no {split} files")
    return meta


def read_meta(folder: str | Path) -> dict:
    """The content of a dataset's meta.json. FileNotFoundError, which says how to make it; ValueError if damaged."""
    path = Path(folder) / "meta.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a finished dataset, it has no meta.json: {how_to_prepare(folder)}")
    return check_meta(read_json(path), path)


def how_to_prepare(folder: str | Path) -> str:
    script = Path(folder) / "prepare.py"
    if script.exists():
        return f"run python {quote(display_path(script))} (--help lists its options)"
    return f"run a prepare.py, such as python data/text/prepare.py --input YOUR_TEXT --out {quote(str(folder))}"
