"""How engines and writers spend their time: seconds and bytes since their start, read now and then. No Ray.

Nothing here is done for each token or sample: an engine's state is looked at when the coordinator wakes, a
writer's clock runs for a whole segment.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Figures:
    """What an engine or a writer says of its own work since it started.

    Attributes:
        ring_wait_s: an engine's forwards waited so long for room in the ring.
        states: of an engine: state -> tokens looked at, mean and standard deviation of values, quantiles of norms, and
            of the error of 8-bit floats where those are stored.
        alarms: tokens with unusual norms that an engine saw.
        last_alarm: the last of them, with sample and state.
        written_bytes: of states that a writer was given.
        write_s: a writer spent putting segments into open shards.
        seal_s: a writer spent ending batches and committing shards.
    """

    ring_wait_s: float = 0.0
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alarms: int = 0
    last_alarm: str = ""
    written_bytes: int = 0
    write_s: float = 0.0
    seal_s: float = 0.0

    def more(self, name: str, by: float) -> Figures:
        """With one figure larger."""
        return replace(self, **{name: getattr(self, name) + by})


def timed(name: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Adds the seconds that a method takes to the figure ``name`` of its object's ``figures_now``."""

    def wrap(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def timed_method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            began_s = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                self.figures_now = self.figures_now.more(name, time.perf_counter() - began_s)

        return timed_method

    return wrap


class EngineTimes:
    """How long each engine had work, and how long it had none although rows were waiting.

    The state that was seen at one look holds until the next; whoever changes it looks again.
    """

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._state: dict[str, str] = {}
        self._seconds: dict[tuple[str, str], float] = {}

    def look(self, now_s: float, busy: Iterable[str], idle: Iterable[str], rows_wait: bool) -> None:
        """Says which engines have work and which don't.

        Args:
            now_s: any monotonic clock.
            busy: names of engines with batches.
            idle: names of engines without.
            rows_wait: there are rows that could be given to them.
        """
        if self._looked_s is not None:
            for name, state in self._state.items():
                key = (name, state)
                self._seconds[key] = self._seconds.get(key, 0.0) + now_s - self._looked_s
        self._looked_s = now_s
        self._state = dict.fromkeys(busy, "busy") | dict.fromkeys(idle, "waiting" if rows_wait else "idle")

    def busy_s(self, name: str) -> float:
        """Seconds with work."""
        return self._seconds.get((name, "busy"), 0.0)

    def waiting_s(self, name: str) -> float:
        """Seconds without work while rows were waiting: something after the engine holds them back."""
        return self._seconds.get((name, "waiting"), 0.0)
