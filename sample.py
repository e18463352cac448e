"""Writes text with a trained model, token by token.

    python sample.py --out_dir=out/baby_llama --prompt="def main():"
    python sample.py --out_dir=Llama-3.2-1B --prompt="A cria is"

out_dir is a run's folder (its newest checkpoint is read), one checkpoint, out/baby_llama/step_001000, or a folder of
published weights: Hugging Face's config.json and .safetensors, or Meta's params.json and consolidated.00.pth.
"""

import os
import sys
from pathlib import Path
from typing import Literal

import torch

from configurator import configure
from data.tokenizer import TextStream, get_tokenizer, tokenizer_of
from runtime import run_folder
from runtime.checkpoint import load_model
from runtime.checkpoint_folder import open_folder
from runtime.device import pick_device, pick_dtype
from runtime.hf_config import read_config

# ----------------------------------------------------------------------------------------------------------------------
# what to read, what to write
out_dir = "out"  # a run's folder, one of its checkpoints, or a folder of published weights
prompt = ""  # empty: the beginning of a document
num_samples = 1  # how many continuations
max_new_tokens = 500  # per sample; it stops sooner where the document ends
tokenizer_path: str | None = None  # llama3's tokenizer.model; none: the one beside the weights, else beside sample.py

# sampling
temperature = 0.8  # 0: always the likeliest token
top_k: int | None = None  # draw from the k likeliest
top_p: float | None = None  # draw from the likeliest that reach this probability together
seed = 1337  # of the draws

# system
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where there is one
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16, on a CPU float32
# ----------------------------------------------------------------------------------------------------------------------
configure(globals(), sys.argv[1:])

sys.stdout.reconfigure(errors="replace")  # for terminals that lack some characters
out_dir = os.path.expanduser(out_dir)  # a shell does not expand the ~ of --out_dir=~/runs
tokenizer_path = tokenizer_path and os.path.expanduser(tokenizer_path)
for name, valid, expected in (
    ("seed", 0 <= seed < 2**63, "at least 0 and below 2**63"),
    ("num_samples", num_samples >= 1, "at least 1"),
    ("max_new_tokens", max_new_tokens >= 1, "at least 1"),
    ("temperature", temperature >= 0, "at least 0"),
    ("top_k", top_k is None or top_k >= 1, "at least 1, or none"),
    ("top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or none"),
):
    if not valid:
        sys.exit(f"{name} is {globals()[name]}: it must be {expected}")
if 0 < temperature < 1e-6:  # in effect greedy, and dividing by it may overflow
    temperature = 0.0
device = pick_device(device)
dtype = pick_dtype(dtype, device)

try:
    folder = run_folder.read_newest(Path(out_dir), open_folder)
    tokenizer = get_tokenizer(read_config(folder)[1], tokenizer_path) if tokenizer_path else tokenizer_of(folder.path)
    prompt_tokens = tokenizer.encode(prompt, special=True)
    begin = [] if tokenizer.bos is None and prompt_tokens else [tokenizer.bos or tokenizer.end_of_text]
    tokens = begin + prompt_tokens
    # Only the context needed here: 131,072 tokens would take gigabytes of keys and values.
    model = load_model(out_dir, device, getattr(torch, dtype), len(tokens) + max_new_tokens)
except (OSError, ValueError) as error:
    sys.exit(str(error))
context = model.config.block_size
if len(tokens) > context:
    print(f"the prompt is {len(tokens):,} tokens long: the model sees the last {context:,} of them", file=sys.stderr)
start = torch.tensor([tokens], device=device)  # (1, T)
generator = torch.Generator(device).manual_seed(seed)

try:
    for _ in range(num_samples):
        print(prompt, end="", flush=True)
        text = TextStream(tokenizer, tokens)
        for token in model.generate(start, max_new_tokens, temperature, top_k, top_p, generator):
            if token.item() in tokenizer.eos:
                break
            print(text.add(token.item()), end="", flush=True)
        print(text.end() + "\n" + "-" * 80)
except KeyboardInterrupt:
    print()
except OSError as error:
    if error.filename or not error.errno:  # not from printing: from compiling a kernel, for example
        raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):  # the reader has stopped, as `head` does
        sys.exit(f"the text could not be written: {error.strerror}")
