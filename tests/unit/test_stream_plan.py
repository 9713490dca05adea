"""The order of a stream, and how it is dealt to ranks and workers."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import ConfigError
from storage.stream_plan import even, pack, sequential_order, share, shuffled_order

SHARDS = np.array([4, 0, 4, 2, 0, 2, 4, 2])
OFFSETS = np.array([50, 0, 0, 10, 70, 0, 20, 90])


def test_sequential_is_the_order_of_the_bytes() -> None:
    assert sequential_order(SHARDS, OFFSETS).tolist() == [1, 4, 5, 3, 7, 2, 6, 0]


def test_a_window_of_one_only_shuffles_shards() -> None:
    order = shuffled_order(SHARDS, OFFSETS, seed=1, epoch=0, window=1)
    assert sorted(order.tolist()) == list(range(8))
    runs = [(shard, list(run)) for shard, run in itertools.groupby(order.tolist(), key=lambda n: SHARDS[n])]
    assert len(runs) == 3
    for _, run in runs:
        assert OFFSETS[run].tolist() == sorted(OFFSETS[run].tolist())
    orders = {tuple(shuffled_order(SHARDS, OFFSETS, 1, epoch, 1).tolist()) for epoch in range(40)}
    assert len(orders) == 6  # every order of three shards


def test_samples_stay_in_their_window() -> None:
    shards = np.repeat(np.arange(10), 10)
    offsets = np.tile(np.arange(10), 10)
    order = shuffled_order(shards, offsets, seed=3, epoch=5, window=20)
    assert sorted(order.tolist()) == list(range(100))
    for start in range(0, 100, 20):
        assert len(set(shards[order[start : start + 20]].tolist())) == 2
    assert (np.diff(order) != 1).sum() > 80


def test_the_same_seed_and_epoch_give_the_same_order_and_others_another() -> None:
    shards, offsets = np.zeros(50, np.int64), np.arange(50)
    first = shuffled_order(shards, offsets, 7, 0, 50).tolist()
    assert shuffled_order(shards, offsets, 7, 0, 50).tolist() == first
    assert shuffled_order(shards, offsets, 7, 1, 50).tolist() != first
    assert shuffled_order(shards, offsets, 8, 0, 50).tolist() != first
    assert shuffled_order(np.zeros(0, np.int64), np.zeros(0, np.int64), 7, 0, 50).tolist() == []


@given(lengths=st.lists(st.integers(1, 100), max_size=60), budget=st.integers(100, 300))
def test_packs_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths, np.int64)
    units = pack(np.arange(tokens.size), tokens, budget)
    assert Counter(itertools.chain(*units)) == Counter(range(tokens.size))
    assert all(units)
    assert all(sum(lengths[n] for n in unit) <= budget for unit in units)


def test_packs_are_nearly_full_and_stay_near_the_order() -> None:
    tokens = np.clip(np.random.default_rng(0).lognormal(7, 0.8, 5000), 16, 8192).astype(np.int64)
    units = pack(np.arange(5000), tokens, 8192)
    assert tokens.sum() / (len(units) * 8192) > 0.97
    assert max(max(unit) - min(unit) for unit in units[:-8]) < 500


def test_a_sample_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"pack_tokens is 100, but the longest sample has 101"):
        pack(np.arange(2), np.array([101, 3]), 100)


@given(
    units=st.integers(0, 40),
    world=st.integers(1, 5),
    workers=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    start=st.integers(0, 45),
)
def test_every_unit_goes_to_one_worker_of_one_rank(
    units: int, world: int, workers: list[int], start: int
) -> None:
    """Also when ranks have different numbers of workers."""
    dealt = [(n,) for n in range(units)]
    shares = [
        [share(dealt, start, rank, world, w, workers[rank]) for w in range(workers[rank])]
        for rank in range(world)
    ]
    everything = [n for rank in shares for part in rank for (n,) in part]
    assert sorted(everything) == list(range(start, units))
    sizes = [sum(map(len, rank)) for rank in shares]
    assert max(sizes) - min(sizes) <= 1
    for rank, parts in enumerate(shares):
        in_turn = [n for turn in itertools.zip_longest(*parts) for unit in turn if unit for n in unit]
        assert in_turn == list(range(start + rank, units, world))


def test_even_ends_give_each_rank_the_same_number() -> None:
    units = [(n,) for n in range(11)]
    assert [len(share(even(units, 4), 0, rank, 4)) for rank in range(4)] == [2, 2, 2, 2]
