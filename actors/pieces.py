"""What a piece of a segment holds: states [K, rows, H] and, where they are 8-bit floats, their scales. Pure.

The scales, float32 [K, rows], follow the codes of their piece as bytes, so a segment stays one flat array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.messages import Piece
from storage.layout import Layout

Array = np.ndarray[Any, Any]
Scales = npt.NDArray[np.float32]


def row_width(layout: Layout) -> int:
    """Elements of the storage dtype that one row of a piece takes, all K states together."""
    return layout.bytes_per_token // layout.itemsize


def split_piece(flat: Array, layout: Layout) -> tuple[Array, Scales | None]:
    """The parts of a piece as views.

    Args:
        flat: [rows x `row_width`] of the storage dtype.
        layout: the dump's geometry.

    Returns:
        [K, rows, H], and float32 [K, rows] where states are quantised.
    """
    k, h = layout.num_states, layout.hidden_size
    rows = flat.size // row_width(layout)
    states = flat[: k * rows * h].reshape(k, rows, h)
    return states, flat[states.size :].view(np.float32).reshape(k, rows) if layout.quantised else None


def split_segment(
    flat: Array, pieces: Sequence[Piece], layout: Layout
) -> list[tuple[Piece, Array, Scales | None]]:
    """Every piece of a segment with its parts, views of ``flat``."""
    found, start = [], 0
    for piece in pieces:
        stop = start + piece.rows * row_width(layout)
        found.append((piece, *split_piece(flat[start:stop], layout)))
        start = stop
    return found
