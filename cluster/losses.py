"""How much a run bears before it ends: losses within an hour, and starts that fail."""

from __future__ import annotations

from collections import Counter

from actors.budgets import FailureRate
from storage.errors import IncompleteRun

FAILED_STARTS = 3
"""Starts that fail in a row on one node, after which it isn't used any more; so many before anything starts
at all end the run."""
_HOUR_S = 3600.0
_WHAT_NOW = "What is committed is safe; mend the cause and run the same command again"


class LossBudget:
    """Counts losses.

    Args:
        losses_per_hour: engines, writers and coordinators lost within an hour that are still borne.
        reload_s: time that engines may spend loading again, all together.
    """

    def __init__(self, losses_per_hour: int, reload_s: float) -> None:
        self._reload_limit_s = reload_s
        self._reloaded_s = 0.0
        self._reloads_due = 0
        self._losses = FailureRate(losses_per_hour, _HOUR_S)
        self._failed: Counter[str] = Counter()
        self._anything_started = False

    def lost(self, name: str, reason: str, now_s: float) -> None:
        """Counts a loss.

        Raises:
            IncompleteRun: there were too many within an hour.
        """
        self._losses.record(now_s)
        if self._losses.exceeded(now_s):
            raise IncompleteRun(
                f"more than limits.losses_per_hour = {self._losses.limit} engines and writers were lost within an "
                f"hour, the last one {name}: {reason}. {_WHAT_NOW}"
            )

    def engine_lost(self) -> None:
        """One that had loaded: the next start makes up for it."""
        self._reloads_due += 1

    def failed_start(self, node_id: str, name: str, reason: str, seconds: float) -> bool:
        """Counts a start that failed after ``seconds``; each try of a large model costs half an hour.

        Returns:
            Whether the node is given up.

        Raises:
            IncompleteRun: too many in a row, and nothing ever started; or too much time was spent.
        """
        self._reload(seconds, f"{name}: {reason}")
        self._failed[node_id] += 1
        total = self._failed.total()
        if not self._anything_started and total >= FAILED_STARTS:
            raise IncompleteRun(
                f"{total} starts in a row failed, the last one of {name}: {reason}. {_WHAT_NOW}"
            )
        return self._failed[node_id] >= FAILED_STARTS

    def started(self, node_id: str, seconds: float) -> None:
        """An engine came up after ``seconds``.

        Raises:
            IncompleteRun: too much time was spent loading again.
        """
        self._anything_started = True
        del self._failed[node_id]
        if self._reloads_due:
            self._reloads_due -= 1
            self._reload(seconds, "engines that came up again")

    def _reload(self, seconds: float, last: str) -> None:
        self._reloaded_s += seconds
        if self._reloaded_s > self._reload_limit_s:
            raise IncompleteRun(
                f"more than limits.reload_s = {self._reload_limit_s:.0f} s went into loading engines again, the last "
                f"of it into {last}. {_WHAT_NOW}"
            )
