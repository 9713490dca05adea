"""Norms and outlier channels of a dump's states, from some of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from storage.layout import State
from storage.reader import Dump, Sample

MOST_SAMPLES = 48
MOST_BYTES = 512 << 20
"""Samples, and bytes of their states, that are read: seconds, however large the dump is."""
OUTLIER = 6.0
"""A channel whose mean magnitude is so many times the median channel's stands out."""
TOP_CHANNELS = 5


@dataclass(frozen=True)
class Channel:
    """A channel that stands out.

    Attributes:
        ratio: its mean magnitude over the median channel's.
    """

    index: int
    ratio: float


@dataclass(frozen=True)
class StateStatistics:
    """One state over the tokens that were read.

    Attributes:
        state: its name.
        norms: float32 [tokens], Euclidean norm of each token's vector.
        outliers: channels with a ratio over `OUTLIER`, the largest first.
        channels: channels in all.
    """

    state: State
    norms: NDArray[np.float32]
    outliers: tuple[Channel, ...]
    channels: int

    def percentile(self, q: float) -> float:
        """Of the norms."""
        return float(np.percentile(self.norms, q))


@dataclass(frozen=True)
class Statistics:
    """Of every state.

    Attributes:
        samples: that were read.
        tokens: that they have.
    """

    samples: int
    tokens: int
    states: tuple[StateStatistics, ...]


def read_statistics(dump: Dump) -> Statistics | None:
    """Reads samples of all lengths; None where the dump has none.

    Raises:
        CorruptDump: one of them isn't what was committed.
    """
    layout = dump.layout
    norms: list[torch.Tensor] = []
    magnitude = torch.zeros(layout.num_states, layout.hidden_size, dtype=torch.float64)
    samples = tokens = 0
    for sample in chosen_samples(dump):
        stack = sample.stack()
        norms.append(stack.float().norm(dim=-1))
        magnitude += stack.abs().sum(dim=0, dtype=torch.float64)
        samples, tokens = samples + 1, tokens + sample.tokens
    if not samples:
        return None
    all_norms = torch.cat(norms).numpy()
    means = (magnitude / tokens).numpy()
    states = tuple(
        StateStatistics(state, all_norms[:, k], _outliers(means[k]), layout.hidden_size)
        for k, state in enumerate(layout.states)
    )
    return Statistics(samples, tokens, states)


def chosen_samples(dump: Dump) -> Iterator[Sample]:
    """Samples spread evenly over the lengths, within `MOST_SAMPLES` and `MOST_BYTES`."""
    order = np.argsort(dump.places.tokens, kind="stable")
    wanted = order[np.unique(np.linspace(0, len(order) - 1, min(MOST_SAMPLES, len(order))).astype(int))]
    room = MOST_BYTES
    for number in np.random.default_rng(0).permutation(wanted):
        sample = dump[int(number)]
        room -= sample.tokens * dump.layout.bytes_per_token
        if room < 0 and room + sample.tokens * dump.layout.bytes_per_token < MOST_BYTES:
            return
        yield sample


def _outliers(means: NDArray[np.float64]) -> tuple[Channel, ...]:
    ratios = means / max(float(np.median(means)), 1e-30)
    order = np.argsort(ratios)[::-1]
    return tuple(Channel(int(i), float(ratios[i])) for i in order if ratios[i] > OUTLIER)
