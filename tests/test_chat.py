"""Conversations: chat templates render as in transformers, only answers are learned, wrong input is reported."""

import copy
import hashlib
import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from data.chat import prepare as chat
from data.chat.formats import Seen, read_row
from data.chat.template import LLAMA3_TEMPLATE, encode_answers, encode_prompt, guarded, inputs_of, render_answers, write
from data.files import write_json
from data.tokenizer import get_tokenizer, tokenizer_of
from data.tokens import IS_DOC_START, IS_TARGET, Tokens
from model import LlamaConfig
from runtime.hf import hf_files
from tests.datasets import byte_tokenizer, save_tokenizer
from tests.published import CHATML, publish_chat_model, smollm2

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
LLAMA3 = byte_tokenizer(r"(?s:.)", SPECIAL)
BOS = {"bos_token": "<|begin_of_text|>"}


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
    ids = tokens.shards[0][:]
    mask = tokens.masks[0][:]
    bounds = [*(mask & IS_DOC_START).nonzero()[0], len(ids)]
    spans = [slice(*pair) for pair in itertools.pairwise(bounds)]
    return [tokenizer_of(folder).decode(ids[span][(mask[span] & IS_TARGET) > 0]) for span in spans]


def learned_of(tokenizer, ids, is_target):
    """The texts that are learned."""
    spans = itertools.groupby(zip(ids, is_target, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode(token for token, _ in span) for target, span in spans if target]


@pytest.fixture(scope="module")
def fast():
    """A tokenizer of transformers: bytes, and the special tokens of ChatML."""
    with tempfile.TemporaryDirectory() as folder:
        yield publish_chat_model(Path(folder))[1]


@pytest.fixture
def reads(fast, tmp_path):
    """reads(template, row): the text that we learn from a row, without marks; reads.learned: the parts that are."""

    def read(template, row):
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "tokenizer")
        tokenizer = get_tokenizer(tmp_path / "tokenizer")
        [(_, text)] = chat.render_rows([("row", json.loads(json.dumps(row)))], tokenizer, refuse, Seen())
        read.ids, read.is_target = encode_answers(tokenizer, text)
        read.learned = learned_of(tokenizer, read.ids, read.is_target)
        return tokenizer.decode(read.ids)

    return read


def refuse(sentence):
    raise ValueError(sentence)


# ---------------------------------------------------------------------------------------------------------------------
# Templates


@pytest.mark.parametrize("template", [
    LLAMA3_TEMPLATE,
    "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}{{ documents }}",
    "{% for m in messages %}\n  {% if loop.index > 2 %}\n    {% break %}{% endif %}\n{{ m.content }}{% endfor %}",
    "{{ strftime_now('%Y') }}{% for m in messages %}{%- generation -%} {{ m.role }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
], ids=["llama3", "tools", "break", "generation", "namespace"])  # fmt: skip
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
def test_templates_render_as_in_transformers(template, prompt):
    tokenizer = byte_tokenizer(".", SPECIAL, template=template)
    tokenizer.named_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    options = dict(chat_template=template, add_generation_prompt=prompt, **tokenizer.named_tokens)
    for tools in (None, [{"type": "function", "function": {"name": "wéather"}}]):
        [expected], _ = render_jinja_template([MESSAGES], tools=tools, **options)
        inputs = inputs_of(tokenizer, MESSAGES, {"tools": tools}) | {"add_generation_prompt": prompt}
        assert write(template, inputs) == expected


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("\n{% for m in messages %}", "cannot be compiled at line 2"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ render.__globals__ }}{{ strftime_now.__globals__ }}", "undefined"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled: maximum recursion depth"),
])  # fmt: skip
def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_a_valueerror(template, message):
    with pytest.raises(ValueError, match=message):
        render_answers(byte_tokenizer(".", SPECIAL, template=template), MESSAGES)


@pytest.mark.parametrize("options", ["true", "false, 2", "indent=4", "true, none, ('; ', '= ')", "sort_keys=true"])
def test_tojson_writes_what_that_of_transformers_writes(reads, fast, options):
    template = "{% for m in messages %}{{ m | tojson(OPTIONS) }}{% generation %}{{ eos_token }}{% endgeneration %}"
    template = template.replace("OPTIONS", options) + "{% endfor %}"
    content = "<|im_end|> é 漢 🦙 \u2028 \\ufdd0 <>&'\""
    messages = [Q | {"content": content}, A | {"name": content}]
    theirs = fast.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert reads(template, {"messages": messages}) == theirs
    assert reads.ids.count(258) == 2, "a message's text became a special token"


