"""Boundary N: the updated residual that the final norm returns, or its input where there is no residual."""

from __future__ import annotations

import functools
from typing import Any

import torch

from actors.capture import adapter
from actors.capture.residual import ResidualTap


class FinalNormTap(ResidualTap):
    """Keeps boundary N.

    Two places are watched, since a model uses either: the norm module itself, and, where this SGLang has it,
    its ``final_norm`` of residual streams, which fuses add and norm in kernels that never call the module.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._norm = getattr(inner, "norm", None)
        if isinstance(self._norm, torch.nn.Module):
            self._norm.register_forward_hook(self.after_norm)
        _watch_residual_streams(self)

    @property
    def norm(self) -> Any:
        """The model's final norm, or None."""
        return self._norm

    def watches(self, norm: Any) -> bool:
        """Whether ``norm`` is the final norm of a forward that is captured."""
        return self.armed and norm is self._norm


def _watch_residual_streams(tap: FinalNormTap) -> None:
    batch = adapter.residual_streams()
    if batch is None:  # the norm module is all there is
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
