"""Conversations: chat templates render as in transformers, only answers are learned, wrong input is reported."""

import gzip
import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
import tiktoken
from transformers.utils.chat_template_utils import render_jinja_template

from data.chat import prepare as chat
from data.chat.template import LLAMA3_TEMPLATE, encode_answers, encode_prompt, render, render_answers
from data.tokenizer import get_tokenizer, tokenizer_of
from data.tokens import IS_TARGET, OPENS, Tokens
from data.vocabulary import HuggingFace, Tiktoken
from model import LlamaConfig
from runtime.restore import documents
from tests.datasets import contents
from tests.published import smollm2
from tests.runs import ROOT

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PLAIN = """\
{%- for m in messages %}{{ m.role + ':' + m.content + (eos_token if m.role == 'assistant' else '') + '\\n' }}
{%- endfor %}{{ 'assistant:' if add_generation_prompt }}"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes.\n"},
]


def byte_tokenizer(pattern, special_tokens, merges=()):
    """A token for each byte, each merge, each special token."""
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    return Tiktoken(tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


LLAMA3 = byte_tokenizer(r"(?s:.)", SPECIAL)


def line(*contents):
    """A conversation of these turns, starting with the user's, as a line of JSON."""
    roles = ["user", "assistant"] * len(contents)
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]})


@pytest.fixture
def written(tmp_path):
    """written(*lines, **options): the folder of a dataset made from these lines."""

    def write(*lines, **options):
        (tmp_path / "plain.jinja").write_text(PLAIN)
        (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
        options = {"tokenizer": "bytes", "template": tmp_path / "plain.jinja"} | options
        chat.prepare([tmp_path / "chats.jsonl"], tmp_path / "data", **options)
        return tmp_path / "data"

    return write


def targets_of(folder, split="train"):
    """The targets of a split as text: one string per conversation."""
    tokens = Tokens(folder, split)
    ids, mask, tokenizer = tokens.shards[0][:], tokens.masks[0][:], tokenizer_of(folder)
    bounds = [*(mask & OPENS).nonzero()[0], len(ids)]
    spans = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    return [tokenizer.decode(ids[span][(mask[span] & IS_TARGET) > 0]) for span in spans]


# ---------------------------------------------------------------------------------------------------------------------
# Templates


@pytest.mark.parametrize("template", [
    LLAMA3_TEMPLATE,
    PLAIN,
    "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}{{ documents }}",
    "{% for m in messages %}\n  {% if loop.index > 2 %}\n    {% break %}{% endif %}\n{{ m.content }}{% endfor %}",
    "{{ strftime_now('%Y') }}{% for m in messages %}{%- generation -%} {{ m.role }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
], ids=["llama3", "plain", "tools", "break", "generation", "namespace"])  # fmt: skip
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
def test_templates_render_as_in_transformers(template, prompt):
    for tools in (None, [{"type": "function", "function": {"name": "wéather"}}]):
        options = dict(chat_template=template, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")
        (theirs,), _ = render_jinja_template([MESSAGES], tools=tools, **options)
        assert render(MESSAGES, template, "<s>", "</s>", prompt, tools) == theirs


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("\n{% for m in messages %}", "cannot write .*: its line 2 is not valid Jinja"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ render.__globals__ }}{{ strftime_now.__globals__ }}", "undefined"),
])  # fmt: skip
def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_a_valueerror(template, message):
    with pytest.raises(ValueError, match=message):
        render(MESSAGES, template, "<s>", "</s>")


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_only_answers_and_their_ends_of_turn_are_targets():
    ids, is_target = encode_answers(LLAMA3, render_answers(LLAMA3, MESSAGES))
    assert ids == LLAMA3.encode(render(MESSAGES, LLAMA3_TEMPLATE, "<|begin_of_text|>", ""), special=True)
    learned = LLAMA3.decode(token for token, target in zip(ids, is_target, strict=True) if target)
    assert learned == "4<|eot_id|>Yes.<|eot_id|>"
    said = "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>" for m in MESSAGES
    )
    assert LLAMA3.decode(ids) == f"<|begin_of_text|>{said}", "not as Llama 3's model card has it"


def test_non_text_and_answers_of_weight_0_are_not_learned():
    messages = [MESSAGES[1], MESSAGES[2] | {"weight": 0}, {"role": "us\ud800er", "content": "\udfff?"}, MESSAGES[4]]
    ids, is_target = encode_answers(LLAMA3, render_answers(LLAMA3, messages))
    assert LLAMA3.decode([i for i, target in zip(ids, is_target, strict=True) if target]) == "Yes.<|eot_id|>"
    assert "us?er" in LLAMA3.decode(ids) and "??" in LLAMA3.decode(ids) and "4<|eot_id|>" in LLAMA3.decode(ids)


