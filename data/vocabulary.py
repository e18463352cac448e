"""Tokenizer classes: a tiktoken.Encoding or a tokenizer.json, with special tokens. data/tokenizer.py finds files."""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import tiktoken

from data.tiktoken_files import json_of_encoding

END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>"]  # OpenAI's spelling, Meta's spelling
LLAMA3_EOS = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]  # end of a document, of a message to a tool, of a turn
HIDDEN = "\ufdd0\ufdd1\ufdd2"  # before the name of a piece that no text may hold: Unicode noncharacters
ADDED_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # its fields
MOST_CHARS = 25_000  # per piece of a text that tiktoken cannot encode whole


class Tokenizer:
    """A vocabulary with its special tokens. It can be pickled, for worker processes.

    name           one of tokenizer.NAMES, or a hash of the vocabulary: equal names mean equal ids
    n_vocab        the largest id + 1
    end_of_text    the id that ends every document
    bos            the id before every document and prompt, or None
    hf_bos         of tokenizer_of(): the id that transformers puts before a text with the same files, or None
    eos            the ids after which a model stops, end_of_text among them
    bos_token, eos_token    as they are spelled; "" if there is none
    named_tokens   {"pad_token": "<pad>", ...}: what transformers gives to a chat template
    templates      {name: chat template}: most have one, "default"
    special_tokens the text of each special token
    files          {name: content} to build it from; {} if its name is enough
    """

    templates: dict[str, str] = {}

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, without bos. special: special tokens spelled out in it become tokens, else stay text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out. Unknown ids are skipped."""
        raise NotImplementedError

    def hf_files(self) -> dict[str, bytes]:
        """{name: content} of the files that transformers' AutoTokenizer needs."""
        return self.files

    def set_special_tokens(self, id_of: Callable[[str], int | None], config: dict) -> None:
        """Set them from `config`, the tokenizer files' content. Raises ValueError if no token ends a document."""
        self.bos_token, self.eos_token = (spelling(config.get(name)) for name in ("bos_token", "eos_token"))
        ends = [id_of(token) for token in (*END_OF_TEXT_NAMES, self.eos_token) if id_of(token) is not None]
        if not ends:
            raise ValueError(
                f"tokenizer {self.name} has no end-of-text token: no eos_token, none of {END_OF_TEXT_NAMES}. If it has "
                'another, name it in a tokenizer_config.json beside it, as in {"eos_token": "</s>"}'
            )
        self.end_of_text, eos = ends[0], config.get("eos_token_id")
        eos = eos if isinstance(eos, list) else [eos]
        eos = [id_of(self.eos_token), *eos, self.end_of_text]
        self.eos = list(dict.fromkeys(token for token in eos if is_id(token)))
        self.bos = config.get("first_id")  # transformers 5 does not go by add_bos_token
        self.eos_token = self.eos_token or self.decode([self.end_of_text])
        self.bos_token = self.bos_token or ("" if self.bos is None else self.decode([self.bos]))
        tokens = dict(config)
        extra = config.get("extra_special_tokens")
        if isinstance(extra, dict):
            tokens |= extra
        self.named_tokens = {
            name: spelling(value)
            for name, value in tokens.items()
            if spelling(value) and (name.endswith("_token") or name in (extra or ()))
        }


class Tiktoken(Tokenizer):
    """A tiktoken.Encoding."""

    def __init__(self, encoding: tiktoken.Encoding, files: dict[str, bytes] | None = None, config: dict | None = None):
        self.encoding, self.name, self.n_vocab, self.files = encoding, encoding.name, encoding.n_vocab, files or {}
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        self.special_tokens = set(special)
        if config is None:  # of Meta's or OpenAI's own files
            eos = [special.get(token) for token in LLAMA3_EOS]
            config = {"eos_token_id": eos, "first_id": special.get("<|begin_of_text|>")}
        self.set_special_tokens(special.get, config)
        if "tokenizer_config.json" not in self.files:
            self.named_tokens = {"bos_token": self.bos_token or self.eos_token, "eos_token": self.eos_token}

    def encode(self, text: str, special: bool = False) -> list[int]:
        options = dict(allowed_special="all" if special else set(), disallowed_special=())
        try:
            return self.encoding.encode(text, **options)
        except ValueError:  # tiktoken's regex fails on a million blanks in a row
            pieces = [text[i : i + MOST_CHARS] for i in range(0, len(text), MOST_CHARS)]
            return [token for piece in pieces for token in self.encoding.encode(piece, **options)]

    def decode(self, ids: Iterable[int]) -> str:
        found = []
        for token in ids:
            with contextlib.suppress(KeyError):  # padding of the vocabulary, or a gap in it
                found.append(self.encoding.decode_single_token_bytes(int(token)))
        return b"".join(found).decode(errors="replace")

    def hf_files(self) -> dict[str, bytes]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {"add_prefix_space": False}  # which llama.cpp would add to bytes
        config |= self.named_tokens
        made = {"tokenizer.json": json_of_encoding(self.encoding, self.bos), "tokenizer_config.json": config}
        return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in made.items()} | self.files


