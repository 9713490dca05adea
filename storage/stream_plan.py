"""In which order a stream yields what, and who gets it: decided from the table alone, before anything is read.

A *unit* is what a stream yields at a time: one sample, or several that are packed together. The order of units
is the same on every rank and in every worker, so that they can share it out without talking to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from storage.errors import ConfigError

Unit = tuple[int, ...]
OPEN_PACKS = 8
"""Packs that are filled at a time. With lognormal lengths (mean 1,730, sigma 0.8) and a budget of 8,192 tokens, 8
of them fill 98 % of the budget, one fills 83 %."""


def sequential_order(shards: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sample numbers in the order of their bytes.

    Args:
        shards: shard of each sample, [n].
        offsets: byte offset of each sample in its shard, [n].
    """
    order: npt.NDArray[np.int64] = np.lexsort((offsets, shards)).astype(np.int64)
    return order


def shuffled_order(
    shards: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], seed: int, epoch: int, window: int
) -> npt.NDArray[np.int64]:
    """Sample numbers with the shards in random order, then shuffled inside windows of ``window`` samples.

    Args:
        shards: shard of each sample, [n].
        offsets: byte offset of each sample in its shard, [n].
        seed: the same seed and epoch give the same order.
        epoch: other epochs have other orders.
        window: samples that are shuffled among each other; a window reads from as few shards as hold it.
    """
    rng = np.random.default_rng([seed, epoch])
    _, dense = np.unique(shards, return_inverse=True)
    place = rng.permutation(int(dense.max(initial=-1)) + 1)
    order: npt.NDArray[np.int64] = np.lexsort((offsets, place[dense])).astype(np.int64)
    for start in range(0, order.size, window):
        rng.shuffle(order[start : start + window])
    return order


def pack(order: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], budget: int) -> list[Unit]:
    """Packs samples, in about their order, into units of at most ``budget`` tokens: first fit.

    Args:
        order: sample numbers.
        tokens: T of each sample, indexed by its number.
        budget: tokens of a unit at most.

    Raises:
        ConfigError: a sample is longer than the budget; it could only be cut or left out.
    """
    longest = int(tokens[order].max(initial=0))
    if longest > budget:
        raise ConfigError(
            f"pack_tokens is {budget}, but the longest sample has {longest} tokens; nothing is cut or left out "
            f"here: set it to {longest} or more"
        )
    units: list[Unit] = []
    filling: list[tuple[list[int], int]] = []
    for number in order.tolist():
        length = int(tokens[number])
        place = next((i for i, (_, used) in enumerate(filling) if used + length <= budget), None)
        if place is not None:
            members, used = filling[place]
            members.append(number)
            filling[place] = (members, used + length)
            continue
        if len(filling) == OPEN_PACKS:
            fullest = max(range(OPEN_PACKS), key=lambda i: filling[i][1])
            units.append(tuple(filling.pop(fullest)[0]))
        filling.append(([number], length))
    return units + [tuple(members) for members, _ in filling]


def even(units: Sequence[Unit], world_size: int) -> Sequence[Unit]:
    """The units without the last few that would give some ranks one more than others."""
    return units[: len(units) // world_size * world_size]


def share(
    units: Sequence[Unit], start: int, rank: int, world_size: int, worker: int = 0, workers: int = 1
) -> Sequence[Unit]:
    """What one worker of one rank yields.

    Units are dealt to the ranks like cards, and each rank's units to its workers; so ranks, and workers, differ
    by at most one unit, and a DataLoader, which asks its workers in turn, gets its rank's units in order.

    Args:
        units: of the epoch, in order.
        start: units that all ranks together have had already.
        rank: of this process.
        world_size: number of ranks.
        worker: of this rank.
        workers: number of workers of this rank.
    """
    return units[start:][rank::world_size][worker::workers]
