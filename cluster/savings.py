"""What a dump of the same rows would take if fewer tokens' states were stored. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from storage.keep import Keep
from storage.layout import Layout

SHOWN_LAST = 512
"""N of the ``last:N`` that is shown when the run itself asks for none."""


@dataclass(frozen=True)
class Saving:
    """One choice of ``capture.keep``.

    Attributes:
        keep: the choice.
        kept: tokens whose states are stored.
        states_bytes: of all of them.
        bytes_per_token: the same for each token that the model reads.
        chosen: the run file says so.
    """

    keep: str
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
    return tuple(_saving(layout, keep, tokens, supervised) for keep in (Keep(), Keep("supervised"), last))


def _saving(layout: Layout, keep: Keep, tokens: NDArray[np.int32], supervised: NDArray[np.int32]) -> Saving:
    kept = int(keep.counts(tokens, supervised).sum(dtype=np.int64))
    states_bytes = kept * replace(layout, keep=keep).bytes_per_token
    mean = states_bytes / max(int(tokens.sum(dtype=np.int64)), 1)
    return Saving(str(keep), kept, states_bytes, round(mean, 1), keep == layout.keep)
