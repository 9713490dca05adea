"""The batches between dispatch and their writer's word, and what each of them holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from actors.balance import Dispatch, Engines, Flight, Writers
from actors.balancer import Choice
from actors.budgets import Permits
from actors.messages import SampleRef
from actors.rows import Rows


class Flights:
    """Flights by batch id. Each is on the books of an engine, a writer and the permits until it lets them go.

    Args:
        rows: the columns.
        engines: who prefills.
        writers: who writes.
        permits: bytes in flight per node.
        kept: int32 [n], tokens of each row whose states are stored.
        bytes_per_token: K x H x itemsize of such a token.
        generation: of the coordinator; a part of the batch ids.
    """

    def __init__(
        self,
        rows: Rows,
        engines: Engines,
        writers: Writers,
        permits: Permits,
        kept: NDArray[np.int32],
        bytes_per_token: int,
        generation: int,
    ) -> None:
        self._rows = rows
        self._engines = engines
        self._writers = writers
        self._permits = permits
        self._kept = kept
        self._bytes_per_token = bytes_per_token
        self._generation = generation
        self._begun = 0
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __getitem__(self, batch_id: str) -> Flight:
        return self._flights[batch_id]

    def __contains__(self, batch_id: str) -> bool:
        return batch_id in self._flights

    def get(self, batch_id: str) -> Flight | None:
        """The flight; None once it is over."""
        return self._flights.get(batch_id)

    def values(self) -> Iterable[Flight]:
        """All of them."""
        return self._flights.values()

    def begin(self, choice: Choice, now_s: float) -> Dispatch:
        """A chosen batch takes off."""
        self._begun += 1
        engine, writer = choice.engine, choice.writer
        tokens_of, kept_of = self._rows.tokens, self._kept
        refs = tuple(
            SampleRef(row, self._rows.start(row), int(tokens_of[row]), int(kept_of[row]))
            for row in choice.rows
        )
        tokens = sum(ref.tokens for ref in refs)
        flight = Flight(
            batch_id=f"{self._generation}-{self._begun}",
            engine=engine.name,
            writer=writer,
            nodes=tuple({engine.node, writer.node}),
            samples={ref.row: ref.attempt for ref in refs},
            tokens=tokens,
            size_bytes=sum(ref.kept for ref in refs) * self._bytes_per_token,
            alone=choice.alone,
        )
        self._flights[flight.batch_id] = flight
        self._permits.take(flight.nodes, flight.size_bytes)
        self._writers.load(flight)
        self._engines.load(flight, now_s)
        return Dispatch(flight.batch_id, engine.name, writer.name, refs)

    def release(self, flight: Flight) -> None:
        """Its bytes have left the object store, or never will come."""
        if flight.holds_permit:
            self._permits.release(flight.nodes, flight.size_bytes)
            self._writers.unload(flight)

    def end(self, batch_id: str) -> list[int]:
        """It is over; returns its rows, without those that a manifest has named meanwhile."""
        flight = self._flights.pop(batch_id)
        self._engines.unload(flight)
        self.release(flight)
        return self._rows.still_in_flight(flight.samples)
