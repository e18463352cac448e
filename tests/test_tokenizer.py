"""The tokenizers: ids, special tokens, splits, files, errors. No network, no GPU."""

import base64

import pytest
import requests
import tiktoken

from data.encode import encode_batch, encode_text
from data.tiktoken_files import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, bytes_encoding
from data.tokenizer import get_tokenizer
from tests.datasets import TEXTS, byte_tokenizer


def write_llama3_model(path, extra_tokens):
    """A small tokenizer.model: every byte, then the tokens given."""
    tokens = [bytes([i]) for i in range(256)] + [token.encode() for token in extra_tokens]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_bytes_are_their_own_ids_and_any_bytes_round_trip():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.n_vocab == 257 and tokenizer.end_of_text == 256
    for string in TEXTS:
        assert tokenizer.encode(string) == list(string.encode())
        assert tokenizer.decode(list(string.encode())) == string
    assert tokenizer.decode([104, 105, 256, 999]) == "hi<|endoftext|>", "what means nothing is passed over"


def test_llama3_special_tokens_have_the_published_ids():
    assert len(LLAMA3_SPECIAL_TOKENS) == len(set(LLAMA3_SPECIAL_TOKENS)) == 256
    published = {
        "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|reserved_special_token_0|>": 128002,
        "<|finetune_right_pad_id|>": 128004, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008, "<|eot_id|>": 128009, "<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255,
    }  # fmt: skip
    assert {token: 128000 + LLAMA3_SPECIAL_TOKENS.index(token) for token in published} == published


def test_llama3_reads_tokenizer_model_and_round_trips(tmp_path):
    model = write_llama3_model(tmp_path / "tokenizer.model", ["he", "ll", "hell", "hello"])
    for path in (model, str(model), tmp_path):  # the file, or the folder it is in
        tokenizer = get_tokenizer(path)
    assert tokenizer.n_vocab == 260 + 256
    assert tokenizer.end_of_text == 261
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.encode("<|begin_of_text|>hello<|eot_id|>", special=True) == [260, 259, 269]
    for string in TEXTS:
        assert tokenizer.decode(tokenizer.encode(string)) == string
    write_llama3_model(model, ["he", "ll"])
    assert get_tokenizer(model).n_vocab == 258 + 256, "a file that has changed is read again"


@pytest.mark.parametrize(
    "string, pieces",
    [
        ("1234567", ["123", "456", "7"]),  # at most three digits
        ("I'll", ["I", "'ll"]),
        ("IT'Sx", ["IT", "'S", "x"]),  # in any case
        (" world (ok)", [" world", " (", "ok", ")"]),
        ("a\n\n  b", ["a", "\n\n", " ", " b"]),  # the last blank belongs to the word
        (");\n\nx", [");\n\n", "x"]),  # line ends belong to the punctuation before them
        ("été", ["été"]),
    ],
)
def test_llama3_never_merges_across_the_published_splits(tmp_path, string, pieces):
    # every substring is a token, so only the split pattern keeps the whole string from being one
    substrings = {string[i:j] for i in range(len(string)) for j in range(i + 1, len(string) + 1)}
    tokens = sorted((s for s in substrings if len(s.encode()) > 1), key=len)
    tokenizer = get_tokenizer(write_llama3_model(tmp_path / "tokenizer.model", tokens))
    assert [tokenizer.decode([token]) for token in tokenizer.encode(string)] == pieces


def test_unknown_tokenizer_error_lists_the_names():
    with pytest.raises(ValueError, match="Unknown tokenizer cl100k: not one of bytes, .* cl100k_base, .*folder"):
        get_tokenizer("cl100k")


def test_a_download_is_kept_in_datasets_and_one_that_fails_says_how_to_bring_the_files(monkeypatch):
    def no_network(name):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(FileNotFoundError, match="gpt2 could not be downloaded .no network.*TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: bytes_encoding())
    assert get_tokenizer("gpt2").files.keys() >= {"tokenizer.json"}


def test_million_consecutive_blanks_are_tokenized():
    text = "\t" * 1_200_000 + "d" * 30_000 + " " * 60_000 + "b\n c"
    tokenizer = byte_tokenizer(LLAMA3_PATTERN, ["<|end_of_text|>"])
    with pytest.raises(ValueError):
        tokenizer.encoding.encode(text)
    tokens, _, counts = encode_batch([("train", text)], tokenizer, encode_text)["train"]
    assert (counts["documents"], counts["bytes"]) == (1, len(text))
    assert tokenizer.decode(tokens[:-1]) == text and tokens[-1] == 256
