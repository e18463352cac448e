"""The formats of conversations that people share, and the one that the rest of nanocria reads.

    conversation = read_row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})
    conversation.format    # "ShareGPT"
    conversation.messages  # [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    conversation.variables # {"tools": None}, what else the template may read

A row is in exactly one format, which its keys tell (see FORMATS). Beside them it may have

    tools                   JSON schemas: a list, or the JSON text of one
    system                  a system message, used unless the conversation has one of its own
    chat_template_kwargs    {name: value} of more variables for the template, as TRL has them

Keys of a row or of a message that are null are absent, as in transformers.
"""

import json
from collections import Counter
from typing import Any, NamedTuple

LEARN_FLAGS = ("weight", "train", "training", "trainable", "loss_mask", "loss")  # of a message; 0: it is not learned
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what an assistant thought before its answer
ROW_FLAGS = ("weight", "train", "label", "kto_tag")  # of a row: 0 refuses it. label is TRL's, kto_tag LLaMA-Factory's
MEDIA = ("images", "videos", "audios")  # which refuse a row, too
ROW_KEYS = {"tools", "system", "chat_template_kwargs", *ROW_FLAGS, *MEDIA}
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


class Conversation(NamedTuple):
    format: str
    messages: list[dict]  # each with a role, most with a content; "weight": 0 if it is not to be learned
    variables: dict[str, Any]  # what else the template may read: tools (None, or JSON schemas) and more
    ignored: list[str]  # keys of the row that nothing reads


def read_row(row: Any) -> Conversation:
    """The conversation in a row. ValueError if it fits no format, or more than one; others if types are wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"found a value of type {type(row).__name__}, expected {EXPECTED}")
    row = without_nulls(row)
    fitting = [name for name, (keys, _, _) in FORMATS.items() if row.keys() >= keys]
    if not fitting:
        raise ValueError(f"found an object with {', '.join(row) or 'nothing':.80}, expected {EXPECTED}")
    if len(fitting) > 1:
        raise ValueError(f"it fits several formats, {' and '.join(fitting)}: keep the keys of one")
    for key in row:
        if key in ("weight", "train") and row[key] not in (0, 1):
            raise ValueError(f"its {key} is {row[key]!r:.40}, expected 0 or 1, false or true")
        if (key in ROW_FLAGS and row[key] == 0) or (key in MEDIA and row[key]):
            raise ValueError(f"its {key} says that it is no text to learn")
    [name] = fitting
    keys, more_keys, read_messages = FORMATS[name]
    messages = [checked(message, i) for i, message in enumerate(read_messages(row), start=1)]
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        messages = [checked({"role": "system", "content": row["system"]}, 0), *messages]
    variables = parsed(row, "chat_template_kwargs", dict) | {"tools": parsed(row, "tools", list) or None}
    ignored = [key for key in row if key not in keys | more_keys | ROW_KEYS]
    return Conversation(name, messages, variables, ignored)


def without_nulls(value: dict) -> dict:
    return {name: each for name, each in value.items() if each is not None}


def parsed(row: dict, name: str, kind: type) -> Any:
    """The list or object in a row, which may stand there as JSON text. An empty one if there is none."""
    value = parse_json(row.get(name) or kind(), kind)
    if value is None:
        raise ValueError(f"{name} is {row[name]!r:.60}, expected a {kind.__name__}, or the JSON text of one")
    return value


def parse_json(value: Any, kind: type) -> Any:
    """A value of this type, or the one that a string holds as JSON. None if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, kind) else None


# ----------------------------------------------------------------------------------------------------------------------
# Formats


def from_prompt_and_completion(row: dict) -> list:
    """Two texts, or two lists of messages. As in TRL, an answer within the prompt is not learned."""
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("only one of prompt and completion is a text, expected two texts or two lists of messages")
    messages = list_of_messages(row, "prompt")
    for message in messages:
        if message.get("role") == "assistant":
            message["weight"] = 0
    return messages + list_of_messages(row, "completion")


def from_sharegpt(row: dict) -> list:
    """from and value, in the roles that LLaMA-Factory and axolotl document; or role and content, as axolotl has it."""
    messages = list_of_messages(row, "conversations")
    return [from_sharegpt_message(message) if "from" in message else message for message in messages]


