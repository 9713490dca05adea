"""Joining: whatever the engine's chunks look like, the segments are what the states were."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.capture.join import BatchJoin, first_bad_row
from actors.messages import Batch, SampleRef, plan_segments
from storage.layout import Layout

LAYOUT = Layout((0, 3, "final"), hidden_size=4, dtype="bfloat16", chunk_rows=4, shard_rows=64)
ONE, NAN, INF, MINUS_INF, MINUS_ZERO = 0x3F80, 0x7FC0, 0x7F80, 0xFF80, 0x8000


def truth(lengths, seed=0):
    """Finite, non-zero states [K, T, H] and token ids [T] for each sample."""
    rng = np.random.default_rng(seed)
    states = [rng.integers(1, 0x7F80, (3, n, 4)).astype(np.uint16) for n in lengths]
    return states, [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]


def batch_of(lengths, max_bytes, kept=None):
    kept = kept or lengths
    refs = tuple(SampleRef(i, 1, n, k) for i, (n, k) in enumerate(zip(lengths, kept, strict=True)))
    return Batch("b", refs, plan_segments(kept, LAYOUT, max_bytes))


def put(join, states, ids, sample, lo, hi, packed=True):
    """Hands rows over as the ring does: views into a packed [n, K, H] block, or K separate arrays."""
    rows = states[sample][:, lo:hi]
    block = np.ascontiguousarray(rows.transpose(1, 0, 2)) if packed else rows.copy()
    views = [block[:, k] for k in range(3)] if packed else list(block)
    return join.put(sample, lo, views, ids[sample][lo:hi])


def expected_segment(batch, states, index):
    pieces = [states[p.sample][:, p.start : p.start + p.rows].ravel() for p in batch.segments[index]]
    return np.concatenate(pieces)


def stored_of(tokens):
    """All tokens of a sample, a stretch at its end, or any that are stored of it."""
    some = st.sets(st.integers(0, tokens - 1), min_size=1)
    return st.one_of(st.just(range(tokens)), st.integers(0, tokens - 1).map(lambda n: range(n, tokens)), some)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_chunking_in_any_order_gives_every_segment_once_and_right(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    positions = [np.array(sorted(data.draw(stored_of(n))), np.int32) for n in lengths]
    batch = batch_of(lengths, data.draw(st.integers(96, 600)), [len(p) for p in positions])
    states, ids = truth(lengths)
    join = BatchJoin(batch, LAYOUT, ids, positions)
    stored = [whole[:, p] for whole, p in zip(states, positions, strict=True)]
    chunks = []
    for i, n in enumerate(lengths):
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
        chunks += [(i, lo, hi) for lo, hi in pairwise(cuts)]
    chunks += data.draw(st.lists(st.sampled_from(chunks), max_size=4))  # requests that ran twice
    done = []
    for i, lo, hi in data.draw(st.permutations(chunks)):
        for s in put(join, states, ids, i, lo, hi, packed=data.draw(st.booleans())):
            assert np.array_equal(join.take(s), expected_segment(batch, stored, s))
            done.append(s)
    assert sorted(done) == list(range(len(batch.segments)))
    assert join.complete
    assert [join.missing_rows(i) for i in range(len(lengths))] == [0] * len(lengths)
    assert all(o.failure is None for o in join.outcomes())


def test_a_repeated_chunk_replaces_what_came_first():
    batch = batch_of([8], 1 << 20)
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, ids)
    put(join, [np.full_like(states[0], ONE)], ids, 0, 0, 5)
    put(join, states, ids, 0, 0, 5)
    assert put(join, states, ids, 0, 5, 8) == [0]
    assert np.array_equal(join.take(0), states[0].ravel())


def test_a_chunk_that_comes_after_its_segment_was_handed_out_changes_nothing():
    batch = batch_of([8], 1 << 20)
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, ids)
    put(join, states, ids, 0, 0, 8)
    handed_out = join.take(0)
    assert put(join, [np.full_like(states[0], ONE)], ids, 0, 0, 8) == []
    assert np.array_equal(handed_out, states[0].ravel())


def test_other_token_ids_than_were_sent_fail_the_sample_and_complete_the_segment():
    batch = batch_of([8, 4], 1 << 20)
    states, ids = truth([8, 4])
    join = BatchJoin(batch, LAYOUT, ids)
    wrong = [ids[0] + 1, ids[1]]
    assert put(join, states, wrong, 0, 0, 8) == []
    assert put(join, states, ids, 1, 0, 4) == [0]
    first, second = join.outcomes()
    assert first.failure is not None
    assert first.failure.kind == "row_mismatch"
    assert second.failure is None
    assert np.array_equal(join.take(0)[-48:], states[1].ravel())


def test_rows_past_the_end_of_a_sample_fail_it():
    batch = batch_of([4], 1 << 20)
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, [ids[0][:4]])
    assert put(join, states, ids, 0, 0, 8) == [0]
    assert join.outcomes()[0].failure.kind == "row_mismatch"


def test_rows_of_a_failed_sample_are_zeros_whatever_the_memory_held_before(monkeypatch):
    used = SimpleNamespace(take=lambda length: np.full(length, 0xAB, np.uint8))
    monkeypatch.setattr("actors.capture.join._memory", used)
    batch = batch_of([8, 8], 10_000)
    states, ids = truth([8, 8])
    join = BatchJoin(batch, LAYOUT, ids)
    put(join, states, ids, 0, 0, 4)
    put(join, states, ids, 1, 0, 8)
    assert join.fail(0, "other", "lost") == [0]
    segment = join.take(0)
    assert not segment[: 8 * 3 * 4].any()
    assert np.array_equal(segment[8 * 3 * 4 :], states[1].ravel())


def test_memory_is_not_handed_on_while_rows_of_a_sample_given_up_are_still_written(monkeypatch):
    used = SimpleNamespace(take=lambda length: np.full(length, 0xAB, np.uint8))
    monkeypatch.setattr("actors.capture.join._memory", used)
    writing, go_on = threading.Event(), threading.Event()

    def gather(source, rows, out):
        writing.set()
        assert go_on.wait(30)
        out[:] = source[rows]

    batch = batch_of([8], 10_000)
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, ids)
    monkeypatch.setattr("actors.capture.join._gather", gather)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(put, join, states, ids, 0, 0, 4)
        assert writing.wait(30)
        assert join.fail(0, "engine", "gave up") == []
        assert not join.complete
        go_on.set()
        assert late.result(30) == [0]
    assert join.complete
    assert join.missing_rows(0) == 0
    assert join.outcomes()[0].failure.reason == "gave up"


def test_a_segment_is_not_handed_out_while_rows_that_it_has_already_are_written_again(monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    batch = batch_of([8], 10_000)
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, ids)
    put(join, states, ids, 0, 0, 4)
    slowly = iter([True])

    def gather(source, rows, out):
        if next(slowly, False):
            writing.set()
            assert go_on.wait(30)
        out[:] = source[rows]

    monkeypatch.setattr("actors.capture.join._gather", gather)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(put, join, states, ids, 0, 0, 4)
        assert writing.wait(30)
        assert put(join, states, ids, 0, 4, 8) == []
        assert not join.complete
        go_on.set()
        assert again.result(30) == [0]
    assert np.array_equal(join.take(0), states[0].ravel())


def test_parts_of_samples_from_several_threads_at_a_time():
    lengths = [400, 7, 301]
    batch = batch_of(lengths, 5000)
    states, ids = truth(lengths)
    join = BatchJoin(batch, LAYOUT, ids)
    parts = [(i, lo, min(lo + 3, n)) for i, n in enumerate(lengths) for lo in range(0, n, 3)]
    np.random.default_rng(0).shuffle(parts)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda part: put(join, states, ids, *part), parts))
    segments = [s for some in done for s in some]
    assert sorted(segments) == list(range(len(batch.segments)))
    for s in segments:
        assert np.array_equal(join.take(s), expected_segment(batch, states, s))


def test_a_token_whose_states_are_not_stored_must_come_all_the_same():
    batch = batch_of([8], 1 << 20, [2])
    states, ids = truth([8])
    join = BatchJoin(batch, LAYOUT, ids, [np.array([5, 7], np.int32)])
    assert put(join, states, ids, 0, 4, 8) == [0]
    assert join.missing_rows(0) == 4


def test_a_bad_row_is_named_by_its_token():
    batch = batch_of([9], 1 << 20, [3])
    states, ids = truth([9])
    states[0][2, 7, 1] = NAN
    join = BatchJoin(batch, LAYOUT, ids, [np.array([1, 4, 7], np.int32)])
    put(join, states, ids, 0, 0, 9)
    assert join.outcomes()[0].failure.reason.startswith("state final, token 7")


def test_a_segment_whose_samples_all_failed_is_empty():
    batch = batch_of([40, 4], 96)
    _, ids = truth([40, 4])
    join = BatchJoin(batch, LAYOUT, ids)
    done = join.fail(0, "engine", "refused")
    assert join.take(done[0]).size == 0
    assert not join.complete
    assert join.missing_rows(1) == 4


@pytest.mark.parametrize(
    ("value", "what"), [(NAN, "non-finite"), (INF, "non-finite"), (MINUS_INF, "non-finite")]
)
def test_non_finite_rows_fail_the_sample_and_say_where(value, what):
    batch = batch_of([9], 1 << 20)
    states, ids = truth([9])
    states[0][2, 7, 1] = value
    join = BatchJoin(batch, LAYOUT, ids)
    assert put(join, states, ids, 0, 0, 9) == [0]
    failure = join.outcomes()[0].failure
    assert failure.kind == "bad_states"
    assert failure.reason.startswith("state final, token 7")
    assert what in failure.reason


@pytest.mark.parametrize("zero", [0, MINUS_ZERO])
def test_all_zero_rows_fail_the_sample_except_at_the_embedding(zero):
    batch = batch_of([9], 1 << 20)
    for k, kind in ((0, None), (1, "bad_states")):
        states, ids = truth([9])
        states[0][k, 3] = zero
        join = BatchJoin(batch, LAYOUT, ids)
        put(join, states, ids, 0, 0, 9)
        failure = join.outcomes()[0].failure
        assert (failure.kind if failure else None) == kind


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    rows=st.lists(st.lists(st.integers(0, (1 << 32) - 1), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_bad_rows_are_those_that_the_element_type_itself_calls_bad(dtype, rows):
    import torch

    width = {"bfloat16": 16, "float16": 16, "float32": 32}[dtype]
    bits = np.array(rows, dtype=np.uint64).astype(f"u{width // 8}")
    values = torch.from_numpy(bits.view(f"i{width // 8}").copy()).view(getattr(torch, dtype)).float()
    broken = ~torch.isfinite(values).all(dim=1)
    empty = (values == 0).all(dim=1)
    expected = None
    if broken.any():
        expected = (int(broken.int().argmax()), "has non-finite values")
    elif empty.any():
        expected = (int(empty.int().argmax()), "is all zeros")
    assert first_bad_row(bits, dtype) == expected
