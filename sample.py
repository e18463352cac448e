"""Sample from a trained model: continue a prompt, chat, or score a file.

    python sample.py --out_dir=out/baby_llama --prompt="def main():"
    python sample.py --out_dir=Llama-3.2-1B-Instruct --chat
    python sample.py --out_dir=Llama-3.2-1B --evaluate=hellaswag_val.jsonl

out_dir is a run's folder (the newest checkpoint is loaded), one checkpoint such as out/baby_llama/step_000800, or a
folder of published weights: Hugging Face's config.json and .safetensors.
runtime/generate.py samples the tokens; runtime/evaluate.py defines the scores.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from configurator import configure
from data.chat.template import encode_prompt
from data.tokenizer import DOC_START, get_tokenizer, tokenizer_of
from data.vocabulary import Tokenizer
from runtime.checkpoint import Folder, load_model, open_folder, read_newest
from runtime.device import pick_device, pick_dtype
from runtime.evaluate import evaluate_file, field, read_file
from runtime.generate import PrefixCache, begin_document, generate_text
from runtime.hf_config import read_config

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  arrow keys in --chat

# ----------------------------------------------------------------------------------------------------------------------
# input and output
out_dir = "out"  # a run's folder, one of its checkpoints, or a folder of published weights
prompt = ""  # empty: start a new document; -: read standard input
prompt_file: str | None = None  # a text file with one prompt, or a .jsonl file of {"prompt": ...} lines
num_samples = 1  # continuations per prompt, generated in one batch
max_new_tokens = 500  # per sample; generation stops earlier at the end of the document or turn
stop: str | list | None = None  # also stop before this string (\n: newline, \t: tab, \\: backslash) or list of strings
tokenizer: str | None = None  # a tokenizer's folder or file; none: out_dir's own

# conversation
chat = False  # answer typed messages, using the folder's chat template; /exit or Ctrl-D ends
system = ""  # the system message, for example "Answer in one sentence."

# evaluation
evaluate: str | None = None  # a text file, or JSON rows: conversations, prompts and completions, or HellaSwag's format
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
_, named = configure(globals(), sys.argv[1:])

sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show some characters
out_dir = os.path.expanduser(out_dir)  # a shell does not expand the ~ of --out_dir=~/runs
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}  # a shell does not read them in --stop='\n'
if isinstance(stop, str):
    stop = [re.sub(r"\\[ntr\\]", lambda match: ESCAPES[match[0]], stop)]
stops = stop or []  # a list is read as Python reads it, escapes too
for name, valid, expected in (
    ("seed", 0 <= seed < 2**63, "at least 0 and below 2**63"),
    ("num_samples", num_samples >= 1, "at least 1"),
    ("max_new_tokens", max_new_tokens >= 1, "at least 1"),
    ("temperature", temperature >= 0, "at least 0"),
    ("top_k", top_k is None or top_k >= 1, "at least 1, or none"),
    ("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or none"),
    ("min_p", min_p is None or 0 <= min_p <= 1, "from 0 to 1, or none"),
    ("window", window is None or window >= 2, "at least 2, or none"),
    ("batch_size", batch_size >= 1, "at least 1"),
    ("stop", all(isinstance(each, str) and each for each in stops), "a string or a list of them, none empty"),
):
    if not valid:
        sys.exit(f"{name} is {globals()[name]}: it must be {expected}")
if "" in (prompt_file, evaluate):  # from an empty shell variable
    sys.exit("--prompt_file and --evaluate need a file name")
if sum([bool(prompt), bool(prompt_file), chat, bool(evaluate)]) > 1:
    sys.exit("--prompt, --prompt_file, --chat and --evaluate exclude each other: give one of them")
for names, task, used in (
    (["system"], "--chat", chat),
    (["window", "batch_size"], "--evaluate", evaluate),
    (["num_samples"], "--prompt", not chat and not evaluate),
    (["max_new_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "seed"], "--prompt and --chat", not evaluate),
):
    for name in names:
        if name in named and not used:
            sys.exit(f"--{name} is for {task}: add that, or leave it out")
device = pick_device(device)
dtype = pick_dtype(dtype, device)


def named_tokenizer(folder: Folder) -> Tokenizer:
    """The tokenizer of --tokenizer. ValueError if it has too many tokens; a warning if the model's is another."""
    given = get_tokenizer(os.path.expanduser(tokenizer))
    settings, trained = read_config(folder)
    if given.name != trained and given.n_vocab > settings["vocab_size"]:
        sizes = f"tokenizer {given.name} has {given.n_vocab:,} tokens, {folder.path} only {settings['vocab_size']:,}"
        raise ValueError(f"{sizes}: leave out --tokenizer, or name the model's own")
    if trained not in (None, given.name):  # equal names mean equal ids, but different names do not imply different ids
        names = f"{folder.path} was trained on {trained} tokens, not on {given.name}"
        print(f"{names}: unless their ids are the same, leave out --tokenizer", file=sys.stderr)
    if given.bos is None:
        given.bos = folder.config.get(DOC_START)
    return given


