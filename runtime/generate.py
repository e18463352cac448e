"""Generate text token by token: prompts of any lengths in one batch, on a GPU one CUDA graph per token.

    for tokens in generate(model, [prompt_ids, other_prompt_ids], max_new_tokens=100, eos=tokenizer.eos):
        ...                                                       # one id per row; None once a row has ended

Rows of different lengths start at the left of their caches and are padded on the right: causal attention never sees
the padding, and the next token overwrites it. So a row's text does not depend on its neighbors.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import torch

from data.chat.template import encode_prompt
from data.loader import Blocks
from data.tokenizer import set_doc_start, tokenizer_of
from data.vocabulary import TextStream, Tokenizer
from model import KVCache, Llama, rope_tables
from runtime.device import CUDAGraph, send_to_cpu
from runtime.distributed import print0, stop_on_error
from runtime.hf import BASE_CONFIG


def new_caches(model: Llama, n_batch: int, n_positions: int) -> list[KVCache]:
    """One empty cache per layer, with n_positions per row."""
    c = model.config
    weight = model.tok_embeddings.weight
    lengths = torch.zeros(n_batch, dtype=torch.int64, device=weight.device)
    tables = rope_tables(c, 0, n_positions, weight.device, torch.promote_types(weight.dtype, torch.float32))
    # Zeros: attention also multiplies the values at masked positions (by 0), so they must be finite.
    shape = 2, n_batch, n_positions, c.n_kv_head, c.head_dim
    return [KVCache(*weight.new_zeros(shape), lengths, *tables) for _ in range(c.n_layer)]


def read_prompts(model: Llama, caches: list[KVCache], prompts: list[list[int]]) -> torch.Tensor:
    """Fill the caches with the prompts, in place of what they hold. Returns the logits (B, V) after each, in fp32."""
    device = caches[0].lengths.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    caches[0].lengths.zero_()
    x = model.hidden(tokens, caches=caches)  # (B, T, C)
    caches[0].lengths.copy_(lengths)
    return model.lm_head(x[torch.arange(len(prompts), device=device), caches[0].lengths - 1]).float()


def decode_step(model: Llama, caches: list[KVCache], tokens: torch.Tensor) -> torch.Tensor:
    """Append tokens (B,) to the caches and return the logits (B, V) after them, in fp32. For a CUDA graph: nothing here
    waits for the GPU or gets the position from the CPU, so the same kernels run for each token.
    """
    x = model.hidden(tokens[:, None], caches=caches)  # (B, 1, C)
    caches[0].lengths.add_(1)
    return model.lm_head(x)[:, 0].float()


def require_in_vocabulary(rows: Iterable[list[int]], model: Llama) -> None:
    """ValueError for a token that the embedding has no row for: on a GPU that would be a device-side assertion."""
    largest = max(map(max, rows))
    if largest >= model.config.vocab_size:
        raise ValueError(f"the tokenizer gives token {largest}, but the model has {model.config.vocab_size:,} tokens")


@torch.no_grad()
def generate(
    model: Llama,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos: Collection[int] = (),
    cuda_graph: bool = True,
    **sampling,
) -> Iterator[list[int | None]]:
    """Continue each prompt by at most max_new_tokens, yielding at each step a list with the next token of each row.

    A row ends before a token of eos and yields None from then on; generation stops when all rows have ended. sampling:
    sample()'s temperature, top_k, top_p, min_p and generator. Past block_size the older half of a row is dropped and
    the rest read again. cuda_graph: on a GPU, one per token. ValueError, from the first next(), for an empty prompt and
    for numbers out of range.
    """
    if not prompts or not all(prompts):
        raise ValueError("generate needs at least one token to continue")
    require_in_vocabulary(prompts, model)
    block_size = model.config.block_size
    on_gpu = model.tok_embeddings.weight.is_cuda
    texts = [list(prompt[-block_size:]) for prompt in prompts]
    running = [True] * len(prompts)
    n_positions = min(block_size, max(map(len, texts)) + max_new_tokens)
    caches = new_caches(model, len(texts), n_positions)
    step = partial(decode_step, model, caches)
    # A step is about 200 kernels of a few microseconds: launching them takes longer than running them.
    if cuda_graph and on_gpu and model.how.kernels != "none":
        step = CUDAGraph(step)
    pending = deque()  # drawn tokens on their way to the CPU. A GPU has the next step queued before the CPU sees them

    def next_tokens():
        for i, token in enumerate(pending.popleft()()):
            running[i] &= token not in eos
            if running[i]:
                texts[i].append(token)
        return [text[-1] if runs else None for text, runs in zip(texts, running, strict=True)]

    tokens = None
    longest = 0  # of the rows in the caches
    for _ in range(max_new_tokens):
        if tokens is None or longest == n_positions:  # read the prompts, or again what fits of each text
            for text, runs in zip(texts, running, strict=True):
                if len(text) > block_size or not runs:
                    # Keep one token of a row that has ended: if full, it would have all rows read again at every token.
                    del text[: -(block_size // 2 + 1) if runs else -1]
            logits = read_prompts(model, caches, texts)
            longest = max(map(len, texts))
        else:
            logits = step(tokens)
            longest += 1
        tokens = sample(logits, **sampling)  # (B,)
        pending.append(send_to_cpu(tokens))
        n_ahead = int(on_gpu and longest < n_positions)  # if the caches are full, the texts are read again
        while len(pending) > n_ahead:
            yield next_tokens()
        if not any(running):
            return
    while pending:
        yield next_tokens()


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Sample one token per row (B,) from logits (B, V) fp32. temperature 0, or nearly 0, takes the likeliest token.
    top_k keeps the k likeliest, top_p the fewest likeliest whose probabilities sum to at least p, min_p those at least
    min_p times as likely as the likeliest. ValueError for numbers out of range.
    """
    if not temperature >= 0 or not (top_k is None or top_k >= 1):
        raise ValueError(f"temperature {temperature} and top_k {top_k}: must be at least 0 and at least 1")
    if not (top_p is None or 0 < top_p <= 1) or not (min_p is None or 0 <= min_p <= 1):
        raise ValueError(f"top_p {top_p} and min_p {min_p}: must be in (0, 1] and in [0, 1]")
    if temperature < 1e-6:  # below it logits could overflow
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None or top_p is not None:
        n_vocab = logits.shape[-1]
        likeliest, order = logits.topk(min(top_k or n_vocab, n_vocab))  # in descending order
        probabilities = likeliest.softmax(-1)
        if top_p is not None:
            before = probabilities.cumsum(-1) - probabilities  # the sum over all likelier tokens
            probabilities[:, 1:][before[:, 1:] >= top_p] = 0  # keep the likeliest, however small top_p is
        probabilities = torch.zeros_like(logits).scatter(-1, order, probabilities)
    else:
        probabilities = logits.softmax(-1)
    if min_p is not None:
        probabilities[probabilities < min_p * probabilities.amax(-1, keepdim=True)] = 0
    # torch.multinomial's method, without its checks, which wait for the GPU.
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def begin_document(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """The ids of a text at the beginning of a document: after the bos if the tokenizer has one. An empty text gives the
    bos, or the end-of-text token without one. special: turn special tokens spelled out in the text into tokens; if the
    first is the bos, no second one is added.
    """
    ids = tokenizer.encode(text, special)
    has_bos = special and ids[:1] == [tokenizer.bos]
    if tokenizer.bos is not None and not has_bos:
        ids = [tokenizer.bos, *ids]
    return ids or [tokenizer.end_of_text]


def generate_text(
    model: Llama, tokenizer: Tokenizer, prompts: list[list[int]], max_new_tokens: int, **sampling
) -> Iterator[list[str]]:
    """Yield what each token of generate() adds to each row's text: whole characters."""
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    for tokens in generate(model, prompts, max_new_tokens, eos=tokenizer.eos, **sampling):
        yield ["" if token is None else stream.add(token) for stream, token in zip(streams, tokens, strict=True)]
    yield [stream.end() for stream in streams]


@stop_on_error()
def new_sampler(prompt: str | None, data: Blocks, hf_files: dict[str, bytes]) -> Callable[[Llama], None]:
    """Return show_sample(model), which prints how the model continues the prompt or, if trained on chats, its answer.

    hf_files: of the run's checkpoints; config.json says what precedes a prompt. prompt None: nothing is printed. The
    text is that of sample.py with the same prompt, seed and number of tokens. It comes from a generator of its own, so
    training does not change. Ends the run if the data's tokenizer cannot be read or its chat template refuses the
    prompt.
    """
    if prompt is None:
        return lambda model: None
    tokenizer = tokenizer_of(data.tokens.folder)
    set_doc_start(tokenizer, json.loads(hf_files.get("config.json") or hf_files[BASE_CONFIG]))
    if data.tokens.masks:  # conversations
        ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
        prompt += "\n"  # the answer begins on a line of its own
    else:
        ids = begin_document(tokenizer, prompt, special=True)

    def show_sample(model):
        generator = torch.Generator(model.tok_embeddings.weight.device).manual_seed(1337)
        # No CUDA graph: its memory could be that of training's graphs.
        options = dict(temperature=0.8, generator=generator, cuda_graph=False)  # sample.py's
        parts = generate_text(model, tokenizer, [ids], 64, **options)
        text = prompt + "".join(part for (part,) in parts)
        print0("sample    " + text.replace("\n", "\n" + " " * 10))

    return show_sample
