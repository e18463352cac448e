"""Tokenizers in folders: published ones, datasets, checkpoints; what transformers reads of ours. No network, no GPU."""

import json
import pickle
import random
import shutil
import unicodedata

import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers

from data.command import tokenizer_for_data
from data.text.prepare import prepare as text_prepare
from data.tiktoken_files import LLAMA3_PATTERN
from data.tokenizer import NAMES, OPENAI, Tiktoken, files_to_save, get_tokenizer, published_name, tokenizer_of
from data.tokens import Tokens
from data.vocabulary import HuggingFace, TextStream
from data.write import write_dataset
from model import LlamaConfig
from runtime.hf import hf_files
from tests.datasets import TEXTS, byte_tokenizer, package_file, save_tokenizer
from tests.published import publish_chat_model, smollm2
from tests.runs import prose
from tests.test_tokenizer import write_llama3_model

SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_level(special):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, tokenizers.trainers.BpeTrainer, special, alphabet)


def metaspace(special):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return trained(tokenizer, tokenizers.trainers.BpeTrainer, special, list("<>/[]CLSké"))


def unigram(special):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    return trained(tokenizer, tokenizers.trainers.UnigramTrainer, special, list("<>/[]CLSk"), unk_token="<unk>")


def trained(tokenizer, trainer, special, alphabet, **options):
    options |= dict(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([prose(i, 500) for i in range(10)], trainer(**options))
    return tokenizer


def put_first(bos, tokenizer):
    """Let a tokenizer's post-processor put this token before every text."""
    first = dict(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**first)


def write_hf_folder(folder, bos=None, **config):
    """A small byte-level BPE, as transformers saves it; bos: the token that its post-processor puts first."""
    tokenizer = byte_level(SPECIAL)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    if bos:
        put_first(bos, tokenizer)
    tokenizer.add_tokens(["\u0120the"])  # in the vocabulary, but not special
    tokenizer.enable_truncation(8)  # as some published files say, for other uses
    tokenizer.enable_padding(length=8)
    eos = {"__type": "AddedToken", "content": "<|im_end|>"}
    save_tokenizer(folder, tokenizer, **{"eos_token": eos, "bos_token": bos, "chat_template": TEMPLATE} | config)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_hf_folder_gives_the_ids_of_tokenizers_and_spelled_special_tokens_are_text_but_in_prompts(tmp_path):
    theirs = write_hf_folder(tmp_path / "hf")
    theirs.no_truncation()
    theirs.no_padding()
    for path in (tmp_path / "hf", str(tmp_path / "hf/tokenizer.json")):
        tokenizer = get_tokenizer(path)
        assert (tokenizer.n_vocab, tokenizer.bos, tokenizer.end_of_text, tokenizer.eos) == (300, None, 0, [3, 0])
        assert tokenizer.named_tokens == {"eos_token": "<|im_end|>"}
        assert tokenizer.chat_template == TEMPLATE
        assert tokenizer.special_tokens == set(SPECIAL)
    for text in (*TEXTS, prose(0, 500), "e\u0301"):
        ids = tokenizer.encode(text)
        assert ids == pickle.loads(pickle.dumps(tokenizer)).encode(text) and not {0, 1, 2, 3} & set(ids)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
        assert tokenizer.encode(text, special=True) == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("<|im_start|>a", special=True)[0] == 2 and tokenizer.decode([2, 99999]) == "<|im_start|>"
    assert tokenizer.encode("h\udcffi") == tokenizer.encode("h?i"), "typed in another encoding"


def test_special_tokens_among_the_pieces_of_a_unigram_model_are_text_too(tmp_path):
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), *((char, -5.0) for char in "9<>/s")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = save_tokenizer(tmp_path, backend, eos_token="</s>")
    assert [backend.id_to_token(i) for i in tokenizer.encode("<s>9</s>")] == list("<s>9</s>")
    assert tokenizer.encode("<s>9</s>", special=True) == [1, 4, 2]
    assert tokenizer.encode("9é9") == tokenizer.encode("9é9", special=True) == [4, 0, 4]


