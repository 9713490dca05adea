"""What bounds a run: bytes in flight per node, infrastructure failures per time, failures in a row. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Permits:
    """Bytes in flight on each node, never more than one budget.

    A batch's bytes lie in the object store of its engine's node and, if its writer is elsewhere, for a while
    in that node's too, so one permit is held on each of them.

    Args:
        budget_bytes: bound for every node.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used: dict[str, int] = {}

    def room(self, nodes: Iterable[str]) -> int:
        """Most bytes that can be taken on every one of ``nodes``."""
        return self.budget_bytes - max((self._used.get(node, 0) for node in nodes), default=0)

    def take(self, nodes: Iterable[str], size_bytes: int) -> None:
        """Takes ``size_bytes`` on every one of ``nodes``.

        Raises:
            ValueError: it doesn't fit.
        """
        nodes = tuple(nodes)
        if size_bytes > self.room(nodes):
            raise ValueError(f"{size_bytes} bytes don't fit into the permits left on {', '.join(nodes)}")
        for node in nodes:
            self._used[node] = self._used.get(node, 0) + size_bytes

    def release(self, nodes: Iterable[str], size_bytes: int) -> None:
        """Gives back what `take` took.

        Raises:
            ValueError: more is given back than was taken.
        """
        for node in nodes:
            left = self._used.get(node, 0) - size_bytes
            if left < 0:
                raise ValueError(f"{size_bytes} bytes given back on {node}, {left + size_bytes} were taken")
            self._used[node] = left

    def used(self) -> dict[str, int]:
        """Bytes taken on each node that ever held any."""
        return dict(self._used)


class FailureRate:
    """Infrastructure failures within a sliding window.

    Args:
        limit: failures within the window that are still borne.
        window_s: length of the window.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._times: deque[float] = deque()

    def record(self, now_s: float) -> None:
        """Counts one failure at ``now_s`` (any monotonic clock)."""
        self._times.append(now_s)

    def exceeded(self, now_s: float) -> bool:
        """Whether more failures than the limit lie within the window that ends at ``now_s``."""
        while self._times and self._times[0] < now_s - self.window_s:
            self._times.popleft()
        return len(self._times) > self.limit


class Breaker:
    """Trips when samples only fail: ``limit`` failures without one success between them.

    Args:
        limit: failures in a row at which it trips.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.failures = 0

    @property
    def tripped(self) -> bool:
        """Whether the limit is reached."""
        return self.failures >= self.limit

    def failure(self) -> None:
        """One attempt failed by the sample's own fault."""
        self.failures += 1

    def success(self) -> None:
        """One sample came through."""
        if not self.tripped:
            self.failures = 0
