"""Conversations for finetuning: only the assistant's answers are learned, each with its end of turn.

    python data/chat/prepare.py --input chats.jsonl --tokenizer Llama-3.2-1B
    python data/chat/prepare.py --input chats.jsonl --tokenizer SmolLM2-135M --template mine.jinja --out data/mine

The input is JSON, an object a line or an array of objects. A conversation is in one of these formats:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}   as OpenAI's
    {"prompt": "...", "completion": "..."}                                                        as TRL's
    {"prompt": [messages], "completion": [messages]}                                              as TRL's
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}       ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                       Alpaca

Beside these keys may stand `tools` and `system`; data/chat/formats.py has the details. Not learned are the messages of
a prompt, and answers whose weight, train, training, trainable, loss_mask or loss is 0 or false. Tools and tool_calls
need a template that supports them. A row in none of these formats is refused.

Makes train.bin, train.mask, val.bin, val.mask and meta.json in --out (this folder by default). The text is
rendered by --template, else by the tokenizer's chat template, else by Llama 3's; sample.py --chat and transformers find
it in the checkpoints. All copies of a conversation go to the same split.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import command
from data.chat.formats import Seen, read_row
from data.chat.sandbox import BREAK
from data.chat.template import encode_answers, encode_conversation, names_read, render_answers, template_of
from data.files import read_small
from data.rows import Bad, json_rows
from data.tokenizer import without_template
from data.vocabulary import Tokenizer
from data.write import split_texts, write_dataset

HERE = Path(__file__).resolve().parent


def render_rows(
    rows: Iterable[tuple[str, Any]], tokenizer: Tokenizer, bad: Callable[[str], None], seen: Seen
) -> Iterator[tuple[str, str]]:
    """Each conversation's messages as JSON, and its text with marks around the answers. seen: counts their formats."""
    for where, row in rows:
        try:
            conversation = read_row(row)
            text = render_answers(tokenizer, conversation.messages, conversation.variables)
        except ValueError as error:
            bad(f"{where}: {error}")
        except (AttributeError, KeyError, TypeError) as error:  # a list instead of an object, ...
            bad(f"{where} is malformed: {error!r:.200}")
        else:
            seen.add(conversation, names_read(template_of(tokenizer)), BREAK in text)
            yield json.dumps([(m["role"], m.get("content")) for m in conversation.messages]), text  # ids may differ


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The id that ends an answer. ValueError if it is not a special token: generation could not stop there."""
    example = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    ids, is_target = encode_answers(tokenizer, render_answers(tokenizer, example))
    learned = [token for token, target in zip(ids, is_target, strict=True) if target]
    if tokenizer.decode(learned[-1:]) not in tokenizer.special_tokens:
        raise ValueError("the chat template does not end answers with a special token: generation could not stop there")
    return learned[-1]


def prepare(
    inputs: list[Path],
    folder: Path = HERE,
    tokenizer: str = "llama3",
    template: Path | None = None,
    val_fraction: float = 0.05,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder`; return its meta.json. template: a file; none: the tokenizer's own, or Llama 3's.

    OSError or ValueError if the input is missing or wrong, an answer has no end, or there is no template.
    """
    chat_tokenizer = command.tokenizer_for_data(tokenizer)
    if template:
        chat_tokenizer.chat_template = read_small(template).decode()
    chat_tokenizer.chat_template = template_of(chat_tokenizer)
    template_file = {"chat_template.jinja": chat_tokenizer.chat_template.encode()}
    chat_tokenizer.files = without_template(chat_tokenizer.files) | template_file
    eos = [end_of_turn(chat_tokenizer), *chat_tokenizer.eos]
    bad = Bad(errors)
    seen = Seen()
    rows = (row for path in inputs for row in json_rows(path, bad))
    texts = render_rows(rows, chat_tokenizer, bad, seen)
    with bad:
        meta = write_dataset(
            folder,
            split_texts(texts, val_fraction),  # by the messages: a template may write today's date
            chat_tokenizer,
            {"eos": list(dict.fromkeys(eos))},
            workers=workers,
            progress=command.Progress(),
            encode=encode_conversation,
        )
    command.print_summary(folder, meta)
    for sentence in seen.sentences():
        print(sentence)
    if re.search(r"{%-?\s*generation\b", chat_tokenizer.chat_template):
        print("{% generation %} in the template is not read: what follows each prompt is learned")
    share = meta["train_targets"] / meta["train_tokens"]
    print(f"{share:.1%} of the training tokens are learned: the answers")
    return meta


def main():
    parser = command.make_parser(__doc__, HERE)
    command.add_input_option(parser)
    command.add_text_options(parser, tokenizer="llama3", val_fraction="0.05")
    template_help = "a Jinja file (default: the tokenizer's, or Llama 3's)"
    parser.add_argument("--template", type=command.path_argument, help=template_help)
    args = parser.parse_args()
    prepare(**vars(args))
    command.print_next("config/sft.py", "--init_from=FOLDER_OF_WEIGHTS", f"--dataset={args.folder.absolute()}")


if __name__ == "__main__":
    command.run_script(main)
