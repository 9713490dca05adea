"""The columns of the ledger: one entry for every prepared row, and the transitions of one row. Pure.

A million rows take some tens of megabytes, and a transition costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from actors.pending import PendingRows

ATTEMPT_BITS = 16
"""A generation of the coordinator numbers its attempts from ``generation << ATTEMPT_BITS``."""


class State(IntEnum):
    """Where a row is."""

    PENDING = 0
    IN_FLIGHT = 1
    WRITTEN = 2
    COMMITTED = 3
    SKIPPED = 4
    FAILED = 5


# Python 3.11 looks a member up through the metaclass at each use, which a million transitions feel.
_PENDING, _IN_FLIGHT, _WRITTEN, _COMMITTED, _SKIPPED, _FAILED = tuple(State)


@dataclass(frozen=True)
class Counts:
    """Rows by state; their sum is the number of prepared rows."""

    pending: int
    in_flight: int
    written: int
    committed: int
    skipped: int
    failed: int

    @property
    def total(self) -> int:
        """Prepared rows."""
        return self.pending + self.in_flight + self.written + self.committed + self.skipped + self.failed


class Rows:
    """State, attempt and budgets of every row.

    Args:
        tokens: int32 [n], tokens of each row.
        skipped: bool [n], rows that preparation skipped.
        generation: of the coordinator.
        committed: rows that manifests name already, perhaps more than once.

    Attributes:
        tokens: as given.
        pending: the rows that wait.
        failures: uint8 [n], the samples' own failures.
        deaths_alone: uint8 [n], engines that died while they had the row alone.
        committed_tokens: tokens of the committed rows.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        skipped: NDArray[np.bool_],
        generation: int,
        committed: NDArray[np.int64],
    ) -> None:
        n = len(tokens)
        self.tokens = tokens
        self.failures = np.zeros(n, dtype=np.uint8)
        self.deaths_alone = np.zeros(n, dtype=np.uint8)
        self._state = np.where(skipped, np.uint8(State.SKIPPED), np.uint8(State.PENDING))
        self._state[committed] = State.COMMITTED
        self.committed_tokens = int(tokens[self._state == State.COMMITTED].sum(dtype=np.int64))
        self.pending = PendingRows(tokens, self._state == State.PENDING)
        self._attempt = np.full(n, generation << ATTEMPT_BITS, dtype=np.int32)
        self._writer = np.full(n, -1, dtype=np.int32)
        self._counts: list[int] = np.bincount(self._state, minlength=len(State)).tolist()
        self._reasons: dict[int, str] = {}

    def counts(self) -> Counts:
        """Rows by state."""
        return Counts(*self._counts)

    def count(self, state: State) -> int:
        """Rows in ``state``."""
        return self._counts[state]

    def state(self, row: int) -> State:
        """Where ``row`` is."""
        return State(int(self._state[row]))

    def attempt(self, row: int) -> int:
        """The newest attempt at ``row``."""
        return int(self._attempt[row])

    def reason(self, row: int) -> str | None:
        """Why this run skipped or failed ``row``; None for others, also those that preparation skipped."""
        return self._reasons.get(row)

    def reasons(self) -> Iterator[tuple[int, str]]:
        """(row, reason) of every row that this run skipped or failed."""
        yield from self._reasons.items()

    def in_state(self, state: State) -> Iterator[int]:
        """Rows in ``state``, ascending."""
        yield from np.flatnonzero(self._state == state).tolist()

    def still_in_flight(self, rows: Iterable[int]) -> list[int]:
        """Those of ``rows`` that are in flight, in their order."""
        asked = np.fromiter(rows, np.int64)
        found: list[int] = asked[self._state[asked] == _IN_FLIGHT].tolist()
        return found

    def written_by(self, writer: int) -> list[int]:
        """Rows that the writer of this number holds and hasn't sealed."""
        rows: list[int] = np.flatnonzero((self._state == State.WRITTEN) & (self._writer == writer)).tolist()
        return rows

    def is_written_by(self, row: int, writer: int) -> bool:
        """Whether the writer of this number holds ``row`` and hasn't sealed it."""
        return bool(self._state[row] == _WRITTEN and self._writer[row] == writer)

    def start(self, row: int) -> int:
        """A row taken out of `pending` goes into flight; returns the attempt's number."""
        self._move(row, _IN_FLIGHT, _PENDING)
        self._attempt[row] += 1
        return int(self._attempt[row])

    def write(self, row: int, writer: int) -> None:
        """The writer of this number holds the row's states."""
        self._move(row, _WRITTEN, _IN_FLIGHT)
        self._writer[row] = writer

    def requeue(self, row: int, alone: bool = False) -> None:
        """What was in flight or written is pending again, as a suspect if it has to be ``alone`` next."""
        self._move(row, _PENDING, _IN_FLIGHT, _WRITTEN)
        self.pending.push(row, alone)

    def skip(self, row: int, reason: str) -> None:
        """The row in flight is given up, and the run is no less complete for it."""
        self._move(row, _SKIPPED, _IN_FLIGHT)
        self._reasons[row] = reason

    def fail(self, row: int, reason: str) -> None:
        """The row in flight is given up."""
        self._move(row, _FAILED, _IN_FLIGHT)
        self._reasons[row] = reason

    def commit(self, rows: NDArray[np.int64]) -> int:
        """A manifest names ``rows``, which outweighs whatever was thought of them.

        Returns:
            How many of them were committed before.
        """
        states = self._state[rows]
        new = rows[states != _COMMITTED]
        for row in rows[states == _PENDING].tolist():
            self.pending.discard(row)
        for row in rows[states > _COMMITTED].tolist():
            self._reasons.pop(row, None)
        for state, count in enumerate(np.bincount(states, minlength=len(State)).tolist()):
            self._counts[state] -= count
        self._counts[_COMMITTED] += len(rows)
        self._state[new] = _COMMITTED
        self.committed_tokens += int(self.tokens[new].sum(dtype=np.int64))
        return len(rows) - len(new)

    def _move(self, row: int, to: State, *allowed: State) -> None:
        state = int(self._state[row])
        if state not in allowed:
            raise ValueError(f"row {row} is {State(state).name.lower()}; it can't become {to.name.lower()}")
        self._counts[state] -= 1
        self._counts[to] += 1
        self._state[row] = to
