"""Writes text with a trained model, token by token.

    python sample.py --out_dir=out/baby_llama --prompt="def main():"
    python sample.py --out_dir=Llama-3.2-1B --prompt="A cria is"

out_dir is a run's folder (its newest checkpoint is read), one checkpoint, out/baby_llama/step_001000, or a folder with
Hugging Face's config.json and .safetensors.
"""

import codecs
import contextlib
import os
import sys
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import convert
from configurator import configure
from tokenizer import end_of_text, get_tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# what to read, what to write
out_dir = "out"  # a run's folder, one of its checkpoints, or one of Hugging Face's format
prompt = ""  # empty: the beginning of a document
num_samples = 1  # how many continuations
max_new_tokens = 500  # tokens of each; the end of the document ends it sooner
tokenizer_path: str | None = None  # where llama3's tokenizer.model is; none: beside this file

# sampling
temperature = 0.8  # 0: always the likeliest token
top_k: int | None = None  # draw from the k likeliest
top_p: float | None = None  # draw from the likeliest that reach this probability together
seed = 1337  # of the draws

# system
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where there is one
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on cuda, else float32
# ----------------------------------------------------------------------------------------------------------------------
configure(globals(), sys.argv[1:])

out_dir = os.path.expanduser(out_dir)  # a shell leaves the ~ of --out_dir=~/runs as it is
if seed >= 2**63:
    sys.exit(f"seed is {seed}: it must be below 2**63")
for name in ("num_samples", "max_new_tokens"):
    if globals()[name] < 1:
        sys.exit(f"{name} is {globals()[name]}: it must be at least 1")
folder = Path(out_dir)
published = (folder / "config.json").exists()
path = folder if published or (folder / "meta.json").exists() else checkpoint.newest(folder)
if path is None:
    sys.exit(f"{out_dir} holds no checkpoint: train one first, or name another folder with --out_dir")
if device == "auto":
    device = "cuda" if torch.cuda.is_available() else "cpu"
if dtype == "auto":
    dtype = "bfloat16" if device == "cuda" else "float32"

if device == "cuda" and not torch.cuda.is_available():
    sys.exit("--device=cuda, but torch finds no CUDA device: use --device=cpu")
try:
    name = convert.read_config(path)[1] if published else checkpoint.read_meta(path)["dataset"]["tokenizer"]
    if name is None:
        sys.exit(f"{path} does not say its tokenizer: only Llama 3's is known by its {convert.LLAMA3_VOCAB:,} tokens")
    if published and tokenizer_path is None and (path / "original" / "tokenizer.model").exists():
        tokenizer_path = str(path)
    tokenizer = get_tokenizer(name, tokenizer_path)
    # Documents follow one another in our training data, each behind the end of the one before.
    begin = end = end_of_text(tokenizer)
    ends = {end}
    if published and name == "llama3":
        begin, ends = convert.read_special_tokens(path, end)
    start = torch.tensor([[begin, *tokenizer.encode_ordinary(prompt)]], device=device)
    if published:  # its context may be of 131,072 tokens: gigabytes of keys and values
        model = convert.load_model(path, start.shape[1] + max_new_tokens, device, getattr(torch, dtype))
    else:
        model = checkpoint.load_model(path, device, getattr(torch, dtype))
except (OSError, ValueError) as error:
    sys.exit(str(error))
generator = torch.Generator(device).manual_seed(seed)

try:
    for _ in range(num_samples):
        print(prompt, end="", flush=True)
        text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be spread over several tokens
        for token in model.generate(start, max_new_tokens, temperature, top_k, top_p, generator):
            if token.item() in ends:
                break
            with contextlib.suppress(KeyError):  # a number that means nothing: padding of the vocabulary, a gap in it
                print(text.decode(tokenizer.decode_single_token_bytes(token.item())), end="", flush=True)
        print("\n" + "-" * 80)
except ValueError as error:  # a temperature, top_k or top_p that makes no sense
    sys.exit(str(error))
except KeyboardInterrupt:
    print()
except BrokenPipeError:  # whoever reads has read enough, as head does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
