"""Prepares the prompt file once: tokenised in parallel, written into the dump in the file's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from storage.errors import IdentityMismatch, PromptError
from storage.files import Store
from storage.prompts.account import IdBook, Tally
from storage.prompts.masks import rejected
from storage.prompts.parts import ASKED, FOLDER, QUESTIONS, SCHEMA, PartWriter, read_prepared, write_prepared
from storage.prompts.source import source_digest
from storage.prompts.spec import (
    PreparedRow,
    PreparedSummary,
    PromptSpec,
    Question,
    Rejection,
    RowResult,
    Tokenised,
)
from storage.prompts.tokenising import load_chat, tokenised

Progress = Callable[[int, int], None]
"""Called with (rows of the file done, tokens to collect so far)."""


def prepare(
    store: Store, spec: PromptSpec, *, workers: int | None = None, progress: Progress | None = None
) -> PreparedSummary:
    """Tokenises the prompt file into ``prompts/`` of the dump.

    A complete preparation with the same identity is left as it is and its summary returned. An incomplete
    one, which has no ``_prepared.json``, is overwritten. The result doesn't depend on ``workers``. Where the model
    is to answer rows, the table goes to ``prompts/asked`` and holds one row an answer; `take_answers` makes
    ``prompts/`` of it later.

    Args:
        store: the dump.
        spec: what to prepare.
        workers: tokenising processes for a large file; None: one a usable core, at most 32.
        progress: called after each batch.

    Returns:
        Counts, reasons, warnings and the identity, as stored; the longest row counts with the longest answer.

    Raises:
        PromptError: the file is missing, unreadable, empty or wholly rejected; its template fails most rows;
            a row is over ``max_tokens`` and ``over_long`` is ``fail``.
        ModelError: the tokenizer can't be loaded.
        IdentityMismatch: the dump holds another preparation.
        ResourceError: a tokenising process died.
        StorageError: the dump can't be written.
    """
    identity = prompts_identity(spec)
    folder, schema = (FOLDER, SCHEMA) if spec.generate is None else (ASKED, QUESTIONS)
    existing = read_prepared(store, folder)
    if existing is not None:
        _require_same(store, existing, identity)
        return existing
    for key, _ in store.list(folder):
        store.delete(key)
    tally, book, parts = Tally(spec.shown_url), IdBook(), PartWriter(store, folder, schema)
    with closing(tokenised(spec, workers)) as batches:
        for batch in batches:
            for result in batch:
                _account(spec, result, tally, book, parts)
            tally.stop_if_template_fails(at_end=False)
            if progress is not None:
                progress(tally.source_rows, tally.tokens)
    tally.stop_if_template_fails(at_end=True)
    tally.stop_if_hopeless()
    summary = _summary(spec, identity, tally, parts)
    write_prepared(store, summary, folder)
    return summary


def prompts_identity(spec: PromptSpec) -> dict[str, Any]:
    """What the prepared rows depend on: digests of file, template and vocabulary, and the settings.

    Raises:
        PromptError: the prompt file can't be read.
        ModelError: the tokenizer can't be loaded.
    """
    file_digest = source_digest(spec.url)  # first: it is quick, and its errors are the commonest
    chat = load_chat(spec)
    asked = {}
    if spec.generate is not None:
        generate = asdict(spec.generate)
        del generate["stop"]
        asked["generate"] = generate | {"stop_token_ids": list(chat.stop_ids(spec.generate.stop))}
    return {
        "file_xxh3_128": file_digest,
        "template_xxh3_128": chat.template_digest(),
        "vocabulary_xxh3_128": chat.vocabulary_digest(),
        "loss_mask": asdict(spec.loss_mask),
        "max_tokens": spec.max_tokens,
        "over_long": spec.over_long,
        "limit": spec.limit,
        **asked,
    }


def _account(spec: PromptSpec, result: RowResult, tally: Tally, book: IdBook, parts: PartWriter) -> None:
    claim = book.claim(result.own_id, result.digest, result.source_row)
    tally.source(result, claim)
    samples = result.samples
    if claim.duplicate_of is not None and any(sample.rejection is None for sample in samples):
        samples = (rejected(Rejection("duplicate", f"duplicate of row {claim.duplicate_of}")),)
    for sample in samples:
        sample_id = claim.sample_id if sample.turn is None else f"{claim.sample_id}/turn-{sample.turn}"
        for one_id, question in _questions(spec, sample, sample_id, result, book):
            _add(
                spec,
                PreparedRow(
                    row=tally.rows,
                    source_row=result.source_row,
                    sample_id=one_id,
                    token_ids=sample.token_ids,
                    loss_mask=sample.loss_mask,
                    skip_reason=sample.rejection.reason if sample.rejection else None,
                    more=question,
                ),
                sample,
                tally,
                parts,
            )


def _questions(
    spec: PromptSpec, sample: Tokenised, sample_id: str, result: RowResult, book: IdBook
) -> Iterator[tuple[str, Question | None]]:
    """Id and question of each row that the sample becomes: one, or one an answer."""
    generate = spec.generate
    if generate is None or not sample.asks:
        yield sample_id, None
        return
    longest = min(generate.max_new_tokens, spec.max_tokens - sample.token_ids.size)
    for number in range(1, generate.n + 1):
        one_id = sample_id
        if generate.n > 1:
            wanted = f"{sample_id}/answer-{number}"
            digest = xxhash.xxh3_128_hexdigest(f"{result.digest}{wanted}".encode())
            one_id = book.claim(wanted, digest, result.source_row).sample_id
        yield one_id, Question(longest, generate.seed_of(one_id))


def _add(spec: PromptSpec, row: PreparedRow, sample: Tokenised, tally: Tally, parts: PartWriter) -> None:
    rejection = sample.rejection
    if rejection is not None and rejection.kind == "over_long" and spec.over_long == "fail":
        raise PromptError(
            f"prompt file {spec.shown_url}, row {row.source_row} ({row.sample_id}): {rejection.reason}; raise "
            "prompts.max_tokens, or set prompts.over_long: skip"
        )
    parts.add(row, sample.turn)
    if rejection is None:
        longest = row.more.max_new_tokens if isinstance(row.more, Question) else 0
        tokens = row.token_ids.size
        tally.collect(tokens, int(np.count_nonzero(row.loss_mask)), tokens + longest)
    else:
        tally.skip(rejection.kind, rejection.reason, row.source_row)


def _require_same(store: Store, existing: PreparedSummary, identity: dict[str, Any]) -> None:
    differing = [
        f"{key}: {identity.get(key)!r} here, {existing.identity.get(key)!r} in the dump"
        for key in sorted({*identity, *existing.identity})
        if identity.get(key) != existing.identity.get(key)
    ]
    if differing:
        raise IdentityMismatch(
            f"{store.url} holds prompts that were prepared otherwise ({'; '.join(differing)}); "
            "collect into another folder, or go back to those settings"
        )


def _summary(spec: PromptSpec, identity: dict[str, Any], tally: Tally, parts: PartWriter) -> PreparedSummary:
    return PreparedSummary(
        identity=identity,
        source_url=spec.shown_url,
        source_rows=tally.source_rows,
        rows=tally.rows,
        to_collect=tally.to_collect,
        skipped=tally.rows - tally.to_collect,
        tokens=tally.tokens,
        supervised_tokens=tally.supervised_tokens,
        longest_tokens=tally.longest_tokens,
        reasons=tally.reasons(),
        warnings=tally.warnings(),
        parts=parts.close(),
    )
