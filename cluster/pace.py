"""How far a run is, how fast, and what holds it back: from one status after another. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from actors.run_messages import MemberStatus, Status

Where = Literal["engine", "ring", "object store", "writer", "storage", "nothing"]
"""What bounds a run's speed. ``nothing``: it is paused, loading, or at its end."""

WINDOW_S = 60.0
_FULL = 0.8
"""Share of the permits in use, or of a second in which something was busy, that counts as full."""
_RING = 0.05
"""Share of the time that forwards waited for room in the ring."""


@dataclass(frozen=True)
class MemberPace:
    """One engine or writer between two looks.

    Attributes:
        busy: share of the time that it had work, None before the second look.
        waiting: share of the time that it had none although rows were waiting.
        ring: share of the time that an engine's forwards waited for room in the ring.
        bytes_per_s: that a writer was given.
        seal: share of the time that a writer spent ending batches and committing shards.
    """

    status: MemberStatus
    busy: float | None = None
    waiting: float | None = None
    ring: float = 0.0
    bytes_per_s: float = 0.0
    seal: float = 0.0


@dataclass(frozen=True)
class Pace:
    """Where a run stands.

    Attributes:
        done_tokens: committed, or captured and on their way.
        total_tokens: of all rows that preparation kept.
        tokens_per_s: over the last minute; None before the second look.
        left_s: time to go at that speed; None where it isn't known.
        retries: what went wrong so far.
        bottleneck: what bounds the speed.
    """

    status: Status
    done_tokens: int
    total_tokens: int
    tokens_per_s: float | None
    left_s: float | None
    engines: tuple[MemberPace, ...]
    writers: tuple[MemberPace, ...]
    bottleneck: Where

    @property
    def permits_share(self) -> float:
        """Of the fullest node's permits, how much is in use."""
        used = max(self.status.in_flight_bytes.values(), default=0)
        return used / max(1, self.status.in_flight_limit_bytes)


@dataclass
class Pacer:
    """Turns statuses into paces.

    Attributes:
        looks: (time, captured tokens) of the last minute.
    """

    looks: deque[tuple[float, int]] = field(default_factory=deque)
    _committed_before: int | None = None
    _last: Status | None = None
    _last_s: float = 0.0

    def look(self, status: Status, now_s: float) -> Pace:
        """A further status, at ``now_s`` of any monotonic clock."""
        another = self._last is not None and self._last.task != status.task
        if another or (
            self.looks and status.captured_tokens < self.looks[-1][1]
        ):  # another coordinator leads
            self.looks.clear()
            self._committed_before, self._last = None, None
        if self._committed_before is None:
            self._committed_before = status.committed_tokens - min(
                status.captured_tokens, status.committed_tokens
            )
        self.looks.append((now_s, status.captured_tokens))
        while len(self.looks) > 2 and now_s - self.looks[0][0] > WINDOW_S:
            self.looks.popleft()
        captured = min(status.tokens, self._committed_before + status.captured_tokens)
        done = max(status.committed_tokens, captured)
        rate = self._rate()
        seconds = now_s - self._last_s if self._last is not None else 0.0
        engines = self._members("engines", status, seconds)
        writers = self._members("writers", status, seconds)
        self._last, self._last_s = status, now_s
        left_s = (status.tokens - done) / rate if rate else None
        pace = Pace(status, done, status.tokens, rate, left_s, engines, writers, "nothing")
        return replace(pace, bottleneck=bottleneck(pace))

    def _rate(self) -> float | None:
        (first_s, first), (last_s, last) = self.looks[0], self.looks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    def _members(self, kind: str, status: Status, seconds: float) -> tuple[MemberPace, ...]:
        before = self._before(kind)
        paces = []
        for member in getattr(status, kind):
            earlier = before.get(member.name)
            if earlier is None or seconds <= 0:
                paces.append(MemberPace(member))
                continue
            now, then = member.figures, earlier.figures
            written = sealed = wrote = ring = 0.0
            if now is not None and then is not None:
                written = (now.written_bytes - then.written_bytes) / seconds
                sealed = (now.seal_s - then.seal_s) / seconds
                wrote = (now.write_s - then.write_s) / seconds
                ring = (now.ring_wait_s - then.ring_wait_s) / seconds
            busy = (member.busy_s - earlier.busy_s) / seconds if kind == "engines" else wrote + sealed
            waiting = (member.waiting_s - earlier.waiting_s) / seconds
            paces.append(
                MemberPace(member, min(1.0, busy), min(1.0, waiting), ring, written, min(1.0, sealed))
            )
        return tuple(paces)

    def _before(self, kind: str) -> Mapping[str, MemberStatus]:
        return {m.name: m for m in getattr(self._last, kind)} if self._last is not None else {}


def spoken_rate(pace: Pace) -> float | None:
    """Tokens a second for people; of the pass of the answers, those that were really said."""
    if pace.tokens_per_s is None or pace.status.task == "capture":
        return pace.tokens_per_s
    # There, a row counts with the most that it may come to.
    return pace.tokens_per_s * pace.status.answer_tokens / max(1, pace.status.captured_tokens)


def bottleneck(pace: Pace) -> Where:
    """What bounds the speed between the last two looks.

    Engines that always have work are the bound one wants. Where they wait although rows are pending, permits are
    used up: by writers that can't keep up, and then by what they spend their time with, or else by the way there.
    """
    busy = [e.busy for e in pace.engines if e.busy is not None]
    if pace.status.paused or not busy or not pace.status.counts.pending:
        return "nothing"
    if max(e.ring for e in pace.engines) > _RING:
        return "ring"
    if sum(busy) / len(busy) > _FULL:
        return "engine"
    writers = [w for w in pace.writers if w.busy is not None]
    hardest = max(writers, key=lambda w: w.busy or 0.0, default=None)
    if hardest is not None and (hardest.busy or 0.0) > _FULL:
        return "storage" if hardest.seal > (hardest.busy or 0.0) / 2 else "writer"
    return "object store" if pace.permits_share >= _FULL else "engine"
