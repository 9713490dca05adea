"""One batch's way through an engine and a writer. It passes references on and never fetches a segment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.balance import Dispatch
from actors.crew import Crew, Member
from actors.failures import Failure, Fault, classify, classify_put
from actors.ledger import Ledger
from actors.messages import Batch, BatchRecord, SampleFailure, SampleOutcome, WriteAck, plan_segments
from storage.layout import Layout


class Carrier:
    """Carries batches, several at a time.

    Args:
        layout: the dump's geometry.
        ledger: told of each step.
        crew: told of dead members.
        trouble: takes a failure that pauses the run.
        wake: called when there may be something new to dispatch.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        crew: Crew,
        trouble: Callable[[Failure], None],
        wake: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._crew = crew
        self._trouble = trouble
        self._wake = wake
        self.captured_tokens = 0

    async def carry(self, dispatch: Dispatch, engine: Member, writer: Member) -> None:
        """Takes one batch to its end, whatever that is; raises nothing that a member did wrong."""
        segments = plan_segments([s.kept for s in dispatch.samples], self._layout)
        batch = Batch(dispatch.batch_id, dispatch.samples, segments)
        record_ref = engine.handle.capture.remote(batch)
        refs = deque(engine.handle.segment.remote(batch.batch_id, i) for i in range(len(segments)))
        puts = asyncio.create_task(self._put_all(writer, batch, refs))
        record, failure = await self._record(engine, batch, record_ref)
        if failure is not None:
            _cancel(refs)  # they might never come, and a put would wait for them
        put_failure = await puts
        failure = failure or put_failure
        _cancel(refs)
        refs.clear()
        if failure is None:
            self._ledger.moved(batch.batch_id)
            self._wake()
        else:
            self._answer(engine, batch, failure)
            record = _all_failed(batch, SampleFailure("engine", failure.reason))
        # The writer has to let go of what it holds of a lost batch before its rows are dispatched again.
        ack = await self._finish(writer, batch, record)
        if failure is None and ack is not None:
            self._ledger.written(batch.batch_id, ack.written, ack.failed, ack.lost)
        elif failure is not None and failure.fault is Fault.SAMPLE:
            self._ledger.batch_failed(batch.batch_id, failure.sample_failure)
        else:
            self._ledger.batch_lost(batch.batch_id)
        self._wake()

    async def _record(
        self, engine: Member, batch: Batch, record_ref: Any
    ) -> tuple[BatchRecord, Failure | None]:
        """The engine's answer, and why there is none."""
        try:
            record: BatchRecord = await record_ref
        except RayError as error:
            failure = classify(error)
            if failure.fault is Fault.MEMBER:
                self._crew.engine_lost(engine, failure)
            return _all_failed(batch, failure.sample_failure), failure
        if self._ledger.captured(batch.batch_id, record.outcomes, asyncio.get_running_loop().time()):
            self.captured_tokens += batch.tokens
        if any(o.failure is not None and o.failure.kind == "engine" for o in record.outcomes):
            self._crew.infrastructure_failed(f"{engine.name} gave up samples of batch {batch.batch_id}")
        self._wake()
        return record, None

    async def _put_all(self, writer: Member, batch: Batch, refs: deque[Any]) -> Failure | None:
        """Hands each segment to the writer as soon as it is there; returns why it couldn't.

        A sample's segments must come in order, so a put begins when the one before has ended. Those that are
        through are gone from ``refs``: nothing holds their bytes any more.
        """
        for index in range(len(batch.segments)):
            try:
                await writer.handle.put.remote(batch, index, refs[0])
            except RayError as error:
                failure = classify_put(error)
                if failure.fault is Fault.MEMBER:
                    await self._crew.writer_lost(writer, failure)
                elif failure.fault is Fault.FULL:
                    self._trouble(failure)
                return failure
            refs.popleft()
        return None

    def _answer(self, engine: Member, batch: Batch, failure: Failure) -> None:
        """What a lost batch means for the run, beside its members."""
        if failure.fault is Fault.SAMPLE:
            self._crew.last_problem = failure.reason
        elif failure.fault is Fault.CAPACITY:
            self._trouble(failure)
        elif failure.fault is Fault.OBJECT_LOST and not engine.lost:
            self._crew.infrastructure_failed(f"segments of batch {batch.batch_id} are lost: {failure.reason}")

    async def _finish(self, writer: Member, batch: Batch, record: BatchRecord) -> WriteAck | None:
        """The writer's word on the batch; None if it gave none."""
        if writer.lost:
            return None
        try:
            ack: WriteAck = await writer.handle.finish.remote(batch, record)
        except RayError as error:
            failure = classify(error)
            if failure.fault is Fault.FULL:
                self._trouble(failure)
            else:
                await self._crew.writer_lost(writer, failure)
            return None
        self._crew.heard(writer, ack)
        return ack


def _cancel(refs: deque[Any]) -> None:
    for ref in refs:
        ray.cancel(ref)


def _all_failed(batch: Batch, failure: SampleFailure) -> BatchRecord:
    outcomes = tuple(SampleOutcome(s.row, s.attempt, failure) for s in batch.samples)
    return BatchRecord(batch.batch_id, "", outcomes, 0.0, 0.0)
