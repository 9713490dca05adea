"""Where the rows of a piece go in the form in which they are stored: as they were computed, or as 8-bit floats.

Shape legend: K states, H hidden size, n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from actors.capture.statistics import EVERY_ROWS
from actors.pieces import split_piece
from storage.layout import Layout

Array = np.ndarray[Any, Any]
Errors = Callable[[int, Array], None]
"""Takes the position of a state along K, and how far some of its tokens are off, |stored - computed| / |computed|."""


class Room(Protocol):
    """A piece's memory."""

    def tile(self, k: int, at: int, rows: int) -> Array:
        """Where rows ``at`` onwards of a state are put as they were computed, bits [n, H]."""

    def settle(self, k: int, at: int, tile: Array) -> None:
        """Stores what was put into a tile."""


def room_for(flat: Array, layout: Layout, errors: Errors | None) -> Room:
    """The memory of one piece.

    Args:
        flat: [rows x width] of the storage dtype.
        layout: as stored.
        errors: hears how far one row of `EVERY_ROWS` is off.
    """
    return _Quantised(flat, layout, errors) if layout.quantised else _Plain(flat, layout)


class _Plain:
    def __init__(self, flat: Array, layout: Layout) -> None:
        self._states, _ = split_piece(flat, layout)

    def tile(self, k: int, at: int, rows: int) -> Array:
        tile: Array = self._states[k, at : at + rows]
        return tile

    def settle(self, k: int, at: int, tile: Array) -> None:
        """It is in its place."""


class _Quantised:
    def __init__(self, flat: Array, layout: Layout, errors: Errors | None) -> None:
        import torch  # not at the top: a synthetic engine does without

        from storage.float8 import dequantise, quantise

        self._torch, self._quantise, self._dequantise = torch, quantise, dequantise
        self._codes, scales = split_piece(flat, layout)
        assert scales is not None
        self._scales = scales
        self._computed = layout.computed
        self._errors = errors

    def tile(self, k: int, at: int, rows: int) -> Array:
        return np.empty((rows, self._computed.hidden_size), self._computed.storage_dtype)

    def settle(self, k: int, at: int, tile: Array) -> None:
        torch = self._torch
        signed = torch.from_numpy(tile.view(np.dtype(f"i{tile.itemsize}")))
        values = signed.view(getattr(torch, self._computed.dtype))
        codes, scales = self._quantise(values)
        self._codes[k, at : at + len(tile)] = codes.numpy()
        self._scales[k, at : at + len(tile)] = scales.numpy()
        if self._errors is not None:
            some = values[::EVERY_ROWS].float()
            stored = torch.empty_like(some)
            self._dequantise(codes[::EVERY_ROWS], scales[::EVERY_ROWS], stored)
            # A row of zeros, the embedding of a padding token, is stored as it is.
            length = some.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
            self._errors(k, ((stored - some).norm(dim=-1) / length).numpy())
