"""Sample from a trained model: continue a prompt, chat, or score a file.

    python sample.py --out_dir=out/baby_llama --prompt="def main():"
    python sample.py --out_dir=Llama-3.2-1B-Instruct --chat
    python sample.py --out_dir=Llama-3.2-1B --evaluate=text.txt

out_dir is a run's folder (the newest checkpoint is loaded), one checkpoint such as out/baby_llama/step_000700, or a
folder of published weights: Hugging Face's config.json and .safetensors.
runtime/generate.py samples the tokens; runtime/evaluate.py defines the scores.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from configurator import configure
from data.chat.template import encode_prompt
from data.tokenizer import get_tokenizer, set_doc_start, tokenizer_of
from runtime.check_settings import limit_problem
from runtime.checkpoint import load_model, newest_model, open_folder
from runtime.device import pick_device, pick_dtype
from runtime.evaluate import evaluate_file
from runtime.generate import begin_document, generate_text

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  arrow keys in --chat

# ----------------------------------------------------------------------------------------------------------------------
# input and output
out_dir = "out"  # a run's folder, one of its checkpoints, or a folder of published weights
prompt = ""  # empty: start a new document; -: read standard input
num_samples = 1  # continuations, generated in one batch
max_new_tokens = 500  # per sample; generation stops earlier at the end of the document or turn
tokenizer: str | None = None  # a tokenizer's folder or file; none: out_dir's own

# conversation
chat = False  # answer typed messages, using the folder's chat template; /exit or Ctrl-D ends
system = ""  # the system message, for example "Answer in one sentence."

# evaluation
evaluate: str | None = None  # a text file, or JSON rows: conversations, or prompts and completions
window: int | None = None  # tokens per window of a text; none: the model's context, at most 4,096
batch_size = 8  # sequences scored at a time

# sampling
temperature = 0.8  # 0: always the most likely token
top_k: int | None = None  # sample from the k most likely tokens
top_p: float | None = None  # sample from the most likely tokens that reach this total probability
min_p: float | None = None  # sample from tokens at least this many times as likely as the most likely one
seed = 1337  # for sampling

# system
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if available
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 or float16, CPU: float32
# ----------------------------------------------------------------------------------------------------------------------
settings, _ = configure(globals(), sys.argv[1:])

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
out_dir = os.path.expanduser(out_dir)  # a shell does not expand the ~ of --out_dir=~/runs
if problem := limit_problem(settings):
    sys.exit(problem)
if sum(map(bool, (prompt, chat, evaluate))) > 1:
    sys.exit("--prompt, --chat and --evaluate exclude each other: give one of them")
device = pick_device(device)
dtype = pick_dtype(dtype, device)


def draw(prompts: list[list[int]]) -> Iterator[list[str]]:
    """Yield, token by token, the text added to each prompt."""
    longest = max(map(len, prompts))
    context = model.config.block_size
    if longest > context:
        print(f"the prompt is {longest:,} tokens long: the model sees the last {context:,} of them", file=sys.stderr)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)
    return generate_text(model, tokenizer, prompts, max_new_tokens, **sampling)


def write_continuations(text: str) -> None:
    """Print the first continuation as it is generated, the others when all are done."""
    texts = [text] * num_samples
    print(text, end="", flush=True)
    for new in draw([begin_document(tokenizer, text, special=True)] * num_samples):
        print(new[0], end="", flush=True)
        texts = [whole + added for whole, added in zip(texts, new, strict=True)]
    print("\n" + "-" * 80)
    for other in texts[1:]:
        print(other + "\n" + "-" * 80)


def converse(messages: list[dict]) -> None:
    """Read a line, print the answer, repeat. Ctrl-C ends an answer; at the prompt it ends the conversation."""
    n_system = len(messages)
    print("/exit or Ctrl-D ends the conversation", file=sys.stderr)
    while (line := input("> ")).strip() != "/exit":
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        room = model.config.block_size - min(max_new_tokens, model.config.block_size // 2)
        while len(ids := encode_prompt(tokenizer, messages)) > room and len(messages) > n_system + 1:
            del messages[n_system : n_system + 2]  # the oldest question and its answer
        answer = ""
        with contextlib.suppress(KeyboardInterrupt):
            for (new,) in draw([ids]):
                print(new, end="", flush=True)
                answer += new
        print()
        messages.append({"role": "assistant", "content": answer})


try:
    newest = newest_model(Path(out_dir))
    folder = open_folder(newest)
    tokenizer = get_tokenizer(os.path.expanduser(tokenizer)) if tokenizer else tokenizer_of(folder.path)
    set_doc_start(tokenizer, folder.config)
    messages = [{"role": "system", "content": system}] if system else []
    if chat:
        encode_prompt(tokenizer, [*messages, {"role": "user", "content": "?"}])  # fail early without a usable template
    model = load_model(newest, device, getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(seed)
    if chat:
        converse(messages)
    elif evaluate:
        metrics = evaluate_file(model, tokenizer, Path(evaluate).expanduser(), window, batch_size)
        print("\n".join(f"{name}: {value}" for name, value in metrics.items()))
    else:
        # echo and editors add the final newline
        write_continuations(sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt)
except (OSError, ValueError) as error:
    sys.exit(str(error))
except (EOFError, KeyboardInterrupt):
    print()
