"""Tokenizer classes: a tiktoken.Encoding or a tokenizer.json, with special tokens. data/tokenizer.py finds files."""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import tiktoken

from data.tiktoken_files import json_of_encoding

END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>"]  # OpenAI's spelling, Meta's spelling
LLAMA3_EOS = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]  # end of a document, of a message to a tool, of a turn
MOST_CHARS = 25_000  # per piece of a text that tiktoken cannot encode whole


class Tokenizer:
    """A vocabulary with its special tokens. It can be pickled, for worker processes.

    name           one of tokenizer.NAMES, or a hash of the vocabulary: equal names mean equal ids
    n_vocab        the largest id + 1
    end_of_text    the id that ends every document
    bos            the id before every document and prompt, or None
    hf_bos         of tokenizer_of(): the id that transformers puts before a text with the same files, or None
    eos            the ids after which a model stops, end_of_text among them
    bos_token, eos_token, chat_template    for chat templates; "" or None if there is none
    special_tokens the text of each special token
    files          {name: content} to build it from; {} if its name is enough
    """

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
        self.eos = list(dict.fromkeys(token for token in eos if isinstance(token, int)))
        self.eos_token = self.eos_token or self.decode([self.end_of_text])
        self.bos_token = self.bos_token or ("" if self.bos is None else self.decode([self.bos]))
        self.chat_template = one_template(named_templates(config.get("chat_template")))


class Tiktoken(Tokenizer):
    """A tiktoken.Encoding."""

    def __init__(self, encoding: tiktoken.Encoding, files: dict[str, bytes] | None = None, config: dict | None = None):
        self.encoding, self.name, self.n_vocab, self.files = encoding, encoding.name, encoding.n_vocab, files or {}
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        self.special_tokens, self.bos = set(special), special.get("<|begin_of_text|>")
        config = {"eos_token_id": [special.get(token) for token in LLAMA3_EOS]} if config is None else config
        self.set_special_tokens(special.get, config)

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
        config |= {"bos_token": self.bos_token or self.eos_token, "eos_token": self.eos_token}
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
            raise ValueError(f"{path} is damaged, or not a Hugging Face tokenizer.json: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        ids = self.backend.get_vocab(with_added_tokens=True)
        self.name, self.n_vocab, self.files = vocabulary_name(ids), max(ids.values()) + 1, files
        added = self.backend.get_added_tokens_decoder().values()
        self.special_tokens = {token.content for token in added if token.special}
        self.special_ids = {ids[token] for token in self.special_tokens}
        example, adds_bos = self.backend.encode("a"), config.get("add_bos_token")
        adds_bos = example.special_tokens_mask[0] if adds_bos is None else adds_bos
        self.bos = ids.get(spelling(config.get("bos_token")), example.ids[0]) if adds_bos else None
        self.set_special_tokens(ids.get, config)

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.backend.encode_special_tokens = not special
        text = text.encode("utf-8", "replace").decode()  # typed or piped text may not have been UTF-8
        ids = self.ids_of(text)
        if special or self.special_ids.isdisjoint(ids):
            return ids
        # A Unigram model matches special tokens as ordinary pieces: cut them apart. <unk> alone needs no cut.
        cuts = [found.end() for found in beginnings(frozenset(self.special_tokens)).finditer(text)]
        pieces = (text[first:end] for first, end in pairwise([0, *cuts, None]))
        return [token for piece in pieces for token in self.ids_of(piece)] if cuts else ids

    def ids_of(self, text: str) -> list[int]:
        # fast: without the offsets of tokens in the text, which take a quarter of the time
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

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


@functools.lru_cache(maxsize=8)
def beginnings(tokens: frozenset[str]) -> re.Pattern:
    """Matches the first character of each of these tokens in a text. A text cut after them holds none of the tokens."""
    return re.compile("|".join(f"{re.escape(token[:1])}(?={re.escape(token[1:])})" for token in tokens) or r"(?!)")


def spelling(token: str | dict | None) -> str:
    """The text of a special token in tokenizer_config.json: there a string, an object or null."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def named_templates(content: str | list[dict] | None) -> dict[str, str]:
    """The chat templates in a tokenizer_config.json: one, or several as [{"name": ..., "template": ...}, ...]."""
    if content is None:
        return {}
    if isinstance(content, str):
        return {"default": content}
    with contextlib.suppress(TypeError, KeyError):
        templates = {each["name"]: each["template"] for each in content}
        if all(isinstance(text, str) for pair in templates.items() for text in pair):
            return templates
    raise ValueError(f"chat_template is {content!r:.60}, expected a text, or a list of {{name, template}}")


def one_template(templates: dict[str, str | None]) -> str | None:
    """One Jinja program that renders conversations with tools as "tool_use" does, all others as "default" does.

    transformers chooses so. A chat_template.jinja of this program serves every other reader, too.
    """
    default = templates.get("default")
    tool_use = templates.get("tool_use")
    if tool_use is None:
        return default
    if default is None:
        default = "{{ raise_exception('it is for conversations with tools only') }}"
    # Jinja drops a line break after a tag, one at the end of a program, and blanks before a tag, but not before {{.
    tool_use = re.sub(r"\r?\n\Z", "", tool_use)
    default = re.sub(r"\r?\n\Z", "", default)
    return "{% if tools %}\n" + tool_use + "{{ '' }}{% else %}\n" + default + "{{ '' }}{% endif %}"


def vocabulary_name(ids: dict[str, int]) -> str:
    return "tokenizer.json-" + hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()[:12]
