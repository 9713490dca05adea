"""Norms of a dump's states, as the engines counted them or from some samples; outlier channels from some samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from storage.layout import State
from storage.reader import Dump
from storage.sample import Sample

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
class Norms:
    """Euclidean norms of tokens' vectors at one state.

    Attributes:
        values: float64 [n], ascending; of several tokens each where they are counted in bins.
        tokens: int64 [n], how many tokens have each.
        counted: while the dump was collected, by its engines; else those of the samples that were read.
    """

    values: NDArray[np.float64]
    tokens: NDArray[np.int64]
    counted: bool

    def percentile(self, q: float) -> float:
        """Norm that a share of q per cent of the tokens doesn't exceed."""
        ends = self.tokens.cumsum()
        return float(self.values[int(np.searchsorted(ends, q / 100 * ends[-1]))])


@dataclass(frozen=True)
class StateStatistics:
    """One state.

    Attributes:
        state: its name.
        norms: of its tokens.
        outliers: channels with a ratio over `OUTLIER`, the largest first.
        channels: channels in all.
    """

    state: State
    norms: Norms
    outliers: tuple[Channel, ...]
    channels: int


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

    @property
    def counted_tokens(self) -> int:
        """Tokens of the state that the engines looked at most; 0 where the norms are all from samples."""
        return max((int(s.norms.tokens.sum()) for s in self.states if s.norms.counted), default=0)

    @property
    def sampled(self) -> list[str]:
        """States whose norms are from samples."""
        return [str(s.state) for s in self.states if not s.norms.counted]


def read_statistics(dump: Dump, counted: Mapping[str, Mapping[float, int]]) -> Statistics | None:
    """Reads samples of all lengths; None where the dump has none.

    Args:
        dump: it may be unfinished.
        counted: state by name -> norm -> tokens, for states whose norms were counted while they were collected.

    Raises:
        CorruptDump: one of the samples isn't what was committed.
    """
    layout = dump.layout
    norms: list[torch.Tensor] = []
    magnitude = torch.zeros(layout.num_states, layout.hidden_size, dtype=torch.float64)
    samples = tokens = 0
    for sample in chosen_samples(dump):
        stack = sample.stack()
        norms.append(stack.float().norm(dim=-1))
        magnitude += stack.abs().sum(dim=0, dtype=torch.float64)
        samples, tokens = samples + 1, tokens + sample.kept
    if not samples:
        return None
    all_norms = torch.cat(norms).numpy()
    means = (magnitude / tokens).numpy()
    states = tuple(
        StateStatistics(
            state,
            _norms(counted.get(str(state), {}), all_norms[:, k]),
            _outliers(means[k]),
            layout.hidden_size,
        )
        for k, state in enumerate(layout.states)
    )
    return Statistics(samples, tokens, states)


def _norms(counted: Mapping[float, int], sampled: NDArray[np.float32]) -> Norms:
    values, tokens = (
        (np.array(list(counted)), np.array(list(counted.values())))
        if counted
        else (sampled.astype(np.float64), np.ones(len(sampled), np.int64))
    )
    order = np.argsort(values)
    return Norms(values[order], tokens[order], bool(counted))


def chosen_samples(dump: Dump) -> Iterator[Sample]:
    """Samples spread evenly over the lengths, within `MOST_SAMPLES` and `MOST_BYTES`."""
    order = np.argsort(dump.places.tokens, kind="stable")
    wanted = order[np.unique(np.linspace(0, len(order) - 1, min(MOST_SAMPLES, len(order))).astype(int))]
    room = MOST_BYTES
    for number in np.random.default_rng(0).permutation(wanted):
        sample = dump[int(number)]
        room -= sample.kept * dump.layout.bytes_per_token
        if room < 0 and room + sample.kept * dump.layout.bytes_per_token < MOST_BYTES:
            return
        yield sample


def _outliers(means: NDArray[np.float64]) -> tuple[Channel, ...]:
    ratios = means / max(float(np.median(means)), 1e-30)
    order = np.argsort(ratios)[::-1]
    return tuple(Channel(int(i), float(ratios[i])) for i in order if ratios[i] > OUTLIER)
