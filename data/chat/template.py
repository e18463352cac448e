"""A conversation as the text that a chat model reads.

    text = render([{"role": "user", "content": "What is a cria?"}], add_generation_prompt=True)
    text = render(messages, tokenizer.chat_template, bos="<s>", eos="</s>")

A chat template is a Jinja program that the makers of a model publish with its tokenizer. It writes every special token
itself, the first one too: encode its text with special tokens, and add none. It comes with downloaded files, so it runs
in Jinja's sandbox. What a template may use is what transformers gives it:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import functools
import json
from datetime import datetime

# Llama 3's own format, as its model card writes it down: without the date and the tools of 3.1's and 3.2's templates.
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""


def render(
    messages: list[dict],
    template: str | None = None,
    bos: str = "<|begin_of_text|>",
    eos: str = "<|eot_id|>",
    add_generation_prompt: bool = False,
    **variables,
) -> str:
    """The text of messages, each with a role and a content.

    template: Jinja source; None: Llama 3's own format. bos, eos: the special tokens as the tokenizer spells them, ""
    where it has none. add_generation_prompt: the text ends where the assistant's answer begins. variables: others that
    the template knows, as tools or date_string. ImportError without jinja2, ValueError if the template is broken or
    refuses the messages.
    """
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install jinja2") from error
    try:
        return compile_template(LLAMA3_TEMPLATE if template is None else template).render(
            messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateError as error:  # SecurityError too: the sandbox
        raise ValueError(f"the chat template cannot write this conversation: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:  # from an operation on what a message holds
        raise ValueError(
            f"the chat template cannot write this conversation: {type(error).__name__}: {error}"
        ) from error


@functools.lru_cache(maxsize=8)
def compile_template(template: str):
    """The compiled template."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks answers for transformers. Here what it encloses is plain."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def to_json(value, ensure_ascii=False, **options):  # Jinja's own escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return environment.from_string(template)
