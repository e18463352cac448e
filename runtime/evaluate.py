"""How well a model predicts a file: python sample.py --evaluate FILE.

    a text                              perplexity exp(-Σ log p / tokens), bits per byte -Σ log₂ p / bytes
    any format of data/chat/formats.py  mean log p of the answers' tokens, including their ends of turn

A text is read in windows of `window` tokens that overlap by half. A window predicts only the tokens beyond the end of
the previous one. So each token is predicted once, and all but those of the first half window from at least half a
window of context. The first token follows the bos, or the end of another document if there is no bos. Lines of only
<|endoftext|> separate documents, as in data/text/prepare.py: each is a text of its own, its end is not predicted.

For HellaSwag and the like: lm-evaluation-harness, which reads a checkpoint as a model of transformers.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from data.chat.formats import Seen
from data.chat.prepare import render_rows
from data.chat.template import encode_answers
from data.rows import BadInput, is_json, json_rows, open_input, reading
from data.vocabulary import SEPARATOR, Tokenizer
from model import Llama
from runtime.distributed import progress
from runtime.generate import begin_document, require_in_vocabulary

Row = tuple[list[int], list[bool]]  # tokens, and which of them are predicted: never the first
CHUNK_TOKENS = 1024  # tokens whose logits exist at a time: 0.5 GiB with Llama 3's vocabulary
MOST_WINDOW = 4096  # the default: attention over 131,072 tokens takes a CPU hours


@torch.no_grad()
def log_likelihoods(model: Llama, rows: list[Row], batch_size: int) -> Iterator[torch.Tensor]:
    """For each row, the log p of its predicted tokens given all tokens before them, in float64 on the CPU.

    The model sees the end of a row longer than the context. ValueError if the tokens to predict do not fit into that.
    """
    context = model.config.block_size
    device = model.tok_embeddings.weight.device
    for number, (tokens, predicted) in enumerate(rows, start=1):
        require_in_vocabulary([tokens], model)
        if any(predicted[: max(len(tokens) - context, 1)]):
            from_end = len(tokens) - predicted.index(True)
            raise ValueError(
                f"of the {len(tokens):,} tokens of conversation {number:,} the first to predict is {from_end:,} "
                f"before the end, but the model's context has {context:,}"
            )
    rows = [(tokens[-context - 1 :], predicted[-context - 1 :]) for tokens, predicted in rows]
    for first in progress(range(0, len(rows), batch_size), "scoring, batches"):
        batch = rows[first : first + batch_size]
        longest = max(len(tokens) for tokens, _ in batch)
        # Pad on the right: causal attention never looks there.
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch], device=device)
        predicted = torch.tensor([each + [False] * (longest - len(each)) for _, each in batch], device=device)[:, 1:]
        x = model.hidden(padded[:, :-1])[predicted]  # (N, C)
        targets = padded[:, 1:][predicted]  # (N,)
        scores = []  # of each chunk
        for x_chunk, targets_chunk in zip(x.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            logits = model.lm_head(x_chunk)
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            scores.append(log_p.gather(-1, targets_chunk[:, None])[:, 0].double().cpu())
        yield from torch.cat(scores).split(predicted.sum(1).tolist())


def windows(ids: list[int], window: int) -> Iterator[Row]:
    """The windows of a text. Every token but the first is predicted in exactly one of them."""
    done = 1
    for start in range(0, len(ids), window // 2):
        part = ids[start : start + window]
        yield part, [start + i >= done for i in range(len(part))]
        done = start + len(part)
        if done == len(ids):
            return


def evaluate_text(model: Llama, tokenizer: Tokenizer, text: str, window: int | None, batch_size: int) -> dict[str, str]:
    documents = [document for document in SEPARATOR.split(text) if document.strip()]
    if not documents:
        raise ValueError("the text is empty")
    rows = []
    for document in documents:
        ids = [*begin_document(tokenizer, ""), *tokenizer.encode(document)]
        rows += windows(ids, min(window or MOST_WINDOW, model.config.block_size + 1))
    log_p = sum(of_row.sum().item() for of_row in log_likelihoods(model, rows, batch_size))
    n_tokens = sum(sum(predicted) for _, predicted in rows)
    n_bytes = sum(len(document.encode()) for document in documents)
    return {
        "perplexity": f"{math.exp(-log_p / n_tokens):.4f} per token",
        "bits per byte": f"{-log_p / math.log(2) / n_bytes:.4f}",
        "read": f"{n_tokens:,} tokens, {n_bytes:,} bytes",
    }


def evaluate_answers(
    model: Llama, tokenizer: Tokenizer, items: list[tuple[str, dict]], batch_size: int
) -> dict[str, str]:
    seen = Seen()
    rows = [encode_answers(tokenizer, text) for _, text in render_rows(items, tokenizer, refuse, seen)]
    scores = list(log_likelihoods(model, rows, batch_size))
    n_tokens = sum(map(len, scores))
    n_answer_tokens = f"{n_tokens:,} tokens of answers, ends of turn included"
    return {
        "mean log-likelihood": f"{sum(each.sum().item() for each in scores) / n_tokens:.6f} per token",
        "read": "; ".join([f"{len(rows):,} conversations", n_answer_tokens, *seen.sentences()]),
    }


def refuse(sentence: str) -> None:
    raise BadInput(sentence)


def evaluate_file(
    model: Llama, tokenizer: Tokenizer, path: Path, window: int | None = None, batch_size: int = 8
) -> dict[str, str]:
    """Return {metric: result} for a file. Raises OSError or ValueError for a file that is in none of the formats."""
    if not is_json(path):
        with reading(path, refuse), open_input(path) as file:
            text = file.read().decode("utf-8-sig")
        return evaluate_text(model, tokenizer, text, window, batch_size)
    rows = list(json_rows(path, refuse))
    if not rows:
        raise ValueError(f"{path} is empty")
    return evaluate_answers(model, tokenizer, rows, batch_size)
