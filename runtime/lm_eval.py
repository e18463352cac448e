"""A model in lm-evaluation-harness (pip install lm_eval):

python -m runtime.lm_eval run --model nanocria --model_args out_dir=out/mine --tasks hellaswag,arc_easy

The numbers are those of the harness's own class for transformers (hf) on the same folder, up to rounding. As there, a
text follows a bos only if the folder's tokenizer adds one: no end of another document takes its place, as it does in
sample.py for a model trained without bos. But an answer also ends at the end of a document or turn, not at eos alone.
"""

import sys
from pathlib import Path

import torch

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    sys.exit(f"{error}: pip install --upgrade lm_eval")

from data.tokenizer import tokenizer_of
from runtime.checkpoint import load_model, newest_model
from runtime.device import pick_device, pick_dtype
from runtime.evaluate import log_likelihoods
from runtime.generate import generate_text


@register_model("nanocria")
class Nanocria(TemplateLM):
    def __init__(self, out_dir: str, batch_size: int | str = 8, device: str | None = None, dtype: str = "auto", **_):
        super().__init__()
        device = pick_device("cpu" if device == "cpu" else "auto")  # the harness passes cuda by default
        self.lm = load_model(out_dir, device, getattr(torch, pick_dtype(dtype, device)))
        self.tokens = tokenizer_of(newest_model(Path(out_dir)))
        self.prefix = self.tokens.bos_token or self.tokens.eos_token  # before what has no context
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 8  # auto, or auto:4

    eot_token_id = property(lambda self: self.tokens.encode(self.tokens.eos_token, special=True)[0])
    prefix_token_id = property(lambda self: self.tokens.encode(self.prefix, special=True)[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_):
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.prefix)
        bos = [self.tokens.hf_bos] if add_special_tokens and self.tokens.hf_bos is not None else []
        return bos + self.tokens.encode(string, special=True)

    def _loglikelihood_tokens(self, requests, **_):
        rows = [(context + ids, [False] * len(context) + [True] * len(ids)) for _, context, ids in requests]
        return [(log_p.sum().item(), greedy) for log_p, greedy in log_likelihoods(self.lm, rows, self.batch_size)]

    def loglikelihood_rolling(self, requests, **_):
        return [self._rolling(*request.args) for request in requests]

    def _rolling(self, text: str) -> float:
        ids = self.tok_encode(text)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.lm.config.block_size, context_len=1)
        disjoint = [(text, *make_disjoint_window(window)) for window in windows]
        return sum(log_p for log_p, _ in self._loglikelihood_tokens(disjoint))

    def generate_until(self, requests, **_):
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, options: dict) -> str:
        options = normalize_gen_kwargs(options)
        stop = [each for each in handle_stop_sequences(options["until"], self.tokens.eos_token) if each]
        sampling = {name: options[name] for name in ("top_k", "top_p", "min_p") if options.get(name)}
        sampling["temperature"] = options.get("temperature", 0.0)
        length = options["max_gen_toks"]
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        if length < self.lm.config.block_size:  # the beginning of a long prompt makes room for the answer
            prompt = prompt[length - self.lm.config.block_size :]
        text = "".join(new for (new,) in generate_text(self.lm, self.tokens, [prompt], length, stop, **sampling))
        for token in self.tokens.special_tokens:
            text = text.replace(token, "")
        return postprocess_generated_text(text, stop, think_end_token=None)


if __name__ == "__main__":
    cli_evaluate()
