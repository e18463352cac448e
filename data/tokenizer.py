"""Tokenizers: bytes, gpt2, cl100k_base, o200k_base, llama3, or any folder that holds one.

    tokenizer = get_tokenizer("bytes")  # by name; bytes needs no files
    tokenizer = get_tokenizer("Llama-3.2-1B")  # by path: a tokenizer.json, Meta's tokenizer.model, or their folder
    tokenizer = tokenizer_of(Path("out/step_001000"))  # of a dataset, a checkpoint or published weights

    tokenizer.encode("a <|eot_id|>")  # of text: a special token that it spells out is text
    tokenizer.encode("a <|eot_id|>", special=True)  # of prompts and chat templates: it is the token

tiktoken downloads the GPT vocabularies on first use. Meta's tokenizer.model comes with the weights; its license must be
accepted first, so nothing here downloads it. A tokenizer.json is read by Hugging Face's `tokenizers`; Llama 3's, and
those that our runs write for others, by tiktoken.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import tiktoken

from configurator import did_you_mean
from data.tiktoken_files import (
    DOWNLOADS,
    bytes_encoding,
    encoding_of_json,
    is_llama3,
    json_of_encoding,
    llama3_encoding,
    openai_encoding,
)

NAMES = ["bytes", *DOWNLOADS, "llama3"]
END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>"]  # OpenAI's spelling, Meta's spelling
LLAMA3_EOS = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]  # of a document, of a message to a tool, of a turn
FILES = (  # that belong to a tokenizer, as Hugging Face publishes them
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
MODEL_FILES = ["tokenizer.model", "original/tokenizer.model"]  # Meta's place, Hugging Face's
LLAMA3_VOCAB = 128256
DESCRIPTIONS = ("meta.json", "run.json", "params.json", "config.json", "base_config.json")  # of data, of models
MOST_BLANKS = 25_000  # in a row, of a text that tiktoken cannot take whole
ROOT = Path(__file__).resolve().parents[1]


class Tokenizer:
    """A vocabulary with its special tokens. Pickles, so that worker processes can have it.

    name           one of NAMES, or made from the vocabulary: equal names mean equal ids
    n_vocab        the largest id + 1
    end_of_text    the id that ends every document
    bos            the id before every document and prompt; None: there is none
    eos            the ids after which a model stops, end_of_text among them
    special_tokens how they are spelled
    bos_token, eos_token, chat_template    as chat templates know them; "" and None if there is none
    files          {name: content} from which get_tokenizer() makes it again; {} if its name is enough
    """

    name: str
    n_vocab: int
    bos: int | None
    files: dict[str, bytes]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, without bos. special: special tokens that it spells out are tokens, not text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out. Ids that mean nothing are left out."""
        raise NotImplementedError

    def hf_files(self) -> dict[str, bytes]:
        """{name: content} of the files that transformers' AutoTokenizer needs."""
        return self.files

    def set_special_tokens(self, id_of: Callable[[str], int | None], config: dict) -> None:
        """config: what the files say. Raises ValueError if no token ends a document."""
        self.bos_token, self.eos_token = (spelling(config.get(name)) for name in ("bos_token", "eos_token"))
        ends = [id_of(token) for token in (*END_OF_TEXT_NAMES, self.eos_token) if id_of(token) is not None]
        if not ends:
            raise ValueError(
                f"tokenizer {self.name} has no end-of-text token: no eos_token, none of {END_OF_TEXT_NAMES}"
            )
        self.end_of_text, eos = ends[0], config.get("eos_token_id")
        eos = eos if isinstance(eos, list) else [eos]
        eos = [id_of(self.eos_token), *eos, self.end_of_text]
        self.eos = list(dict.fromkeys(token for token in eos if isinstance(token, int)))
        self.eos_token = self.eos_token or self.decode([self.end_of_text])
        self.bos_token = self.bos_token or ("" if self.bos is None else self.decode([self.bos]))
        templates = config.get("chat_template")
        if isinstance(templates, list):  # several, each with a name
            templates = next((each["template"] for each in templates if each["name"] == "default"), None)
        self.chat_template = templates


