"""What became of every prepared row. Pure: no I/O, no clock, no asyncio.

    pending -> in flight (attempt n) -> written -> committed
                                                 | skipped(reason) | failed(reason)

Written isn't safe: when its writer dies before the shard is sealed, the row is pending again. A manifest is
the only truth: a row that one names is committed, whatever the ledger thought of it. A row leaves its batch
only when the batch is over, since until then the batch's writer may hold a part of it.

Which failure costs a row what is in `actors.verdicts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.balance import Dispatch, Engines, Limits, Writers
from actors.balancer import Balancer
from actors.budgets import Breaker, Permits
from actors.flights import Flights
from actors.messages import SampleFailure, SampleOutcome
from actors.rows import Counts, Rows, State
from actors.verdicts import Verdicts
from storage.errors import ResourceError


class Ledger:
    """The account over all prepared rows of a run.

    Args:
        tokens: int32 [n], tokens of each row.
        skipped: bool [n], rows that preparation skipped.
        bytes_per_token: K x H x itemsize of a token whose states are stored.
        limits: bounds of batches, permits and retries.
        generation: of the coordinator, from 0. Attempt numbers and batch ids of different generations differ,
            so that a replaced coordinator's late results are refused.
        committed: rows that manifests name already.
        kept: int32 [n], tokens of each row whose states are stored; None for all.

    Attributes:
        rows: the columns; read them, but change them only by the ledger's methods.
        engines: who prefills.
        writers: who writes.
        permits: bytes in flight per node.
        breaker: trips when samples only fail.
        events: what went wrong, counted by class.

    Raises:
        ResourceError: a pending row needs more bytes than one node's budget.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        skipped: NDArray[np.bool_],
        bytes_per_token: int,
        limits: Limits,
        generation: int = 0,
        committed: NDArray[np.int64] | Sequence[int] = (),
        kept: NDArray[np.int32] | None = None,
    ) -> None:
        kept = tokens if kept is None else kept
        row_bytes = kept.astype(np.int64) * bytes_per_token
        self.limits = limits
        self.rows = Rows(tokens, skipped, generation, np.asarray(committed, dtype=np.int64))
        self.engines = Engines()
        self.writers = Writers()
        self.permits = Permits(limits.in_flight_bytes)
        self.breaker = Breaker(limits.failures_in_a_row)
        self.events: Counter[str] = Counter()
        self._pending = self.rows.pending
        self._verdicts = Verdicts(self.rows, self.breaker, self.events, limits.retries)
        self._flights = Flights(
            self.rows, self.engines, self.writers, self.permits, kept, bytes_per_token, generation
        )
        token_bytes = int(row_bytes.sum()) / max(int(tokens.sum(dtype=np.int64)), 1) or float(bytes_per_token)
        self._balancer = Balancer(
            limits, row_bytes, token_bytes, self._pending, self.engines, self.writers, self.permits
        )
        self._refuse_giants(row_bytes)

    def _refuse_giants(self, row_bytes: NDArray[np.int64]) -> None:
        row = self._pending.heaviest(row_bytes)
        if row is not None and row_bytes[row] > self.limits.in_flight_bytes:
            raise ResourceError(
                f"row {row} has {self._pending.tokens_of(row)} tokens, whose states take {row_bytes[row]} bytes, "
                f"but only {self.limits.in_flight_bytes} bytes may be in flight on a node; give Ray a larger object "
                "store (and raise the limit with it) or lower prompts.max_tokens"
            )

    # ---- what it all comes to

    def counts(self) -> Counts:
        """Rows by state; they add up to the prepared rows."""
        return self.rows.counts()

    @property
    def open_batches(self) -> int:
        """Batches between dispatch and their writer's word."""
        return len(self._flights)

    @property
    def settled(self) -> bool:
        """Whether nothing is pending or in flight: what is left is to seal."""
        return self.rows.count(State.PENDING) == 0 and not self._flights

    @property
    def finished(self) -> bool:
        """Whether every row is committed, skipped or failed, and no batch is open."""
        return self.settled and self.rows.count(State.WRITTEN) == 0

    # ---- engines and writers

    def add_engine(self, name: str, node: str) -> None:
        """An engine is ready for work."""
        self.engines.add(name, node)

    def drain_engine(self, name: str) -> None:
        """The engine gets no more work; what is in flight there goes on."""
        self.engines[name].draining = True

    def dismiss_engine(self, name: str) -> None:
        """A drained engine leaves.

        Raises:
            ValueError: it has batches in flight.
        """
        if self.engines[name].batches:
            raise ValueError(f"{name} has batches in flight")
        self.engines.remove(name)

    def engine_lost(self, name: str, blame: bool = True) -> None:
        """The engine is gone. What it had not yet answered is pending again once `batch_lost` says so.

        Args:
            name: the engine.
            blame: whether a sample may have killed it; False when its node was taken away.
        """
        for batch_id in tuple(self.engines[name].batches):
            flight = self._flights[batch_id]
            self.engines.unload(flight)
            flight.blame = blame
        self.engines.remove(name)
        self.events["engine_lost"] += 1

    def add_writer(self, name: str, node: str) -> None:
        """A writer is ready."""
        self.writers.add(name, node)

    def drain_writer(self, name: str) -> None:
        """The writer gets no more work."""
        self.writers[name].draining = True

    def expects(self, name: str) -> bool:
        """Whether a batch that isn't over will end at the writer."""
        return any(flight.writer.name == name for flight in self._flights.values())

    def dismiss_writer(self, name: str) -> None:
        """A drained writer leaves.

        Raises:
            ValueError: it has something that isn't committed.
        """
        if self.expects(name) or self.unsealed(name):
            raise ValueError(f"{name} has batches or rows that aren't committed")
        self.writers.remove(name)

    def unsealed(self, name: str) -> int:
        """Rows that the writer holds and hasn't sealed."""
        return len(self.rows.written_by(self.writers[name].number))

    def writer_lost(self, name: str) -> None:
        """The writer is gone; what it had written and not sealed is pending again.

        Tell the ledger of every manifest that the writer may have left, with `committed`, before this.
        Batches in flight to it end by `batch_lost`.
        """
        for row in self.rows.written_by(self.writers[name].number):
            self.rows.requeue(row)
        self.writers.remove(name)
        self.events["writer_lost"] += 1

    def shard_lost(self, name: str, rows: Iterable[int]) -> None:
        """A shard of a writer that lives is gone, and with it ``rows``; those that it held are pending again."""
        for row in rows:
            if self.rows.is_written_by(row, self.writers[name].number):
                self.rows.requeue(row)
        self.events["shard_lost"] += 1

    # ---- a batch's way

    def next_batch(self, now_s: float = 0.0) -> Dispatch | None:
        """The next batch and where it goes, by `Balancer`; None while nothing can be dispatched.

        Args:
            now_s: any monotonic clock, the same as in `captured`; engines' speeds are measured by it.
        """
        choice = self._balancer.choose()
        return None if choice is None else self._flights.begin(choice, now_s)

    def captured(self, batch_id: str, outcomes: Iterable[SampleOutcome], now_s: float = 0.0) -> bool:
        """The engine has answered: it may get more work. Samples that failed stay until the batch is over.

        Outcomes of other attempts are ignored. A sample without an outcome failed.

        Returns:
            False if the engine was lost or the batch given up before: nothing changes.

        Raises:
            ValueError: it was captured before.
        """
        flight = self._flights.get(batch_id)
        if flight is None or flight.blame is not None:
            self.events["stale"] += 1
            return False
        if not flight.on_engine:
            raise ValueError(f"batch {batch_id} was captured before")
        self.engines.answered(flight, now_s)
        by_attempt = {(outcome.row, outcome.attempt): outcome for outcome in outcomes}
        left_out = SampleFailure("row_mismatch", "the engine's answer leaves it out")
        for row, attempt in flight.samples.items():
            if flight.alone:
                self.rows.deaths_alone[row] = 0
            outcome = by_attempt.get((row, attempt))
            failure = left_out if outcome is None else outcome.failure
            if failure is not None:
                flight.failures[row] = failure
        return True

    def moved(self, batch_id: str) -> bool:
        """The batch's bytes have left the object store: its permit is free again.

        Returns:
            False if the batch was given up before: nothing changes.

        Raises:
            ValueError: they had left before.
        """
        flight = self._flights.get(batch_id)
        if flight is None:
            return False
        if not flight.holds_permit:
            raise ValueError(f"batch {batch_id} gave its permit back before")
        self._flights.release(flight)
        return True

    def written(
        self,
        batch_id: str,
        rows: Iterable[int],
        failed: Iterable[SampleOutcome] = (),
        lost: Iterable[int] = (),
    ) -> bool:
        """The batch's writer holds ``rows``; the batch is over.

        ``lost`` samples are pending again without blame. One that the writer names nowhere counts as failed.

        Returns:
            False if the batch was given up before: nothing changes.

        Raises:
            ValueError: the batch wasn't captured and moved.
        """
        flight = self._flights.get(batch_id)
        if flight is None:
            return False
        if flight.on_engine or flight.holds_permit or flight.blame is not None:
            raise ValueError(f"batch {batch_id} can't be written before it is captured and moved")
        if flight.writer not in self.writers:
            return self.batch_lost(batch_id)
        for outcome in failed:
            if flight.samples.get(outcome.row) == outcome.attempt and outcome.failure is not None:
                flight.failures.setdefault(outcome.row, outcome.failure)
        silent = SampleFailure("other", f"{flight.writer.name} doesn't say what became of it")
        written, lost = set(rows), set(lost)
        for row in self._flights.end(batch_id):
            if row in flight.failures:
                self._verdicts.after_failure(row, flight.failures[row])
            elif row in written:
                self.rows.write(row, flight.writer.number)
                self.breaker.success()
            elif row in lost:
                self.rows.requeue(row)
            else:
                self._verdicts.after_failure(row, silent)
        return True

    def batch_failed(self, batch_id: str, failure: SampleFailure) -> bool:
        """The whole batch failed by the fault of one of its samples, nobody knows of which.

        A sample that was the only one is to blame; of several each goes alone next, and none is blamed yet.

        Returns:
            False if it was given up before: nothing changes.
        """
        if batch_id not in self._flights:
            return False
        rows = self._flights.end(batch_id)
        for row in rows:
            if len(rows) == 1:
                self._verdicts.after_failure(row, failure)
            else:
                self.rows.requeue(row, alone=True)
        self.events["batch_failed"] += 1
        return True

    def batch_lost(self, batch_id: str) -> bool:
        """The batch is given up, and no process holds a part of it any more: its rows are pending again.

        What its engine or writer said of single samples before holds; after the death of its engine they are
        suspects.

        Returns:
            False if it was given up before: nothing changes.
        """
        flight = self._flights.get(batch_id)
        if flight is None:
            return False
        for row in self._flights.end(batch_id):
            if flight.blame is not None:
                self._verdicts.after_death(row, flight.alone, flight.blame)
            elif row in flight.failures:
                self._verdicts.after_failure(row, flight.failures[row])
            else:
                self.rows.requeue(row)
        self.events["batch_lost"] += 1
        return True

    def committed(self, rows: Iterable[int]) -> None:
        """A manifest that names ``rows`` is in place."""
        again = self.rows.commit(np.unique(np.fromiter(rows, np.int64)))
        if again:
            self.events["duplicate"] += again
