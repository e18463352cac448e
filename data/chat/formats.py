"""The formats of conversations that people share, and the one that the rest of nanocria reads.

    conversation = read_row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})
    conversation.format    # "ShareGPT"
    conversation.messages  # [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    conversation.tools     # None, or a list of JSON schemas

A row is in exactly one format, which its keys tell (see FORMATS). Beside them it may have

    tools                   JSON schemas: a list, or the JSON text of one
    system                  a system message, used unless the conversation has one of its own
    documents               for templates that read them
    chat_template_kwargs    {name: value} of more variables for the template, as TRL has them
    weight, train           0 or false: the row is left out; also where TRL's label or LLaMA-Factory's kto_tag is false

Keys of a row or of a message that are null are absent, as in transformers.
"""

import json
from collections import Counter
from typing import Any, NamedTuple

LEARN_FLAGS = ("weight", "train", "training", "trainable", "loss_mask", "loss")  # of a message; 0: it is not learned
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what an assistant thought before its answer
ROW_FLAGS = ("weight", "train", "label", "kto_tag")
MEDIA = ("images", "videos", "audios")
ROW_KEYS = {"tools", "system", "documents", "chat_template_kwargs", *MEDIA, *ROW_FLAGS}
MOST_IGNORED = 100  # names of ignored keys that are counted
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


class Conversation(NamedTuple):
    format: str
    messages: list[dict]  # each with a role, most with a content; "weight": 0 if it is not to be learned
    tools: list[dict] | None
    variables: dict[str, Any]  # more of them, for the chat template
    is_learned: bool
    ignored: list[str]  # keys of the row that nothing reads


def read_row(row: Any) -> Conversation:
    """The conversation in a row. ValueError if it fits no format, or more than one, or is malformed."""
    if not isinstance(row, dict):
        raise ValueError(f"found a {type(row).__name__}, expected {EXPECTED}")
    row = without_nulls(row)
    fitting = [name for name, (keys, _, _) in FORMATS.items() if row.keys() >= keys]
    if not fitting:
        raise ValueError(f"found an object with {', '.join(row) or 'nothing':.80}, expected {EXPECTED}")
    if len(fitting) > 1:
        raise ValueError(f"it fits several formats, {' and '.join(fitting)}: keep the keys of one")
    if any(row.get(name) for name in MEDIA):
        raise ValueError(f"it has {', '.join(row.keys() & set(MEDIA))}, but only text can be learned")
    [name] = fitting
    keys, more_keys, read_messages = FORMATS[name]
    messages = [checked(message, i) for i, message in enumerate(read_messages(row), start=1)]
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        messages = [checked({"role": "system", "content": row["system"]}, 0), *messages]
    is_learned = all(row.get(flag, 1) != 0 for flag in ROW_FLAGS)
    read = keys | more_keys | ROW_KEYS
    ignored = [key for key in row if key not in read or (key in ROW_FLAGS and row[key] not in (0, 1))]
    return Conversation(name, messages, tools_of(row), variables_of(row), is_learned, ignored)


def without_nulls(value: dict) -> dict:
    return {name: each for name, each in value.items() if each is not None}


# ----------------------------------------------------------------------------------------------------------------------
# Formats


def from_messages(row: dict) -> list:
    return list_of_messages(row, "messages")


def from_prompt_and_completion(row: dict) -> list:
    """Two texts, or two lists of messages. As in TRL, an answer within the prompt is not learned."""
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("one of prompt and completion is a text: both must be texts, or both lists of messages")
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
    if not isinstance(who, str) or who not in SHAREGPT_ROLES:
        raise ValueError(f"a message is from {who!r:.40}, expected one of {', '.join(SHAREGPT_ROLES)}")
    if who != "function_call":
        return message | {"role": SHAREGPT_ROLES[who], "content": value}
    calls = parse_json(value, list) or [parse_json(value, dict)]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        expected = 'expected the JSON text of {"name": ..., "arguments": {...}}, or of a list of these'
        raise ValueError(f"a message has {value!r:.60} as its function call, {expected}")
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
    "messages": ({"messages"}, set(), from_messages),
    "prompt and completion": ({"prompt", "completion"}, set(), from_prompt_and_completion),
    "ShareGPT": ({"conversations"}, set(), from_sharegpt),
    "Alpaca": ({"instruction", "output"}, {"input", "history"}, from_alpaca),
}
EXPECTED = (
    "an object with messages, or with prompt and completion, with conversations (ShareGPT), or with instruction and "
    "output (Alpaca)"
)