def from_sharegpt_message(message: dict) -> dict:
    who = message.pop("from")
    value = message.pop("value", None)
    if who not in SHAREGPT_ROLES:
        raise ValueError(f"a message is from {who!r:.40}, expected one of {', '.join(SHAREGPT_ROLES)}")
    if who != "function_call":
        return message | {"role": SHAREGPT_ROLES[who], "content": value}
    calls = parse_json(value, list) or [parse_json(value, dict)]
    if not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"a function call is {value!r:.60}, expected the JSON text of an object, or of a list of them")
    return message | {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def from_alpaca(row: dict) -> list:
    """As LLaMA-Factory documents it: the question is instruction and input, a newline between them, after `history`,
    a list of [question, answer] whose answers are learned too.
    """
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    messages = []
    for asked, answered in [*row.get("history", []), [question, row["output"]]]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return messages


FORMATS = {  # name: the keys that tell it, keys that it may have, its reader
    "messages": ({"messages"}, set(), lambda row: list_of_messages(row, "messages")),
    "prompt and completion": ({"prompt", "completion"}, set(), from_prompt_and_completion),
    "ShareGPT": ({"conversations"}, set(), from_sharegpt),
    "Alpaca": ({"instruction", "output"}, {"input", "history"}, from_alpaca),
}
EXPECTED = (
    "an object with messages, or with prompt and completion, with conversations (ShareGPT), or with instruction and "
    "output (Alpaca)"
)


# ----------------------------------------------------------------------------------------------------------------------
# Messages

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # only assistant's are learned


def list_of_messages(row: dict, name: str) -> list[dict]:
    messages = row[name]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name} is {messages!r:.60}, expected a list of messages, each an object")
    return [without_nulls(message) for message in messages]


def checked(message: dict, i: int) -> dict:
    """A message with its parts joined, and its flags as "weight": 0 or none. ValueError if it is malformed."""
    role = message.get("role")
    if role not in ROLES:  # an answer of an "Assistant" would silently not be learned
        raise ValueError(f"message {i} has the role {role!r:.40}, expected one of {', '.join(ROLES)}")
    flags = {name: message[name] for name in LEARN_FLAGS if name in message}
    if any(flag not in (0, 1) for flag in flags.values()):
        raise ValueError(f"message {i} has {flags!r:.60}, expected 0 or 1, false or true")
    message = {name: value for name, value in message.items() if name not in LEARN_FLAGS}
    if not all(flags.values()):
        message["weight"] = 0
    if message.get("tool_calls") == []:  # some templates would read it as a call
        del message["tool_calls"]
    if "content" not in message and message.get("tool_calls"):
        return message
    return message | {"content": text_of(message.get("content"), i)}


def text_of(content: Any, i: int) -> str:
    """A content's text: itself, or that of its parts, one after another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"message {i} has {content!r:.40} as content, expected a text or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"message {i} has {part!r:.60} as a part of its content, but only text can be learned")
    return "".join(part["text"] for part in content)


# ----------------------------------------------------------------------------------------------------------------------
# Counts


class Seen:
    """Counts the rows of each format, those that spell out special tokens, and the keys that nothing reads."""

    def __init__(self):
        self.rows = Counter()
        self.n_spelled = 0
        self.n_empty = 0
        self.ignored = Counter()

    def add(self, conversation: Conversation, names_read: frozenset[str], spells_special: bool) -> None:
        """names_read: what the chat template reads."""
        self.rows[conversation.format] += 1
        self.n_spelled += spells_special
        answers = [m for m in conversation.messages if m["role"] == "assistant" and m.get("weight") != 0]
        self.n_empty += any(not m["content"].strip() for m in answers if not m.get("tool_calls"))
        self.ignored.update(f"{name!r:.40} of rows" for name in conversation.ignored)
        known = {"role", "content", "weight", *names_read}
        if known.intersection(REASONING):
            known.update(REASONING)
        for message in conversation.messages:
            self.ignored.update(f"{name!r:.40} of messages" for name in message.keys() - known)

    def sentences(self) -> list[str]:
        sentences = [", ".join(f"{n:,} {'row' if n == 1 else 'rows'} of {name}" for name, n in self.rows.most_common())]
        if self.n_spelled:  # perhaps leftovers of a template, such as </s> at the end of each answer
            sentences.append(f"rows that spell out special tokens, which stay text: {self.n_spelled:,}")
        if self.n_empty:
            sentences.append(f"rows with an empty answer, which teaches to say nothing: {self.n_empty:,}")
        if self.ignored:
            keys = ", ".join(f"{name} ({n:,})" for name, n in self.ignored.most_common(9))
            sentences.append(f"ignored, because nothing reads them: {keys}")
        return sentences
