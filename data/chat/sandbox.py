"""Chat templates are Jinja programs of strangers: they run in Jinja's sandbox, which lets them read their inputs only.

A template finds what transformers provides: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import functools
import json
import re
from datetime import datetime

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BREAK = "\ufdd0"  # inside a special token that a message spells out, so that it stays text; no character of Unicode


@functools.lru_cache(maxsize=8)
def compile_template(template: str) -> Template:
    try:
        return ENVIRONMENT.from_string(template)
    except Exception as error:  # invalid, or nested too deeply for Jinja or Python
        line = f" at line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"the chat template cannot be compiled{line}: {error!s:.200}") from error


@functools.lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """What a template may read: its variables and filters, and message.name, message['name'] or 'name' in message."""
    compile_template(template)  # ValueError if it is broken
    tree = ENVIRONMENT.parse(template)
    names = {node.name for node in tree.find_all((nodes.Name, nodes.Filter))}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(names)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: a template's own marks around answers. They change nothing here: which
    tokens are learned follows from the prompts (render_answers in data/chat/template.py).
    """

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def raise_exception(message):
    raise TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """transformers' tojson. Jinja's own escapes HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub(f"[^\0-\x7f{BREAK}]", lambda char: json.dumps(char[0])[1:-1], text)
    return text


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