def test_a_template_has_every_named_token_that_it_has_in_transformers(tmp_path):
    names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ [" + ", ".join([*names, "tool_token"]) + "] }}"
    _, fast = publish_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    for tokens in (
        {"unk_token": "<|endoftext|>", "sep_token": None},
        {"cls_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "image_token": "a", "bos_token": None},
        {"mask_token": "b", "extra_special_tokens": {"tool_token": "<|im_start|>"}},
        {"additional_special_tokens": ["a"], "eos_token": "<|endoftext|>"},
    ):
        path = tmp_path / "tokenizer_config.json"
        changed = json.loads(path.read_text()) | tokens
        path.write_text(json.dumps(changed))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = get_tokenizer(tmp_path)
        assert ours.decode(encode_prompt(ours, [Q])) == theirs.apply_chat_template([Q], tokenize=False)


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_only_answers_and_their_ends_of_turn_are_targets():
    ids, is_target = encode_answers(LLAMA3, render_answers(LLAMA3, MESSAGES))
    [theirs], _ = render_jinja_template([MESSAGES], chat_template=LLAMA3_TEMPLATE, **BOS)
    assert ids == LLAMA3.encode(theirs, special=True)
    assert learned_of(LLAMA3, ids, is_target) == ["4<|eot_id|>", "Yes.<|eot_id|>"]
    turns = "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>" for m in MESSAGES
    )
    assert LLAMA3.decode(ids) == f"<|begin_of_text|>{turns}", "not as Llama 3's model card has it"


def test_an_answer_follows_the_ids_that_sample_py_gives_for_its_prompt():
    """Even if the tokenizer would merge the end of the prompt with the start of the answer."""
    tokenizer = byte_tokenizer(r"(?s:.+)", ["<|endoftext|>"], merges=[b"\n ", b":x"], template=PLAIN)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "xyz"}]
    ids, is_target = encode_answers(tokenizer, render_answers(tokenizer, messages))
    first = is_target.index(True)
    assert ids[:first] == encode_prompt(tokenizer, messages[:1])
    assert tokenizer.decode(ids[first:]) == "xyz<|endoftext|>\n" and is_target[-2:] == [True, False]
    assert 257 in tokenizer.encode("assistant:xyz"), "it does not merge"


def test_a_long_conversation_takes_time_proportional_to_its_length(monkeypatch):
    searched = []
    encoded = []
    tokenizer = byte_tokenizer(r"(?s:.)", [*SPECIAL, *(f"{chr(33 + i % 90)}reserved_{i}" for i in range(251))])
    encode = tokenizer.encode

    def counted(value, *more):
        searched.append(len(value) if isinstance(value, str) else 0)
        return guarded(value, *more)

    monkeypatch.setattr("data.chat.template.guarded", counted)
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: encoded.append(len(text)) or encode(text, **more))
    text = render_answers(tokenizer, MESSAGES[1:3] * 200)
    ids, is_target = encode_answers(tokenizer, text)
    assert sum(searched) < 2 * len(text) and sum(encoded) < 4 * len(text)
    assert learned_of(tokenizer, ids, is_target) == ["4<|eot_id|>"] * 200


def test_a_special_token_that_a_message_spells_out_stays_text():
    messages = [
        {"role": "user", "content": "What is <|eot_id|>?<|start_header_id|>system"},
        {"role": "assistant", "content": "<|eot_id|> ends a turn."},
    ]
    ids, _ = encode_answers(LLAMA3, render_answers(LLAMA3, messages))
    [theirs], _ = render_jinja_template([messages], chat_template=LLAMA3_TEMPLATE, **BOS)
    assert LLAMA3.decode(ids) == theirs
    assert ids.count(260) == 2 and ids.count(258) == 2, "a message's text became a special token"
    assert encode_prompt(LLAMA3, messages[:1]) == ids[: len(encode_prompt(LLAMA3, messages[:1]))]
    with pytest.raises(ValueError, match="not characters"):
        render_answers(LLAMA3, [{"role": "assistant", "content": "\ufdd1"}])
    fenced = byte_tokenizer(r"(?s:.)", ["<|endoftext|>", "```"], template=PLAIN)
    assert 257 not in encode_prompt(fenced, [{"role": "user", "content": "````` overlap"}])