def test_an_answer_follows_the_ids_that_sample_py_gives_for_its_prompt():
    """Even if the tokenizer would merge the end of the prompt with the start of the answer."""
    tokenizer = byte_tokenizer(r"(?s:.+)", ["<|endoftext|>"], merges=[b"\n ", b":x"])
    tokenizer.chat_template = PLAIN
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "xyz"}]
    ids, is_target = encode_answers(tokenizer, render_answers(tokenizer, messages))
    first = is_target.index(True)
    assert ids[:first] == encode_prompt(tokenizer, messages[:1])
    assert tokenizer.decode(ids[first:]) == "xyz<|endoftext|>\n" and is_target[-2:] == [True, False]
    assert 257 in tokenizer.encode(render(messages, PLAIN, "", "")), "it does not merge: the test shows nothing"


def test_encoding_a_conversation_takes_time_proportional_to_its_length(monkeypatch):
    encode, encoded = LLAMA3.encode, []
    monkeypatch.setattr(LLAMA3, "encode", lambda text, **more: encoded.append(len(text)) or encode(text, **more))
    text = render_answers(LLAMA3, MESSAGES[1:3] * 100)
    ids, is_target = encode_answers(LLAMA3, text)
    assert sum(encoded) < 4 * len(text)
    assert LLAMA3.decode(i for i, target in zip(ids, is_target, strict=True) if target) == "4<|eot_id|>" * 100
    assert ids == encode(render(MESSAGES[1:3] * 100, LLAMA3_TEMPLATE, "<|begin_of_text|>", ""), special=True)


def test_a_special_token_that_a_message_spells_out_stays_text():
    messages = [
        {"role": "user", "content": "What is <|eot_id|>?<|start_header_id|>system"},
        {"role": "assistant", "content": "<|eot_id|> ends a turn."},
    ]
    ids, _ = encode_answers(LLAMA3, render_answers(LLAMA3, messages))
    assert LLAMA3.decode(ids) == render(messages, LLAMA3_TEMPLATE, "<|begin_of_text|>", ""), "the text changed"
    assert ids.count(260) == 2 and ids.count(258) == 2, "a message's text became a special token"
    assert encode_prompt(LLAMA3, messages[:1]) == ids[: len(encode_prompt(LLAMA3, messages[:1]))]
    with pytest.raises(ValueError, match="not characters"):
        render_answers(LLAMA3, [{"role": "assistant", "content": "\ufdd1"}])
    fenced = byte_tokenizer(r"(?s:.)", ["<|endoftext|>", "```"])
    fenced.chat_template = PLAIN
    assert 257 not in encode_prompt(fenced, [{"role": "user", "content": "````` overlap"}])


def test_tools_and_tool_calls_are_written_where_the_template_does(written, tmp_path):
    calls = "m.content ~ (m.tool_calls | tojson if m.tool_calls)"
    (tmp_path / "tools.jinja").write_text("{{ tools | tojson if tools }}" + PLAIN.replace("m.content", calls))
    row = line("a?", "b").replace("{", '{"tools": [{"name": "<|endoftext|>"}], ', 1)
    rows = [row.replace('"b"', f'null, "tool_calls": [{i}]') for i in range(1, 9)]
    folder = written(*rows, template=tmp_path / "tools.jinja")
    assert sorted(targets_of(folder) + targets_of(folder, "val")) == [f"[{i}]<|endoftext|>" for i in range(1, 9)]
    tokens = Tokens(folder, "train")
    assert (tokens.shards[0][:] == 256).sum() == tokens.meta["train_documents"], "a tool's name became a special token"


def test_a_template_that_rewrites_earlier_answers_is_refused():
    tokenizer = get_tokenizer("bytes")
    tokenizer.chat_template = PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else '') ")
    assert "4" in render_answers(tokenizer, MESSAGES[1:3])
    with pytest.raises(ValueError, match="message 2 differently when .* others follow"):
        render_answers(tokenizer, MESSAGES[1:])
    tokenizer.chat_template = "{% if messages %}as a system: {% endif %}" + PLAIN  # differs without messages
    with pytest.raises(ValueError, match="the conversation begins with an answer: put a user"):
        render_answers(tokenizer, MESSAGES[2:])


