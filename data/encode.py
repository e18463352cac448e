"""Documents to token ids, in this process or in several.

for encoded in encode_documents([("train", "some text"), ("val", "more text")], tokenizer, workers=8):
    tokens, mask, counts = encoded["train"]
"""

import multiprocessing
import os
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import numpy as np

from data.meta import SPLITS
from data.tokenizer import Tokenizer
from data.tokens import IS_TARGET, token_dtype

BATCH_CHARS = 2**20  # text handed to a worker at a time: enough to hide the hand-over, small enough to hold many

Document = tuple[str, str]  # (split, text)
Encode = Callable[[str, Tokenizer], tuple[list[int], list[int], int]]  # the ids of a text, their mask, its bytes


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_text(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int], int]:
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    return [*bos, *tokenizer.encode(text), tokenizer.end_of_text], [], len(text.encode())


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int = 1, encode: Encode = encode_text
) -> Iterator[dict]:
    """Yield {split: (tokens (n,), mask uint8 (n,), counts)}, one batch of documents after another, in order.

    Each worker has its own pipe, and they take turns: so the results come in order, and one that is killed, even
    halfway through a result, is noticed. (A pool of the standard library would wait for the other half forever.)
    """
    waiting = batches(documents)
    first = list(islice(waiting, workers))
    if len(first) < 2:
        for batch in chain(first, waiting):
            yield encode_batch(batch, tokenizer, encode)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy locks held by threads of the libraries
    processes = []
    pipes = deque()
    resource_tracker.ensure_running()  # before a worker does: its start unblocks these signals
    try:
        with interrupts_held():  # a worker that has half started would print a traceback
            for _ in first:
                pipe, workers_end = context.Pipe()
                process = context.Process(target=work, args=(workers_end,), daemon=True)
                process.start()
                workers_end.close()
                processes.append(process)
                pipes.append(pipe)
        for pipe, batch in zip(pipes, first, strict=True):
            with worker_alive():
                pipe.send((tokenizer, encode))
                pipe.send(batch)
        for batch in chain(waiting, [None] * len(first)):  # None: no batch is left, only the last results
            pipe = pipes.popleft()
            with worker_alive():
                encoded = pipe.recv()
                if batch:
                    pipe.send(batch)
            if isinstance(encoded, Exception):
                raise encoded
            pipes.append(pipe)
            yield encoded
    finally:
        for process in processes:
            process.terminate()


@contextmanager
def interrupts_held():
    """Hold Ctrl-C and SIGTERM back. Processes that start inside have them blocked: Ctrl-C is for this one alone.

    Blocking is not enough: a library's thread takes what this thread blocks, and Python runs the handler here.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    taken = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    handlers = [signal.signal(number, lambda number, frame: taken.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number in taken:
        signal.raise_signal(number)


@contextmanager
def worker_alive():
    """Where a pipe is used: say so if its other end is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise OSError("a worker process died, perhaps out of memory: try fewer --workers") from error


def work(pipe: Connection) -> None:
    """The loop of a worker process: encode batches until the parent exits."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the parent's terminate()
    with suppress(EOFError, ConnectionError):
        tokenizer, encode = pipe.recv()
        while True:
            batch = pipe.recv()
            try:
                encoded = encode_batch(batch, tokenizer, encode)
            except Exception as error:
                error.add_note(traceback.format_exc())
                encoded = error
            pipe.send(encoded)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch = []
    n_chars = 0
    for split, text in documents:
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
    largest = max(max(ids, default=0) for ids in tokens.values())
    if largest >= tokenizer.n_vocab:
        token = tokenizer.decode([largest])
        raise ValueError(f"the text has {token}, token {largest}, but the weights have {tokenizer.n_vocab:,} rows")
    dtype = token_dtype(tokenizer.n_vocab)
    return {
        split: (np.array(tokens[split], dtype), np.array(masks[split], np.uint8), counts[split]) for split in SPLITS
    }
