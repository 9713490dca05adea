"""The residual stream as a norm sees it: what boundaries are read from where no collector gives them.

A norm at the head of a layer, or at the end of the model, gets either the whole residual stream, or the last
layer's part of it together with the rest. In the second case the sum that it computes on the way is the residual
stream, and the second value that it returns. That lies in storage that later layers reuse, so it is copied at
once. Every all-reduce that the sum was owed has happened by then.
"""

from __future__ import annotations

from typing import Any

import torch


class ResidualTap:
    """Keeps the residual stream of one place for the forward that runs between `arm` and `take`."""

    def __init__(self) -> None:
        self._armed = False
        self._kept: torch.Tensor | None = None

    @property
    def armed(self) -> bool:
        """Whether a forward that is captured is running."""
        return self._armed

    def arm(self) -> None:
        """From now on the next state is kept."""
        self._armed, self._kept = True, None

    def take(self) -> torch.Tensor | None:
        """The state [rows, H] of the forward that just ran; None if the place wasn't passed."""
        kept, self._armed, self._kept = self._kept, False, None
        return kept

    def keep(self, residual: torch.Tensor) -> None:
        """Copies borrowed storage that holds the residual stream."""
        if self._armed and self._kept is None:
            self._kept = residual.clone()

    def after_norm(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward hook for the norm module."""
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], torch.Tensor):
            self.keep(output[1])
        elif len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            self.keep(inputs[0])
