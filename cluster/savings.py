"""What a dump of the same rows would take if fewer tokens' states were stored, or smaller ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from storage.keep import Keep
from storage.layout import ENCODINGS, Layout

SHOWN_LAST = 512
"""N of the ``last:N`` that is shown when the run itself asks for none."""


@dataclass(frozen=True)
class Saving:
    """One choice of ``capture.keep`` and ``capture.dtype``.

    Attributes:
        keep: which tokens.
        dtype: as what.
        kept: tokens whose states are stored.
        states_bytes: of all of them.
        bytes_per_token: the same for each token that the model reads.
        chosen: the run file says so.
    """

    keep: str
    dtype: str
    kept: int
    states_bytes: int
    bytes_per_token: float
    chosen: bool


def forecast_savings(
    layout: Layout, tokens: NDArray[np.int32], supervised: NDArray[np.int32]
) -> tuple[Saving, ...]:
    """Every choice, the run's own among them.

    Args:
        layout: of the run's dump.
        tokens: int32 [n], lengths of the rows to collect.
        supervised: int32 [n], their supervised tokens.
    """
    last = layout.keep if layout.keep.policy == "last" else Keep("last", SHOWN_LAST)
    layouts = (
        replace(layout, keep=keep, encoding=e)
        for keep in (Keep(), Keep("supervised"), last)
        for e in ENCODINGS
    )
    return tuple(_saving(other, other == layout, tokens, supervised) for other in layouts)


def _saving(layout: Layout, chosen: bool, tokens: NDArray[np.int32], supervised: NDArray[np.int32]) -> Saving:
    kept = int(layout.keep.counts(tokens, supervised).sum(dtype=np.int64))
    states_bytes = kept * layout.bytes_per_token
    mean = states_bytes / max(int(tokens.sum(dtype=np.int64)), 1)
    dtype = "float8" if layout.quantised else layout.dtype
    return Saving(str(layout.keep), dtype, kept, states_bytes, round(mean, 1), chosen)
