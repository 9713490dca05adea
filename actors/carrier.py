"""One batch's way through an engine and a writer. It passes references on and never fetches a segment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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
        absorb: takes every acknowledgement of a writer.
        trouble: takes a failure that pauses the run.
        wake: called when there may be something new to dispatch.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        crew: Crew,
        absorb: Callable[[WriteAck], None],
        trouble: Callable[[Failure], None],
        wake: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._crew = crew
        self._absorb = absorb
        self._trouble = trouble
        self._wake = wake
        self.captured_tokens = 0

    async def carry(self, dispatch: Dispatch, engine: Member, writer: Member) -> None:
        """Takes one batch to its end, whatever that is; raises nothing that a member did wrong."""
        segments = plan_segments([s.tokens for s in dispatch.samples], self._layout)
        batch = Batch(dispatch.batch_id, dispatch.samples, segments)
        record_ref = engine.handle.capture.remote(batch)
        places = range(len(batch.segments))
        segment_refs = [engine.handle.segment.remote(batch.batch_id, i) for i in places]
        put_refs = [
            writer.handle.put.remote(batch, i, ref) for i, ref in zip(places, segment_refs, strict=True)
        ]
        record = await self._record(engine, batch, record_ref, segment_refs)
        del segment_refs
        puts = await asyncio.gather(*put_refs, return_exceptions=True)
        del put_refs
        failures = [classify_put(p) for p in puts if isinstance(p, RayError)]
        if failures:
            record = await self._put_failed(writer, batch, record, failures)
        else:
            self._ledger.moved(batch.batch_id)
            self._wake()
        if not writer.lost:
            await self._finish(writer, batch, record)
        self._ledger.batch_lost(batch.batch_id)  # unless it came to its end
        self._wake()

    async def _record(
        self, engine: Member, batch: Batch, record_ref: Any, segment_refs: Sequence[Any]
    ) -> BatchRecord:
        """The engine's answer; one in which everything failed if it gave none."""
        try:
            record: BatchRecord = await record_ref
        except RayError as error:
            failure = classify(error)
            if failure.fault is Fault.MEMBER:
                self._crew.engine_lost(engine, failure)
                return _all_failed(batch, SampleFailure("engine", failure.reason))
            for ref in segment_refs:
                ray.cancel(ref)  # of a capture that failed they might never come
            record = self._all_failed_by(batch, failure)
        if self._ledger.captured(batch.batch_id, record.outcomes):
            self.captured_tokens += batch.tokens
        if any(o.failure is not None and o.failure.kind == "engine" for o in record.outcomes):
            self._crew.infrastructure_failed(f"{engine.name} gave up samples of batch {batch.batch_id}")
        self._wake()
        return record

    def _all_failed_by(self, batch: Batch, failure: Failure) -> BatchRecord:
        if failure.fault is Fault.SAMPLE:
            self._crew.last_problem = failure.reason
            return _all_failed(batch, failure.sample_failure)
        if failure.fault in (Fault.FULL, Fault.CAPACITY):
            self._trouble(failure)
        return _all_failed(batch, SampleFailure("engine", failure.reason))

    async def _put_failed(
        self, writer: Member, batch: Batch, record: BatchRecord, failures: Sequence[Failure]
    ) -> BatchRecord:
        """The batch is lost; its writer, if it lives, is to drop what it has of it."""
        worst = min(failures, key=lambda f: f.fault.value)
        if worst.fault is Fault.SAMPLE:
            # Neither storage nor a process: a segment that isn't what the batch says. Budgets bound it.
            self._crew.last_problem = worst.reason
            self._ledger.moved(batch.batch_id)
            self._ledger.written(batch.batch_id, (), _all_failed(batch, worst.sample_failure).outcomes)
        else:
            self._ledger.batch_lost(batch.batch_id)
        if worst.fault is Fault.MEMBER:
            await self._crew.writer_lost(writer, worst)
        elif worst.fault in (Fault.FULL, Fault.CAPACITY):
            self._trouble(worst)
        elif worst.fault is Fault.OBJECT_LOST and record.engine in self._crew.engines:
            self._crew.infrastructure_failed(f"segments of batch {batch.batch_id} are lost: {worst.reason}")
        return _all_failed(batch, SampleFailure("engine", worst.reason))

    async def _finish(self, writer: Member, batch: Batch, record: BatchRecord) -> None:
        try:
            ack: WriteAck = await writer.handle.finish.remote(batch, record)
        except RayError as error:
            failure = classify(error)
            if failure.fault in (Fault.FULL, Fault.CAPACITY):
                self._trouble(failure)
            else:
                await self._crew.writer_lost(writer, failure)
            return
        self._ledger.written(batch.batch_id, ack.written, ack.failed)
        self._absorb(ack)


def _all_failed(batch: Batch, failure: SampleFailure) -> BatchRecord:
    outcomes = tuple(SampleOutcome(s.row, s.attempt, failure) for s in batch.samples)
    return BatchRecord(batch.batch_id, "", outcomes, 0.0, 0.0)
