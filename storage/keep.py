"""Of which tokens the states are stored: ``capture.keep`` of a run. Pure, no I/O.

Shape legend: T a sample's tokens, R those whose states are stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

PATTERN = r"all|supervised|last:[1-9][0-9]*"
"""What `Keep.parse` takes."""


@dataclass(frozen=True)
class Keep:
    """Which tokens of a sample.

    Attributes:
        policy: ``all``; ``supervised``, those whose loss mask is 1; ``last``, the last so many.
        last: how many the policy ``last`` takes; a shorter sample is taken whole.
    """

    policy: Literal["all", "supervised", "last"] = "all"
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Inverse of `str`.

        Raises:
            ValueError: it is neither ``all`` nor ``supervised`` nor ``last:N``.
        """
        if not re.fullmatch(PATTERN, text):
            raise ValueError(f"{text!r} isn't all, supervised or last:N with N from 1, such as last:512")
        name, _, number = text.partition(":")
        return cls("last", int(number)) if number else cls("supervised" if name == "supervised" else "all")

    def __str__(self) -> str:
        return f"last:{self.last}" if self.policy == "last" else self.policy

    @property
    def everything(self) -> bool:
        """Whether the states of every token are stored."""
        return self.policy == "all"

    def positions(self, loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """The tokens of one sample whose states are stored.

        Args:
            loss_mask: uint8 [T], 1 where supervised.

        Returns:
            int32 [R], ascending; perhaps none.
        """
        if self.policy == "supervised":
            return np.flatnonzero(loss_mask).astype(np.int32)
        first = max(loss_mask.size - self.last, 0) if self.policy == "last" else 0
        return np.arange(first, loss_mask.size, dtype=np.int32)

    def counts(
        self, tokens: npt.NDArray[np.int32], supervised: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """R of many samples.

        Args:
            tokens: int32 [n], T of each.
            supervised: int32 [n], of these the supervised ones.
        """
        if self.policy == "supervised":
            return supervised
        return np.minimum(tokens, np.int32(self.last)) if self.policy == "last" else tokens


ALL = Keep()
"""The states of every token."""
