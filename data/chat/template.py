"""Turn a conversation into the text and the tokens that a chat model reads.

    messages = [{"role": "user", "content": "What is a cria?"}]
    ids = encode_prompt(tokenizer, messages)  # what sample.py continues

    text = render_answers(tokenizer, messages + [{"role": "assistant", "content": "A baby llama."}])
    ids, is_target = encode_answers(tokenizer, text)  # what train.py learns

A chat template is a Jinja program that the makers of a model publish with its tokenizer. It writes every special token
itself, bos included. It comes with downloaded files, so it runs in a sandbox (data/chat/sandbox.py).
"""

import functools
import re

from data.chat.formats import REASONING, parse_json
from data.chat.sandbox import BREAK, compile_template, names_read
from data.tokens import IS_DOC_START, IS_TARGET
from data.vocabulary import Tokenizer

# Llama 3's own format, as its model card gives it: without the date and the tools of 3.1's and 3.2's templates.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Marks in a rendered text, as BREAK: Unicode noncharacters, which no text may contain.
ANSWER = "\ufdd1"  # before a text to learn
ANSWER_END = "\ufdd2"  # after it
MARKS = re.compile(f"[{BREAK}{ANSWER}{ANSWER_END}]")


def template_of(tokenizer: Tokenizer) -> str:
    """The tokenizer's own template, or Llama 3's. ValueError if it has neither that nor Llama 3's special tokens."""
    if tokenizer.chat_template:
        return tokenizer.chat_template
    if "<|eot_id|>" in tokenizer.special_tokens:
        return LLAMA3_TEMPLATE
    raise ValueError(
        f"tokenizer {tokenizer.name} has no chat template, and none of Llama 3's tokens: put a chat_template.jinja "
        "beside its files, or prepare conversations with --template FILE and finetune on them"
    )


def render_answers(tokenizer: Tokenizer, messages: list[dict], variables: dict | None = None) -> str:
    """The text of a conversation, for encode_answers: with marks around the assistant's answers and their ends of turn.

    An answer is what its message adds to the text of the prompt before it. variables: tools, and what else the template
    may read. ValueError if there is no answer to learn, or if the template does not write what the conversation has, or
    writes a message differently when others follow, as templates do that drop old thoughts.
    """
    template = template_of(tokenizer)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learned = [i for i in answers if messages[i].get("weight") != 0]
    if not learned:
        raise ValueError("there is no answer to learn: no role is assistant, or each answer is flagged, as by weight 0")
    inputs = inputs_of(tokenizer, messages, variables)
    calls = [message for message in messages if message.get("tool_calls")]
    for name, is_used in (("tools", inputs["tools"]), ("tool_calls", calls)):
        if is_used and name not in names_read(template):
            raise ValueError(f"it has {name}, which the chat template does not write")

    def write_first(n: int, add_generation_prompt: bool = False) -> str:
        shorter = {"messages": inputs["messages"][:n], "add_generation_prompt": add_generation_prompt}
        return write(template, inputs | shorter)

    if "add_generation_prompt" not in names_read(template):
        _refuse_open_end(tokenizer, template)
    text = write(template, inputs)
    done = 0
    parts = []
    for i in learned:
        prompt = write_first(i, add_generation_prompt=True)
        upto = write_first(i + 1).rstrip()  # a newline may follow the end of turn
        if not (upto.startswith(prompt) and text.startswith(upto) and len(prompt) >= done):
            begun = prompt.removeprefix(write_first(i))
            raise ValueError(
                f"the chat template writes message {i + 1} differently when it is to be answered, by {begun!r:.60}, or "
                "when others follow: put each answer at the end of a conversation of its own, or give a --template FILE"
            )
        parts += [text[done : len(prompt)], ANSWER, upto[len(prompt) :], ANSWER_END]
        done = len(upto)
    _refuse_loss(template, inputs)
    return "".join([*parts, text[done:]])


def _refuse_loss(template: str, inputs: dict) -> None:
    """ValueError if a template leaves out a message's content or one of its tool calls, and so a mark at its end."""
    marked = [with_marks(message, i) for i, message in enumerate(inputs["messages"], start=1)]
    text = write(template, inputs | {"messages": marked})
    for i, message in enumerate(inputs["messages"], start=1):
        calls = message.get("tool_calls") or []
        if message.get("content") and mark(i) not in text:
            beside = ", beside its tool_calls" if calls else ""
            raise ValueError(f"the chat template leaves out message {i}, of the role {message['role']}{beside}")
        for j in range(len(calls)):
            if mark(i, j) not in text:
                raise ValueError(f"the chat template leaves out tool call {j + 1} of message {i}")


def mark(*numbers: int) -> str:
    return f"{BREAK}{numbers}{BREAK}"


def with_marks(message: dict, i: int) -> dict:
    """Message i with marks at the ends of its content and of the names of the functions that it calls."""
    message = dict(message)
    if message.get("content"):
        message["content"] += mark(i)
    if message.get("tool_calls"):
        message["tool_calls"] = [with_mark(call, mark(i, j)) for j, call in enumerate(message["tool_calls"])]
    return message


def with_mark(call: dict, text: str) -> dict:
    function = call.get("function", call)
    function = function | {"name": f"{function.get('name')}{text}"}
    return call | {"function": function} if "function" in call else function


