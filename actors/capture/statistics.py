"""What the norms and values of each captured state look like over a run, and which tokens fall out of the band.

Every 32nd row of what arrives is looked at, and the first of each chunk: that costs a few hundredths of a CPU second
a gigabyte, where all rows would cost as much as joining them. No I/O.

Shape legend: K states, n rows, H hidden size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.layout import Layout

Array = np.ndarray[Any, Any]

EVERY_ROWS = 32
BINS_PER_OCTAVE = 16
LOWEST_EXPONENT, HIGHEST_EXPONENT = -40, 60
"""Norms between 2**-40 and 2**60 have bins of their own; others count in the first or the last one."""
QUANTILES = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
BAND = (0.001, 0.999)
BAND_MARGIN = 4.0
"""A norm is outside the band when it is so many times beyond the band's quantiles. Massive activations are a hundred
times their neighbours and yet regular: they are in the quantiles."""
BAND_AFTER = 2_000
"""Norms of a state that have to be seen before any is called unusual."""


ALARMS_LOGGED = 100
"""Further ones are only counted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outlier:
    """A token whose norm is outside its state's band.

    Attributes:
        state: index into the layout's states.
        row: of the chunk that was looked at.
        norm: of that token.
        low: lower end of the band.
        high: upper end of the band.
        seen: norms that the band was made of.
    """

    state: int
    row: int
    norm: float
    low: float
    high: float
    seen: int


def to_float(bits: Array, dtype: str) -> Array:
    """float32 values of stored bits of any shape."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(dtype).astype(np.float32, copy=False)


class StateStatistics:
    """Running sums of every state of one engine. `look` may be called by several threads.

    Args:
        layout: states, hidden size and element type.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        bins = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * BINS_PER_OCTAVE
        self._norms = np.zeros((layout.num_states, bins), dtype=np.int64)
        self._sums = np.zeros((layout.num_states, 2), dtype=np.float64)
        self._errors = np.zeros((layout.num_states, bins), dtype=np.int64)
        self._bands: list[tuple[int, float, float] | None] = [None] * layout.num_states
        self._lock = threading.Lock()

    def look(self, states: Sequence[Array]) -> list[Outlier]:
        """Counts some rows of a chunk.

        Args:
            states: K arrays of bits [n, H], any stride between rows.

        Returns:
            Tokens outside the band of what was seen before.
        """
        found: list[Outlier] = []
        for k, rows in enumerate(states):
            values = to_float(rows[::EVERY_ROWS], self._layout.dtype)
            squares = np.einsum("ij,ij->i", values, values, dtype=np.float32)
            norms = np.sqrt(squares)
            found += self._outliers(k, norms)
            places = self._bins(norms)
            with self._lock:
                np.add.at(self._norms[k], places, 1)
                self._sums[k] += float(values.sum()), float(squares.sum(dtype=np.float64))
        return found

    def measured(self, k: int, errors: Array) -> None:
        """Counts how far some tokens' stored states are from what was computed.

        Args:
            k: position of the state.
            errors: |stored - computed| / |computed|, [n].
        """
        places = self._bins(errors)
        with self._lock:
            np.add.at(self._errors[k], places, 1)

    def summary(self) -> dict[str, Mapping[str, Any]]:
        """For each state by name: tokens looked at, mean and standard deviation of values, quantiles of norms.

        ``norm_counts`` is the distribution that the quantiles are of: norm of a bin's middle, and tokens in it. Where
        states are stored as 8-bit floats there are also quantiles of `measured`.
        """
        with self._lock:
            counts, sums, errors = self._norms.copy(), self._sums.copy(), self._errors.copy()
        found: dict[str, Mapping[str, Any]] = {}
        for k, state in enumerate(self._layout.states):
            tokens = int(counts[k].sum())
            if tokens:
                mean, square = sums[k] / (tokens * self._layout.hidden_size)
                found[str(state)] = {
                    "tokens": tokens,
                    "mean": float(mean),
                    "std": float(max(square - mean * mean, 0.0) ** 0.5),
                    "norm_quantiles": {str(q): _quantile(counts[k], q) for q in QUANTILES},
                    "norm_counts": [[_middle(int(i)), int(counts[k, i])] for i in np.flatnonzero(counts[k])],
                }
                if errors[k].any():
                    quantiles = {str(q): _quantile(errors[k], q) for q in QUANTILES}
                    found[str(state)] = {**found[str(state)], "float8_error_quantiles": quantiles}
        return found

    def _bins(self, values: Array) -> Array:
        """The bin of each of some positive numbers."""
        exponents = np.log2(np.maximum(values, np.float32(1e-30)))
        places: Array = ((exponents - LOWEST_EXPONENT) * BINS_PER_OCTAVE).astype(np.int64)
        return places.clip(0, self._norms.shape[1] - 1)

    def _outliers(self, k: int, norms: Array) -> list[Outlier]:
        band = self._band(k)
        if band is None:
            return []
        seen, low, high = band
        rows = np.flatnonzero((norms < low) | (norms > high))
        return [Outlier(k, int(i) * EVERY_ROWS, float(norms[i]), low, high, seen) for i in rows]

    def _band(self, k: int) -> tuple[int, float, float] | None:
        """Norms seen, lower and upper end; made again when twice as many were seen."""
        with self._lock:
            seen = int(self._norms[k].sum())
            band = self._bands[k]
            if seen >= BAND_AFTER and (band is None or seen >= 2 * band[0]):
                low, high = (_quantile(self._norms[k], q) for q in BAND)
                band = self._bands[k] = (seen, low / BAND_MARGIN, high * BAND_MARGIN)
            return band


class Alarms:
    """Tokens with unusual norms: how many, and the last of them in words. Several threads may raise them.

    Args:
        layout: names the states.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self.count = 0
        self.last_row: int | None = None
        self.last = ""

    def raise_for(self, row: int, start: int, outliers: Sequence[Outlier]) -> None:
        """Keeps what was found in a chunk.

        Args:
            row: prepared row of the sample.
            start: token that the chunk begins with.
            outliers: in it.
        """
        for o in outliers:
            said = (
                f"state {self._layout.states[o.state]}, token {start + o.row}: norm {o.norm:.4g} is outside "
                f"{o.low:.4g} to {o.high:.4g}, the band of {o.seen} norms before it"
            )
            with self._lock:
                self.count += 1
                self.last_row, self.last = row, said
                logged = self.count <= ALARMS_LOGGED
            if logged:
                logger.warning("row %d: %s", row, said)


def _quantile(counts: Array, q: float) -> float:
    """Norm below which a share ``q`` of those counted lies: the middle of its bin."""
    ordered = counts.cumsum()
    place = int(np.searchsorted(ordered, q * ordered[-1]))
    return _middle(place)


def _middle(place: int) -> float:
    return float(2.0 ** ((place + 0.5) / BINS_PER_OCTAVE + LOWEST_EXPONENT))
