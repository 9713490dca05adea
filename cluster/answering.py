"""The pass before the capture: the model answers rows, and the prompt table is made of what it said."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.balance import Limits
from actors.run_messages import CoordinatorSpec, RunSummary
from cluster.config import GenerateConfig
from cluster.report import duration, say, say_prepared
from storage.errors import IncompleteRun, ResourceError
from storage.files import Store
from storage.prompts import ASKED, PromptSpec, PromptTable, take_answers

_BATCH_ROWS = 4
"""Rows that are answered together; small, since a batch ends with its longest answer and is lost with its engine."""
_FULL_TOKENS = 1 << 40
"""More than an engine can be given: it gets rows until it has as many as it may."""
_REASONS_SHOWN = 5


def answer_limits(limits: Limits, generate: GenerateConfig) -> Limits:
    """Those of the capture, for engines that work on many rows at once and are kept full to the end. Pure."""
    batch_rows = min(_BATCH_ROWS, generate.concurrent_rows)
    return replace(
        limits,
        batch_samples=batch_rows,
        batches_per_engine=max(1, generate.concurrent_rows // batch_rows),
        fed_tokens=_FULL_TOKENS,
    )


class AnswerPass:
    """What the driver does about it.

    Args:
        store: the dump.
        prompts: as they were prepared.
        generate: how they are answered.
        capture: how the capture will be led.

    Raises:
        ResourceError: the states of a row with the longest answer that it may get wouldn't fit on a node.
    """

    def __init__(
        self,
        store: Store,
        prompts: PromptSpec,
        generate: GenerateConfig,
        capture: CoordinatorSpec,
    ) -> None:
        most = int(PromptTable(store, ASKED).kept(capture.layout.keep).max())
        need, room = most * capture.layout.bytes_per_token, capture.limits.in_flight_bytes
        if need > room:
            raise ResourceError(
                f"a row may come to {most:,} tokens with its answer, whose states take {need:,} bytes, but "
                f"only {room:,} bytes may be in flight on a node; lower generate.max_new_tokens or prompts.max_tokens, "
                "or give Ray a larger object store"
            )
        self._store = store
        self._prompts = prompts
        self._skips = generate.unanswered == "skip"
        self.spec = replace(capture, limits=answer_limits(capture.limits, generate))
        self.record: Mapping[str, Any] = {}

    def finish(self, summary: RunSummary) -> None:
        """Makes ``prompts/`` of questions and answers.

        Args:
            summary: of the pass, in which every row came to an end.

        Raises:
            IncompleteRun: rows couldn't be answered, and they aren't to be skipped.
            PromptError: no row is left to collect.
            StorageError: the dump can't be read or written.
        """
        account, seconds = summary.account, summary.work_s
        assert account is not None
        for outcome in summary.outcomes[:_REASONS_SHOWN]:
            say(f"no answer to row {outcome.row} ({outcome.sample_id}): {outcome.reason}")
        if account.failed and not self._skips:
            raise IncompleteRun(
                f"{account.failed} rows couldn't be answered, and nothing was captured; the same command tries them "
                "again, and with --set generate.unanswered=skip it goes on without them"
            )
        began_s = time.monotonic()
        reasons = {outcome.row: outcome.reason for outcome in summary.outcomes}
        prepared = take_answers(self._store, self._prompts, reasons)
        said = f"{account.committed:,} answers of {account.tokens:,} tokens are committed"
        rate = f", {summary.answer_tokens / seconds:,.0f} tokens/s" if seconds else ""
        say(f"{said}, {summary.answer_tokens:,} tokens in {duration(seconds)} of this run's work{rate}")
        self.record = {
            "rows": account.committed,
            "tokens": account.tokens,
            "work_seconds": round(seconds, 2),
            "work_rows": summary.answered_rows,
            "work_tokens": summary.answer_tokens,
            "table_seconds": round(time.monotonic() - began_s, 2),
            "events": dict(summary.events),
        }
        say_prepared(prepared)
