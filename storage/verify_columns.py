"""Whether the token columns of a sample are what was sent to the model. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.layout import POSITIONS, TOKEN_COLUMNS, Layout
from storage.manifest import ManifestSample, tokens_digest

Columns = Mapping[str, npt.NDArray[Any]]


def wrong_columns(layout: Layout, sample: ManifestSample, stored: Columns, whole: Columns) -> str | None:
    """What is wrong with the token columns of a sample, if anything is.

    Args:
        layout: the dump's geometry.
        sample: as its manifest lists it.
        stored: `Layout.token_columns` of its stored tokens, [R] each.
        whole: `TOKEN_COLUMNS` of all its tokens, [T] each; ``stored`` itself where all are stored.
    """
    if layout.keep.everything:
        good = tokens_digest(stored["token_ids"], stored["loss_mask"]) == sample.tokens_xxh3
        return None if good else "token_ids or loss_mask: xxh3 isn't what the manifest says"
    positions = stored[POSITIONS]
    if tokens_digest(whole["token_ids"], whole["loss_mask"], positions) != sample.tokens_xxh3:
        return "its prompt's token_ids or loss_mask, or positions: xxh3 isn't what the manifest says"
    if not np.array_equal(positions, layout.keep.positions(whole["loss_mask"])):
        return f"positions aren't those that keep: {layout.keep} takes"
    for name in TOKEN_COLUMNS:
        if not np.array_equal(stored[name], whole[name][positions]):
            return f"{name} isn't that of its prompt at its positions"
    return None