def test_generation_config_says_where_a_model_stops_and_a_file_holds_the_template(tmp_path):
    templates = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]
    write_hf_folder(tmp_path / "hf", chat_template=templates)
    (tmp_path / "hf/config.json").write_text('{"eos_token_id": 7}')
    tokenizer = get_tokenizer(tmp_path / "hf")
    assert tokenizer.eos == [3, 7, 0]
    assert tokenizer.chat_template == "one", "of several, the default"
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (tmp_path / "hf/chat_template.jinja").write_text("é")
    tokenizer = get_tokenizer(tmp_path / "hf")
    assert (tokenizer.eos, tokenizer.chat_template) == ([3, 2, 0], "é")


def test_text_stream_keeps_the_blank_before_a_first_word(tmp_path):
    """Like Llama 2's tokenizer, whose decoder drops the blank before the first word of a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.train_from_iterator([prose(0, 500)], tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=["</s>"]))
    tokenizer = save_tokenizer(tmp_path, backend, eos_token="</s>")
    text = prose(1, 20)
    words = text.split()
    prompt = tokenizer.encode(words[0])
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in ids[len(prompt) :]]
    assert ids[: len(prompt)] == prompt and words[0] + "".join([*pieces, stream.end()]) == text.strip()


def test_text_stream_gives_whole_characters_and_all_of_them(tmp_path):
    write_hf_folder(tmp_path / "hf")
    for tokenizer in (get_tokenizer("bytes"), get_tokenizer(tmp_path / "hf")):
        for text in (*TEXTS, "漢字 🦙 é", "\ufffd", "e\ufffd!"):
            stream = TextStream(tokenizer, tokenizer.encode("é"))
            pieces = [stream.add(token) for token in tokenizer.encode(text)]
            assert "".join([*pieces, stream.end()]) == text
            assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    stream = TextStream(get_tokenizer("bytes"))
    assert [stream.add(token) for token in (0xC3, 0x41, 256, 0xE6, 0xBC)] == ["", "\ufffdA", "<|endoftext|>", "", ""]
    assert stream.end() == "\ufffd" and stream.end() == ""


def write_files(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def hf_ids(folder, text):
    """The ids from transformers' AutoTokenizer, with special tokens spelled out in the text kept as text."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.decode(theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids) == text
    return theirs(text, split_special_tokens=True).input_ids


PATTERNS = {  # tiktoken's, with possessive quantifiers and $, which Hugging Face reads differently
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": LLAMA3_PATTERN,
}


def small_encoding(name, end_of_text="<|endoftext|>"):
    """A tokenizer of bytes with the pattern of a larger one."""
    return byte_tokenizer(PATTERNS.get(name, LLAMA3_PATTERN), [end_of_text], name=name)


AWKWARD = "I'll IT'S 'ſ 1234567 ½²٣ été\r\n\n  \t \n x;;\n\nK漢字🦙\u0301\xa0\u3000 .  \n \n"
AWKWARD += "<|endoftext|>aaaaaaaa ababab  "


