"""Boundary N: the updated residual that the final norm returns, or its input where there is no residual.

The final norm gets a pair (hidden, residual) whose first element alone is the last layer's delta. The sum
that the norm computes on the way is boundary N. It lies in storage that may be reused, so it is copied at
once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


class FinalNormTap:
    """Keeps boundary N of the forward that runs between `arm` and `take`.

    Two places are watched, since a model uses either: the norm module itself, and, where this SGLang has it,
    its ``final_norm`` of residual streams, which fuses add and norm in kernels that never call the module.
    """

    def __init__(self, inner: Any) -> None:
        self._norm = getattr(inner, "norm", None)
        self._armed = False
        self._kept: torch.Tensor | None = None
        if isinstance(self._norm, torch.nn.Module):
            self._norm.register_forward_hook(self._after_norm)
        _watch_residual_streams(self)

    @property
    def norm(self) -> Any:
        """The model's final norm, or None."""
        return self._norm

    def arm(self) -> None:
        """From now on the next final state is kept."""
        self._armed, self._kept = True, None

    def take(self) -> torch.Tensor | None:
        """Boundary N [rows, H] of the forward that just ran; None if the norm didn't give it."""
        kept, self._armed, self._kept = self._kept, False, None
        return kept

    def keep(self, residual: torch.Tensor) -> None:
        """Copies borrowed storage that holds boundary N."""
        if self._armed and self._kept is None:
            self._kept = residual.clone()

    def watches(self, norm: Any) -> bool:
        """Whether ``norm`` is the final norm of a forward that is captured."""
        return self._armed and norm is self._norm

    def _after_norm(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not self._armed:
            return
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], torch.Tensor):
            self.keep(output[1])
        elif len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            self.keep(inputs[0])


def _watch_residual_streams(tap: FinalNormTap) -> None:
    try:
        from sglang.srt.layers.layer_boundary.residual import batch
    except ImportError:  # before 0.5.23 the norm module is all there is
        return
    original = batch.final_norm

    @functools.wraps(original)
    def final_norm(
        hidden_states: Any, forward_batch: Any, layernorm: Any, capture: Any = None, **kwargs: Any
    ) -> Any:
        if not tap.watches(layernorm):
            return original(hidden_states, forward_batch, layernorm, capture, **kwargs)

        def both(residual: torch.Tensor) -> None:
            tap.keep(residual)
            if capture is not None:
                capture(residual)

        return original(hidden_states, forward_batch, layernorm, both, **kwargs)

    batch.final_norm = final_norm
