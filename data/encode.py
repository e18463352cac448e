"""Documents to token ids, in this process or in several.

Documents travel to the worker processes, and their ids come back, in batches of about a megabyte:

    for encoded in encode_documents([("train", "some text"), ("val", "more text")], tokenizer, 8, encode=None):
        tokens, mask, counts = encoded["train"]
"""

import multiprocessing
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from data.meta import SPLITS
from data.tokenizer import Tokenizer
from data.tokens import IS_TARGET, token_dtype

BATCH_CHARS = 2**20  # text handed to a worker at a time: enough to hide the hand-over, small enough to hold many

Document = tuple[str, str]  # (split, text)
Encode = Callable[[str, Tokenizer], tuple[list[int], list[int], int]]  # the ids of a text, their mask, its bytes


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int, encode: Encode | None
) -> Iterator[dict]:
    """Yield {split: (tokens (n,), mask uint8 (n,), counts)}, one batch of documents after another, in order."""
    if workers == 1:
        for batch in batches(documents):
            yield encode_batch(batch, tokenizer, encode)
        return
    # spawn: fork would copy locks held by the threads of whatever library reads the documents
    context, processes, thread = multiprocessing.get_context("spawn"), [], threading.local()

    def encode_in_worker(batch: list[Document]) -> dict:
        """Each thread has its own process and pipe, so a killed process is noticed even halfway through a result.
        ProcessPoolExecutor has one pipe for all results and waits forever for the other half.
        """
        try:
            if not hasattr(thread, "pipe"):
                pipe, end = context.Pipe()
                with end:
                    process = context.Process(target=work, args=(end,), daemon=True)
                    process.start()
                processes.append(process)
                thread.pipe = pipe
                pipe.send((tokenizer, encode))  # not in args: start() waits forever if the process dies before reading
            thread.pipe.send(batch)
            encoded = thread.pipe.recv()
        except (EOFError, OSError):
            raise OSError("a worker process died, perhaps out of memory: try fewer --workers") from None
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    threads, pending = ThreadPoolExecutor(workers), deque()
    try:
        for batch in batches(documents):
            pending.append(threads.submit(encode_in_worker, batch))
            if len(pending) > 2 * workers:  # bounds the memory: the input may be far larger
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def work(pipe) -> None:
    """The loop of a worker process: encode batches until the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
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
    batch, chars = [], 0
    for split, text in documents:
        if split not in SPLITS:
            raise ValueError(f"a document's split is {' or '.join(SPLITS)}, not {split!r}")
        batch.append((split, text))
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_batch(batch: list[Document], tokenizer: Tokenizer, encode: Encode | None = None) -> dict:
    found = {split: ([], [], Counter()) for split in SPLITS}
    for split, text in batch:
        tokens, mask, counts = found[split]
        ids, bits, n_bytes = (encode or encode_text)(text, tokenizer)
        tokens += ids
        mask += bits
        counts.update(documents=1, tokens=len(ids), bytes=n_bytes)
        if encode:
            counts["targets"] += sum(bit & IS_TARGET for bit in bits)
    dtype = token_dtype(tokenizer.n_vocab)
    return {s: (np.array(t, dtype), np.array(m, np.uint8), counts) for s, (t, m, counts) in found.items()}


def encode_text(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int], int]:
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    utf8 = text.encode("utf-8", "replace")  # JSON can hold a lone surrogate: it becomes a question mark
    return [*bos, *tokenizer.encode(utf8.decode()), tokenizer.end_of_text], [], len(utf8)
