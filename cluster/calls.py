"""Remote calls that are under way, and who takes each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

Handler = Callable[[Any], None]
"""Takes the call's reference once it is there; ``ray.get`` of it returns or raises at once."""


class Calls:
    """What one single-threaded loop waits for."""

    def __init__(self) -> None:
        self._waiting: dict[ray.ObjectRef, Handler] = {}

    def expect(self, ref: ray.ObjectRef, handler: Handler) -> None:
        """Has ``handler`` called with ``ref`` in the turn in which its answer is there."""
        self._waiting[ref] = handler

    def forget(self, ref: ray.ObjectRef) -> None:
        """Waits for it no more."""
        self._waiting.pop(ref, None)

    def turn(self, timeout_s: float) -> None:
        """Waits until a call is answered, or so long, and has the answer handled."""
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=timeout_s)
        for ref in ready:
            self._waiting.pop(ref)(ref)
