"""Tokenizer classes: a tiktoken.Encoding or a tokenizer.json, with special tokens. data/tokenizer.py finds files."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import tiktoken
import tokenizers

from data.meta import TOKEN_ID, fits
from data.tiktoken_files import SPECIAL_TOKENS, json_of_encoding

END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>"]  # OpenAI's spelling, Meta's spelling
# A whole line of a text, between two documents. re searches for "<", then checks that it starts a line, at 1.3 GB/s;
# for "^" at 0.13.
SEPARATOR = re.compile(
    "<(?<=^<)(?:" + "|".join(re.escape(name[1:]) for name in END_OF_TEXT_NAMES) + r")[ \t\r]*(?:\n|\Z)", re.MULTILINE
)
LLAMA3_EOS = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]  # end of a document, of a message to a tool, of a turn
LLAMA3_HASHES = {"6ea727c43071", "05ed779349be"}  # of the vocabularies of 3.1 and later, of 3.0
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}  # for transformers
MOST_CHARS = 25_000  # per piece of a text that tiktoken cannot encode whole


class Tokenizer:
    """A vocabulary with its special tokens. It can be pickled, for worker processes.

    name           one of tokenizer.NAMES, or a hash of the vocabulary: equal names mean equal vocabularies
    n_vocab        the largest id + 1, or in a model's folder the number of its weights' rows
    end_of_text    the id that ends every document
    bos            the id before every document and prompt, or None
    hf_bos         the id that transformers puts before a text with the same files, or None
    eos            the ids after which a model stops, end_of_text among them
    named_tokens   {"eos_token": "</s>", ...}: what transformers gives to a chat template
    chat_template  a Jinja program, or "" if there is none
    special_tokens the text of each special token
    files          {name: content} to build it from; {} if its name is enough
    """

    chat_template = ""

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, without bos. special: special tokens spelled out in it become tokens, else stay text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out. Unknown ids are skipped."""
        raise NotImplementedError

    def hf_files(self) -> dict[str, bytes]:
        """{name: content} of the files that transformers' AutoTokenizer needs."""
        return self.files

    def set_special_tokens(self, id_of: Callable[[str], int | None], options: dict, eos: Iterable, bos: int | None):
        """options: tokenizer_config.json's; eos: where the model stops. ValueError if no token ends a document."""
        self.named_tokens = named_tokens(options)
        eos_token = self.named_tokens.get("eos_token", "")
        ends = [id_of(token) for token in (*END_OF_TEXT_NAMES, eos_token) if id_of(token) is not None]
        if not ends:
            raise ValueError(
                f"tokenizer {self.name} has no end-of-text token: no eos_token, none of {END_OF_TEXT_NAMES}. If it has "
                'another, name it in a tokenizer_config.json beside it, as in {"eos_token": "</s>"}'
            )
        self.end_of_text = ends[0]
        eos = [id_of(eos_token), *eos, self.end_of_text]
        self.eos = list(dict.fromkeys(token for token in eos if fits(token, TOKEN_ID)))
        self.bos = bos
        self.hf_bos = bos


class Tiktoken(Tokenizer):
    """A tiktoken.Encoding. options, eos, bos: as set_special_tokens takes them. Without options, Meta's or OpenAI's."""

    def __init__(self, encoding: tiktoken.Encoding, files=None, options: dict | None = None, eos=(), bos=None):
        self.encoding = encoding
        self.name = encoding.name
        self.n_vocab = encoding.n_vocab
        self.files = files or {}
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        self.special_tokens = set(special)
        if options is None:
            eos = [special.get(token) for token in LLAMA3_EOS]
            bos = special.get("<|begin_of_text|>")
        self.set_special_tokens(special.get, options or {}, eos, bos)
        if not self.named_tokens:
            first = self.end_of_text if self.bos is None else self.bos
            self.named_tokens = {"bos_token": self.decode([first]), "eos_token": self.decode([self.end_of_text])}

    def encode(self, text: str, special: bool = False) -> list[int]:
        options = dict(allowed_special="all" if special else set(), disallowed_special=())
        try:
            return self.encoding.encode(text, **options)
        except ValueError:  # tiktoken's regex fails on a million blanks in a row
            pieces = [text[i : i + MOST_CHARS] for i in range(0, len(text), MOST_CHARS)]
            return [token for piece in pieces for token in self.encoding.encode(piece, **options)]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = []
        for token in ids:
            with contextlib.suppress(KeyError):  # padding of the vocabulary, or a gap in it
                pieces.append(self.encoding.decode_single_token_bytes(int(token)))
        return b"".join(pieces).decode(errors="replace")

    def hf_files(self) -> dict[str, bytes]:
        config = FAST | {"add_prefix_space": False} | self.named_tokens  # llama.cpp would add one to bytes
        made = {"tokenizer.json": json_of_encoding(self.encoding, self.hf_bos), "tokenizer_config.json": config}
        return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in made.items()} | self.files


