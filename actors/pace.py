"""How fast an engine answers. Pure."""

from __future__ import annotations

PACE_ANSWERS = 3
"""Answers after which an engine's speed is believed: the first ones hold its warming up."""
PACE_HALF_LIFE_S = 10.0
"""Seconds of work after which what was seen of an engine's speed counts half."""


class Pace:
    """An engine's speed, by its answers while it has work; what is long ago counts for less.

    From one answer to the next an engine that has several batches has done one batch's work, however it
    interleaves them.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._answers = 0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None until enough was seen."""
        if self._answers < PACE_ANSWERS or self._seconds <= 0 or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def begin(self, now_s: float) -> None:
        """It had nothing to do and gets something."""
        self._since_s = now_s

    def answer(self, tokens: int, now_s: float) -> None:
        """It has done a batch of so many tokens."""
        took_s = now_s - self._since_s
        kept = 0.5 ** (took_s / PACE_HALF_LIFE_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + took_s
        self._answers += 1
        self._since_s = now_s