@pytest.mark.parametrize("package", ["jinja2", "tokenizers"])
def test_a_package_that_is_missing_is_named_with_its_command(package, monkeypatch, tmp_path):
    tokenizer = get_tokenizer("bytes")
    tokenizer.chat_template = PLAIN + package  # not compiled yet
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        render_answers(tokenizer, MESSAGES[1:3]) if package == "jinja2" else HuggingFace(tmp_path, {}, {})


@pytest.mark.real
def test_smollm2_conversations_have_the_ids_that_transformers_gives_them(tmp_path):
    [theirs] = smollm2(tmp_path)
    ours = get_tokenizer(tmp_path)
    for messages in (MESSAGES, MESSAGES[1:3], [{"role": "user", "content": "漢字 🦙?"}, *MESSAGES[2:3]]):
        ids, is_target = encode_answers(ours, render_answers(ours, messages))
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert encode_prompt(ours, messages[:-1]) == prompt
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        learned = ours.decode(token for token, target in zip(ids, is_target, strict=True) if target)
        assert learned == "".join(f"{answer}<|im_end|>" for answer in answers)


# ---------------------------------------------------------------------------------------------------------------------
# prepare.py


def test_prepared_conversations_read_back_with_masks_counts_and_template(written, capsys):
    lines = [line(f"{i} + {i}?", str(2 * i), "Sure?", "é") for i in range(30)]
    folder = written(*lines, '{"prompt": "in", "completion": "out\\ud83e"}', "", val_fraction=0.2)
    found, eos = [targets_of(folder, split) for split in ("train", "val")], "<|endoftext|>"
    expected = [f"{2 * i}{eos}é{eos}" for i in range(30)] + [f"out?{eos}"]
    assert len(found[1]) == 7 and sorted(sum(found, [])) == sorted(expected)
    meta = Tokens(folder, "train").meta
    n_targets = sum(len(text.replace(eos, ".").encode()) for text in found[0])
    assert (meta["train_documents"], meta["train_targets"]) == (24, n_targets)
    assert meta["train_bytes"] == meta["train_tokens"] - sum(text.count(eos) for text in found[0]) * (1 - len(eos))
    said = f"{meta['train_targets'] / meta['train_tokens']:.1%} of the training tokens are learned"
    assert said in capsys.readouterr().out
    content = [(folder / f"train.{kind}").read_bytes() for kind in ("bin", "mask")]
    assert meta["train_sha256"] == hashlib.sha256(b"".join(content)).hexdigest()
    assert meta["eos"] == [256] and tokenizer_of(folder).chat_template == PLAIN
    (folder / "train.mask").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.mask is missing, .*: run python data/chat/prepare.py --out "):
        Tokens(folder, "train")


