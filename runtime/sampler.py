"""The sample that train.py prints after each evaluation, with --sample_prompt.

    sampler = Sampler("A cria is", train_data, hf_files)  # None as the prompt: show() prints nothing
    sampler.show(model)                                   # how it continues or, if trained on chats, its answer

The text is that of sample.py with the same prompt, seed and number of tokens. It comes from a generator of its own:
training does not change.
"""

import json

import torch

from data.chat.template import encode_prompt
from data.loader import Blocks
from data.tokenizer import doc_start_of, tokenizer_of
from model import Llama
from runtime.distributed import print0, stop_on_error
from runtime.generate import begin_document, generate_text
from runtime.hf import ADAPTED

NEW_TOKENS = 64
TEMPERATURE = 0.8  # sample.py's
SEED = 1337


class Sampler:
    @stop_on_error()
    def __init__(self, prompt: str | None, data: Blocks, hf_files: dict[str, bytes]):
        """hf_files: of the run's checkpoints; config.json says what precedes a prompt.

        It ends the run if the data's tokenizer cannot be read or, for chats, its template refuses the prompt.
        """
        self.prompt = prompt
        if prompt is None:
            return
        self.is_chat = bool(data.tokens.masks)
        try:
            self.tokenizer = tokenizer_of(data.tokens.folder)
        except ImportError as error:
            raise ValueError(f"sample_prompt needs the data's tokenizer: {error}") from error
        if self.tokenizer.bos is None:
            self.tokenizer.bos = doc_start_of(json.loads(hf_files.get("config.json") or hf_files[ADAPTED]))
        if self.is_chat:
            self.ids = encode_prompt(self.tokenizer, [{"role": "user", "content": prompt}])
        else:
            self.ids = begin_document(self.tokenizer, prompt, special=True)

    def show(self, model: Llama) -> None:
        if self.prompt is None:
            return
        generator = torch.Generator(model.tok_embeddings.weight.device).manual_seed(SEED)
        # No CUDA graph: its memory could be that of training's graphs.
        options = dict(temperature=TEMPERATURE, generator=generator, cuda_graph=False)
        parts = generate_text(model, self.tokenizer, [self.ids], NEW_TOKENS, **options)
        text = self.prompt + "\n" * self.is_chat + "".join(part for (part,) in parts)
        print0("sample    " + text.replace("\n", "\n" + " " * 10))
