"""The pass in which the model answers rows itself: a run whose outcome is an answer rather than states.

Ledger, crew and departures are those of the capture; so are retries, losses, suspects and the drain. What differs:
an engine's answer is small, so the coordinator takes it itself and commits it to ``prompts/answers``. In the
ledger it stands as the run's only writer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from actors.archive import Archive
from actors.balance import Dispatch
from actors.coordinator import Coordinator
from actors.crew import Crew, Member
from actors.failures import Failure, Fault, classify
from actors.ledger import Ledger
from actors.messages import Batch, BatchAnswers, WriterInfo
from actors.rows import State
from actors.run_messages import CoordinatorSpec, RunSummary, Status
from storage.errors import StorageFull
from storage.prompts import ASKED, AnswerParts, PromptTable, Reply, answered
from storage.table import Account, Outcome

logger = logging.getLogger(__name__)

COMMITTER = "answers"
"""The coordinator's name among the ledger's writers."""
TOKEN_BYTES = 4
"""Of a token id: what an answer takes."""
_PART_ROWS = 1024
_COMMIT_AFTER_S = 5.0
"""A part is committed when it has so many answers, or the first of them is so old."""


class AnswerArchive(Archive):
    """What was asked and what is answered. As with `Archive`, the storage is touched in threads.

    Attributes:
        answer_tokens: of all answers that are committed.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        super().__init__(spec)
        self.answer_tokens = 0
        self._open: list[Reply] = []
        self._open_since_s = 0.0

    def _load(self) -> tuple[Ledger, frozenset[int]]:
        spec = self._spec
        self._table = PromptTable(self._store, ASKED)
        self._parts = AnswerParts(self._store)
        longest, _ = self._table.questions()
        rows, tokens = answered(self._store)
        self.answer_tokens = int(tokens.sum())
        asks = longest > 0
        # What a row may come to: nobody knows what it will.
        at_most = np.where(asks, self._table.tokens + longest, 0).astype(np.int32)
        self.tokens = int(at_most.sum(dtype=np.int64))
        ledger = Ledger(at_most, ~asks, TOKEN_BYTES, spec.limits, spec.generation, committed=rows[asks[rows]])
        return ledger, frozenset()

    def add(self, replies: tuple[Reply, ...], now_s: float) -> None:
        """Takes answers that are to be committed."""
        if not self._open:
            self._open_since_s = now_s
        self._open += replies

    def due(self, now_s: float) -> bool:
        """Whether enough is open, or has been for long enough."""
        return len(self._open) >= _PART_ROWS or bool(
            self._open and now_s - self._open_since_s >= _COMMIT_AFTER_S
        )

    async def commit(self) -> list[int]:
        """Puts a part in place with all that is open; its rows.

        Raises:
            StorageFull: no space is left; nothing is lost.
            StorageError: the storage failed for too long.
        """
        taken, self._open = self._open, []
        if not taken:
            return []
        try:
            self.stored_bytes += await asyncio.to_thread(self._patience.call, lambda: self._parts.put(taken))
        except BaseException:
            self._open = taken + self._open
            raise
        self.answer_tokens += sum(reply.token_ids.size for reply in taken)
        return [reply.row for reply in taken]

    @property
    def trouble(self) -> str | None:
        """What a commit waits for; None while all is well."""
        return self._patience.trouble or None

    async def finalise(self, ledger: Ledger) -> Account:
        """The counts; the prompt table is made by the driver, which has the tokenizer."""
        c = ledger.counts()
        return Account(c.total, c.committed, c.skipped, c.failed, self.answer_tokens, kept=0)

    def outcomes(self, ledger: Ledger) -> tuple[Outcome, ...]:
        """Rows that this pass couldn't answer, with the reasons."""
        reasons = dict(ledger.rows.reasons())
        ids = self._table.sample_ids(np.fromiter(reasons, np.int64, len(reasons))).to_pylist()
        return tuple(
            Outcome(row, one_id, "failed" if ledger.rows.state(row) == State.FAILED else "skipped", reason)
            for (row, reason), one_id in zip(reasons.items(), ids, strict=True)
        )


