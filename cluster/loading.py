"""What engines that load are doing, so that a person can follow half an hour of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import ray
from ray.exceptions import RayError

from cluster.calls import Calls
from cluster.fleet import Member
from cluster.report import duration, say


class Loading:
    """Asks engines for their phase, and says when it changes.

    Args:
        calls: of the driver's loop.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._phases: dict[str, str] = {}
        self._asked: set[str] = set()

    def look(self, engines: Iterable[Member]) -> None:
        """Asks those that haven't started, one question at a time; one that is busy answers later."""
        for engine in engines:
            if engine.info is None and engine.name not in self._asked:
                self._asked.add(engine.name)
                self._calls.expect(engine.handle.phase.remote(), partial(self._on_phase, engine))

    def _on_phase(self, engine: Member, ref: ray.ObjectRef) -> None:
        try:
            phase: str = ray.get(ref)
        except RayError:
            return  # its start says what happened; it isn't asked again
        self._asked.discard(engine.name)
        if engine.info is None and phase != self._phases.get(engine.name):
            self._phases[engine.name] = phase
            say(f"{engine.name}: {phase} (after {duration(time.monotonic() - engine.created)})")
