"""The first rows of a sample, captured twice: in it, and as a request of their own in another forward. No I/O.

What a batch mixes up, rows of another sample or of another position, differs between the two; what a right engine
rounds differently doesn't differ by much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.capture.statistics import to_float
from storage.layout import Layout

Array = np.ndarray[Any, Any]

LOOK_EVERY = 256
"""One of so many samples is captured twice."""
LOOK_TOKENS = 256
"""So many of its first tokens: since attention is causal, their states don't depend on the rest."""
LARGEST_MEDIAN = 0.05
"""Two captures may differ by so much, |a - b| / |b| as a median over tokens. Rounding in bfloat16 gives 0.02 at most,
rows of another sample or layer 0.2 and more."""


class SecondLook:
    """Two captures of the same tokens.

    Args:
        layout: geometry of the states.
        tokens: T of the sample.
    """

    def __init__(self, layout: Layout, tokens: int) -> None:
        self._layout = layout
        self.tokens = min(tokens, LOOK_TOKENS)
        shape = (layout.num_states, self.tokens, layout.hidden_size)
        self._captures = [np.zeros(shape, dtype=layout.storage_dtype) for _ in range(2)]
        self.lost_reason = ""

    def first(self, start: int, states: Sequence[Array]) -> None:
        """Keeps what came in the sample's batch: K arrays [n, H] from token ``start`` on."""
        self._keep(0, start, states)

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        """Keeps what came the second time."""
        self._keep(1, start, states)

    def lost(self, rid: str, reason: str) -> None:
        """Hears that the second capture failed."""
        self.lost_reason = reason

    def found(self, kind: str, finding: dict[str, Any]) -> None:
        """Hears of a check in the scheduler process; none is asked for."""

    def difference(self) -> str | None:
        """Which state differs by too much, if one does."""
        if self.lost_reason:
            return f"a second capture was lost: {self.lost_reason}"
        for k, state in enumerate(self._layout.states):
            one, other = (to_float(c[k], self._layout.dtype) for c in self._captures)
            length = np.maximum(np.linalg.norm(other, axis=-1), 1e-30)
            median = float(np.median(np.linalg.norm(one - other, axis=-1) / length))
            if not median < LARGEST_MEDIAN:
                return (
                    f"state {state}, captured in another forward, differs by {median:.3g} per token "
                    f"(at most {LARGEST_MEDIAN} is rounding)"
                )
        return None

    def _keep(self, which: int, start: int, states: Sequence[Array]) -> None:
        if start < self.tokens:
            for k, rows in enumerate(states):
                kept = self._captures[which][k, start : start + len(rows)]
                kept[:] = rows[: len(kept)]
