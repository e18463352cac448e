"""A model in lm-evaluation-harness (pip install lm_eval):

python -m runtime.lm_eval run --model nanocria --model_args out_dir=out/mine --tasks hellaswag,arc_easy
"""

import sys
from pathlib import Path

import torch

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    sys.exit(f"{error}: pip install lm_eval")

from data.tokenizer import tokenizer_of
from runtime import run_folder
from runtime.checkpoint import load_model
from runtime.device import pick_device, pick_dtype
from runtime.evaluate import MOST_WINDOW, log_likelihoods, text_log_likelihood
from runtime.generate import begin_document, generate_text

# Tasks' names for the maximum number of tokens in an answer.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("nanocria")
class Nanocria(TemplateLM):
    def __init__(self, out_dir: str, batch_size: int | str = 8, device: str | None = None, dtype: str = "auto", **_):
        super().__init__()
        device = pick_device("cpu" if device == "cpu" else "auto")  # the harness passes cuda by default
        self.lm = load_model(out_dir, device, getattr(torch, pick_dtype(dtype, device)))
        self.tokens = run_folder.read_newest(Path(out_dir), tokenizer_of)
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 8  # auto, or auto:4

    eot_token_id = property(lambda self: self.tokens.end_of_text)
    prefix_token_id = property(lambda self: begin_document(self.tokens, "")[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_):
        return self.tokens.encode(string) if add_special_tokens is False else begin_document(self.tokens, string)

    def _loglikelihood_tokens(self, requests, **_):
        rows = [(context + ids, [False] * len(context) + [True] * len(ids)) for _, context, ids in requests]
        return [(log_p.sum().item(), greedy) for log_p, greedy in log_likelihoods(self.lm, rows, self.batch_size)]

    def loglikelihood_rolling(self, requests, **_):
        return [text_log_likelihood(self.lm, self.tokens, r.args[0], MOST_WINDOW, self.batch_size)[0] for r in requests]

    def generate_until(self, requests, **_):
        def answer(context, options):
            greedy = options.get("do_sample") is False or not options.get("temperature")
            sampling = {"temperature": 0.0 if greedy else float(options["temperature"])}
            sampling |= {name: options[name] for name in ("top_k", "top_p", "min_p") if options.get(name)}
            length = int(next((options[name] for name in LENGTHS if options.get(name)), 256))
            until = options.get("until") or []
            stop = [until] if isinstance(until, str) else list(filter(None, until))  # "" would end it at once
            prompt = begin_document(self.tokens, context)
            return "".join(new for (new,) in generate_text(self.lm, self.tokens, [prompt], length, stop, **sampling))

        return [answer(*request.args) for request in requests]


if __name__ == "__main__":
    cli_evaluate()