class Tiktoken(Tokenizer):
    """A tiktoken.Encoding."""

    def __init__(self, encoding: tiktoken.Encoding, files: dict[str, bytes] | None = None, config: dict | None = None):
        self.encoding, self.name, self.n_vocab, self.files = encoding, encoding.name, encoding.n_vocab, files or {}
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        self.special_tokens = sorted(special)
        self.bos = special.get("<|begin_of_text|>")
        config = {"eos_token_id": [special.get(token) for token in LLAMA3_EOS]} if config is None else config
        self.set_special_tokens(special.get, config)

    def encode(self, text: str, special: bool = False) -> list[int]:
        options = dict(allowed_special="all" if special else set(), disallowed_special=())
        try:
            return self.encoding.encode(text, **options)
        except ValueError:  # tiktoken's pattern cannot match a million blanks in a row: cut them, as Meta's code does
            cuts = [0]
            for blanks in re.finditer(rf"\s{{{MOST_BLANKS + 1},}}", text):
                cuts += range(blanks.start() + MOST_BLANKS, blanks.end(), MOST_BLANKS)
            pieces = [text[start:end] for start, end in pairwise([*cuts, len(text)])]
            return [token for piece in pieces for token in self.encoding.encode(piece, **options)]

    def decode(self, ids: Iterable[int]) -> str:
        found = []
        for token in ids:
            with contextlib.suppress(KeyError):  # padding of the vocabulary, or a gap in it
                found.append(self.encoding.decode_single_token_bytes(int(token)))
        return b"".join(found).decode(errors="replace")

    def hf_files(self) -> dict[str, bytes]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {"bos_token": self.bos_token or self.eos_token, "eos_token": self.eos_token}
        made = {"tokenizer.json": json_of_encoding(self.encoding, self.bos), "tokenizer_config.json": config}
        return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in made.items()} | self.files


class HuggingFace(Tokenizer):
    """A tokenizer.json, with any normalizer, pre-tokenizer and model that `tokenizers` has."""

    def __init__(self, path: Path, files: dict[str, bytes], config: dict):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(f"{path} is read by Hugging Face's tokenizers: pip install tokenizers") from error
        try:
            self.backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # it has no class of its own
            raise ValueError(f"{path} is damaged, or no tokenizer.json of Hugging Face's: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        ids = self.backend.get_vocab(with_added_tokens=True)
        self.special_tokens = [t.content for t in self.backend.get_added_tokens_decoder().values() if t.special]
        self.name, self.n_vocab, self.files = vocabulary_name(ids), max(ids.values()) + 1, files
        example, adds_bos = self.backend.encode("a"), config.get("add_bos_token")
        adds_bos = example.special_tokens_mask[0] if adds_bos is None else adds_bos
        self.bos = ids.get(spelling(config.get("bos_token")), example.ids[0]) if adds_bos else None
        self.set_special_tokens(ids.get, config)

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.backend.encode_special_tokens = not special
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=False)


