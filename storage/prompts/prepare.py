"""Prepares the prompt file once: tokenised in parallel, written into the dump in the file's order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from storage.errors import IdentityMismatch, PromptError
from storage.files import Store
from storage.prompts.account import IdBook, Tally
from storage.prompts.masks import rejected
from storage.prompts.parts import FOLDER, PREPARED_KEY, PartWriter, read_prepared
from storage.prompts.source import source_digest
from storage.prompts.spec import PreparedRow, PreparedSummary, PromptSpec, Rejection, RowResult, Tokenised
from storage.prompts.tokenising import load_chat, tokenised

Progress = Callable[[int, int], None]
"""Called with (rows of the file done, tokens to collect so far)."""


def prepare(
    store: Store, spec: PromptSpec, *, workers: int | None = None, progress: Progress | None = None
) -> PreparedSummary:
    """Tokenises the prompt file into ``prompts/`` of the dump.

    A complete preparation with the same identity is left as it is and its summary returned. An incomplete
    one, which has no ``_prepared.json``, is overwritten. The result doesn't depend on ``workers``.

    Args:
        store: the dump.
        spec: what to prepare.
        workers: tokenising processes for a large file; None: one a usable core, at most 32.
        progress: called after each batch.

    Returns:
        Counts, reasons, warnings and the identity, as stored.

    Raises:
        PromptError: the file is missing, unreadable, empty or wholly rejected; its template fails most rows;
            a row is over ``max_tokens`` and ``over_long`` is ``fail``.
        ModelError: the tokenizer can't be loaded.
        IdentityMismatch: the dump holds another preparation.
        ResourceError: a tokenising process died.
        StorageError: the dump can't be written.
    """
    identity = prompts_identity(spec)
    existing = read_prepared(store)
    if existing is not None:
        _require_same(store, existing, identity)
        return existing
    for key, _ in store.list(FOLDER):
        store.delete(key)
    tally, book, parts = Tally(spec.shown_url), IdBook(), PartWriter(store)
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
    store.put_if_absent(PREPARED_KEY, json.dumps(summary.to_json(), indent=1).encode())
    return summary


def prompts_identity(spec: PromptSpec) -> dict[str, Any]:
    """What the prepared rows depend on: digests of file, template and vocabulary, and the settings.

    Raises:
        PromptError: the prompt file can't be read.
        ModelError: the tokenizer can't be loaded.
    """
    file_digest = source_digest(spec.url)  # first: it is quick, and its errors are the commonest
    chat = load_chat(spec)
    return {
        "file_xxh3_128": file_digest,
        "template_xxh3_128": chat.template_digest(),
        "vocabulary_xxh3_128": chat.vocabulary_digest(),
        "loss_mask": asdict(spec.loss_mask),
        "max_tokens": spec.max_tokens,
        "over_long": spec.over_long,
        "limit": spec.limit,
    }


def _account(spec: PromptSpec, result: RowResult, tally: Tally, book: IdBook, parts: PartWriter) -> None:
    claim = book.claim(result.own_id, result.digest, result.source_row)
    tally.source(result, claim)
    samples = result.samples
    if claim.duplicate_of is not None and any(sample.rejection is None for sample in samples):
        samples = (rejected(Rejection("duplicate", f"duplicate of row {claim.duplicate_of}")),)
    for sample in samples:
        sample_id = claim.sample_id if sample.turn is None else f"{claim.sample_id}/turn-{sample.turn}"
        _add(
            spec,
            PreparedRow(
                row=tally.rows,
                source_row=result.source_row,
                sample_id=sample_id,
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                skip_reason=sample.rejection.reason if sample.rejection else None,
            ),
            sample,
            tally,
            parts,
        )


def _add(spec: PromptSpec, row: PreparedRow, sample: Tokenised, tally: Tally, parts: PartWriter) -> None:
    rejection = sample.rejection
    if rejection is not None and rejection.kind == "over_long" and spec.over_long == "fail":
        raise PromptError(
            f"prompt file {spec.shown_url}, row {row.source_row} ({row.sample_id}): {rejection.reason}; raise "
            "prompts.max_tokens, or set prompts.over_long: skip"
        )
    parts.add(row, sample.turn)
    if rejection is None:
        tally.collect(row.token_ids.size, int(np.count_nonzero(row.loss_mask)))
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