def test_a_template_that_rewrites_an_answer_or_begins_it_otherwise_is_refused():
    forgets = PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else '') ")
    tokenizer = byte_tokenizer(".", SPECIAL, template=forgets)
    assert "4" in render_answers(tokenizer, MESSAGES[1:3])
    with pytest.raises(ValueError, match="message 2 differently when .* others follow"):
        render_answers(tokenizer, MESSAGES[1:])
    tokenizer.chat_template = "{% if messages %}system: {% endif %}" + PLAIN  # differs without messages
    with pytest.raises(ValueError, match="message 1 differently"):
        render_answers(tokenizer, MESSAGES[2:])
    tokenizer.chat_template = PLAIN.replace("'assistant:' if", "'assistant:<think>' if")  # writes no such thought
    with pytest.raises(ValueError, match="message 2 differently when it is to be answered, by 'assistant:<think>'"):
        render_answers(tokenizer, MESSAGES[1:3])


def test_a_template_that_begins_another_answer_after_every_conversation_is_refused_and_answers_prompts():
    """As the first one of Llama 3 Instruct: its last answer would end with the beginning of another."""
    always = LLAMA3_TEMPLATE.replace("if add_generation_prompt", "if true")
    tokenizer = byte_tokenizer(r"(?s:.)", SPECIAL, template=always)
    with pytest.raises(ValueError, match="begins another answer after every conversation"):
        render_answers(tokenizer, MESSAGES[:3])
    assert encode_prompt(tokenizer, MESSAGES[:2]) == encode_prompt(LLAMA3, MESSAGES[:2])
    tokenizer.chat_template = PLAIN.replace("'assistant:' if add_generation_prompt", "''")  # Mistral's begin none
    assert "4" in render_answers(tokenizer, MESSAGES[:3])


