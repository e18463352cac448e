"""How well a model predicts a file: python sample.py --evaluate FILE. The first row determines the metric:

    {"ctx": ..., "endings": [...], "label": 2}   HellaSwag's format: how often the right ending is the likeliest
    any format of data/chat/formats.py           mean log p of the answers' tokens, including their ends of turn
    anything else is a text                      perplexity exp(-Σ log p / tokens), bits per byte -Σ log₂ p / bytes

A text is read in windows of `window` tokens that overlap by half. A window predicts only the tokens beyond the end of
the previous one. So each token is predicted once, and all but those of the first half window from at least half a
window of context. The first token follows the bos, or the end of another document if there is no bos.

Endings are compared by log p (accuracy) and by log p divided by their length in characters (length-normalised): acc and
acc_norm of lm-evaluation-harness. As there, "ctx ending" is encoded as one text, and the tokens after ctx's count.
Rows with the activity_label, ctx_a and ctx_b of HellaSwag's own files are read as its task hellaswag reads them.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.chat.formats import Seen
from data.chat.prepare import render_rows
from data.chat.template import encode_answers
from data.rows import format_of, read_rows, whole_text
from data.vocabulary import Tokenizer
from model import Llama
from runtime.distributed import progress
from runtime.generate import begin_document, require_in_vocabulary

Row = tuple[list[int], list[bool]]  # tokens, and which of them are predicted: never the first
CHUNK_TOKENS = 1024  # tokens whose logits exist at a time: 0.5 GiB with Llama 3's vocabulary
MOST_WINDOW = 4096  # the default: attention over 131,072 tokens takes a CPU hours


@torch.no_grad()
def log_likelihoods(model: Llama, rows: list[Row], batch_size: int) -> Iterator[tuple[torch.Tensor, bool]]:
    """For each row, the log p of its predicted tokens given all tokens before them (float64 on the CPU), and whether
    every one of them is the likeliest token.

    The model sees the end of a row longer than the context. ValueError if the tokens to predict do not fit into that.
    """
    context = model.config.block_size
    device = model.tok_embeddings.weight.device
    for tokens, predicted in rows:
        require_in_vocabulary([tokens], model)
        if any(predicted[: max(len(tokens) - context, 1)]):
            raise ValueError(
                f"of {len(tokens):,} tokens the first to predict is {len(tokens) - predicted.index(True):,} "
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
        scores = []  # (n, 2) of each chunk: log p of the target, and of the likeliest token
        for x_chunk, targets_chunk in zip(x.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            logits = model.lm_head(x_chunk)
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            of_targets = log_p.gather(-1, targets_chunk[:, None])[:, 0]
            scores.append(torch.stack([of_targets, log_p.amax(-1)], dim=1).double().cpu())
        for of_row in torch.cat(scores).split(predicted.sum(1).tolist()):
            yield of_row[:, 0], torch.equal(of_row[:, 0], of_row[:, 1])


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
    ids = [*begin_document(tokenizer, ""), *tokenizer.encode(text)]
    rows = list(windows(ids, min(window or MOST_WINDOW, model.config.block_size + 1)))
    log_p = sum(log_p.sum().item() for log_p, _ in log_likelihoods(model, rows, batch_size))
    n_tokens = len(ids) - 1
    n_bytes = len(text.encode())
    if not n_bytes:
        raise ValueError("the text is empty")
    perplexity = torch.tensor(-log_p / n_tokens, dtype=torch.float64).exp()  # math.exp raises where this is inf
    return {
        "perplexity": f"{perplexity:.4f} per token",
        "bits per byte": f"{-log_p / math.log(2) / n_bytes:.4f}",
        "read": f"{n_tokens:,} tokens, {n_bytes:,} bytes",
    }


def evaluate_answers(
    model: Llama, tokenizer: Tokenizer, items: list[tuple[str, dict]], batch_size: int
) -> dict[str, str]:
    seen = Seen()
    rows = [encode_answers(tokenizer, text) for text in render_rows(items, tokenizer, refuse, seen)]
    scores = [log_p for log_p, _ in log_likelihoods(model, rows, batch_size)]
    n_tokens = sum(map(len, scores))
    n_answer_tokens = f"{n_tokens:,} tokens of answers, ends of turn included"
    return {
        "mean log-likelihood": f"{sum(each.sum().item() for each in scores) / n_tokens:.6f} per token",
        "read": "; ".join([f"{len(rows):,} conversations", n_answer_tokens, *seen.sentences()]),
    }


def evaluate_choices(
    model: Llama, tokenizer: Tokenizer, items: list[tuple[str, dict]], batch_size: int
) -> dict[str, str]:
    rows = []
    answers = []
    for where, item in items:
        ctx = field(where, item, "ctx", str)
        endings = field(where, item, "endings", list)
        label = item.get("label")
        if item.keys() >= {"activity_label", "ctx_a", "ctx_b"}:
            activity, first, last = (field(where, item, name, str) for name in ("activity_label", "ctx_a", "ctx_b"))
            ctx = without_headings(f"{activity}: {first} {last.capitalize()}")
            endings = [without_headings(ending) if isinstance(ending, str) else ending for ending in endings]
        if not endings or not all(isinstance(ending, str) and ending for ending in endings):
            raise ValueError(f"{where} has {endings!r:.60} as endings: expected texts")
        if str(label) not in map(str, range(len(endings))):  # some HellaSwag files have "2"
            raise ValueError(f"{where} has {label!r} as label: expected a number below {len(endings)}")
        n_context = len(begin_document(tokenizer, ctx.rstrip()))  # as there, blanks belong to the ending
        # Without a ctx the ending's first token is predicted too: from the bos, or else the end of another document.
        before = [] if ctx.strip() or tokenizer.bos is not None else begin_document(tokenizer, "")
        for ending in endings:
            ids = before + begin_document(tokenizer, f"{ctx} {ending}")
            rows.append((ids, [i >= n_context for i in range(len(ids))]))
        answers.append((endings, int(label)))
    totals = (log_p.sum().item() for log_p, _ in log_likelihoods(model, rows, batch_size))
    right = 0
    normalised = 0
    for endings, label in answers:
        log_p = [next(totals) for _ in endings]
        by_length = [x / len(ending) for x, ending in zip(log_p, endings, strict=True)]
        right += log_p.index(max(log_p)) == label
        normalised += by_length.index(max(by_length)) == label
    return {
        "accuracy": f"{right / len(items):.4f} ({right:,} of {len(items):,})",
        "accuracy, length-normalised": f"{normalised / len(items):.4f} ({normalised:,} of {len(items):,})",
    }


def without_headings(text: str) -> str:
    """Remove the marks of HellaSwag's WikiHow half, such as [header], from a text. A [title] becomes a full stop."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def refuse(sentence: str) -> None:
    raise ValueError(sentence)


def field(where: str, row: dict, name: str, kind: type) -> Any:
    """The value of row[name]. ValueError if it is missing or of another type."""
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{where} has {value!r:.40} as {name}: expected a {kind.__name__}")
    return value


def evaluate_file(
    model: Llama, tokenizer: Tokenizer, path: Path, window: int | None = None, batch_size: int = 8
) -> dict[str, str]:
    """Return {metric: result} for a file. Raises OSError or ValueError for a file that is in none of the formats."""
    format = format_of(path)
    if format == "text":
        return evaluate_text(model, tokenizer, whole_text(path), window, batch_size)
    rows = list(read_rows(path, format, refuse))
    if not rows:
        raise ValueError(f"{path} is empty")
    if isinstance(rows[0][1], dict) and "endings" in rows[0][1]:
        return evaluate_choices(model, tokenizer, rows, batch_size)
    return evaluate_answers(model, tokenizer, rows, batch_size)
