"""What holds a run back for a while, and what ends it. Pure but for the clock that is handed in."""

from __future__ import annotations

from collections.abc import Callable

from actors.failures import Failure, Fault
from actors.ledger import Ledger
from storage.errors import HsdumpError, IncompleteRun, StorageFull

_PAUSE_S = 10.0


class Brakes:
    """Pauses a run after trouble and says when it can't go on.

    Args:
        url: of the output, for messages.
        full_timeout_s: longest time without space at the output.
        losses_per_hour: infrastructure failures within an hour that are borne, for the message.
        now_s: a monotonic clock.

    Attributes:
        paused: why nothing is dispatched just now; None if it is.
    """

    def __init__(
        self, url: str, full_timeout_s: float, losses_per_hour: int, now_s: Callable[[], float]
    ) -> None:
        self._url = url
        self._full_timeout_s = full_timeout_s
        self._losses_per_hour = losses_per_hour
        self._now_s = now_s
        self._paused_until_s = 0.0
        self._full_since_s: float | None = None
        self.paused: str | None = None

    def pull(self, failure: Failure) -> None:
        """Pauses the dispatch for a while."""
        now_s = self._now_s()
        if failure.fault is Fault.FULL and self._full_since_s is None:
            self._full_since_s = now_s
        self.paused = failure.reason
        self._paused_until_s = now_s + min(_PAUSE_S, self._full_timeout_s / 6)

    def works_again(self) -> None:
        """Something was written: a pause need not last."""
        self._full_since_s = None
        self._paused_until_s = 0.0

    def ease(self) -> None:
        """Ends a pause that is over."""
        if self.paused is not None and self._now_s() >= self._paused_until_s:
            self.paused = None

    def end(self, ledger: Ledger, problem: str | None, losses_exceeded: bool) -> HsdumpError | None:
        """Why the run can't go on; None if it can.

        Args:
            ledger: the account.
            problem: what went wrong last.
            losses_exceeded: too much died within an hour.
        """
        full = self._full_since_s is not None and self._now_s() - self._full_since_s > self._full_timeout_s
        if not (ledger.breaker.tripped or losses_exceeded or full):
            return None
        counts = ledger.counts()
        left = f"{counts.committed} of {counts.total} rows are committed; the same command goes on from there"
        if ledger.breaker.tripped:
            failures = ledger.breaker.failures
            return IncompleteRun(f"{failures} samples failed and none came through ({problem}); {left}")
        if losses_exceeded:
            return IncompleteRun(
                f"more than {self._losses_per_hour} engines, writers or batches were lost within an hour, the "
                f"last one: {problem}; {left}"
            )
        return StorageFull(f"{self._url} had no space for {self._full_timeout_s:.0f} s; {left}")