class AnswerCarrier:
    """Carries batches of questions to engines and their answers to the archive.

    Args:
        ledger: told of each step.
        crew: told of dead engines.
        archive: takes the answers.
        trouble: takes a failure that pauses the run.
        wake: called when there may be something new to dispatch.
    """

    def __init__(
        self,
        ledger: Ledger,
        crew: Crew,
        archive: AnswerArchive,
        trouble: Callable[[Failure], None],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._crew = crew
        self._archive = archive
        self._trouble = trouble
        self._wake = wake
        self.captured_tokens = 0
        self.answered_rows = 0
        self.answer_tokens = 0

    async def carry(self, dispatch: Dispatch, engine: Member) -> None:
        """Takes one batch to its end, whatever that is; raises nothing that an engine did wrong."""
        batch = Batch(dispatch.batch_id, dispatch.samples, ())
        try:
            said: BatchAnswers = await engine.handle.answer.remote(batch)
        except RayError as error:
            self._failed(batch, engine, classify(error))
        else:
            self._take(batch, engine, said)
        self._wake()

    def _take(self, batch: Batch, engine: Member, said: BatchAnswers) -> None:
        now_s = asyncio.get_running_loop().time()
        if any(o.failure is not None and o.failure.kind == "engine" for o in said.outcomes):
            self._crew.infrastructure_failed(f"{engine.name} gave up questions of batch {batch.batch_id}")
        if not self._ledger.captured(batch.batch_id, said.outcomes, now_s):
            self._ledger.batch_lost(batch.batch_id)
            return
        self.captured_tokens += batch.tokens
        self.answered_rows += len(said.replies)
        self.answer_tokens += sum(reply.token_ids.size for reply in said.replies)
        self._ledger.moved(batch.batch_id)
        self._ledger.written(batch.batch_id, [reply.row for reply in said.replies])
        self._archive.add(said.replies, now_s)

    def _failed(self, batch: Batch, engine: Member, failure: Failure) -> None:
        if failure.fault is Fault.MEMBER:
            self._crew.engine_lost(engine, failure)
        elif failure.fault is Fault.SAMPLE:
            self._crew.last_problem = failure.reason
            self._ledger.batch_failed(batch.batch_id, failure.sample_failure)
        elif failure.fault in (Fault.CAPACITY, Fault.FULL):
            self._trouble(failure)
        self._ledger.batch_lost(batch.batch_id)


class AnsweringCoordinator(Coordinator):
    """Leads the pass; called as `Coordinator` is."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        super().__init__(spec)
        self._archive: AnswerArchive = AnswerArchive(spec)
        self._committing = asyncio.Lock()

    async def run(self) -> RunSummary:
        """Runs until every row is answered, or can't be; see `Coordinator.run`."""
        summary = await super().run()
        return replace(
            summary,
            outcomes=self._archive.outcomes(self._ledger),
            answer_tokens=self._answers.answer_tokens,
            answered_rows=self._answers.answered_rows,
        )

    async def add_writer(self, info: WriterInfo, handle: Any) -> None:
        """Nothing is written yet."""

    async def status(self) -> Status:
        """Where the pass stands; tokens are the most that the rows may come to."""
        status = await super().status()
        paused = status.paused or self._archive.trouble
        said = self._answers.answer_tokens
        return replace(status, task="answer", answer_tokens=said, writers=(), paused=paused)

    def _work(self) -> None:
        self._ledger.add_writer(COMMITTER, ray.get_runtime_context().get_node_id())
        self._answers = AnswerCarrier(self._ledger, self._crew, self._archive, self._trouble, self._wake)

    def _captured_tokens(self) -> int:
        return self._answers.captured_tokens

    def _carry(self, dispatch: Dispatch) -> Coroutine[Any, Any, None]:
        return self._answers.carry(dispatch, self._crew.engines[dispatch.engine])

    async def _keep_up(self) -> None:
        if self._archive.due(asyncio.get_running_loop().time()) and not self._committing.locked():
            self._spawn(self._seal_all())

    async def _seal_all(self) -> None:
        """Commits every answer that is there."""
        async with self._committing:
            try:
                rows = await self._archive.commit()
            except StorageFull as error:
                self._trouble(Failure(Fault.FULL, str(error)))
                return
        if rows:
            self._ledger.committed(rows)
            self._brakes.works_again()
            self._meter.lap()
        self._wake()
