"""Tokenizers: bytes, gpt2, cl100k_base, o200k_base, llama3, or any folder that holds one.

    tokenizer = get_tokenizer("bytes")  # by name; bytes needs no files
    tokenizer = get_tokenizer("Llama-3.2-1B")  # by path: a tokenizer.json, Meta's tokenizer.model, or their folder
    tokenizer = tokenizer_of(Path("out/step_001000"))  # of a dataset, a run, a checkpoint or published weights

    tokenizer.encode("a <|eot_id|>")  # for text: special tokens spelled out in it stay text
    tokenizer.encode("a <|eot_id|>", special=True)  # for prompts and chat templates: they become tokens

tiktoken downloads the GPT vocabularies on first use. Meta's tokenizer.model comes with the weights; you must accept its
license first, so nothing here downloads it. Hugging Face's `tokenizers` reads a tokenizer.json; tiktoken reads Llama
3's, and those that nanocria writes.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from configurator import did_you_mean
from data.meta import FILES, check_meta
from data.tiktoken_files import DOWNLOADS, bytes_encoding, encoding_of_json, is_llama3, llama3_encoding, openai_encoding
from data.vocabulary import HuggingFace, Tiktoken, Tokenizer, one_template, vocabulary_name

NAMES = ["bytes", *DOWNLOADS, "llama3"]
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # beside chat_template.jinja, for conversations with tools
MODEL_FILES = ["tokenizer.model", "original/tokenizer.model"]  # in Meta's folders, in Hugging Face's
MOST_FILE_BYTES = 2**28  # of a tokenizer's file: the largest published ones have 35 MB
LLAMA3_VOCAB = 128256
DOC_START = "nanocria_doc_start"  # in config.json: what precedes a prompt where the tokenizer has no bos
DESCRIPTIONS = ("meta.json", "run.json", "params.json", "config.json", "base_config.json")  # of data, of models
ROOT = Path(__file__).resolve().parents[1]


def get_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer with this name, or in this folder or file.

    Raises ValueError for an unknown name or a damaged file; FileNotFoundError, saying where to get the files and where
    to put them, if they are missing and cannot be downloaded; ImportError without the package that reads them.
    """
    if name == "bytes":
        return Tiktoken(bytes_encoding())
    if name == "llama3":
        return read_model(find_model(ROOT))
    if name in NAMES:
        tokenizer = Tiktoken(openai_encoding(name))
        tokenizer.files = tokenizer.hf_files()  # another machine may not have the download
        return tokenizer
    path = Path(name)
    if path.is_dir() or (path.is_file() and path.name == "tokenizer.json"):
        return tokenizer_of(path if path.is_dir() else path.parent)
    if path.is_file():
        content = path.read_bytes()
        return read_json(path, {"tokenizer.json": content}) if content.lstrip()[:1] == b"{" else read_model(path)
    hint = did_you_mean(str(name), {known: known for known in NAMES})
    raise ValueError(f"Unknown tokenizer {name}: it is not one of {', '.join(NAMES)}, nor a file or folder{hint}")


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a dataset, a run, a checkpoint or published weights, with the bos of its data.

    Raises what get_tokenizer raises.
    """
    folder = max(folder.glob("step_*[0-9]"), default=folder)  # each checkpoint of a run has it
    found = read_files(folder, DESCRIPTIONS)
    meta, run, params, config, adapted = (parse(found.get(name, b"{}"), folder / name) for name in DESCRIPTIONS)
    config = config or adapted
    data = meta or run.get("dataset", {})
    data = data and check_meta(data, folder / ("meta.json" if meta else "run.json"))
    meta = meta and data
    sizes = (params.get("vocab_size"), config.get("vocab_size"))
    name = meta.get("tokenizer", config.get("nanocria_tokenizer"))
    files = dataset_files(folder, meta) if meta else read_files(folder, FILES)
    if name == "bytes":
        tokenizer = get_tokenizer(name)
    elif "tokenizer.json" in files:
        tokenizer = read_json(folder / "tokenizer.json", files, name, config.get("eos_token_id"))
    elif name in DOWNLOADS:
        tokenizer = get_tokenizer(name)
    elif name == "llama3" or LLAMA3_VOCAB in sizes or any((folder / name).exists() for name in MODEL_FILES):
        tokenizer = read_model(find_model(folder, ROOT))
    else:
        raise FileNotFoundError(
            f"{folder} does not say its tokenizer, and has none of tokenizer.json, {', '.join(MODEL_FILES)}; "
            f"only Llama 3's is known by its size, {LLAMA3_VOCAB:,}"
        )
    if data:
        tokenizer.eos = list(dict.fromkeys([*data.get("eos", []), *tokenizer.eos]))
    # meta.json has the bos of the data, but not one that is the end_of_text: that stands between documents anyway.
    if meta or (data and tokenizer.bos != tokenizer.end_of_text):
        tokenizer.bos = data.get("bos")
    elif name in NAMES and config.get("bos_token_id") == tokenizer.end_of_text:  # a copy without its run.json
        tokenizer.bos = None
    tokenizer.hf_bos = tokenizer.bos
    if tokenizer.bos is None and not meta:
        tokenizer.bos = doc_start_of(config, data)
    if "chat_template.jinja" in files:
        tokenizer.chat_template = files["chat_template.jinja"].decode()
    tool_use = {} if meta else read_files(folder, [TOOL_TEMPLATE])
    if tool_use:
        both = {"default": tokenizer.chat_template, "tool_use": tool_use[TOOL_TEMPLATE].decode()}
        tokenizer.chat_template = one_template(both)
        tokenizer.files = tokenizer.files | {"chat_template.jinja": tokenizer.chat_template.encode()}
    return tokenizer


def doc_start_of(config: dict, data: dict) -> int | None:
    """What precedes a prompt of a model whose tokenizer has no bos. config: its config.json; data: of its run.json.

    A model trained from scratch saw each text start after the end_of_text of another. Published weights did not, and a
    finetune leaves their prompts as they were: None.
    """
    if DOC_START in config:
        found = config[DOC_START]
    elif data:  # an older run: conversations are for finetuning
        found = None if "train_targets" in data else data.get("end_of_text")
    else:  # an older one without its run.json
        found = config.get("bos_token_id") if config.get("nanocria_tokenizer") in NAMES else None
    if not (found is None or (type(found) is int and found >= 0)):
        raise ValueError(f"config.json has {found!r:.40} as {DOC_START}: expected a token's id, or null")
    return found


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    paths = {name: folder / name for name in names if (folder / name).is_file()}
    for path in paths.values():
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ValueError(f"{path} has more than {MOST_FILE_BYTES:,} bytes: it is no tokenizer's")
    return {name: path.read_bytes() for name, path in paths.items()}


def dataset_files(folder: Path, meta: dict) -> dict[str, bytes]:
    """The tokenizer files kept in a dataset. Raises ValueError if one is missing or has changed."""
    digests = meta.get("tokenizer_files", {})
    files = read_files(folder, digests)
    for name, sha256 in digests.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != sha256:
            what = "damaged, or another tokenizer's" if name in files else "missing"
            raise ValueError(f"{folder / name} is {what}: restore the one the data was made with, or prepare it again")
    return files


def read_json(path: Path, files: dict[str, bytes], name: str | None = None, eos: int | list | None = None) -> Tokenizer:
    """A tokenizer.json with the files beside it. name: given if nanocria wrote it; eos: eos_token_id of config.json."""
    config, content = {}, parse(files["tokenizer.json"], path)
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= parse(files.get(file, b"{}"), path.with_name(file))
    generation = parse(files.get("generation_config.json", b"{}"), path.with_name("generation_config.json"))
    config["eos_token_id"] = generation.get("eos_token_id", eos)
    name = "llama3" if is_llama3(content) else name
    if name in NAMES:
        return Tiktoken(encoding_of_json(name, content, path), files, config)
    return HuggingFace(path, files, config)


def read_model(file: Path) -> Tokenizer:
    return Tiktoken(llama3_encoding(file), {"tokenizer.model": file.read_bytes()})


def find_model(*places: Path) -> Path:
    """Meta's tokenizer.model: the first that is one of these files, or in one of these folders."""
    files = [file for place in places for file in (place, *(place / name for name in MODEL_FILES))]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"tokenizer llama3 needs Meta's tokenizer.model, which is not at {' or in '.join(map(str, places))}. "
            "Accept the license at https://huggingface.co/meta-llama/Llama-3.2-1B, then: "
            f"hf download meta-llama/Llama-3.2-1B original/tokenizer.model --local-dir {ROOT}"
        )
    return found


def parse(content: bytes, path: Path) -> dict:
    """The JSON object in a file. Raises ValueError for a damaged one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def published_name(folder: Path) -> str | None:
    """The name of the tokenizer in a folder's tokenizer.json, without `tokenizers`; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = parse((folder / "tokenizer.json").read_bytes(), folder)
        ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
        return "llama3" if is_llama3(content) else vocabulary_name(ids)
    return None