# ----------------------------------------------------------------------------------------------------------------------
# Messages and tools


def list_of_messages(row: dict, name: str) -> list[dict]:
    messages = row[name]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name} is not a list of messages, or is empty")
    return [without_nulls(message) for message in messages]


def checked(message: dict, i: int) -> dict:
    """A message with its parts joined, and its flags as "weight": 0 or none. ValueError if it is malformed."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {i} is not an object with a role, as in {{'role': 'user', 'content': 'hello'}}")
    for name in LEARN_FLAGS:
        if message.get(name, 1) not in (0, 1):
            raise ValueError(f"message {i} has {name} {message[name]!r:.40}, expected 0 or 1, false or true")
    is_learned = all(message.get(name, 1) for name in LEARN_FLAGS)
    message = {name: value for name, value in message.items() if name not in LEARN_FLAGS}
    if not is_learned:
        message["weight"] = 0
    if message.get("tool_calls") == []:  # some templates would read it as a call
        del message["tool_calls"]
    if "content" not in message and any(message.get(name) for name in ("tool_calls", *REASONING)):
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
            expected = "expected {'type': 'text', 'text': '...'}: only text can be learned"
            raise ValueError(f"message {i} has {part!r:.60} as a part of its content, {expected}")
    return "".join(part["text"] for part in content)


def parse_json(value: Any, kind: type) -> Any:
    """A value of this type, or the one that a string holds as JSON. None if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, kind) else None


def tools_of(row: dict) -> list[dict] | None:
    if row.get("tools", "") in ("", []):
        return None
    tools = parse_json(row["tools"], list)
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is not a list of objects, or the JSON text of one, but {row['tools']!r:.60}")
    return tools or None


def variables_of(row: dict) -> dict[str, Any]:
    """What a chat template gets besides messages and tools."""
    variables = parse_json(row.get("chat_template_kwargs", {}), dict)
    if variables is None:
        raise ValueError(f"chat_template_kwargs is {row['chat_template_kwargs']!r:.60}, expected an object")
    return {"documents": row.get("documents")} | variables


# ----------------------------------------------------------------------------------------------------------------------
# Counts


class Seen:
    """Counts the rows of each format, those that are not to be learned, and the keys that nothing reads."""

    def __init__(self):
        self.rows = Counter()
        self.n_left_out = 0
        self.ignored = Counter()

    def add(self, conversation: Conversation, names_read: frozenset[str]) -> None:
        """names_read: what the chat template reads."""
        self.rows[conversation.format] += 1
        self.n_left_out += not conversation.is_learned
        known = {"role", "content", "weight", *names_read}
        if known.intersection(REASONING):
            known.update(REASONING)
        variables = [name for name, value in conversation.variables.items() if value is not None and name not in known]
        ignored = [f"{name!r:.40} of rows" for name in (*conversation.ignored, *variables)]
        for message in conversation.messages:
            ignored += [f"{name!r:.40} of messages" for name in message.keys() - known]
        for name in ignored:
            if name in self.ignored or len(self.ignored) < MOST_IGNORED:
                self.ignored[name] += 1

    def sentences(self) -> list[str]:
        rows = ", ".join(f"{n:,} {'row' if n == 1 else 'rows'} of {name}" for name, n in self.rows.most_common())
        sentences = [rows]
        if self.n_left_out:
            sentences.append(f"rows left out because of {', '.join(ROW_FLAGS)}: {self.n_left_out:,}")
        if self.ignored:
            keys = ", ".join(f"{name} ({n:,})" for name, n in self.ignored.most_common(9))
            sentences.append(f"ignored, because nothing reads them: {keys}")
        return sentences
