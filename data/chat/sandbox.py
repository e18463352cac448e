"""Chat templates are Jinja programs of strangers: what they may use, and how much of it.

    template = compile_template(source)
    with bounded():
        text = template.render(messages=messages, bos_token="<s>")

A template finds what transformers provides: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import functools
import json
import re
import resource
import signal
import sys
import time
from contextlib import contextmanager
from datetime import datetime

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 2**31  # of memory, for the texts of one conversation: a worker process that starts meanwhile inherits it
MOST_SECONDS = 10  # of the processor's time
MOST_BITS = 10_000  # of a number in a template

# Marks in a rendered text: Unicode noncharacters, which no text may contain.
BREAK = "\ufdd0"  # inside a special token that a message spells out, so that it stays text
ANSWER = "\ufdd1"  # before a text to learn
ANSWER_END = "\ufdd2"  # after it


@contextmanager
def bounded():
    """In the main thread: let a template take MOST_SECONDS and, on Linux, MOST_BYTES of memory. Then it ends with a
    TimeoutError or a MemoryError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, raise_timeout)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS, 1)  # again: Jinja's compiler may catch the first
    try:
        if sys.platform == "linux":
            n_bytes = bytes_now(int(time.monotonic())) + MOST_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (n_bytes if hard < 0 else min(n_bytes, hard), hard))
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@functools.lru_cache(maxsize=1)
def bytes_now(second: int) -> int:
    """The process's memory, read once in a second: that takes as long as a short conversation."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def raise_timeout(signum, frame):
    raise TimeoutError(f"it takes more than {MOST_SECONDS} seconds")


def reason_of(error: Exception) -> str:
    """Why a template failed, in a few words."""
    if isinstance(error, MemoryError):
        return f"it takes more than {MOST_BYTES:,} bytes of memory"
    return f"{str(error) or type(error).__name__:.200}"


@functools.lru_cache(maxsize=8)
def compile_template(template: str) -> Template:
    try:
        with bounded():  # Jinja computes constants as it compiles
            return make_environment().from_string(template)
    except Exception as error:  # invalid, nested too deeply for Jinja or Python, or constants that take too much
        line = f" at line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"the chat template cannot be compiled{line}: {reason_of(error)}") from error


@functools.lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """What a template may read: its variables and filters, and message.name, message['name'] or 'name' in message."""
    tree = compile_template(template).environment.parse(template)
    names = {node.name for node in tree.find_all((nodes.Name, nodes.Filter))}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(names)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: a template's own marks around answers, as in transformers."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller) -> str:
        return ANSWER + caller() + ANSWER_END


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with small numbers only: no signal interrupts an operation on huge ones."""

    intercepted_binops = frozenset(("*", "**", "//", "%"))

    def call_binop(self, context, operator: str, left, right):
        if isinstance(left, int) and isinstance(right, int):
            n_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if n_bits > MOST_BITS:
                raise ArithmeticError(f"a number has more than {MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)


def make_environment() -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    for name in ("round", "urlize"):  # they take any time inside one operation: 10**decimals, a length's square
        del environment.filters[name]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def raise_exception(message):
    raise TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """transformers' tojson. Jinja's own escapes HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub(f"[^\0-\x7f{BREAK}]", lambda char: json.dumps(char[0])[1:-1], text)
    return text
