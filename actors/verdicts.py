"""What a failure means for a row: again, alone, skipped or failed. Pure.

Two failure budgets are kept apart. A sample's own failures end in ``failed`` after the retries. The death of
an engine isn't the sample's fault, but it may be its doing: every row that was in flight there becomes a
*suspect* and is dispatched alone, to an engine with nothing else in flight. Only a death while alone counts
against the row, and the second one makes it failed: poison. So a poison row costs three engines: one in
company, two alone.
"""

from __future__ import annotations

from collections import Counter

from actors.budgets import Breaker
from actors.messages import SampleFailure
from actors.rows import Rows

DEATHS_ALONE = 2
"""Engine deaths while alone at which a row is poison."""


class Verdicts:
    """Judges rows whose batch is over.

    Args:
        rows: the columns.
        breaker: told of each failure that is a sample's own.
        events: counts what went wrong by class.
        retries: further attempts after a sample's first own failure.
    """

    def __init__(self, rows: Rows, breaker: Breaker, events: Counter[str], retries: int) -> None:
        self._rows = rows
        self._breaker = breaker
        self._events = events
        self._retries = retries

    def after_death(self, row: int, alone: bool, blame: bool) -> None:
        """The row was in flight at an engine that died; ``blame``: a sample may have killed it."""
        rows = self._rows
        rows.deaths_alone[row] += alone and blame
        if rows.deaths_alone[row] >= DEATHS_ALONE:
            rows.fail(row, f"poison: {DEATHS_ALONE} engines died while they had this sample alone")
        else:
            rows.requeue(row, alone=alone or blame)

    def after_failure(self, row: int, failure: SampleFailure) -> None:
        """An attempt at the row gave no states."""
        rows = self._rows
        self._events[failure.kind] += 1
        if failure.kind == "too_long":
            rows.skip(row, failure.reason)
        elif failure.kind == "engine":
            rows.requeue(row)
        else:
            self._breaker.failure()
            rows.failures[row] += 1
            if rows.failures[row] > self._retries:
                rows.fail(row, f"{failure.reason} ({rows.failures[row]} attempts)")
            else:
                rows.requeue(row)
