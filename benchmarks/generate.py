"""Tokens per second of generation, against transformers.generate, and how much of the memory bandwidth a step uses.

    python bench.py generate                        Llama 3.2 1B with random weights, batches of 1 and of 64
    python bench.py generate --batches=8 --prompt=1024 --tokens=512
    python bench.py generate --config=config/llama_114m.py --trainers=nanocria,hf --batches=1,8      also on a CPU

tok_per_s   of runtime/generate.py, or of transformers' generate, with its defaults (hf) and with the static cache that
            its documentation recommends, whose steps it compiles (hf-static): greedy, including the prompts, the
            median of three
step_ms     ours only: one replayed step in the second half of the text. It must read the weights and what the caches
            hold; of_copy is the rate at which it does so over that of a large copy, measured in the same run

Each point runs in a separate process.
"""

import statistics
from functools import partial
from itertools import product

import torch

from benchmarks import runner, settings, timing
from benchmarks.peers import hf_model
from benchmarks.trainers import llama_config
from model import Llama
from runtime.device import CUDAGraph, pick_device
from runtime.generate import decode_step, generate, new_caches, read_prompts

# settings
trainers = "nanocria,hf,hf-static"  # who generates
config = runner.CONFIG  # the model
batches = "1,64"  # texts at once
prompt = 128  # tokens of each prompt
tokens = 256  # new tokens of each text
out = "out/generate.json"  # the record

ROUNDS = 3  # timed, after one to warm up


@torch.no_grad()
def measure(trainer: str, config: str, batch: int, prompt: int, tokens: int, copy_tb_s: float) -> dict:
    """On the GPU in bfloat16, or on the CPU in float32. copy_tb_s: the rate of a large copy."""
    device = torch.device(pick_device("auto"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    c = llama_config(config, block_size=prompt + tokens)
    prompts = torch.randint(c.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    if trainer == "nanocria":
        with torch.device("meta"):
            model = Llama(c).to(dtype)
        model.to_empty(device=device).init_weights(0, device)

        def call():
            return list(generate(model, prompts, tokens, temperature=0))
    else:
        model = hf_model(c, "none", device, dtype=dtype)[0].eval()
        ids = torch.tensor(prompts, device=device)
        options = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(ids)
        if trainer == "hf-static":
            options["cache_implementation"] = "static"

        def call():
            return model.generate(ids, **options)[0, prompt:]

    n_new = len(call())  # the first also warms up
    assert n_new == tokens, f"{n_new} of {tokens} tokens"
    seconds = statistics.median(timing.wall_seconds(call, device) for _ in range(ROUNDS))
    row = {"tok_per_s": batch * tokens / seconds}
    if trainer == "nanocria":
        row |= measure_step(model, prompts, tokens, device)
        row["of_copy"] = row["step_bytes"] / row["step_ms"] / 1e9 / copy_tb_s
    return row


def measure_step(model: Llama, prompts: list[list[int]], tokens: int, device: torch.device) -> dict:
    """The milliseconds of one step in the second half of the text, and the bytes that it must read."""
    c = model.config
    caches = new_caches(model, len(prompts), len(prompts[0]) + tokens)
    newest = read_prompts(model, caches, prompts).argmax(-1)
    step = partial(decode_step, model, caches)
    step = CUDAGraph(step) if device.type == "cuda" else step
    half = max(1, tokens // 2)
    for _ in range(tokens - half):
        step(newest)
    ms = 1000 * timing.wall_seconds(lambda: [step(newest) for _ in range(half)], device) / half
    weights = sum(p.nbytes for name, p in model.named_parameters() if c.tie_embeddings or "tok_embeddings" not in name)
    positions = len(prompts) * (len(prompts[0]) + tokens - half / 2)  # of all rows, halfway through the timing
    cached = 2 * c.n_layer * c.n_kv_head * c.head_dim * positions * caches[0].k.element_size()
    return {"step_ms": ms, "step_bytes": round(weights + cached)}


def main(argv: list[str]) -> None:
    s = settings.read_settings(globals(), argv, trainers=["nanocria", "hf", "hf-static"], batches=int)
    record = runner.start("generate", s, on_cpu=True)
    for batch, trainer in product(s.batches, s.trainers):
        key = {"trainer": trainer, "config": s.config, "batch": batch, "prompt": s.prompt, "tokens": s.tokens}
        record.measure("points", key, runner.call, "generate.measure", copy_tb_s=record.head["copy_tb_s"], **key)
    runner.finish(record)