@pytest.mark.parametrize("name", PATTERNS)
def test_transformers_and_tiktoken_read_what_we_write_with_the_same_ids(name, tmp_path):
    words = ["aa", "ab", "aaa", "abab", "aab", "34", "234", "12", "123", " x", "  ", "\n\n", "\r\n", "été", "é", ";;"]
    ranks = {bytes([i]): i for i in range(256)} | {word.encode(): 256 + i for i, word in enumerate(words)}
    special = {"<|end_of_text|>": 300, "<|begin_of_text|>": 301} if name == "llama3" else {"<|endoftext|>": 300}
    bos = [301] if name == "llama3" else []
    ours = Tiktoken(tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special))
    write_files(tmp_path, ours.hf_files())
    told = json.loads((tmp_path / "tokenizer_config.json").read_bytes())  # older transformers and llama.cpp
    assert told["clean_up_tokenization_spaces"] is told["add_prefix_space"] is False
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "nanocria_tokenizer": name}))
    (tmp_path / "chat_template.jinja").write_text("of others")
    again = tokenizer_of(tmp_path)
    assert type(again) is Tiktoken and again.special_tokens == ours.special_tokens
    assert again.hf_files() == again.files and again.files["chat_template.jinja"] == b"of others"
    rng = random.Random(0)
    shuffled = ["".join(rng.choices(AWKWARD, k=60)) for _ in range(50)]
    for text in (*TEXTS, AWKWARD, *shuffled):
        assert hf_ids(tmp_path, text) == [*bos, *ours.encode(text)] == [*bos, *again.encode(text)], text
    content = json.loads(ours.hf_files()["tokenizer.json"])
    for changes in ({"normalizer": {"type": "NFC"}}, {"model": content["model"] | {"ignore_merges": False}}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
        assert type(tokenizer_of(tmp_path)) is HuggingFace, "tiktoken would give other ids"


ADDED = ["<think>", "</think>", "foo", "Th e", "é", "THE", " lead", "trail "]


@pytest.mark.parametrize("kind", [byte_level, metaspace, unigram])
def test_added_tokens_have_the_ids_of_transformers_in_texts_and_prompts(kind, tmp_path):
    special = ["<unk>", "<s>", "</s>", "[CLS]"]
    rng = random.Random(0)
    tokenizer = kind(special)
    plain = tokenizer.to_str()
    known = [tokenizer.id_to_token(i) for i in (20, 30)]
    for trial in range(8):
        tokenizer = tokenizers.Tokenizer.from_str(plain)
        folder = tmp_path / str(trial)
        options = ["special", "single_word", "lstrip", "rstrip", "normalized"]
        chosen = [{name: rng.random() < 0.4 for name in options} for _ in ADDED]
        tokenizer.add_tokens([tokenizers.AddedToken(text, **each) for text, each in zip(ADDED, chosen, strict=True)])
        config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": rng.choice([*known, "<think>"])}
        ours = save_tokenizer(folder, tokenizer, **config)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        spelled = {tokenizer.token_to_id(token) for token in special[1:]}
        pieces = {tokenizer.token_to_id(token) for token in known} | spelled
        for _ in range(60):
            parts = [*ADDED, *special[1:], " ", "\n", "a", "the ", "<", "ﬁ", "Ｔ", "e\u0301", *prose(trial, 5).split()]
            text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
            assert ours.encode(text, special=True) == theirs(text, add_special_tokens=False).input_ids, text
            expected = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
            # If special tokens are pieces of the model, transformers gives them even then.
            assert ours.encode(text) == expected or not pieces.isdisjoint(expected), text
            assert spelled.isdisjoint(ours.encode(text)), text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_with_additions_has_another_name_and_the_ids_of_transformers(name, special, tmp_path):
    token = "<|end_of_text|>" if name == "llama3" else "<|endoftext|>"
    write_files(tmp_path, small_encoding(name, token).hf_files())
    (tmp_path / "config.json").write_text(json.dumps({"nanocria_tokenizer": name, "bos_token_id": None}))
    assert get_tokenizer(tmp_path).name == published_name(tmp_path, name) == name
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    theirs.add_tokens([tokenizers.AddedToken("<think>", special=special)])
    theirs.save_pretrained(tmp_path)
    tokenizer = get_tokenizer(tmp_path)
    assert tokenizer.name == published_name(tmp_path, name) != name and tokenizer.n_vocab == 258
    text = f"so <think>it's</think> 12345  {token}\n"
    assert tokenizer.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.encode(text, special=True) == theirs(text, add_special_tokens=False).input_ids
    assert (257 in tokenizer.encode(text)) != special


def test_a_checkpoint_has_the_chat_template_of_its_data_and_not_that_of_its_weights(tmp_path):
    """Also if the data's tokenizer has no tokenizer_config.json, as Meta's, in which llama.cpp looks first."""
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    tokenizer = get_tokenizer("bytes")
    tokenizer.files = {"chat_template.jinja": b"new"}
    meta = write_dataset(tmp_path / "data", [("train", "a"), ("val", "b")], tokenizer)
    files = files_to_save(tmp_path, tmp_path / "data", meta, "bytes")
    assert files["chat_template.jinja"] == b"new" and "chat_template" not in json.loads(files["tokenizer_config.json"])


def test_what_is_null_in_one_file_stands_in_the_other(tmp_path):
    write_hf_folder(tmp_path / "hf", eos_token=None, added_tokens_decoder={})
    (tmp_path / "hf/special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "bos_token": null}')
    assert get_tokenizer(tmp_path / "hf").named_tokens == {"eos_token": "<|im_end|>"}


NAMELESS = json.dumps({"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode()


@pytest.mark.parametrize("file, content, message", [
    ("config.json", b'{"vocab_size": 300}', "no tokenizer.json or tokenizer.model in .*hf download meta-llama"),
    ("tokenizer.json", b'{"a": 1}', "hf/tokenizer.json is damaged, or not"),
    ("tokenizer.json", NAMELESS, "has no end-of-text token: no eos_token, none of .* tokenizer_config.json"),
    ("tokenizer_config.json", b'{"chat_template": [1]}', "expected a text, or a list of {name, template}"),
    ("tokenizer.model", b"\x0a\x0b sentencepiece \xff", "tokenizer.model is not Llama 3's"),
    ("tokenizer.model", b"AA== 0\nAQ== 7\n", "tokenizer.model is damaged or incomplete"),
])  # fmt: skip
def test_a_folder_whose_tokenizer_is_missing_or_damaged_is_a_sentence(file, content, message, tmp_path):
    if file in ("config.json", "tokenizer.model"):
        (tmp_path / "hf").mkdir()
    else:
        write_hf_folder(tmp_path / "hf", eos_token=None if content == NAMELESS else "<|im_end|>")
    (tmp_path / "hf" / file).write_bytes(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        get_tokenizer(tmp_path / "hf")


def test_a_vocabulary_with_a_gap_or_without_added_tokens_is_read(tmp_path):
    write_hf_folder(tmp_path / "hf")
    ids = get_tokenizer(tmp_path / "hf").encode("hello")
    file = tmp_path / "hf/tokenizer.json"
    file.write_text(file.read_text().replace(": 299", ": 999"))
    assert get_tokenizer(tmp_path / "hf").encode("hello") == ids and get_tokenizer(tmp_path / "hf").n_vocab == 1000
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens": []}))
    assert published_name(tmp_path / "hf") == get_tokenizer(tmp_path / "hf").name


def test_a_vocabulary_for_tiktoken_that_lacks_a_byte_is_damaged(tmp_path):
    """tiktoken would end at the first text with that byte, by a panic in Rust."""
    write_files(tmp_path, small_encoding("gpt2").hf_files())
    (tmp_path / "config.json").write_text('{"nanocria_tokenizer": "gpt2"}')
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    del content["model"]["vocab"]["h"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tokenizer.json is damaged"):
        get_tokenizer(tmp_path)


def test_data_for_weights_with_more_rows_than_tokens_has_their_vocab_size(tmp_path):
    """A run takes its vocab_size from the data: with the tokenizer's it would refuse the weights."""
    write_hf_folder(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text('{"vocab_size": 320}')
    documents = [("train", prose(0, 99)), ("val", prose(1, 99))]
    assert write_dataset(tmp_path / "data", documents, get_tokenizer(tmp_path / "hf"))["vocab_size"] == 320
    assert tokenizer_of(tmp_path / "data").n_vocab == 320, "more data with this tokenizer would not fit this"


def test_a_token_beyond_the_rows_of_the_weights_does_not_count_and_its_use_is_an_error(tmp_path):
    """Many of Llama 2's finetunes have a [PAD] that their weights lack: text without it can be learned."""
    write_hf_folder(tmp_path / "hf")
    file = tmp_path / "hf/tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["[PAD]"])
    tokenizer.save(str(file))
    assert get_tokenizer(tmp_path / "hf").n_vocab == 301
    (tmp_path / "hf/config.json").write_text('{"vocab_size": 300}')
    tokenizer = get_tokenizer(tmp_path / "hf")
    documents = [("train", prose(0, 99)), ("val", prose(1, 99))]
    assert write_dataset(tmp_path / "data", documents, tokenizer)["vocab_size"] == 300
    assert tokenizer_of(tmp_path / "data").n_vocab == 300, "more data with this tokenizer would not fit this"
    with pytest.raises(ValueError, match=r"the text has \[PAD\], token 300, but the weights have 300 rows"):
        write_dataset(tmp_path / "data", [*documents, ("train", "[PAD]")], tokenizer)


# Which bos the data has, and whether the published tokenizer puts it before a text.
PUBLISHED = {
    "adds": dict(bos="<s>"), "adds, but says not to": dict(bos="<s>", add_bos_token=False),
    "says to add": dict(bos_token="<s>", add_bos_token=True), "has one": dict(bos_token="<s>"), "none": dict(),
    "has end-of-text": dict(bos_token="<|endoftext|>"),
    "adds another": dict(bos="<s>", bos_token="<|im_start|>", add_bos_token=True),
    "Llama's class": dict(bos="<s>", tokenizer_class="LlamaTokenizer", add_bos_token=True),
    "GPT-2's class": dict(bos_token="<s>", tokenizer_class="GPT2Tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("published", [*PUBLISHED, "llama3", "gpt2", "sentencepiece"])
def test_transformers_begins_texts_as_the_data_does(published, tmp_path):
    name = tmp_path / "hf"
    if published == "llama3":
        name = write_llama3_model(tmp_path / "tokenizer.model", ["he"])
    elif published == "sentencepiece":  # as Llama 2's: transformers builds its own from the vocabulary
        tokenizer = metaspace(["<unk>", "<s>", "</s>"])
        put_first("<s>", tokenizer)
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        save_tokenizer(name, tokenizer, **config)
    elif published == "gpt2":
        write_files(name, small_encoding("gpt2").hf_files())
    else:
        write_hf_folder(name, **PUBLISHED[published])
        (name / "special_tokens_map.json").write_text(json.dumps({"bos_token": PUBLISHED[published].get("bos")}))
    tokenizer = tokenizer_for_data(str(name))
    meta = write_dataset(tmp_path / "data", [("train", "he é"), ("val", "said")], tokenizer)
    config = LlamaConfig(n_layer=1, n_head=1, n_kv_head=1, n_embd=2, ffn_dim=2, vocab_size=600, block_size=8)
    files = hf_files(None, config, meta["tokenizer"], "float32", meta, tmp_path / "data")
    trained = Tokens(tmp_path / "data", "train").shards[0][:].tolist()[:-1]
    write_files(tmp_path / "out", files)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("he é").input_ids == trained
    config = json.loads(files["config.json"])
    assert config["bos_token_id"] == meta.get("bos", meta["end_of_text"])


@pytest.mark.usefixtures("plain_pytorch_on_one_core")
def test_metas_tokenizer_is_found_where_it_is_published_and_becomes_a_tokenizer_json(train, tmp_path):
    """llama.cpp's converter reads a tokenizer.model beside config.json as SentencePiece's, and fails."""
    for published in ("hf/original", "meta"):
        (tmp_path / published).mkdir(parents=True)
        write_llama3_model(tmp_path / published / "tokenizer.model", ["he"])
    (tmp_path / "meta/params.json").write_text("{}")
    (tmp_path / "notes.jsonl").write_text('{"text": "he"}\n{"text": "<|eot_id|> and many more words"}\n')
    for published in ("hf", "meta", "meta/tokenizer.model"):
        meta = text_prepare([tmp_path / "notes.jsonl"], tmp_path / "data", tokenizer=str(tmp_path / published))
        assert (meta["tokenizer"], meta["bos"], list(meta["tokenizer_files"])) == ("llama3", 257, ["tokenizer.model"])
    shutil.rmtree(tmp_path / "meta")
    tokenizer = tokenizer_of(tmp_path / "data")
    assert (tokenizer.eos, tokenizer.named_tokens["bos_token"]) == ([258, 265, 266], "<|begin_of_text|>")
    texts = [Tokens(tmp_path / "data", split).shards[0][:].tolist() for split in ("train", "val")]
    assert sorted(texts, key=len) == [[257, 256, 258], [257, *b"<|eot_id|> and many more words", 258]]
    write_dataset(tmp_path / "data", [("train", prose(0, 200)), ("val", prose(1, 200))], tokenizer)
    train(dataset=tmp_path / "data", max_iters=1)
    checkpoint = tmp_path / "out/step_000001"
    assert (checkpoint / "tokenizer.json").exists() and not (checkpoint / "tokenizer.model").exists()
    assert hf_ids(checkpoint, "he said") == [257, *tokenizer.encode("he said")]
    assert get_tokenizer(tmp_path / "out").encode("he said") == tokenizer.encode("he said")


def test_datasets_and_runs_take_the_tokenizer_along(train, sample, convert_to_hf, tmp_path, plain_pytorch_on_one_core):
    """mask_documents uses its bos; sample.py, transformers and convert.py find it in the checkpoint."""
    write_hf_folder(tmp_path / "hf", bos="<s>")
    texts = [prose(i, 3 + i % 9) + f" é {i}" for i in range(200)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = tmp_path / "data"
    meta = text_prepare([tmp_path / "in.jsonl"], data, tokenizer=str(tmp_path / "hf"), val_fraction=0.2, workers=2)
    expected = get_tokenizer(tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf")
    tokenizer = tokenizer_of(data)
    assert (meta["tokenizer"], meta["bos"]) == (expected.name, 1) == (tokenizer.name, tokenizer.bos)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos == expected.eos
    ids = np.concatenate([Tokens(data, split).shards[0][:] for split in ("train", "val")]).tolist()
    assert ids.count(1) == ids.count(0) == len(texts) and ids[0] == 1
    read_back = tokenizer.decode(ids).removesuffix("<|endoftext|>").split("<|endoftext|>")
    assert sorted(read_back) == sorted("<s>" + text for text in texts)
    run = train(dataset=data, mask_documents=True, n_embd=64, max_iters=2)
    tokens, _, starts = run["make_batch"](run["read_step"](0)[0][1])
    first = (tokens == 1).nonzero().tolist()
    assert first and all(starts[row, i] == i and (i == 0 or tokens[row, i - 1] == 0) for row, i in first)
    assert all(starts[row, i - 1] < i for row, i in first if i)  # the end of text belongs to the document that it ends
    config = json.loads((tmp_path / "out/step_000002/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    for folder in (tmp_path / "out/step_000002", convert_to_hf(tmp_path / "out", folder="converted")):
        copy = tokenizer_of(folder)
        assert (copy.name, copy.bos, copy.eos, copy.files) == (expected.name, 1, [3, 0], tokenizer.files)
        assert hf_ids(folder, "text é") == [1, *expected.encode("text é")]
        text, errors = sample(out_dir=folder, prompt="é <|im_start|>", max_new_tokens=5)
        assert text.startswith("é <|im_start|>") and not errors
    file = data / "tokenizer_config.json"
    file.write_text("{}")
    for message in ("damaged, or another tokenizer's", "missing"):
        with pytest.raises(ValueError, match=f"tokenizer_config.json is {message}: restore"):
            tokenizer_of(data)
        file.unlink(missing_ok=True)


def test_a_run_of_our_own_tokenizer_is_read_by_transformers(alone, tmp_path):
    for text in (*TEXTS, AWKWARD):
        assert hf_ids(alone / "step_000020", text) == list(text.encode())
    ours = tokenizer_of(alone / "step_000020")
    assert (ours.name, ours.bos) == ("bytes", 256)  # its documents start after the end of another
    shutil.copy(alone / "step_000020/config.json", tmp_path)
    made_again = tokenizer_of(tmp_path).hf_files()
    assert made_again["tokenizer.json"] == ours.files["tokenizer.json"], "transformers would put that end first"
    gguf = pytest.importorskip("gguf")  # llama.cpp's converter
    tokens = [(text.decode(), kind.name) for text, _, kind in gguf.LlamaHfVocab(alone / "step_000020").all_tokens()]
    assert tokens.pop(256) == ("<|endoftext|>", "CONTROL") and tokens.pop(32) == ("\u2581", "NORMAL")
    assert tokens == [(f"<0x{i:02X}>", "BYTE") for i in range(256) if i != 32]


# ----------------------------------------------------------------------------------------------------------------------
# Published files


def all_blocks():
    """Strings from every Unicode block that has letters, and awkward mixtures."""
    rng = random.Random(0)
    for first in range(0, 0x110000, 128):
        chars = [chr(i) for i in range(first, first + 128) if not 0xD800 <= i < 0xE000]
        if any(unicodedata.category(char) not in ("Cn", "Co") for char in chars):
            yield "".join(chars)
            yield "".join(char + rng.choice("\n\t 1'sx") for char in rng.sample(chars, len(chars)))
    for _ in range(500):
        yield "".join(rng.choices([*AWKWARD, "'S", "'ll", "  ", "\r\n", "word", "<|endoftext|>"], k=30))


@pytest.mark.real
@pytest.mark.parametrize("name", ["llama3", *OPENAI])
def test_published_vocabularies_give_the_same_ids_as_tokenizer_json(name):
    try:
        ours = get_tokenizer(package_file("llama_models", "llama3/tokenizer.model") if name == "llama3" else name)
    except OSError as error:
        pytest.skip(str(error))
    theirs = tokenizers.Tokenizer.from_str(ours.hf_files()["tokenizer.json"].decode())
    theirs.encode_special_tokens = True
    differing = [s for s in all_blocks() if theirs.encode(s, add_special_tokens=False).ids != ours.encode(s)]
    assert not differing
    if name == "llama3":
        assert (ours.n_vocab, ours.bos, ours.eos) == (128256, 128000, [128001, 128008, 128009])


@pytest.mark.real
@pytest.mark.parametrize("added", [None, {"id": 128256, "content": "<think>"}, {"id": 128002, "content": "<think>"}])
def test_llama3_is_known_by_its_vocabulary_and_with_additions_it_is_another(added, tmp_path):
    """<think> is 128002 in SmolLM3, which takes a reserved token of Llama 3 for it."""
    write_files(tmp_path, get_tokenizer(package_file("llama_models", "llama3/tokenizer.model")).hf_files())
    (tmp_path / "tokenizer.model").unlink()
    content = json.loads((tmp_path / "tokenizer.json").read_bytes())
    if added:
        options = dict.fromkeys(["special", "single_word", "lstrip", "rstrip", "normalized"], False)
        others = [token for token in content["added_tokens"] if token["id"] != added["id"]]
        content["added_tokens"] = sorted([*others, options | added], key=lambda token: token["id"])
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = get_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.name == "llama3") == (published_name(tmp_path) == "llama3") == (not added)
    text = "<think>It's 12345</think> <|eot_id|>"
    assert theirs(text, split_special_tokens=True).input_ids == [128000, *ours.encode(text)]
    assert theirs(text).input_ids == [128000, *ours.encode(text, special=True)]
    assert not added or added["id"] in ours.encode(text)


@pytest.mark.real
def test_smollm2_is_read_as_transformers_reads_it(tmp_path):
    [theirs] = smollm2(tmp_path)
    ours = get_tokenizer(tmp_path)
    assert published_name(tmp_path) == ours.name and (ours.n_vocab, ours.bos, ours.end_of_text) == (49152, None, 0)
    assert ours.eos == [2, 0] and "<|im_start|>" in ours.chat_template
    ids = {s: theirs(s, add_special_tokens=False, split_special_tokens=True).input_ids for s in all_blocks()}
    assert not [s for s in ids if ours.encode(s) != ids[s]]
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    assert ours.encode(prompt, special=True) == theirs(prompt, add_special_tokens=False).input_ids


def test_a_published_folder_has_its_own_tokenizer_whatever_folders_it_holds(tmp_path):
    publish_chat_model(tmp_path)
    (tmp_path / "step_1000").mkdir()
    assert tokenizer_of(tmp_path).special_tokens == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_a_tokenizer_that_cannot_write_all_text_says_so_when_data_is_made(tmp_path, capsys):
    save_tokenizer(tmp_path, tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])), eos_token="b")
    tokenizer_for_data(str(tmp_path))
    assert "cannot write é 漢 🦙: such text is lost" in capsys.readouterr().out
    tokenizer_for_data("bytes")
    assert not capsys.readouterr().out
