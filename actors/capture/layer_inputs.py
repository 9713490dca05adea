"""Boundaries read where their layer reads them, for models whose own collector is missing or wrong.

Two places, found by looking at the layer: the boundary object of newer releases, whose `prepare` hands out the
residual stream on request, after completing what it is owed; and otherwise the layer's input norm. Where neither
is passed, because a kernel fuses it away, nothing is kept, and the proof at start says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from actors.capture import adapter
from actors.capture.residual import ResidualTap
from storage.errors import CaptureRefused

INPUT_NORMS = ("input_layernorm", "attention_norm", "attention_layernorm", "ln_1", "norm1", "operator_norm")


def input_norm(layer: Any) -> Any:
    """The norm that a layer's attention reads through, or None."""
    return next((m for m in (getattr(layer, name, None) for name in INPUT_NORMS) if m is not None), None)


class LayerInputs:
    """Reads boundaries at the entry of their layers.

    Handing out the residual stream may complete a collective, so every rank asks for it, and the ranks that
    don't own the rows drop it.

    Args:
        layers: decoder layers, 0-based.
        boundaries: below N.

    Raises:
        CaptureRefused: a layer has neither place.
    """

    def __init__(self, layers: Any, boundaries: Sequence[int]) -> None:
        self.boundaries = tuple(boundaries)
        self.places: list[str] = []
        self._taps = {b: ResidualTap() for b in boundaries}
        self._off = False
        for b in boundaries:
            self.places.append(self._watch(layers[b], self._taps[b]))

    def arm(self) -> None:
        """From now on the next forward's states are kept."""
        for tap in self._taps.values():
            tap.arm()

    def take(self) -> dict[int, torch.Tensor | None]:
        """Boundary -> [rows, H] of the forward that just ran; None where its place wasn't passed."""
        return {b: tap.take() for b, tap in self._taps.items()}

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Nothing is asked of the layers inside the context."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def _watch(self, layer: Any, tap: ResidualTap) -> str:
        entry = adapter.layer_entry(layer)
        if entry is not None:
            entry.prepare = self._asking(entry.prepare, tap)
            return "attn_boundary.prepare"
        norm = input_norm(layer)
        if not isinstance(norm, torch.nn.Module):
            raise CaptureRefused(f"{type(layer).__name__} has no input norm where its input could be read")
        norm.register_forward_hook(tap.after_norm)
        return next(name for name in INPUT_NORMS if getattr(layer, name, None) is norm)

    def _asking(self, prepare: Any, tap: ResidualTap) -> Any:
        @functools.wraps(prepare)
        def prepare_and_keep(*args: Any, capture: Any = None, **kwargs: Any) -> Any:
            def both(residual: torch.Tensor, *, owned: bool = False) -> None:
                tap.keep(residual)
                if capture is not None:
                    capture(residual, owned=owned)

            return prepare(*args, capture=capture if self._off else both, **kwargs)

        return prepare_and_keep