class TextStream:
    """Text from ids that come one at a time, where a character may be spread over several.

    text = TextStream(tokenizer, prompt); print(text.add(id), end="") for each id; print(text.end())
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()):
        # What ids spell may depend on those before them: `shown` are the last ones whose text is not wanted any more.
        self.tokenizer, self.shown, self.pending = tokenizer, list(before), []

    def add(self, token: int) -> str:
        """The text that is complete with this id: often "", or several characters."""
        self.pending.append(int(token))
        text = self.text()
        return "" if text.endswith("\ufffd") else self.end()  # bytes that are not a whole character yet

    def end(self) -> str:
        """The rest of the text, with U+FFFD for bytes that are no character."""
        text, self.shown, self.pending = self.text(), self.pending or self.shown, []
        return text

    def text(self) -> str:
        return self.tokenizer.decode(self.shown + self.pending)[len(self.tokenizer.decode(self.shown)) :]


# ----------------------------------------------------------------------------------------------------------------------


def get_tokenizer(name: str | Path, path: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a name, or in a folder or file; `path` is llama3's tokenizer.model, or the folder that holds it.

    Raises ValueError for an unknown name, a path that the tokenizer does not read or a damaged file, FileNotFoundError
    when a file is neither here nor to be had, saying where to get it and where to put it, ImportError without the
    package that reads it.
    """
    if path is not None and name != "llama3":
        raise ValueError(f"tokenizer_path is {path}, but only the tokenizer llama3 is read from a file, not {name}")
    if name == "bytes":
        return Tiktoken(bytes_encoding())
    if name == "llama3":
        return read_model(find_model(Path(path or ROOT)))
    if name in NAMES:
        tokenizer = Tiktoken(openai_encoding(name))
        tokenizer.files = tokenizer.hf_files()  # another machine may not have the download
        return tokenizer
    if Path(name).is_dir():
        return tokenizer_of(Path(name))
    if Path(name).is_file():
        content = Path(name).read_bytes()
        return read_json(Path(name), {"tokenizer.json": content}) if content[:1] == b"{" else read_model(Path(name))
    hint = did_you_mean(str(name), {known: known for known in NAMES}, cutoff=0.4) or "."
    raise ValueError(f"Unknown tokenizer {name}{hint} There are: {', '.join(NAMES)}, and files and folders")


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a dataset, of a checkpoint of ours or of published weights; its bos is that of their data.

    Raises what get_tokenizer raises.
    """
    found = read_files(folder, DESCRIPTIONS)
    meta, run, params, config, adapted = (parse(found.get(name, b"{}"), folder / name) for name in DESCRIPTIONS)
    config, data = config or adapted, meta or run.get("dataset", {})
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
        # A model whose data had no bos has seen every document begin behind the end of another.
        tokenizer.bos = data.get("bos", None if meta else data["end_of_text"])
        tokenizer.eos = list(dict.fromkeys([*data.get("eos", []), *tokenizer.eos]))
    elif name in NAMES:  # a converted checkpoint
        tokenizer.bos = config.get("bos_token_id", tokenizer.bos)
    if "chat_template.jinja" in files:  # of the conversations that it was trained on
        tokenizer.chat_template = files["chat_template.jinja"].decode()
    return tokenizer


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def dataset_files(folder: Path, meta: dict) -> dict[str, bytes]:
    """The tokenizer's files that a dataset keeps. Raises ValueError if one is not what was written."""
    digests = meta.get("tokenizer_files", {})
    files = read_files(folder, digests)
    for name, sha256 in digests.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != sha256:
            what = "damaged, or another tokenizer's" if name in files else "missing"
            raise ValueError(f"{folder / name} is {what}: put back what the data were made with, or prepare them again")
    return files


def read_json(path: Path, files: dict[str, bytes], name: str | None = None, eos: int | list | None = None) -> Tokenizer:
    """A tokenizer.json, with files that belong to it; name: of ours, whose run wrote it; eos: what config.json says."""
    config, content = {}, parse(files["tokenizer.json"], path)
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= parse(files.get(file, b"{}"), path.with_name(file))
    generation = parse(files.get("generation_config.json", b"{}"), path.with_name("generation_config.json"))
    config["eos_token_id"] = generation.get("eos_token_id", eos)
    if "chat_template.jinja" in files:
        config["chat_template"] = files["chat_template.jinja"].decode()
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
    """The name of the tokenizer whose tokenizer.json a folder holds, without reading it by `tokenizers`; else None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = parse((folder / "tokenizer.json").read_bytes(), folder)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # of pairs, token and score
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        ids = vocabulary | {token["content"]: token["id"] for token in content["added_tokens"]}
        return "llama3" if is_llama3(content) else vocabulary_name(ids)
    return None


def spelling(token: str | dict | None) -> str:
    """A special token as tokenizer_config.json has it: its text, or an object with it, or null."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def vocabulary_name(ids: dict[str, int]) -> str:
    return "tokenizer.json-" + hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()[:12]