class HuggingFace(Tokenizer):
    """A tokenizer.json, with any normalizer, pre-tokenizer and model that `tokenizers` supports."""

    def __init__(self, path: Path, files: dict[str, bytes], config: dict):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else each worker has an idle thread per core
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(f"{path} needs a package ({error}): pip install tokenizers") from error
        try:
            self.backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers has no exception class of its own
            raise ValueError(f"{path} is damaged, or not a Hugging Face tokenizer.json: {error!s:.200}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        ids = self.backend.get_vocab(with_added_tokens=True)
        self.name, self.n_vocab, self.files = vocabulary_name(ids), max(ids.values()) + 1, files
        try:
            self.add_named_tokens(config, ids)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = "has special or added tokens that are not as transformers writes them"
            raise ValueError(f"{path.with_name('tokenizer_config.json')} {said}: {error!r:.60}") from error
        added = self.backend.get_added_tokens_decoder().values()
        self.special_tokens = {token.content for token in added if token.special}
        self.special_ids = {ids[token] for token in self.special_tokens}
        self.set_special_tokens(ids.get, config)

    def encode(self, text: str, special: bool = False) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # typed or piped text may not have been UTF-8
        self.backend.encode_special_tokens = not special
        ids = ids_of_text(self.backend, text)
        if special or self.special_ids.isdisjoint(ids):
            return ids
        # The model has special tokens among its pieces, as Unigram's do.
        backend, ids_in_backend = self.text_backend
        return [ids_in_backend.get(token, token) for token in ids_of_text(backend, text)]

    def add_named_tokens(self, config: dict, ids: dict[str, int]) -> None:
        """Add what tokenizer_config.json and special_tokens_map.json say of tokens, as transformers does. Tokens that
        are not in the vocabulary stay out: the weights have no rows for them.
        """
        from tokenizers import AddedToken

        def added_token(value):
            fields = value if isinstance(value, dict) else {"content": value, "special": True}
            return AddedToken(**{name: fields[name] for name in ADDED_TOKEN if name in fields})

        tokens = {token.content: token for token in self.backend.get_added_tokens_decoder().values()}
        for value in config.get("added_tokens_decoder", {}).values():
            tokens[value["content"]] = added_token(value)
        named = [value for name, value in config.items() if name.endswith("_token") and spelling(value)]
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        for value in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
            tokens.setdefault(spelling(value), added_token(value))
        for value in named:
            tokens[spelling(value)].special = True
        self.backend.add_tokens([token for content, token in tokens.items() if content in ids])

    @functools.cached_property
    def text_backend(self) -> tuple:
        """The backend with its special pieces under names that no text has, and {id: id in self.backend}."""
        import tokenizers

        content = json.loads(self.backend.to_str())
        added = [token["content"] for token in content["added_tokens"]]
        hide_pieces(content["model"], self.special_tokens)
        backend = tokenizers.Tokenizer.from_str(json.dumps(content | {"post_processor": None}))
        backend.encode_special_tokens = True
        return backend, {backend.token_to_id(token): self.backend.token_to_id(token) for token in added}

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=False)


class TextStream:
    """Text from ids that come one at a time. A character may span several ids.

    text = TextStream(tokenizer, prompt); print(text.add(id), end="") for each id; print(text.end())
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()):
        # The text of ids may depend on those before them: `shown` are the last ids returned as text, at first `before`.
        self.tokenizer, self.shown, self.pending = tokenizer, list(before), []

    def add(self, token: int) -> str:
        """The text that this id completes: often "", or several characters."""
        self.pending.append(int(token))
        text = self.text()
        return "" if text.endswith("\ufffd") else self.end()  # perhaps an incomplete character

    def end(self) -> str:
        """The rest of the text, with U+FFFD for bytes that are not a character."""
        text, self.shown, self.pending = self.text(), self.pending, []
        return text

    def text(self) -> str:
        return self.tokenizer.decode(self.shown + self.pending)[len(self.tokenizer.decode(self.shown)) :]


def ids_of_text(backend, text: str) -> list[int]:
    # fast: without the offsets of tokens in the text, which take a quarter of the time
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def hide_pieces(model: dict, special_tokens: set[str]) -> None:
    """Rename special tokens among the pieces of a tokenizer.json's model, so that no text holds them.

    Single characters and what BPE merges stay: texts need them, and no other pieces have their ids.
    """
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    inside = model.get("continuing_subword_prefix") or ""
    needed = {piece for left, right in merges for piece in (left, right, left + right.removeprefix(inside))}
    names = {token: HIDDEN + token for token in special_tokens - needed if len(token) > 1}
    if isinstance(model["vocab"], list):  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


@functools.lru_cache(maxsize=8)
def beginnings(tokens: frozenset[str]) -> re.Pattern:
    """Matches the first character of each of these tokens in a text. A text cut after them holds none of the tokens."""
    return re.compile("|".join(f"{re.escape(token[:1])}(?={re.escape(token[1:])})" for token in tokens) or r"(?!)")


def spelling(token: str | dict | None) -> str:
    """The text of a special token in tokenizer_config.json: there a string, an object or null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def is_id(token, n_vocab: int = 2**31) -> bool:
    return type(token) is int and 0 <= token < n_vocab


def ids_of_json(content: dict) -> dict[str, int]:
    """The ids of all tokens in a tokenizer.json."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram's pieces and their scores
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in content["added_tokens"]}


def named_templates(content: str | list[dict] | dict[str, str] | None) -> dict[str, str]:
    """The chat templates in a tokenizer_config.json: one, or several as [{"name": ..., "template": ...}, ...], or
    as {name: template}.
    """
    if content is None:
        return {}
    if isinstance(content, str):
        return {"default": content}
    with contextlib.suppress(TypeError, KeyError):
        templates = content
        if not isinstance(content, dict):
            templates = {each["name"]: each["template"] for each in content}
        if all(isinstance(text, str) for pair in templates.items() for text in pair):
            return templates
    raise ValueError(f"chat_template is {content!r:.60}, expected a text, or a list of {{name, template}}")


def vocabulary_name(ids: dict[str, int]) -> str:
    return "tokenizer.json-" + hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()[:12]