class HuggingFace(Tokenizer):
    """A tokenizer.json, with any normalizer, pre-tokenizer and model that `tokenizers` supports."""

    def __init__(self, path: Path, name: str, files: dict[str, bytes], options: dict, eos: Iterable, bos: int | None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else each worker has an idle thread per core
        try:
            self.backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            ids = self.backend.get_vocab(with_added_tokens=True)
            self.mark_special(options, ids)
        except Exception as error:  # tokenizers has no exception class of its own
            problem = "or a file beside it is damaged, or not as transformers writes it"
            raise ValueError(f"{path} {problem}: {error!r:.200}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.name = name
        self.n_vocab = max(ids.values()) + 1
        self.files = files
        added = self.backend.get_added_tokens_decoder().values()
        self.special_tokens = {token.content for token in added if token.special}
        self.special_ids = {ids[token] for token in self.special_tokens}
        self.set_special_tokens(ids.get, options, eos, bos)

    def mark_special(self, options: dict, ids: dict[str, int]) -> None:
        """Make the tokens special that tokenizer_config.json names, as transformers does. Tokens that are not in the
        vocabulary stay out: the weights have no rows for them.
        """
        added = {token.content: token for token in self.backend.get_added_tokens_decoder().values()}
        names = [name for name in named_tokens(options).values() if name in ids]
        self.backend.add_special_tokens([added.get(name) or tokenizers.AddedToken(name) for name in names])

    def encode(self, text: str, special: bool = False) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # typed or piped text may not have been UTF-8
        self.backend.encode_special_tokens = not special
        # fast: without the offsets of tokens in the text, which take a quarter of the time
        ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if special or self.special_ids.isdisjoint(ids):
            return ids
        # Models such as Unigram have special tokens among their pieces. Spell these, but for the unknown token.
        spelled = self.special_ids - {piece.id for piece in self.backend.model.tokenize("\uffff")}
        return [part for token in ids for part in (self.characters(token) if token in spelled else [token])]

    def characters(self, token: int) -> list[int]:
        """The ids of a token's characters."""
        return [piece.id for char in self.backend.id_to_token(token) for piece in self.backend.model.tokenize(char)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=False)


class TextStream:
    """Text from ids that come one at a time. A character may span several ids.

    text = TextStream(tokenizer, prompt); print(text.add(id), end="") for each id; print(text.end())
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.shown = list(before)  # the last ids returned as text: that of the next ones may depend on them
        self.pending = []

    def add(self, token: int) -> str:
        """The text that this id completes: often "", or several characters."""
        self.pending.append(int(token))
        return "" if self.text().endswith("\ufffd") else self.end()  # perhaps an incomplete character

    def end(self) -> str:
        """The rest of the text, with U+FFFD for bytes that are not a character."""
        text = self.text()
        self.shown = self.pending
        self.pending = []
        return text

    def text(self) -> str:
        return self.tokenizer.decode(self.shown + self.pending)[len(self.tokenizer.decode(self.shown)) :]


def named_tokens(options: dict) -> dict[str, str]:
    """The special tokens that have names in tokenizer_config.json, and in the extra_special_tokens in it."""
    tokens = {name: value for name, value in options.items() if name.endswith("_token")}
    if isinstance(options.get("extra_special_tokens"), dict):
        tokens |= options["extra_special_tokens"]
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def name_of_json(content: dict, written_as: str | None = None) -> str:
    """The name of the tokenizer in a tokenizer.json: a hash of its vocabulary, unless that is a known one.

    written_as: what nanocria called it when it wrote the file. Others may have added tokens since.
    """
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    if written_as in SPECIAL_TOKENS and added.keys() <= SPECIAL_TOKENS[written_as]:
        return written_as
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram's pieces and their scores
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    ids = sorted((vocab | added).items())
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
    return "llama3" if digest in LLAMA3_HASHES else f"tokenizer.json-{digest}"
