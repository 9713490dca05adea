"""Tokenises the rows of the prompt file, in their order, in as many processes as it takes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.process import BaseProcess

from storage.errors import ResourceError, RowRejected
from storage.prompts.asking import ask
from storage.prompts.chat import ChatTokenizer
from storage.prompts.masks import rejected, supervise
from storage.prompts.rows import content_digest, decode_row, own_id, read_content
from storage.prompts.source import RawRow, read_rows
from storage.prompts.spec import PromptSpec, Rejection, RowResult, Tokenised

_BATCH_ROWS = 64
_IN_PROCESS_ROWS = 512
_IN_PROCESS_BYTES = 4 << 20
"""A file up to these is tokenised right here: a process costs more, since it has to import transformers."""
_MAX_WORKERS = 32

_Batch = list[tuple[int, RawRow]]


def tokenised(spec: PromptSpec, workers: int | None) -> Generator[list[RowResult], None, None]:
    """Results in the file's order, in batches; the same for any number of workers.

    Args:
        spec: what to prepare.
        workers: processes for a large file; None: one a usable core, at most 32.

    Raises:
        PromptError: the file can't be read.
        ModelError: the tokenizer can't be loaded.
        ResourceError: a process died.
    """
    rows = read_rows(spec.url, spec.format, spec.limit)
    head, small = _head(rows)
    processes = workers if workers is not None else min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    batches = _batches(itertools.chain(head, rows))
    if small or processes <= 1:
        for batch in batches:
            yield _work(spec, batch)
        return
    yield from _in_processes(spec, batches, processes)


def _head(rows: Iterator[tuple[int, RawRow]]) -> tuple[_Batch, bool]:
    """The first rows, and whether they are all there is."""
    head: _Batch = []
    size_bytes = 0
    for number, raw in rows:
        head.append((number, raw))
        size_bytes += len(raw) if isinstance(raw, bytes) else len(repr(raw))
        if len(head) > _IN_PROCESS_ROWS or size_bytes > _IN_PROCESS_BYTES:
            return head, False
    return head, True


def _batches(rows: Iterable[tuple[int, RawRow]]) -> Iterator[_Batch]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH_ROWS)):
        yield batch


def _in_processes(spec: PromptSpec, batches: Iterator[_Batch], processes: int) -> Iterator[list[RowResult]]:
    # Spawned, since a fork would copy whatever threads and file systems this process has open.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    waiting: deque[Future[list[RowResult]]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, spec, batch))
            if len(waiting) > 2 * processes:  # bounds memory, and keeps everybody busy
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as exc:
        raise ResourceError(
            f"a process that tokenises {spec.shown_url} died, most likely for want of memory; "
            f"run with fewer than {processes} of them"
        ) from exc
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C goes to the whole group; the parent alone answers it. And a worker whose parent was killed would
    # wait for work for ever, since it holds both ends of its queue.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(spec: PromptSpec, batch: _Batch) -> list[RowResult]:
    chat = load_chat(spec)
    return [tokenise_row(chat, spec, number, raw) for number, raw in batch]


@lru_cache(maxsize=1)
def load_chat(spec: PromptSpec) -> ChatTokenizer:
    """The tokenizer of ``spec``, loaded once a process. Raises as `ChatTokenizer.load`."""
    return ChatTokenizer.load(spec)


def tokenise_row(chat: ChatTokenizer, spec: PromptSpec, source_row: int, raw: RawRow) -> RowResult:
    """One row of the file, all the way to token ids; never raises for what the row holds."""
    try:
        row = decode_row(raw)
    except RowRejected as exc:
        sample = rejected(Rejection(exc.kind, exc.reason))
        return RowResult(source_row, None, content_digest(raw), (sample,))
    try:
        content = read_content(row)
        if spec.generate is None:
            samples = supervise(chat, content, spec.loss_mask)
        else:
            samples = ask(chat, content, spec.loss_mask, spec.generate)
    except RowRejected as exc:
        samples = [rejected(Rejection(exc.kind, exc.reason))]
    vocab_size = spec.vocab_size or chat.vocab_size
    checked = tuple(_checked(sample, spec, vocab_size) for sample in samples)
    return RowResult(source_row, own_id(row), content_digest(row), checked)


def _checked(sample: Tokenised, spec: PromptSpec, vocab_size: int) -> Tokenised:
    """The sample, or its rejection where its length, its ids or its mask forbid it."""
    if sample.rejection is not None:
        return sample
    tokens = sample.token_ids.size
    if tokens == 0:
        return rejected(Rejection("empty", "it has no tokens"), sample.turn)
    if sample.asks and tokens >= spec.max_tokens:
        text = f"{tokens} tokens leave no room for an answer within max_tokens {spec.max_tokens}"
        return rejected(Rejection("over_long", text), sample.turn)
    if tokens > spec.max_tokens:
        return rejected(
            Rejection("over_long", f"{tokens} tokens are over max_tokens {spec.max_tokens}"), sample.turn
        )
    highest = int(sample.token_ids.max())
    if highest >= vocab_size:
        return rejected(
            Rejection("vocab", f"token id {highest} is outside the vocabulary of {vocab_size}"), sample.turn
        )
    if spec.loss_mask.policy != "all" and not sample.asks and not sample.loss_mask.any():
        return rejected(Rejection("unsupervised", "no token is supervised"), sample.turn)
    return sample
