"""The rows that wait for an engine, longest first, at an amortised cost of O(log n) a row. Pure."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


class PendingRows:
    """Waiting rows: a sorted column walked once, a heap of rows that came back, and the suspects.

    Args:
        tokens: int32 [n], tokens of every prepared row.
        waiting: bool [n], the rows that wait at the start.
    """

    def __init__(self, tokens: NDArray[np.int32], waiting: NDArray[np.bool_]) -> None:
        self._lengths = tokens
        self._waiting = waiting.copy()
        rows = np.flatnonzero(waiting).astype(np.int32)
        self._order = rows[np.argsort(-tokens[rows], kind="stable")]
        self._next = 0
        self._back: list[tuple[int, int]] = []
        self._suspects: dict[int, None] = {}
        self.tokens = int(tokens[rows].sum(dtype=np.int64))

    @property
    def suspects(self) -> int:
        """Rows that must be dispatched alone."""
        return len(self._suspects)

    def tokens_of(self, row: int) -> int:
        """Tokens of one row."""
        return int(self._lengths[row])

    def push(self, row: int, alone: bool = False) -> None:
        """Takes a row back, as a suspect if it must be ``alone`` next time."""
        if self._waiting[row]:
            raise ValueError(f"row {row} is waiting already")
        self._waiting[row] = True
        self.tokens += int(self._lengths[row])
        if alone:
            self._suspects[row] = None
        else:
            heapq.heappush(self._back, (-int(self._lengths[row]), row))

    def discard(self, row: int) -> None:
        """Takes out a row that waits and was found to be committed."""
        if not self._waiting[row]:
            raise ValueError(f"row {row} isn't waiting")
        self._leave(row)

    def heaviest(self, weights: NDArray[np.int64]) -> int | None:
        """The waiting row of the largest weight, of those of all rows [n]; None when there is none."""
        return int(np.where(self._waiting, weights, -1).argmax()) if self._waiting.any() else None

    def head(self) -> int | None:
        """The longest waiting row that is no suspect; None when there is none."""
        while self._next < len(self._order) and not self._waiting[self._order[self._next]]:
            self._next += 1
        while self._back and not self._waiting[self._back[0][1]]:
            heapq.heappop(self._back)
        first = int(self._order[self._next]) if self._next < len(self._order) else None
        if self._back and (first is None or -self._back[0][0] > self._lengths[first]):
            return self._back[0][1]
        return first

    def pop(self) -> int:
        """Takes out what `head` shows."""
        row = self.head()
        if row is None:
            raise ValueError("no row waits")
        if self._next < len(self._order) and row == self._order[self._next]:
            self._next += 1  # at once: the row may come back as a suspect before the next look
        self._leave(row)
        return row

    def suspect(self) -> int | None:
        """The suspect that has waited longest; None when there is none."""
        return next(iter(self._suspects), None)

    def pop_suspect(self) -> int:
        """Takes out what `suspect` shows."""
        row = next(iter(self._suspects))
        self._leave(row)
        return row

    def _leave(self, row: int) -> None:
        self._waiting[row] = False
        self._suspects.pop(row, None)
        self.tokens -= int(self._lengths[row])
