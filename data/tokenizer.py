"""Tokenizers: bytes, gpt2, cl100k_base, o200k_base, llama3, or any folder that holds one.

    tokenizer = get_tokenizer("bytes")  # by name; bytes needs no files
    tokenizer = get_tokenizer("Llama-3.2-1B")  # by path: a tokenizer.json, Meta's tokenizer.model, or their folder
    tokenizer = tokenizer_of(Path("out/step_001000"))  # of a dataset, a run, a checkpoint or published weights

    tokenizer.encode("a <|eot_id|>")  # for text: special tokens spelled out in it stay text
    tokenizer.encode("a <|eot_id|>", special=True)  # for prompts and chat templates: they become tokens

tiktoken downloads the GPT vocabularies on first use. Meta's tokenizer.model comes with the weights; you must accept its
license first, so nothing here downloads it. Hugging Face's `tokenizers` reads a tokenizer.json; tiktoken, three to six
times as fast, reads Llama 3's and those that nanocria writes, unless somebody added tokens or changed anything else.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.files import how_to_fetch, parse_object, read_small
from data.meta import FILES, TOKEN_ID, check_meta, fits
from data.tiktoken_files import bytes_encoding, encoding_of_json, first_id, llama3_encoding, openai_encoding
from data.vocabulary import END_OF_TEXT_NAMES, FAST, HuggingFace, Tiktoken, Tokenizer, name_of_json

OPENAI = ("gpt2", "cl100k_base", "o200k_base")
NAMES = ["bytes", *OPENAI, "llama3"]
MODEL_FILES = ["tokenizer.model", "original/tokenizer.model"]  # in Meta's folders, in Hugging Face's
LLAMA3_VOCAB = 128256
BASE_CONFIG = "base_config.json"  # in a folder of adapters, in place of config.json
DOC_START = "nanocria_doc_start"  # in config.json: what precedes a prompt where the tokenizer has no bos
ROWS = range(1, 2**31)  # of an embedding
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # what JSON of another form raises
ROOT = Path(__file__).resolve().parents[1]


def get_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer with this name, or in this folder or file.

    Raises ValueError for an unknown name or a damaged file; FileNotFoundError, saying how to get the files, if they are
    missing and cannot be downloaded.
    """
    if name == "bytes":
        return Tiktoken(bytes_encoding())
    if name == "llama3":
        return read_model(find_model(ROOT))
    if name in OPENAI:
        tokenizer = Tiktoken(openai_encoding(name))
        tokenizer.files = tokenizer.hf_files()  # another machine may not have the download
        return tokenizer
    path = Path(name)
    if path.is_dir() or path.name == "tokenizer.json":
        return tokenizer_of(path if path.is_dir() else path.parent)
    if path.is_file():
        return read_model(path)
    known = ", ".join(NAMES)
    raise ValueError(f"Unknown tokenizer {name}: not one of {known}, nor a file or folder. {how_to_fetch(path)}")


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a dataset, a run, a checkpoint or published weights, with the bos of its data.

    Raises what get_tokenizer raises.
    """
    if not (folder / "config.json").exists():  # published weights may hold folders of such names, too
        folder = max(folder.glob("step_*[0-9]"), default=folder)  # each checkpoint of a run has it
    if meta := read_optional_json(folder, "meta.json"):
        meta = check_meta(meta, folder / "meta.json")
        tokenizer = read_tokenizer(folder, dataset_files(folder, meta), meta["tokenizer"], meta)
        tokenizer.eos = list(dict.fromkeys([*meta.get("eos", []), *tokenizer.eos]))
        tokenizer.bos = meta.get("bos")
        return tokenizer
    config = read_optional_json(folder, "config.json") or read_optional_json(folder, BASE_CONFIG)
    tokenizer = read_tokenizer(folder, read_files(folder, FILES), config.get("nanocria_tokenizer"), config)
    set_doc_start(tokenizer, config)
    return tokenizer


def read_tokenizer(folder: Path, files: dict[str, bytes], name: str | None, config: dict) -> Tokenizer:
    """The tokenizer in these files of a folder, or the one of this name. config: the model's, or a data's meta.json."""
    if "tokenizer.json" in files:
        generation = optional_json(files, "generation_config.json", folder)
        eos = generation.get("eos_token_id", config.get("eos_token_id"))  # an id, a list of them, or None
        tokenizer = tokenizer_of_json(folder / "tokenizer.json", files, name, eos if isinstance(eos, list) else [eos])
        # Many models have more rows than tokens. Many of Llama 2's have a [PAD] without a row, which no text needs.
        if fits(config.get("vocab_size"), ROWS):
            tokenizer.n_vocab = config["vocab_size"]
    elif name == "bytes" or name in OPENAI:
        tokenizer = get_tokenizer(name)
    else:
        tokenizer = read_model(find_model(folder, ROOT) if name == "llama3" else find_model(folder))
    tokenizer.chat_template = template_in(files)
    return tokenizer


def set_doc_start(tokenizer: Tokenizer, config: dict) -> None:
    """Let a tokenizer without a bos begin a document as config.json says that its model has learned it.

    A model trained from scratch saw each text start after the end_of_text of another. Published weights did not, and a
    finetune leaves their prompts as they were: null.
    """
    doc_start = config.get(DOC_START)
    if doc_start is not None and not fits(doc_start, TOKEN_ID):
        raise ValueError(f"config.json has {doc_start!r:.40} as {DOC_START}: expected a token's id, or null")
    if tokenizer.bos is None:
        tokenizer.bos = doc_start


def train_tokenizer(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A byte-level BPE learned from texts: every byte, <|endoftext|>, and the most frequent pairs up to n_vocab tokens.

    Fewer if the texts have fewer pairs, but at least 257. It cuts a text as gpt2 does, and so has the same ids in
    transformers.
    """
    end_of_text = END_OF_TEXT_NAMES[0]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab, special_tokens=[end_of_text], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    config = FAST | {"eos_token": end_of_text}
    files = {"tokenizer.json": bpe.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return tokenizer_of_json(Path("tokenizer.json"), files)


# ----------------------------------------------------------------------------------------------------------------------
# Files, read


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of these files that a folder has. Raises ValueError for a git-lfs pointer, or a very large file."""
    return {name: read_small(folder / name) for name in names if (folder / name).exists()}


def read_optional_json(folder: Path, name: str) -> dict:
    """The JSON object in this file of a folder, {} if it has none."""
    return optional_json(read_files(folder, [name]), name, folder)


def optional_json(files: dict[str, bytes], name: str, folder: Path = Path()) -> dict:
    """The JSON object in one of these files of a folder, {} if it is not among them."""
    return parse_object(files.get(name, b"{}"), folder / name)


def dataset_files(folder: Path, meta: dict) -> dict[str, bytes]:
    """The tokenizer files kept in a dataset. Raises ValueError if one is missing or has changed."""
    digests = meta.get("tokenizer_files", {})
    files = read_files(folder, digests)
    for name, sha256 in digests.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != sha256:
            what = "damaged, or another tokenizer's" if name in files else "missing"
            raise ValueError(f"{folder / name} is {what}: restore the one the data was made with, or prepare it again")
    return files


def files_to_save(weights: Path | None, data: Path | None, meta: dict, name: str) -> dict[str, bytes]:
    """The files of a tokenizer for a checkpoint: from the folder of weights that a run began with and, in their place,
    from that of its data. meta: the data's meta.json; name: the tokenizer's.
    """
    files = read_files(weights, (*FILES, "tokenizer.model")) if weights else {}
    if data:
        own = dataset_files(data, meta)
        if template_in(own):  # it replaces that of the weights, wherever this one stands
            files = without_template(files)
        files |= own
    if "tokenizer.json" not in files:
        with contextlib.suppress(OSError, ValueError):  # the tokenizer is not on this machine
            files = tokenizer_of(data or weights).hf_files() | files
    if name == "llama3" and "tokenizer.json" in files:
        files.pop("tokenizer.model", None)  # llama.cpp's converter would take Meta's for a SentencePiece model
    return files


def tokenizer_of_json(path: Path, files: dict[str, bytes], name: str | None = None, eos: Iterable = ()) -> Tokenizer:
    """A tokenizer.json with the files beside it. name: given if nanocria wrote it; eos: the ids where a model stops."""
    content = parse_object(files["tokenizer.json"], path)
    options = read_options(path.parent, files)
    try:
        name = name_of_json(content, name)
        bos = first_id(content.get("post_processor"))  # transformers 5 goes by this alone, not by add_bos_token
        encoding = encoding_of_json(name, content) if name in NAMES else None
    except MALFORMED as error:
        raise ValueError(f"{path} is damaged, or not a Hugging Face tokenizer.json: {error!r:.60}") from error
    bos = bos if fits(bos, TOKEN_ID) else None
    if encoding:
        return Tiktoken(encoding, files, options, eos, bos)
    return HuggingFace(path, name, files, options, eos, bos)


def published_name(folder: Path, written_as: str | None = None) -> str | None:
    """The name of the tokenizer in a folder's tokenizer.json; written_as if it cannot be read."""
    with contextlib.suppress(OSError, *MALFORMED):
        return name_of_json(read_optional_json(folder, "tokenizer.json"), written_as)
    return written_as


def read_options(folder: Path, files: dict[str, bytes]) -> dict:
    """special_tokens_map.json and tokenizer_config.json in one: what is null in the latter may stand in the former."""
    options = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = optional_json(files, file, folder)
        options |= {name: value for name, value in content.items() if value is not None}
    return options


def read_model(file: Path) -> Tokenizer:
    content = read_small(file)
    return Tiktoken(llama3_encoding(content, file), {"tokenizer.model": content})


def find_model(*places: Path) -> Path:
    """The first tokenizer.model of Meta's in these folders."""
    files = [place / name for place in places for name in MODEL_FILES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"no tokenizer.json or tokenizer.model in {' or in '.join(map(str, places))}. {how_to_fetch(places[0])}. "
            "For Llama 3's accept the license at https://huggingface.co/meta-llama/Llama-3.2-1B, then: "
            f"hf download meta-llama/Llama-3.2-1B original/tokenizer.model --local-dir {ROOT}"
        )
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Chat templates in files: chat_template.jinja, or an entry of tokenizer_config.json


def template_in(files: dict[str, bytes]) -> str:
    """The chat template in tokenizer files, or "". Of several, [{"name": ..., "template": ...}, ...], the default."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    content = optional_json(files, "tokenizer_config.json").get("chat_template") or ""
    if isinstance(content, str):
        return content
    try:
        return {each["name"]: str(each["template"]) for each in content}.get("default", "")
    except (KeyError, TypeError) as error:
        expected = "expected a text, or a list of {name, template}"
        raise ValueError(f"chat_template is {content!r:.60}, {expected}") from error


def without_template(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files without any chat template: llama.cpp prefers one in tokenizer_config.json."""
    files = {name: content for name, content in files.items() if name != "chat_template.jinja"}
    config = optional_json(files, "tokenizer_config.json")
    if config.pop("chat_template", None) is not None:
        files["tokenizer_config.json"] = to_json(config)
    return files


def to_json(content: dict) -> bytes:
    return json.dumps(content, indent=2).encode()
