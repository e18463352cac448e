"""Byte-level BPE vocabulary files: read for tiktoken, written as Hugging Face's tokenizer.json.

A pattern splits the text into pieces. A piece that is a token is taken whole. Any other piece starts as bytes, and the
adjacent pair that forms the token of the lowest rank is merged until no pair forms a token. tiktoken's files hold
tokens and ranks, which are the ids. A tokenizer.json lists, by rank, the pairs that merge into each token.
"""

import base64
import json
import re
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

# Llama 3 splits text before merging bytes: contractions, words with one leading space or sign,
# numbers of at most three digits, punctuation, newlines, other whitespace.
LLAMA3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# 256 special tokens follow the 128,000 merged ones, in this order, as in the vocabularies of Llama 3.1 and 3.2.
# (3.0 still calls the finetune_right_pad and eom ids reserved; Meta's own code calls reserved_2 <|step_id|>.)
LLAMA3_SPECIAL_TOKENS = [
    "<|begin_of_text|>",  # 128000
    "<|end_of_text|>",  # 128001
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",  # 128004
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",  # 128006
    "<|end_header_id|>",  # 128007
    "<|eom_id|>",  # 128008, end of message: a tool's answer follows
    "<|eot_id|>",  # 128009, end of turn
    "<|python_tag|>",  # 128010
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),  # 128011 .. 128255
]
SPECIAL_TOKENS = {  # of each vocabulary
    "bytes": {"<|endoftext|>"},
    "gpt2": {"<|endoftext|>"},
    "cl100k_base": {"<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endofprompt|>"},
    "o200k_base": {"<|endoftext|>", "<|endofprompt|>"},
    "llama3": {*LLAMA3_SPECIAL_TOKENS, *(f"<|reserved_special_token_{i}|>" for i in range(248, 251))},  # 3.0's, too
}


def bytes_encoding() -> tiktoken.Encoding:
    """Ids 0..255 are the bytes themselves, 256 is <|endoftext|>."""
    return tiktoken.Encoding(
        "bytes",
        # Nothing ever merges, so any split works: 64 characters at a time are 4x faster than one by one.
        pat_str=r"(?s:.{1,64})",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def openai_encoding(name: str) -> tiktoken.Encoding:
    """One of OpenAI's vocabularies, which tiktoken downloads and keeps. Raises FileNotFoundError without a network."""
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise FileNotFoundError(
            f"tokenizer {name} could not be downloaded ({error}). Set TIKTOKEN_CACHE_DIR to a folder, "
            f"""run python -c 'import tiktoken; tiktoken.get_encoding("{name}")' on a machine with a network, """
            "and copy the folder here"
        ) from error


def llama3_encoding(content: bytes, file: Path) -> tiktoken.Encoding:
    """Meta's tokenizer.model: lines of `base64(token) rank`. Its special tokens take the ids after the last rank.

    tiktoken's own loader caches by path, and would return the old vocabulary after the file has changed.
    """
    try:
        pairs = [line.split() for line in content.splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ValueError(f"{file} is not Llama 3's tokenizer.model: Llama 2's has another format") from error
    check_ranks(ranks, file)
    special_tokens = {token: len(ranks) + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS)}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


def check_ranks(ranks: dict[bytes, int], file: str | Path) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([i]) in ranks for i in range(256)):
        raise ValueError(f"{file} is damaged or incomplete: its {len(ranks):,} ranks or single bytes have gaps")


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer.json, read


def encoding_of_json(name: str, content: dict) -> tiktoken.Encoding | None:
    """tiktoken's encoding with the ids of a tokenizer.json whose vocabulary has this name, one of SPECIAL_TOKENS.

    None if the file normalizes text or merges otherwise, as it may after somebody's changes.
    """
    if name == "bytes":
        return bytes_encoding()
    if content["normalizer"] or not content["model"].get("ignore_merges"):
        return None
    byte_of = {char: byte for byte, char in visible_bytes().items()}
    pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    ranks = {bytes(map(byte_of.__getitem__, token)): rank for token, rank in content["model"]["vocab"].items()}
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    check_ranks(ranks, name)
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def first_id(post_processor: dict | None) -> int | None:
    """The id that a tokenizer.json's post_processor puts before a text, or None."""
    match post_processor:
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token}}, *_], "special_tokens": named}:
            return named[token]["ids"][0]
        case {"type": "Sequence", "processors": [*parts]}:
            return next((first for first in map(first_id, parts) if first is not None), None)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer.json, written


def json_of_encoding(encoding: tiktoken.Encoding, bos: int | None) -> dict:
    """The content of a tokenizer.json. bos: the id that transformers is to put before each text; None: no id.

    Bytes are in SentencePiece's form: llama.cpp's converter accepts byte-level BPE only with published vocabularies.
    SentencePiece spells a space as U+2581, so U+2581 in a text is read as a space.
    """
    if encoding.name == "bytes":
        vocab = {"\u2581" if i == ord(" ") else f"<0x{i:02X}>": i for i in range(256)}
        backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        to_blank = decoders.Replace("\u2581", " ")
        backend.decoder = decoders.Sequence([to_blank, decoders.ByteFallback(), decoders.Fuse()])
    else:
        ranks = encoding._mergeable_ranks
        char_of = visible_bytes()
        spelled = {token: "".join(map(char_of.__getitem__, token)) for token in ranks}
        merges = [
            (spelled[token[:i]], spelled[token[i:]])
            for token in sorted(ranks, key=ranks.get)
            for i in range(1, len(token))
            if token[:i] in ranks and token[i:] in ranks
        ]
        vocab = {text: ranks[token] for token, text in spelled.items()}
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
        # Hugging Face's regex engine is Oniguruma: $ matches at any line end, and {1,3}+ is not possessive but repeats.
        pattern = re.sub(r"([+*?]|\d})\+", r"\1", encoding._pat_str).replace("$", r"\z")
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        backend.decoder = decoders.ByteLevel()
    if bos is not None:
        token = encoding.decode([bos])
        first = dict(single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, bos)])
        backend.post_processor = processors.TemplateProcessing(**first)
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    # The library would number added tokens without the gaps that OpenAI's have.
    added = [{"id": i, "content": token, **options} for token, i in special]
    return json.loads(backend.to_str()) | {"added_tokens": added}


def visible_bytes() -> dict[int, str]:
    """A character for each byte, as GPT-2's files spell tokens: itself if printable, else one from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + i) for i, byte in enumerate(others)}