@functools.lru_cache(maxsize=8)  # once, not for each row
def _refuse_open_end(tokenizer: Tokenizer, template: str) -> None:
    """ValueError if a template begins another answer after every conversation, as the first of Llama 3 Instruct did: as
    the end of the last answer that would be learned, and generation would stop there.
    """
    messages = [{"role": role, "content": "Hello."} for role in ("user", "assistant", "user")]
    ended, followed = (write(template, inputs_of(tokenizer, messages[:n])) for n in (2, 3))
    if not followed.startswith(ended.rstrip()):
        raise ValueError(
            "the chat template begins another answer after every conversation, because it does not read "
            "add_generation_prompt: give one that does, --template FILE"
        )


def inputs_of(tokenizer: Tokenizer, messages: list[dict], variables: dict | None = None) -> dict:
    """What a template reads of a conversation, with BREAK inside the special tokens that it spells out."""
    names = names_read(template_of(tokenizer))
    # transformers always defines documents and tools: templates compare them with none.
    inputs = {"documents": None, "tools": None} | (variables or {})
    inputs["messages"] = [as_read(message, names) for message in messages]
    inputs = {name: guarded(value, tokenizer) for name, value in inputs.items()}
    return tokenizer.named_tokens | inputs | {"add_generation_prompt": False}


def as_read(message: dict, names: frozenset[str]) -> dict:
    """A message as templates read it: reasoning under each of its names, and arguments of tool calls as an object.

    names: what the template reads. One without tojson writes arguments as the JSON text that OpenAI's format has.
    """
    if "tool_calls" in message and "tojson" in names:
        message = message | {"tool_calls": [parse_arguments(call) for call in message["tool_calls"]]}
    reasoning = [message[name] for name in REASONING if name in message]
    if not reasoning:
        return message
    return message | dict.fromkeys(REASONING, max(reasoning, key=bool))  # the first that is not empty


def parse_arguments(call: dict) -> dict:
    """A call whose arguments are an object if they came as the JSON text of one."""
    function = call.get("function", call)
    arguments = parse_json(function.get("arguments"), dict)
    if arguments is None:
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def write(template: str, inputs: dict) -> str:
    """What a template writes. ValueError if it is broken, or refuses the messages."""
    compiled = compile_template(template)
    try:
        return compiled.render(inputs)
    except Exception as error:  # a third-party program may raise anything
        raise ValueError(f"the chat template cannot write this conversation: {error!s:.200}") from error


def guarded(value, tokenizer: Tokenizer):
    """A message, or a value in it, with BREAK inside the special tokens that it spells out."""
    if isinstance(value, dict):
        return {guarded(name, tokenizer): guarded(each, tokenizer) for name, each in value.items()}
    if isinstance(value, list):
        return [guarded(each, tokenizer) for each in value]
    if not isinstance(value, str):
        return value
    value = value.encode("utf-8", "replace").decode()  # JSON can hold lone surrogates, which UTF-8 cannot
    if MARKS.search(value):
        raise ValueError("it contains U+FDD0, U+FDD1 or U+FDD2, which are not characters")
    return first_characters(frozenset(tokenizer.special_tokens)).sub(lambda found: found[0] + BREAK, value)


@functools.lru_cache(maxsize=8)
def first_characters(tokens: frozenset[str]) -> re.Pattern:
    """Matches the first character of each of these tokens in a text. A text cut after them holds none of the tokens."""
    return re.compile("|".join(f"{re.escape(token[:1])}(?={re.escape(token[1:])})" for token in tokens) or r"(?!)")


# ----------------------------------------------------------------------------------------------------------------------
# Tokens


def encode_prompt(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """The ids of a conversation up to where the assistant's next answer begins. ValueError as write."""
    inputs = inputs_of(tokenizer, messages) | {"add_generation_prompt": True}
    return encode(tokenizer, write(template_of(tokenizer), inputs))


def encode_answers(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[bool]]:
    """The ids of render_answers' text, and which of them are targets.

    Prompts and answers are encoded one by one: so a prompt has the same ids as alone, as in sample.py. Yet some
    tokenizers write the first word of a text differently. So each part follows its context, the text from the last
    special token on, whose ids are then left out.
    """
    ids = []
    is_target = []
    context = ""
    for i, part in enumerate(re.split(f"[{ANSWER}{ANSWER_END}]", text)):
        is_answer = i % 2 == 1
        before = encode(tokenizer, context)
        both = encode(tokenizer, context + part)
        n = len(before)
        continues = both[:n] == before == ids[len(ids) - n :]  # else the part would merge with its context
        part_ids = both[n:] if continues else encode(tokenizer, BREAK + part)
        ids += part_ids
        is_target += [is_answer] * len(part_ids)
        context += part
        context = context[max([0, *(context.rfind(token) for token in tokenizer.special_tokens)]) :]
    return ids, is_target


def encode_conversation(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int], int]:
    """What data/write.py stores of render_answers' text: its ids, their mask, and its UTF-8 bytes without the marks."""
    ids, is_target = encode_answers(tokenizer, text)
    mask = [IS_TARGET * target for target in is_target]
    mask[0] = IS_DOC_START  # there is nothing to predict it from
    return ids, mask, len(MARKS.sub("", text).encode())


def encode(tokenizer: Tokenizer, marked: str) -> list[int]:
    """The ids of a text with BREAKs. Some tokenizers begin a text with a blank: what follows a BREAK is encoded as
    after a line end, whose ids are then left out, unless it merges with that.
    """
    first, *others = marked.split(BREAK)
    ids = tokenizer.encode(first, special=True)
    before = tokenizer.encode("\n") if others else []
    for piece in others:
        after = tokenizer.encode("\n" + piece, special=True)
        continues = after[: len(before)] == before
        ids += after[len(before) :] if continues else tokenizer.encode(piece, special=True)
    return ids