@pytest.mark.real
def test_smollm2_conversations_have_the_ids_that_transformers_gives_them(tmp_path):
    [theirs] = smollm2(tmp_path)
    ours = get_tokenizer(tmp_path)
    for messages in (MESSAGES, MESSAGES[1:3], [{"role": "user", "content": "漢字 🦙?"}, *MESSAGES[2:3]]):
        ids, is_target = encode_answers(ours, render_answers(ours, messages))
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert encode_prompt(ours, messages[:-1]) == prompt
        answers = [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
        assert learned_of(ours, ids, is_target) == answers


# ---------------------------------------------------------------------------------------------------------------------
# Formats. Templates in the style of published ones.

QWEN = """\
{{- 'think' if thinks else bos_token }}
{%- for document in documents or [] %}
    {{- document.text }}
{%- endfor %}
{%- macro call_text(call) %}
<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}</tool_call>
{%- endmacro %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + (' ' + message.name if 'name' in message else '') + '\\n' }}
    {%- if message.reasoning_content is defined %}
        {{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' }}
    {%- endif %}
    {{- message.content if message.content is string }}
    {%- for part in message.content if message.content is not string %}
        {{- part.text }}
    {%- endfor %}
    {%- if message.tool_calls is defined %}
        {{- '<calls>' }}
        {%- for call in message.tool_calls %}
            {{- call_text(call.function if call.function else call) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
DEEPSEEK = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' }}
    {%- for call in message.tool_calls %}
        {{- call.function.name + '(' + call.function.arguments + ')' }}{{ call.function.arguments }}
    {%- endfor %}
    {{- message.content + '<|eot|>' if message.content }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
Q = {"role": "user", "content": "a?"}
A = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Rain?"}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
FOUND = {"role": "tool", "content": "dry"}
ANSWERED = {"role": "assistant", "content": "No."}
BARE_CALL = CALL | {"arguments": json.dumps(CALL["arguments"])}
CALLS = [ASKED, CALLED, FOUND, ANSWERED]


def called(arguments):
    return [
        ASKED,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL | {"arguments": arguments}}]},
    ]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def share(*names_and_values, **more):
    return {"conversations": [{"from": name, "value": value} for name, value in names_and_values]} | more


def with_nulls(value):
    """A row as tables have it: keys that it or a message lacks are null."""
    nulls = ["name", "content", "tool_calls", "reasoning_content", "thinking", "function", "weight", "tools", "system"]
    row = dict.fromkeys(nulls) | value
    for name in {"messages", "conversations", "prompt", "completion"} & row.keys():
        if isinstance(row[name], list):
            row[name] = [dict.fromkeys(nulls) | message for message in row[name]]
    return row


ROWS = {  # name: a row, its messages, what else transformers is given
    "messages": ({"messages": MESSAGES}, MESSAGES, {}),
    "tools": ({"messages": CALLS, "tools": [TOOL]}, CALLS, {"tools": [TOOL]}),
    "last call": ({"messages": CALLS[:2], "tools": json.dumps([TOOL])}, CALLS[:2], {"tools": [TOOL]}),
    "arguments as JSON": ({"messages": called(json.dumps(CALL["arguments"]))}, CALLS[:2], {}),
    "nulls inside": ({"messages": called({"city": None}), "tools": [TOOL | {"strict": None}]},
                     called({"city": None}), {"tools": [TOOL | {"strict": None}]}),
    "arguments that are not JSON": ({"messages": called("{")}, called("{"), {}),
    "a bare call": ({"messages": [ASKED, {"role": "assistant", "tool_calls": [BARE_CALL]}]}, CALLS[:2], {}),
    "no calls": ({"messages": [Q, A | {"tool_calls": []}], "tools": []}, [Q, A], {}),
    "reasoning": ({"messages": [Q, A | {"reasoning_content": "c"}]}, [Q, A | {"reasoning_content": "c"}], {}),
    "parts": ({"messages": [Q | {"content": parts("a", "?")}, A | {"content": parts("b")}]}, [Q, A], {}),
    "more variables": ({"messages": [Q, A], "chat_template_kwargs": {"thinks": 1, "bos_token": "mine"}}, [Q, A],
                       {"thinks": 1, "bos_token": "mine"}),
    "documents": ({"messages": [Q, A], "chat_template_kwargs": '{"documents": [{"text": "<|im_end|>"}]}'}, [Q, A],
                  {"documents": [{"text": "<|im_end|>"}]}),
    "prompt and completion": ({"prompt": "a?", "completion": "b"}, [Q, A], {}),
    "lists": ({"prompt": [SYSTEM, Q], "completion": [A], "tools": [TOOL]}, [SYSTEM, Q, A], {"tools": [TOOL]}),
    "ShareGPT": (share(("human", "a?"), ("gpt", "b")), [Q, A], {}),
    "two systems": (share(("system", "Be brief."), ("human", "a?"), ("gpt", "b"), system="-"), [SYSTEM, Q, A], {}),
    "axolotl's": ({"conversations": [Q, A], "system": ""}, [Q, A], {}),
    "ShareGPT's tools": (
        share(("human", "Rain?"), ("function_call", json.dumps(CALL)), ("observation", "dry"), ("gpt", "No."),
              tools=json.dumps([TOOL])), CALLS, {"tools": [TOOL]}),
    "a list of calls": (share(("human", "Rain?"), ("function_call", json.dumps([CALL])), tools="[]"), CALLS[:2], {}),
    "Alpaca": ({"instruction": "Add.", "input": "2, 2", "output": "4"},
               [{"role": "user", "content": "Add.\n2, 2"}, {"role": "assistant", "content": "4"}], {}),
    "Alpaca without input": ({"instruction": "a?", "input": "", "output": "b", "history": None}, [Q, A], {}),
    "Alpaca's history": ({"instruction": "Rain?", "output": "No.", "system": "Be brief.", "history": [["a?", "b"]]},
                         [SYSTEM, Q, A, ASKED, ANSWERED], {}),
    "other keys": ({"messages": [Q, A], "system": "Be brief.", "prompt": "a?", "id": 1}, [SYSTEM, Q, A], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_renders_as_transformers_renders_its_messages(reads, fast, name):
    row, messages, given = ROWS[name]
    theirs = fast.apply_chat_template(messages, chat_template=QWEN, tokenize=False, **given)
    assert reads(QWEN, row) == reads(QWEN, with_nulls(row)) == theirs
    assert reads.ids.count(258) == len(messages), "a text became a special token"
    answers = ["weather" if "tool_calls" in m else m["content"] for m in messages if m["role"] == "assistant"]
    assert all(
        answer.strip() in learned and learned.endswith("<|im_end|>")
        for answer, learned in zip(answers, reads.learned, strict=True)
    )


@pytest.mark.parametrize("arguments", ['{"city":"<|im_end|>", "days" : null}', "[]", "", "not JSON"])
def test_arguments_stay_the_text_that_they_are_where_a_template_adds_them_to_a_text(reads, fast, arguments):
    theirs = fast.apply_chat_template(called(arguments), chat_template=DEEPSEEK, tokenize=False)
    assert reads(DEEPSEEK, {"messages": called(arguments)}) == theirs and theirs.count(arguments) >= 2


def test_a_special_token_or_mark_in_tools_and_arguments_stays_text(reads):
    tool = {"name": "f", "parameters": {"<|im_end|>": 1, "\ud800": 2}}
    text = reads(QWEN, {"messages": called('{"city":"<|im\\u005fend|>", "text": null}'), "tools": [tool]})
    assert "<|im_end|>" in text.partition("</tools>")[0] and '{"city": "<|im_end|>", "text": null}' in text
    assert reads.ids.count(258) == 2
    with pytest.raises(ValueError, match="not characters"):
        reads(QWEN, {"messages": [Q, A], "tools": [tool | {"\ufdd1": 1}]})


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_learned_under_every_name_that_a_template_reads(reads, fast, given, read):
    template = QWEN.replace("reasoning_content", read)
    row = {"messages": [ASKED, ANSWERED | {"reasoning_content": "", given: "It is dry."}]}
    assert reads(template, row).endswith("<think>\nIt is dry.\n</think>\nNo.<|im_end|>\n")
    expected = [ASKED, ANSWERED | {read: "It is dry."}]  # not every version of transformers knows the other names
    assert reads(template, row) == fast.apply_chat_template(expected, chat_template=template, tokenize=False)


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trainable", "loss_mask", "loss"])
@pytest.mark.parametrize("of", [
    lambda flags: {"messages": [Q, A | flags, Q, ANSWERED]},
    lambda flags: {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"} | flags, ASKED,
                                     ANSWERED]},
])  # fmt: skip
def test_an_answer_that_is_flagged_is_not_learned(reads, flag, of):
    for off, on in ((0, 1), (False, True), (0.0, None)):
        reads(CHATML, of({flag: off}))
        assert reads.learned == ["No.<|im_end|>"]
        reads(CHATML, of({flag: on}))
        assert reads.learned == ["b<|im_end|>", "No.<|im_end|>"]
    with pytest.raises(ValueError, match=rf"row: message 2 has .*{flag}"):
        reads(CHATML, of({flag: 0.5}))


MARKED = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- m.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def test_what_a_template_marks_is_what_follows_the_prompts(reads, fast):
    for messages in (MESSAGES[1:4] + [ANSWERED], [Q, A]):
        options = dict(chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True)
        theirs = fast.apply_chat_template(messages, **options)
        reads(MARKED, {"messages": messages})
        assert reads.ids == theirs["input_ids"]
        assert reads.is_target == [bool(bit) for bit in theirs["assistant_masks"]] and any(reads.is_target)


@pytest.mark.parametrize("key, refused, fine", [
    ("label", False, True), ("kto_tag", False, True), ("weight", 0, 1.0), ("weight", 0.25, True),
    ("train", False, True), ("images", ["a"], []),
])  # fmt: skip
def test_a_row_that_says_that_it_is_not_to_be_learned_is_refused(key, refused, fine):
    assert read_row({"messages": [Q, A], key: fine}).ignored == []
    with pytest.raises(ValueError, match=f"its {key} (says|is 0.25)"):
        read_row({"messages": [Q, A], key: refused})


def test_formats_and_keys_that_nothing_reads_are_printed_and_counted(written, capsys):
    turns = [{"from": "human", "value": "?", "mood": 1}, {"from": "gpt", "value": "b", "name": "x"}]
    rows = [{"conversations": turns, "id": i} for i in range(1200)]
    rows += [{"instruction": f"{i}?", "output": "c"} for i in range(3)]
    rows += [{"messages": [Q, A | {"weight": 1, "train": True, "refusal": None}]}]
    rows += [{"messages": [Q, A | {"thinking": "hm"}]}]
    rows += [{"messages": [Q, A | {"content": "b<|endoftext|>"}]}]
    rows += [{"instruction": "?", "output": " "}]
    rows += [{"messages": [Q, A], "tools": [{}]}]  # refused, so not counted
    written(*map(json.dumps, rows), "{}", errors="skip")
    out = capsys.readouterr().out
    assert "1,200 rows of ShareGPT, 4 rows of Alpaca, 3 rows of messages\n" in out
    assert "\nrows that spell out special tokens, which stay text: 1\n" in out
    assert "\nrows with an empty answer, which teaches to say nothing: 1\n" in out
    [ignored] = [line for line in out.splitlines() if line.startswith("ignored")]
    for name in ("'id' of rows (1,200)", "'mood' of messages (1,200)", "'name' of messages (1,200)"):
        assert name in ignored
    assert "'thinking' of messages (1)" in ignored and ignored.count(" of ") == 4
    seen = Seen()
    seen.add(read_row(rows[-3]), frozenset({"reasoning"}), False)
    assert seen.sentences() == ["1 row of messages"], "a template reads thinking under each of its names"


ODD_VALUES = (
    None, 0, -1.5, 10**400, True, "", "{", "<|im_end|>\ud800", "x" * 10**5, [], {}, [[]], [None], Q,
    {"x" * 10**5: 1},
)  # fmt: skip


def paths_in(value, path=()):
    """The place of every value in a row."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, child in value.items() if isinstance(value, dict) else ():
        yield from paths_in(child, (*path, key))


def test_whatever_stands_anywhere_in_a_row_it_is_learned_or_a_sentence(fast, tmp_path):
    fast.chat_template = QWEN
    fast.save_pretrained(tmp_path)
    tokenizer = get_tokenizer(tmp_path)
    rows = [
        {"messages": [*called("{}"), FOUND, ANSWERED | {"weight": 0}], "tools": [TOOL], "chat_template_kwargs": {}},
        {"prompt": [SYSTEM, Q], "completion": [CALLED], "tools": json.dumps([TOOL])},
        share(("human", "a"), ("function_call", json.dumps(CALL)), ("tool", "b"), ("gpt", "c"), system="d"),
        {"instruction": "a", "output": "b", "input": "c", "history": [["d", "e"]], "system": "f"},
    ]
    n_learned = 0
    sentences = []
    for row in rows:
        for *path, last in (path for path in paths_in(row) if path):
            for odd in ODD_VALUES:
                changed = copy.deepcopy(row)
                parent = changed
                for key in path:
                    parent = parent[key]
                parent[last] = odd
                for _, text in chat.render_rows([("here", changed)], tokenizer, sentences.append, Seen()):
                    ids, is_target = encode_answers(tokenizer, text)
                    n_learned += any(is_target) and len(ids) == len(is_target)
    assert n_learned > 100 and len(sentences) > 100
    assert all(sentence.startswith("here") and len(sentence) < 600 for sentence in sentences)


# ---------------------------------------------------------------------------------------------------------------------
# prepare.py


def test_prepared_conversations_read_back_with_masks_counts_and_template(written, capsys):
    lines = [line(f"{i} + {i}?", str(2 * i), "Sure?", "é") for i in range(30)]
    folder = written(*lines, '{"prompt": "in", "completion": "out\\ud83e"}', "", val_fraction=0.2)
    eos = "<|endoftext|>"
    train, val = (targets_of(folder, split) for split in ("train", "val"))
    expected = [f"{2 * i}{eos}é{eos}" for i in range(30)] + [f"out?{eos}"]
    assert 2 <= len(val) <= 12 and sorted(train + val) == sorted(expected)
    meta = Tokens(folder, "train").meta
    n_targets = sum(len(text.replace(eos, ".").encode()) for text in train)
    assert (meta["train_documents"], meta["train_targets"]) == (len(train), n_targets)
    assert meta["train_bytes"] == meta["train_tokens"] - sum(text.count(eos) for text in train) * (1 - len(eos))
    share_learned = f"{meta['train_targets'] / meta['train_tokens']:.1%} of the training tokens are learned"
    assert share_learned in capsys.readouterr().out
    content = [(folder / f"train.{kind}").read_bytes() for kind in ("bin", "mask")]
    assert meta["train_sha256"] == hashlib.sha256(b"".join(content)).hexdigest()
    assert meta["eos"] == [256] and tokenizer_of(folder).chat_template == PLAIN
    write_json(folder / "meta.json", meta | {"eos": [7]})
    assert tokenizer_of(folder).eos == [7, 256], "the data's end of turn, then the tokenizer's"
    (folder / "train.mask").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.mask"):
        Tokens(folder, "train")


@pytest.mark.parametrize("template, end", [
    (PLAIN.replace("eos_token", "'<|im_end|>'"), 257),  # the tokenizer does not say it
    (MARKED.replace("'<|im_end|>' }}", "eos_token + '\\n' }}"), 256),
])  # fmt: skip
def test_generation_ends_at_the_end_of_a_turn(template, end, written, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(r"(?s:.)", ["<|endoftext|>", "<|im_end|>"])
    monkeypatch.setattr("data.command.tokenizer_for_data", lambda _: tokenizer)
    (tmp_path / "turns.jinja").write_text(template)
    folder = written(*[line(f"{i}?", str(i)) for i in range(9)], template=tmp_path / "turns.jinja")
    assert Tokens(folder, "train").meta["eos"][0] == end


@pytest.mark.parametrize("bad, message", [
    ('{"text": "a"}', "an object with text, expected an object with messages, or with prompt and completion"),
    (json.dumps({"instruction": "a", "output": "b", "messages": [Q, A]}), "fits several formats, messages and Alpaca"),
    ('{"messages": [{"content": "no role"}]}', "message 1 has the role None, expected one of system"),
    (line("a", "b").replace("assistant", "Assistant"), "message 2 has the role 'Assistant', expected one of system"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text can be learned"),
    (json.dumps(share(("elf", "a"))), "a message is from 'elf', expected one of human"),
    (json.dumps(share(("human", "a"), ("function_call", "f(2)"))), "a function call is 'f.2.', expected the JSON text"),
    ('{"messages": "a text"}', "messages is 'a text', expected a list of messages, each an object"),
    (json.dumps({"messages": [[Q, A]]}), "messages is .*, expected a list of messages, each an object"),
    (json.dumps({"prompt": "a", "completion": [A]}), "only one of prompt and completion is a text, expected two texts"),
    (json.dumps({"prompt": [Q], "completion": 4}), "completion is 4, expected a list of messages"),
    ("null", "found a value of type NoneType, expected an object with messages"),
    (json.dumps({"instruction": "a", "output": "b", "history": 3}), "is malformed"),
    (line("only a question"), "there is no answer to learn: no role is assistant"),
    (line("a", "b").replace('"b"', '"b", "weight": 0'), "there is no answer to learn: .* flagged, as by weight 0"),
    (line("a", "b").replace("{", '{"tools": [{}], ', 1), "it has tools, which the chat template does not write"),
    (line("a", "b").replace('"b"', 'null, "tool_calls": [{}]'), "it has tool_calls, which the chat template does not"),
    (line("a", "b").replace('"b"', 'null, "reasoning": "c"'), "message 2 has None as content, expected a text"),
])  # fmt: skip
def test_a_row_that_cannot_be_learned_is_a_sentence_or_skipped_and_counted(written, capsys, bad, message):
    good = [line(f"{i}?", str(i)) for i in range(9)]
    with pytest.raises(ValueError, match=f"chats.jsonl:4:? .*{message}"):
        written(*good[:3], bad, *good[3:])
    folder = written(*good[:3], bad, *good[3:], errors="skip")
    assert Tokens(folder, "train").meta["train_documents"] == 8
    assert "left out by --errors skip: 1, the first:" in capsys.readouterr().out


@pytest.mark.parametrize("left_out", ["system", "tool"])
def test_a_message_that_the_template_leaves_out_is_refused_not_lost(reads, left_out):
    template = CHATML.replace("for message in messages", f"for message in messages if message.role != '{left_out}'")
    row = {"messages": [SYSTEM, ASKED, ANSWERED, FOUND, ANSWERED]}
    assert "Be brief." in reads(CHATML, row)
    with pytest.raises(ValueError, match=f"the chat template leaves out message ., of the role {left_out}"):
        reads(template, row)


def test_text_beside_calls_second_calls_and_system_messages_are_refused_if_a_template_leaves_them_out(reads):
    calls = "{{ m.tool_calls[0].function.name + eos_token if m.tool_calls else m.content + eos_token }}"
    llama32 = "{% for m in messages %}" + calls + "{% endfor %}{{ '' if add_generation_prompt }}"
    assert reads(llama32, {"messages": CALLS})
    beside = [ASKED, CALLED | {"content": "Let me look."}, FOUND, ANSWERED]
    assert reads(QWEN, {"messages": beside}).count("Let me look.") == 1
    with pytest.raises(ValueError, match="leaves out message 2, of the role assistant, beside its tool_calls"):
        reads(llama32, {"messages": beside})
    both = [ASKED, CALLED | {"tool_calls": CALLED["tool_calls"] * 2}, FOUND, ANSWERED]
    assert reads(QWEN, {"messages": both}).count("<tool_call>") == 2
    with pytest.raises(ValueError, match="the chat template leaves out tool call 2 of message 2"):
        reads(llama32, {"messages": both})
    first = "{% for message in messages %}{% if message.role != 'system' or loop.first %}" + CHATML.split("%}", 1)[1]
    first = first.replace("{%- endfor %}", "{% endif %}{% endfor %}", 1)
    assert reads(first, {"messages": [SYSTEM, ASKED, ANSWERED]})
    with pytest.raises(ValueError, match="leaves out message 2, of the role system"):
        reads(first, {"messages": [SYSTEM, SYSTEM | {"content": "In French."}, ASKED, ANSWERED]})


def test_a_special_token_that_is_text_gets_no_blank_from_a_tokenizer_that_begins_texts_with_one(tmp_path):
    pieces = ["<unk>", "</s>", "\u2581", *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])  # fmt: skip
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = save_tokenizer(tmp_path, backend, eos_token="</s>")
    tokenizer.chat_template = PLAIN
    messages = [Q | {"content": "What is </s>?"}, A | {"content": "</s>\nends."}]
    ids, _ = encode_answers(tokenizer, render_answers(tokenizer, messages))
    assert tokenizer.decode(ids) == "user:What is </s>?\nassistant:</s>\nends.</s>\n" and ids.count(1) == 1


def test_copies_whose_messages_have_ids_share_a_split(written):
    rows = [{"messages": [Q | {"content": f"{i % 9}?", "id": i}, A | {"content": str(i % 9)}]} for i in range(90)]
    folder = written(*map(json.dumps, rows), val_fraction=0.3)
    assert not {*targets_of(folder, "train")} & {*targets_of(folder, "val")}


def test_the_split_is_that_of_the_messages_whatever_else_a_template_writes(written, tmp_path):
    """As the date in Llama 3.1's. A dataset that is made again with more rows keeps its validation rows."""
    splits = []
    for day in ("28 Nov", "29 Nov"):
        (tmp_path / "dated.jinja").write_text(day + PLAIN)
        folder = written(
            *[line(f"{i}?", str(i)) for i in range(60)], template=tmp_path / "dated.jinja", val_fraction=0.2
        )
        splits.append(targets_of(folder, "val"))
    assert splits[0] == splits[1] and len(splits[0]) > 1


def test_a_tokenizer_without_template_and_an_answer_without_end_are_refused(written, tmp_path):
    (tmp_path / "empty.jinja").write_text("{{ '' }}")
    (tmp_path / "endless.jinja").write_text(PLAIN.replace("eos_token", "''"))
    for template, message in (
        (None, "bytes has no chat template, and none of Llama 3's tokens: put .* with --template FILE"),
        (tmp_path / "endless.jinja", "does not end answers with a special token"),
        (tmp_path / "empty.jinja", "the chat template leaves out message 1, of the role user"),
    ):
        with pytest.raises(ValueError, match=message):
            written(line("a", "b"), template=template)
    assert not (tmp_path / "data").exists()


def test_a_checkpoint_says_in_both_files_that_transformers_stops_at_the_end_of_a_turn(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    base = SimpleNamespace(path=tmp_path, pieces=None, config={"eos_token_id": 1, "bos_token_id": 0})
    config = LlamaConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=16, vocab_size=9, block_size=8)
    files = hf_files(base, config, "bytes", "bfloat16", {"end_of_text": 1, "eos": [4, 1], "bos": 3})
    config, generation = (json.loads(files[name]) for name in ("config.json", "generation_config.json"))
    assert config["eos_token_id"] == generation["eos_token_id"] == [4, 1] and generation["temperature"] == 0.6
    assert config["bos_token_id"] == 3, "the data's, not that of the weights it began with"
