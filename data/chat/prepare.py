"""Conversations for finetuning: only the assistant's answers are learned, each with its end of turn.

    python data/chat/prepare.py --input chats.jsonl --tokenizer Llama-3.2-1B
    python data/chat/prepare.py --input chats.jsonl --tokenizer SmolLM2-135M --template mine.jinja --out data/mine

A line of the input is one conversation, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]},
or {"prompt": "...", "completion": "..."}. Makes train.bin, train.mask, val.bin, val.mask and meta.json in --out (this
folder by default). The text is that of the tokenizer's own chat template, else of Llama 3's; sample.py --chat and
transformers find it in the checkpoints. Copies of a conversation are all on the same side of the split.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.chat.template import encode_answers, encode_conversation, render_answers, template_of
from data.files import display_path
from data.text.prepare import split
from data.vocabulary import Tokenizer
from data.write import (
    Progress,
    add_tokenizer_options,
    check_val_fraction,
    cpu_cores,
    path_argument,
    print_summary,
    run_script,
    tokenizer_for_data,
    write_dataset,
)

HERE = Path(__file__).resolve().parent


def read_conversations(files: list[Path], tokenizer: Tokenizer, errors: str) -> Iterator[str]:
    """The text of each conversation, with marks around the answers. ValueError names the line, or with errors="skip"
    those that cannot be read are counted.
    """
    for path in files:
        n_skipped = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip():
                        yield render_answers(tokenizer, messages_of(line.decode("utf-8-sig")))
                except ValueError as error:  # a UnicodeDecodeError too
                    if errors == "strict":
                        raise ValueError(f"{path}:{number}: {error}") from error
                    n_skipped, example = n_skipped + 1, error
        if n_skipped:
            print(f"{f'skipped {n_skipped:,} lines of {display_path(path)}, the last one as {example}':<100}")


def messages_of(line: str) -> list[dict]:
    """The messages of a line of JSON. ValueError if it holds none, or what is no message."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("not JSON: thousands of brackets in brackets") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error}): a line is one conversation") from error
    if isinstance(row, dict) and "messages" in row:
        messages = row["messages"]
    elif isinstance(row, dict) and {"prompt", "completion"} <= row.keys():
        sides = (("user", row["prompt"]), ("assistant", row["completion"]))
        messages = [{"role": role, "content": content} for role, content in sides]
    else:
        found = f"an object with {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f"found {found}, expected an object with messages, or with prompt and completion")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list of messages, or an empty one")
    return [checked(message, i) for i, message in enumerate(messages, start=1)]


def checked(message, i: int) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {i} is no object with a role, as in {{'role': 'user', 'content': 'hello'}}")
    if not isinstance(message.get("content"), str):
        found = type(message["content"]).__name__ if "content" in message else "nothing"
        raise ValueError(f"message {i} has {found} as content, expected a string")
    # JSON can hold a lone surrogate: it becomes a question mark
    return message | {"content": message["content"].encode("utf-8", "replace").decode()}


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The id that ends an answer. ValueError if it is no special token: the model could not be told to stop there."""
    example = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    ids, is_target = encode_answers(tokenizer, render_answers(tokenizer, example))
    end = [token for token, target in zip(ids, is_target, strict=True) if target][-1]
    if tokenizer.decode([end]) not in tokenizer.special_tokens:
        raise ValueError("the chat template ends an answer with no special token: after it nothing could tell the end")
    return end


def prepare(
    inputs: list[Path],
    folder: Path = HERE,
    tokenizer: str = "llama3",
    tokenizer_path: Path | None = None,
    template: Path | None = None,
    val_fraction: float = 0.05,
    errors: str = "strict",
    workers: int = 1,
) -> dict:
    """Write the dataset into `folder`; return its meta.json. template: a file; none: the tokenizer's own, or Llama 3's.

    OSError or ValueError if the input is missing or wrong, an answer has no end, or there is no template.
    """
    check_val_fraction(val_fraction)
    found = tokenizer_for_data(tokenizer, tokenizer_path)
    if template:
        found.chat_template = Path(template).read_text()
    found.chat_template = template_of(found)
    found.files = found.files | {"chat_template.jinja": found.chat_template.encode()}
    end = end_of_turn(found)
    meta = write_dataset(
        Path(folder),
        split(read_conversations([Path(path) for path in inputs], found, errors), val_fraction),
        found,
        {"eos": list(dict.fromkeys([end, *found.eos]))},
        workers=workers,
        progress=Progress(None, "documents"),
        encode=encode_conversation,
    )
    print_summary(folder, meta)
    share = meta["train_targets"] / meta["train_tokens"]
    print(f"{share:.1%} of the training tokens are learned: the answers")
    return meta


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=path_argument, nargs="+", required=True, help=".jsonl files, or pipes")
    add_tokenizer_options(parser, default="llama3", bos=False)
    parser.add_argument("--template", type=path_argument, help="a Jinja file (default: the tokenizer's, or Llama 3's)")
    parser.add_argument(
        "--out", type=path_argument, default=HERE, help="folder for the dataset (default: the script's)"
    )
    parser.add_argument("--val_fraction", type=float, default=0.05, help="validation share (default: 0.05)")
    parser.add_argument(
        "--errors", choices=["strict", "skip"], default="strict", help="for a line that is no conversation"
    )
    parser.add_argument("--workers", type=int, default=cpu_cores(), help="processes (default: one per CPU core)")
    args = vars(parser.parse_args())
    out = args.pop("out")
    prepare(args.pop("input"), out, **args)
    train = ["python", "train.py", "config/sft_llama32_1b.py", "--init_from=FOLDER", f"--dataset={out.absolute()}"]
    print("next:", shlex.join(train), "with the FOLDER of the weights")


if __name__ == "__main__":
    run_script(main)