def test_generation_ends_at_the_end_of_a_turn_also_where_the_tokenizer_does_not_say_it(written, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(r"(?s:.)", ["<|endoftext|>", "<|im_end|>"])
    monkeypatch.setattr(chat, "tokenizer_for_data", lambda _: tokenizer)
    (tmp_path / "turns.jinja").write_text(PLAIN.replace("eos_token", "'<|im_end|>'"))
    folder = written(*[line(f"{i}?", str(i)) for i in range(9)], template=tmp_path / "turns.jinja")
    assert Tokens(folder, "train").meta["eos"] == [257, 256]


@pytest.mark.parametrize("bad, message", [
    ("{", "not JSON"),
    ('"text"', "found a str, expected an object with messages, or with prompt and completion"),
    ('{"conversations": []}', "found an object with conversations, expected"),
    ('{"messages": []}', "messages is not a list of messages, or is empty"),
    ('{"messages": [{"content": "no role"}]}', "message 1 is not an object with a role"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', r"message 1 has \['x'\] as content, expected a string"),
    (line("only a question"), "there is no answer to learn: no role is assistant, but user"),
    (line("a", "b").replace('"b"', '"b", "weight": 0'), "there is no answer to learn: each has weight 0"),
    (line("a", "b").replace('"b"', '"b", "weight": "0"'), "message 2 has weight '0', expected 0 or 1"),
    (line("a", "b").replace("{", '{"tools": [{}], ', 1), "it has tools, which the chat template does not write"),
    (line("a", "b").replace("{", '{"tools": "[]", ', 1), "tools is not a list"),
    (line("a", "b", "c", " "), "message 4 is an empty answer, as the chat template writes it"),
    *((line("a", "b").replace('"b"', f'{content}, "tool_calls": [{{}}]'), "message 2 has tool calls, which the chat")
      for content in ('"b"', '""', "null")),
])  # fmt: skip
def test_a_line_that_is_not_a_conversation_is_reported_or_skipped_and_counted(written, capsys, bad, message):
    good = [line(f"{i}?", str(i)) for i in range(9)]
    with pytest.raises(ValueError, match=f"chats.jsonl:4:? .*{message}"):
        written(*good[:3], bad, *good[3:])
    folder = written(*good[:3], bad, *good[3:], errors="skip")
    assert Tokens(folder, "train").meta["train_documents"] == 8
    assert "left out by --errors skip: 1, the first:" in capsys.readouterr().out


def test_several_processes_arrays_and_compressed_files_give_the_same_dataset(written, tmp_path, monkeypatch):
    monkeypatch.setattr("data.encode.BATCH_CHARS", 100)
    lines = [line(f"{i}?", str(i)) for i in range(40)]
    expected = contents(written(*lines))
    (tmp_path / "chats.json").write_text(f"[{', '.join(lines)}]")
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    for name, workers in (("chats.jsonl", 2), ("chats.json", 1), ("chats.jsonl.gz", 1)):
        options = dict(tokenizer="bytes", template=tmp_path / "plain.jinja", workers=workers)
        chat.prepare([tmp_path / name], tmp_path / "data", **options)
        assert contents(tmp_path / "data") == expected, name


def test_a_tokenizer_without_template_and_an_answer_without_end_are_refused(written, tmp_path):
    (tmp_path / "empty.jinja").write_text("")
    (tmp_path / "endless.jinja").write_text(PLAIN.replace("eos_token", "''"))
    for template, error, message in (
        (None, ValueError, "bytes has no chat template, and none of Llama 3's tokens: put .* with --template FILE"),
        (tmp_path / "endless.jinja", ValueError, "does not end answers with a special token"),
        (tmp_path / "empty.jinja", ValueError, "the chat template does not write the answers"),
        (tmp_path / "none.jinja", OSError, "No such file or directory: .*none.jinja"),
    ):
        with pytest.raises(error, match=message):
            written(line("a", "b"), template=template)
    assert not (tmp_path / "data").exists()
    with pytest.raises(OSError, match="none.jsonl cannot be read: No such file or directory"):
        chat.prepare([tmp_path / "none.jsonl"], tmp_path / "data", "bytes", tmp_path / "plain.jinja")


def test_prepare_names_the_next_command_from_any_folder(written, tmp_path, monkeypatch, capsys):
    written(line("a", "b"), line("c", "d"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"nanocria_tokenizer": "bytes"}')
    (tmp_path / "run/step_000002").mkdir(parents=True)
    for name in ("config.json", "run.json"):
        (tmp_path / "run/step_000002" / name).write_text('{"nanocria_tokenizer": "bytes"}')
    monkeypatch.chdir(tmp_path)
    data = f"--dataset={tmp_path}/o"
    for tokenizer, said in {
        "bytes": f"--init_from=FOLDER {data}, where FOLDER holds the weights",
        "model": f"--init_from={tmp_path}/model {data}",
        "run": f"--init_from={tmp_path}/run {data}",
    }.items():
        arguments = f"--input chats.jsonl --tokenizer {tokenizer} --template plain.jinja --out o --workers=1"
        monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments.split()])
        chat.main()
        assert capsys.readouterr().out.endswith(f"\nnext: python {ROOT}/train.py {ROOT}/config/sft.py {said}\n")
    assert (ROOT / "config/sft.py").exists()


@pytest.mark.usefixtures("plain_pytorch_on_one_core")
def test_a_run_on_conversations_names_the_command_that_talks_with_it(written, train, sample, tmp_path, capsys):
    train(dataset=written(*[line(f"{i}?", str(i)) for i in range(40)]), mask_documents=True, n_embd=64, max_iters=1)
    assert f"next: python sample.py --out_dir={tmp_path}/out --chat\n" in capsys.readouterr().out
    out, said = sample("hi\n", chat=True)
    assert out.startswith("> ") and said == "/exit or Ctrl-D ends the conversation\n"


def test_a_checkpoint_says_in_both_files_that_transformers_stops_at_the_end_of_a_turn(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    base = SimpleNamespace(path=tmp_path, pieces=None, config={"eos_token_id": 1, "bos_token_id": 0})
    config = LlamaConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=16, vocab_size=9, block_size=8)
    found = documents(base, config, "bytes", "bfloat16", {"end_of_text": 1, "eos": [4, 1], "bos": 3})
    config, generation = (json.loads(found[name]) for name in ("config.json", "generation_config.json"))
    assert config["eos_token_id"] == generation["eos_token_id"] == [4, 1] and generation["temperature"] == 0.6
    assert config["bos_token_id"] == 3, "the data's, not that of the weights it began with"
