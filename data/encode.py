"""Documents to token ids, in this process or in several.

for encoded in encode_documents([("train", "some text"), ("val", "more text")], tokenizer, workers=8):
    tokens, mask, counts = encoded["train"]
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import resource_tracker

import numpy as np

from data.meta import SPLITS
from data.tokenizer import Tokenizer
from data.tokens import IS_TARGET, token_dtype

BATCH_CHARS = 2**20  # text handed to a worker at a time: enough to hide the hand-over, small enough to hold many

Document = tuple[str, str]  # (split, text)
Encode = Callable[[str, Tokenizer], tuple[list[int], list[int], int]]  # the ids of a text, their mask, its bytes
WORKER = {}  # in a worker process: its tokenizer and its encode


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_text(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int], int]:
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    utf8 = text.encode("utf-8", "replace")  # JSON can hold a lone surrogate: it becomes a question mark
    return [*bos, *tokenizer.encode(utf8.decode()), tokenizer.end_of_text], [], len(utf8)


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int = 1, encode: Encode = encode_text
) -> Iterator[dict]:
    """Yield {split: (tokens (n,), mask uint8 (n,), counts)}, one batch of documents after another, in order.

    OSError if a worker is killed, but not halfway through writing a result: the pool then waits for its other half.
    """
    waiting = batches(documents)
    first = list(islice(waiting, workers))
    if len(first) < 2:
        for batch in chain(first, waiting):
            yield encode_batch(batch, tokenizer, encode)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy locks held by threads of the libraries
    pool = ProcessPoolExecutor(len(first), context, start_worker, (tokenizer, encode))
    resource_tracker.ensure_running()  # before a worker does: its start unblocks these signals
    # Workers inherit that they are blocked: Ctrl-C is for this process, and waits until they have started.
    stopping = (signal.SIGINT, signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        pending = deque(pool.submit(encode_here, batch) for batch in first)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for batch in waiting:
            pending.append(pool.submit(encode_here, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died, perhaps out of memory: try fewer --workers") from error
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, stopping)  # a second one would hang
        pool.shutdown(cancel_futures=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def start_worker(tokenizer: Tokenizer, encode: Encode) -> None:
    """Prepare a worker process: Ctrl-C is for the parent, and if that is killed, the worker ends, too."""

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker that starts late has not inherited that it is blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # by which a pool ends the others when one has died
    WORKER.update(tokenizer=tokenizer, encode=encode)
    threading.Thread(target=end_with_parent, daemon=True).start()


def encode_here(batch: list[Document]) -> dict:
    return encode_batch(batch, **WORKER)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch = []
    n_chars = 0
    for split, text in documents:
        assert split in SPLITS, split
        batch.append((split, text))
        n_chars += len(text)
        if n_chars >= BATCH_CHARS:
            yield batch
            batch = []
            n_chars = 0
    if batch:
        yield batch


def encode_batch(batch: list[Document], tokenizer: Tokenizer, encode: Encode) -> dict:
    tokens = {split: [] for split in SPLITS}
    masks = {split: [] for split in SPLITS}
    counts = {split: Counter() for split in SPLITS}
    for split, text in batch:
        ids, mask, n_bytes = encode(text, tokenizer)
        tokens[split] += ids
        masks[split] += mask
        counts[split].update(documents=1, tokens=len(ids), bytes=n_bytes)
        if mask:
            counts[split]["targets"] += sum(bits & IS_TARGET for bits in mask)
    dtype = token_dtype(tokenizer.n_vocab)
    return {
        split: (np.array(tokens[split], dtype), np.array(masks[split], np.uint8), counts[split]) for split in SPLITS
    }
