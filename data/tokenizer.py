"""A tiktoken `Encoding` by name: bytes, gpt2, cl100k_base, o200k_base or llama3.

    tokenizer = get_tokenizer("bytes")
    tokenizer.decode(tokenizer.encode_ordinary("hello")) == "hello"

`bytes` needs no files. The GPT vocabularies are downloaded by tiktoken on first use. `llama3` reads the
`tokenizer.model` that Meta publishes with the weights; its license must be accepted first, so nothing here
downloads it.
"""

import base64
import hashlib
from pathlib import Path

import requests  # tiktoken depends on it and downloads with it
import tiktoken

from configurator import did_you_mean

NAMES = ["bytes", "gpt2", "cl100k_base", "o200k_base", "llama3"]
END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>"]  # OpenAI's spelling, Meta's spelling

# Llama 3 cuts text into words before merging bytes: contractions, words with one leading space or sign,
# numbers of at most three digits, punctuation, line ends, other blanks.
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
    "<|eom_id|>",  # 128008, end of message: a tool's answer is expected
    "<|eot_id|>",  # 128009, end of turn
    "<|python_tag|>",  # 128010
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),  # 128011 .. 128255
]
ROOT = Path(__file__).resolve().parents[1]
LLAMA3_PLACES = [ROOT / "tokenizer.model", ROOT / "original" / "tokenizer.model"]


def get_tokenizer(name: str, path: str | Path | None = None) -> tiktoken.Encoding:
    """Return the Encoding called `name`; `path` is llama3's tokenizer.model, or the folder that holds it.

    Raises ValueError for an unknown name, a path that the tokenizer does not read or a broken file, FileNotFoundError
    when a vocabulary file is neither here nor to be had, saying where to get it and where to put it.
    """
    if path is not None and name != "llama3":
        raise ValueError(f"tokenizer_path is {path}, but only the tokenizer llama3 is read from a file, not {name}")
    if name == "bytes":
        return bytes_tokenizer()
    if name == "llama3":
        return llama3_tokenizer(path)
    if name not in NAMES:
        hint = did_you_mean(name, {known: known for known in NAMES}, cutoff=0.4) or "."
        raise ValueError(f"Unknown tokenizer {name}{hint} There are: {', '.join(NAMES)}")
    try:
        return tiktoken.get_encoding(name)
    except requests.RequestException as error:
        if error.request is None:  # broken off on the way
            raise OSError(f"the download of tokenizer {name} failed: {error}") from error
        url = error.request.url
        cached_as = hashlib.sha1(url.encode()).hexdigest()  # tiktoken's own naming
        raise FileNotFoundError(
            f"tokenizer {name} needs {url}, which could not be downloaded. On a machine with a network fetch that "
            f"file, store it here as {cached_as} in a folder of your choice, and set TIKTOKEN_CACHE_DIR to the folder"
        ) from error


def end_of_text(tokenizer: tiktoken.Encoding) -> int:
    """Return the id of the token that ends every document. Raises ValueError if the Encoding has none."""
    for token in END_OF_TEXT_NAMES:
        if token in tokenizer.special_tokens_set:
            return tokenizer.encode_single_token(token)
    raise ValueError(f"tokenizer {tokenizer.name} has no end-of-text token, neither of {END_OF_TEXT_NAMES}")


def bytes_tokenizer() -> tiktoken.Encoding:
    """Ids 0..255 are the bytes themselves, 256 is <|endoftext|>."""
    return tiktoken.Encoding(
        "bytes",
        # Nothing ever merges, so where the text is cut does not matter: 64 at a time is 4x faster than one by one.
        pat_str=r"(?s:.{1,64})",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def llama3_tokenizer(path: str | Path | None = None) -> tiktoken.Encoding:
    """Read Meta's tokenizer.model; its special tokens take the ids after the last rank."""
    if path is None:
        places = LLAMA3_PLACES
    elif Path(path).is_dir():
        places = [Path(path) / "tokenizer.model", Path(path) / "original" / "tokenizer.model"]
    else:
        places = [Path(path)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"tokenizer llama3 needs Meta's tokenizer.model, which is not at {' or '.join(map(str, places))}. Accept "
            "the license at https://huggingface.co/meta-llama/Llama-3.2-1B, then: "
            f"hf download meta-llama/Llama-3.2-1B original/tokenizer.model --local-dir {ROOT}"
        )
    ranks = read_ranks(file)
    special_tokens = {token: len(ranks) + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS)}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Read a tiktoken vocabulary, one `base64(token) rank` a line, ranks 0, 1, 2, ... and every byte among them.

    tiktoken's own loader would keep a copy by path in its cache, and serve it after the file has changed.
    """
    ranks = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{file}:{number} is not a line of a tiktoken vocabulary (base64 token, rank): is this the "
                "tokenizer.model of Llama 3? Llama 2's is another format"
            ) from error
    whole = sorted(ranks.values()) == list(range(len(ranks))) and all(bytes([i]) in ranks for i in range(256))
    if not whole:
        raise ValueError(f"{file} is incomplete: {len(ranks):,} tokens whose ranks or single bytes have gaps")
    return ranks