def read_prompts() -> list[str]:
    """The prompts to continue. The final newline of a file or pipe is dropped: echo and editors add it."""
    if not prompt_file:
        return [sys.stdin.read().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt]
    path = Path(prompt_file).expanduser()
    if ".jsonl" in path.suffixes:
        return [field(where, row, "prompt", str) for where, row in read_file(path)] or [""]
    return [read_file(path, "text").removesuffix("\n").removesuffix("\r")]


def draw(prompts: list[list[int]], prefix: PrefixCache | None = None) -> Iterator[list[str]]:
    """Yield, token by token, the text added to each prompt."""
    longest = max(map(len, prompts))
    context = model.config.block_size
    if longest > context:
        print(f"the prompt is {longest:,} tokens long: the model sees the last {context:,} of them", file=sys.stderr)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)
    return generate_text(model, tokenizer, prompts, max_new_tokens, stops, prefix=prefix, **sampling)


def write_continuations(prompts: list[str]) -> None:
    """Print the first continuation as it is generated, the others when all are done."""
    texts = [text for text in prompts for _ in range(num_samples)]
    if any(tokenizer.encode(text, special=True)[:1] == [tokenizer.bos] for text in prompts):
        bos = tokenizer.decode([tokenizer.bos])
        print(f"the prompt begins with {bos}: no second one is put before it", file=sys.stderr)
    print(texts[0], end="", flush=True)
    for new in draw([begin_document(tokenizer, text, special=True) for text in texts]):
        print(new[0], end="", flush=True)
        texts = [text + added for text, added in zip(texts, new, strict=True)]
    print("\n" + "-" * 80)
    for text in texts[1:]:
        print(text + "\n" + "-" * 80)


def converse(messages: list[dict]) -> None:
    """Read a line, print the answer, repeat. Ctrl-C ends an answer; at the prompt it ends the conversation."""
    n_system = len(messages)
    prefix = PrefixCache()
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
            for (new,) in draw([ids], prefix):
                print(new, end="", flush=True)
                answer += new
        print()
        messages.append({"role": "assistant", "content": answer})


try:
    folder = read_newest(Path(out_dir), open_folder)
    tokenizer = named_tokenizer(folder) if tokenizer else tokenizer_of(folder.path)
    messages = [{"role": "system", "content": system}] if system else []
    if chat:
        encode_prompt(tokenizer, [*messages, {"role": "user", "content": "?"}])  # fail early without a usable template
    prompts = [] if chat or evaluate else read_prompts()
    model = load_model(out_dir, device, getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(seed)
    metrics = evaluate_file(model, tokenizer, Path(evaluate).expanduser(), window, batch_size) if evaluate else {}
except (ImportError, OSError, ValueError) as error:
    sys.exit(str(error))
except KeyboardInterrupt:
    sys.exit(130)

try:
    if chat:
        converse(messages)
    elif evaluate:
        print("\n".join(f"{name}: {value}" for name, value in metrics.items()))
    else:
        write_continuations(prompts)
except ValueError as error:
    sys.exit(str(error))
except (EOFError, KeyboardInterrupt):
    print()
except OSError as error:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python would flush the rest at exit
    if not isinstance(error, BrokenPipeError):  # the reader closed the pipe, as `head` does
        sys.exit(f"the text cannot be written: {error.strerror}")
