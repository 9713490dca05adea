"""The ledger by behaviour: dispatch, budgets, deaths, resume."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.balance import Dispatch, Limits
from actors.budgets import FailureRate, Permits
from actors.ledger import Ledger
from actors.messages import FailureKind, SampleFailure, SampleOutcome
from actors.pending import PendingRows
from actors.rows import State
from storage.errors import ResourceError

BYTES_PER_TOKEN = 10


def make_ledger(tokens: Sequence[int], generation: int = 0, **limits: Any) -> Ledger:
    bounds = {
        "batch_tokens": 100,
        "batch_bytes": 10_000,
        "batch_samples": 8,
        "batches_per_engine": 2,
        "in_flight_bytes": 10_000,
    } | limits
    lengths = np.array(tokens, dtype=np.int32)
    return Ledger(lengths, lengths == 0, BYTES_PER_TOKEN, Limits(**bounds), generation)


def with_crew(ledger: Ledger, engines: int = 1, writers: int = 1) -> Ledger:
    for i in range(engines):
        ledger.add_engine(f"engine-{i}", f"node-{i}")
    for i in range(writers):
        ledger.add_writer(f"writer-{i}", f"node-{i}")
    return ledger


def next_batch(ledger: Ledger) -> Dispatch:
    batch = ledger.next_batch()
    assert batch is not None
    return batch


def all_batches(ledger: Ledger) -> list[Dispatch]:
    return list(iter(ledger.next_batch, None))


def outcomes(
    batch: Dispatch, kind: FailureKind | None = None, only: int | None = None
) -> list[SampleOutcome]:
    failure = None if kind is None else SampleFailure(kind, f"{kind} it is")
    return [
        SampleOutcome(s.row, s.attempt, failure if only in (None, s.row) else None) for s in batch.samples
    ]


def finish(ledger: Ledger, batch: Dispatch, kind: FailureKind | None = None, only: int | None = None) -> None:
    answer = outcomes(batch, kind, only)
    assert ledger.captured(batch.batch_id, answer)
    assert ledger.moved(batch.batch_id)
    assert ledger.written(batch.batch_id, [o.row for o in answer if o.failure is None])


def rows(batch: Dispatch) -> list[int]:
    return [s.row for s in batch.samples]


# ---- dispatch


def test_longest_samples_go_first() -> None:
    ledger = with_crew(make_ledger([5, 90, 20, 70, 1], batch_samples=1, batches_per_engine=5))
    assert [rows(b) for b in all_batches(ledger)][:2] == [[1], [3]]


def test_batch_is_bounded_in_tokens_samples_and_bytes() -> None:
    many = [10] * 1000
    assert len(next_batch(with_crew(make_ledger(many, batch_tokens=45))).samples) == 4
    assert len(next_batch(with_crew(make_ledger(many, batch_samples=3))).samples) == 3
    assert len(next_batch(with_crew(make_ledger(many, batch_bytes=250))).samples) == 2


def test_sample_over_the_batch_bound_travels_by_itself() -> None:
    ledger = with_crew(make_ledger([500, 3, 3]))
    assert rows(next_batch(ledger)) == [0]


def test_batch_goes_to_the_engine_with_the_fewest_outstanding_tokens() -> None:
    ledger = with_crew(
        make_ledger([90, 60, 20, 20, 20] + [10] * 50, batch_samples=1, batches_per_engine=9), 2
    )
    given = [next_batch(ledger).engine for _ in range(4)]
    assert given == ["engine-0", "engine-1", "engine-1", "engine-1"]


def test_engine_takes_no_more_than_its_batches() -> None:
    ledger = with_crew(make_ledger([10] * 1000, batches_per_engine=3))
    assert len(all_batches(ledger)) == 3


def test_longest_comes_first_also_among_rows_that_came_back() -> None:
    ledger = with_crew(make_ledger([90, 80, 70, 60], batch_samples=1, batches_per_engine=9))
    first = next_batch(ledger)
    ledger.batch_lost(next_batch(ledger).batch_id)
    ledger.batch_lost(first.batch_id)
    assert rows(next_batch(ledger)) == [0]
    assert rows(next_batch(ledger)) == [1]


def test_suspect_never_passes_for_an_ordinary_row() -> None:
    lengths = np.array([9, 5], dtype=np.int32)
    pending = PendingRows(lengths, lengths > 0)
    pending.push(pending.pop(), alone=True)
    assert pending.head() == 1
    assert pending.suspect() == 0
    assert pending.tokens == 14


def test_engine_with_a_full_batch_and_more_than_its_share_of_the_rest_gets_no_more() -> None:
    ledger = with_crew(make_ledger([150] + [10] * 12, batches_per_engine=9), engines=2)
    given = all_batches(ledger)
    assert [b.engine for b in given][:2] == ["engine-0", "engine-1"]
    assert {b.engine for b in given[1:]} == {"engine-1"}
    assert sum(s.tokens for b in given[1:] for s in b.samples) < 120


def test_batches_shrink_towards_the_end_to_a_quarter_of_a_full_one() -> None:
    ledger = with_crew(make_ledger([1] * 400, batch_samples=100), engines=2)
    sizes = []
    while batches := all_batches(ledger):
        sizes += [len(b.samples) for b in batches]
        for batch in batches:
            finish(ledger, batch)
    assert sizes[0] == 100
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-2] == 25


def test_engine_with_less_than_a_full_batch_to_do_gets_the_rest_at_once() -> None:
    ledger = with_crew(make_ledger([1] * 100, batch_samples=100, batches_per_engine=9))
    assert sum(len(b.samples) for b in all_batches(ledger)) == 100


def test_writer_on_the_same_node_is_preferred() -> None:
    ledger = make_ledger([10] * 100)
    ledger.add_engine("engine", "b")
    ledger.add_writer("writer-a", "a")
    ledger.add_writer("writer-b", "b")
    assert {b.writer for b in all_batches(ledger)} == {"writer-b"}


def test_remote_writer_with_the_fewest_bytes_to_come_is_chosen_and_its_node_charged() -> None:
    ledger = make_ledger([10] * 100)
    ledger.add_engine("engine", "b")
    ledger.add_writer("writer-a", "a")
    ledger.add_writer("writer-c", "c")
    first, second = all_batches(ledger)
    assert {first.writer, second.writer} == {"writer-a", "writer-c"}
    used = ledger.permits.used()
    assert used["b"] == used["a"] + used["c"]


def test_nothing_is_dispatched_without_engine_or_writer() -> None:
    ledger = make_ledger([10])
    ledger.add_engine("engine", "a")
    assert ledger.next_batch() is None
    ledger.add_writer("writer", "a")
    ledger.drain_engine("engine")
    assert ledger.next_batch() is None


def test_drained_engine_finishes_what_it_has() -> None:
    ledger = with_crew(make_ledger([10] * 100))
    batch = next_batch(ledger)
    ledger.drain_engine("engine-0")
    assert ledger.next_batch() is None
    finish(ledger, batch)
    assert ledger.counts().written == len(batch.samples)


def test_name_in_use_is_refused() -> None:
    ledger = with_crew(make_ledger([10]))
    with pytest.raises(ValueError, match="engine-0"):
        ledger.add_engine("engine-0", "x")
    with pytest.raises(ValueError, match="writer-0"):
        ledger.add_writer("writer-0", "x")


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 2.0, 1.3)])
def test_engines_of_unequal_speed_finish_within_five_percent(speeds: tuple[float, ...]) -> None:
    """A simulation in virtual time: each engine prefills its batches one after another."""
    rng = np.random.default_rng(7)
    tokens = np.clip(rng.lognormal(6.5, 1.3, 4000), 16, 32_768).astype(int).tolist()
    ledger = with_crew(
        make_ledger(tokens, batch_tokens=16_384, batch_bytes=10**9, in_flight_bytes=10**9, batch_samples=64),
        engines=len(speeds),
    )
    clock, free_at = 0.0, dict.fromkeys((f"engine-{i}" for i in range(len(speeds))), 0.0)
    events: list[tuple[float, int, Dispatch]] = []
    number = 0
    while not ledger.settled:
        for batch in all_batches(ledger):
            speed = speeds[int(batch.engine.removeprefix("engine-"))]
            start = max(clock, free_at[batch.engine])
            free_at[batch.engine] = start + sum(s.tokens for s in batch.samples) / speed
            heapq.heappush(events, (free_at[batch.engine], number := number + 1, batch))
        clock, _, batch = heapq.heappop(events)
        finish(ledger, batch)
    mean = sum(free_at.values()) / len(free_at)
    assert max(free_at.values()) < 1.05 * mean


# ---- permits


def test_sample_that_no_budget_holds_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=r"(?s)60 tokens.* 600 bytes.* 500 bytes"):
        make_ledger([7, 60], in_flight_bytes=500)


def test_giant_that_is_committed_already_is_not_refused() -> None:
    tokens = np.array([7, 60], dtype=np.int32)
    limits = Limits(100, 500, 8, 2, in_flight_bytes=500)
    ledger = Ledger(tokens, tokens == 0, BYTES_PER_TOKEN, limits, committed=[1])
    assert ledger.counts().committed == 1


def test_dispatch_waits_for_permits_and_resumes_when_bytes_have_moved() -> None:
    ledger = with_crew(make_ledger([10] * 100, batch_samples=1, batches_per_engine=50, in_flight_bytes=300))
    batches = all_batches(ledger)
    assert len(batches) == 3
    assert ledger.permits.used() == {"node-0": 300}
    ledger.captured(batches[0].batch_id, outcomes(batches[0]))
    assert ledger.next_batch() is None
    ledger.moved(batches[0].batch_id)
    assert ledger.next_batch() is not None


def test_permit_is_released_once_however_a_batch_ends() -> None:
    ledger = with_crew(make_ledger([10] * 40))
    first, second = all_batches(ledger)
    finish(ledger, first)
    ledger.captured(second.batch_id, outcomes(second))
    ledger.batch_lost(second.batch_id)
    assert not ledger.moved(second.batch_id)
    assert ledger.permits.used() == {"node-0": 0}


def test_permits_refuse_more_than_the_budget_and_more_back_than_was_taken() -> None:
    permits = Permits(10)
    permits.take(["a"], 7)
    with pytest.raises(ValueError, match="don't fit"):
        permits.take(["a"], 4)
    with pytest.raises(ValueError, match="given back"):
        permits.release(["a"], 8)
    permits.take(["b"], 4)
    assert permits.used() == {"a": 7, "b": 4}


# ---- failures of samples


def test_bad_sample_fails_after_two_retries_and_its_neighbours_are_written() -> None:
    ledger = with_crew(make_ledger([10] * 8 + [1000]))
    attempts = 0
    while batches := all_batches(ledger):
        for batch in batches:
            attempts += 3 in rows(batch)
            finish(ledger, batch, "bad_states", only=3)
    assert attempts == 3
    assert ledger.rows.state(3) == State.FAILED
    assert ledger.rows.reason(3) == "bad_states it is (3 attempts)"
    assert ledger.counts().written == 8


def test_too_long_is_skipped_with_its_reason_and_never_retried() -> None:
    ledger = with_crew(make_ledger([100, 5]))
    finish(ledger, next_batch(ledger), "too_long")
    assert ledger.rows.state(0) == State.SKIPPED
    assert ledger.rows.reason(0) == "too_long it is"
    assert not ledger.breaker.tripped
    assert [rows(b) for b in all_batches(ledger)] == [[1]]


def test_engine_failure_of_a_sample_costs_it_nothing() -> None:
    ledger = with_crew(make_ledger([10]))
    for _ in range(10):
        finish(ledger, next_batch(ledger), "engine")
    assert ledger.rows.state(0) == State.PENDING


def test_sample_that_the_answer_leaves_out_has_failed() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    ledger.captured(batch.batch_id, [])
    assert ledger.rows.state(0) == State.IN_FLIGHT, "its writer may hold a part of it"
    ledger.moved(batch.batch_id)
    ledger.written(batch.batch_id, [])
    assert ledger.events["row_mismatch"] == 1
    assert ledger.rows.state(0) == State.PENDING


def test_rows_that_went_down_with_a_shard_are_pending_again_without_blame() -> None:
    ledger = with_crew(make_ledger([10] * 4, batch_samples=2), writers=2)
    first, second = all_batches(ledger)
    finish(ledger, first)
    ledger.captured(second.batch_id, outcomes(second))
    ledger.moved(second.batch_id)
    kept, gone = rows(second)
    ledger.written(second.batch_id, [kept], lost=[gone, *rows(first)])
    ledger.shard_lost(second.writer, [gone, *rows(first)])
    assert ledger.counts().written == 1
    assert sorted(rows(next_batch(ledger))) == sorted([*rows(first), gone])[:2]
    assert not ledger.rows.failures.any()
    assert ledger.breaker.failures == 0


def test_news_of_a_lost_shard_leaves_alone_what_is_with_another_writer_by_now() -> None:
    ledger = with_crew(make_ledger([10] * 2), writers=2)
    batch = next_batch(ledger)
    finish(ledger, batch)
    other = next(name for name in ("writer-0", "writer-1") if name != batch.writer)
    ledger.shard_lost(other, rows(batch))
    assert ledger.counts().written == 2


def test_sample_that_the_writer_forgets_has_failed() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    ledger.captured(batch.batch_id, outcomes(batch))
    ledger.moved(batch.batch_id)
    ledger.written(batch.batch_id, [])
    assert ledger.events["other"] == 1


def test_breaker_trips_on_failures_without_success_between() -> None:
    ledger = with_crew(make_ledger([10] * 9, batch_samples=1, retries=9, failures_in_a_row=3))
    for _ in range(2):
        finish(ledger, next_batch(ledger), "bad_states")
    finish(ledger, next_batch(ledger))
    for _ in range(2):
        finish(ledger, next_batch(ledger), "bad_states")
    assert not ledger.breaker.tripped
    finish(ledger, next_batch(ledger), "bad_states")
    assert ledger.breaker.tripped


def test_batch_that_fails_as_a_whole_is_taken_apart_before_anyone_is_blamed() -> None:
    ledger = with_crew(make_ledger([10] * 6))
    attempts = 0
    while batches := all_batches(ledger):
        for batch in batches:
            if 4 in rows(batch):
                attempts += len(batch.samples) == 1
                assert ledger.batch_failed(batch.batch_id, SampleFailure("other", "it broke"))
                assert not ledger.batch_failed(batch.batch_id, SampleFailure("other", "it broke"))
            else:
                finish(ledger, batch)
    assert attempts == 3
    assert ledger.rows.reason(4) == "it broke (3 attempts)"
    assert ledger.counts().written == 5
    assert ledger.permits.used() == {"node-0": 0}


# ---- stale results and impossible transitions


def test_outcome_of_another_attempt_is_ignored() -> None:
    ledger = with_crew(make_ledger([10]))
    first = next_batch(ledger)
    ledger.batch_lost(first.batch_id)
    second = next_batch(ledger)
    assert second.samples[0].attempt == first.samples[0].attempt + 1
    assert not ledger.captured(first.batch_id, outcomes(first))
    ledger.captured(second.batch_id, outcomes(first, "too_long") + outcomes(second))
    assert ledger.rows.state(0) == State.IN_FLIGHT


def test_late_result_of_a_lost_batch_changes_nothing() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    lose_engine(ledger, "engine-0", blame=False)
    before = ledger.counts()
    assert not ledger.captured(batch.batch_id, outcomes(batch))
    assert not ledger.moved(batch.batch_id)
    assert not ledger.written(batch.batch_id, rows(batch))
    assert not ledger.batch_lost(batch.batch_id)
    assert ledger.counts() == before


def test_generations_share_neither_attempts_nor_batch_ids() -> None:
    batches = [next_batch(with_crew(make_ledger([10], generation=g))) for g in (0, 1, 2)]
    assert [b.samples[0].attempt for b in batches] == [1, (1 << 16) + 1, (2 << 16) + 1]
    assert len({b.batch_id for b in batches}) == 3


def test_impossible_orders_raise() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    with pytest.raises(ValueError, match="before it is captured"):
        ledger.written(batch.batch_id, [0])
    ledger.captured(batch.batch_id, outcomes(batch))
    with pytest.raises(ValueError, match="captured before"):
        ledger.captured(batch.batch_id, outcomes(batch))
    ledger.moved(batch.batch_id)
    with pytest.raises(ValueError, match="permit back"):
        ledger.moved(batch.batch_id)
    with pytest.raises(ValueError, match="no engine"):
        ledger.engine_lost("engine-7")
    with pytest.raises(ValueError, match="no writer"):
        ledger.writer_lost("writer-7")


# ---- deaths


def test_suspects_are_dispatched_alone_to_an_idle_engine() -> None:
    ledger = with_crew(make_ledger([10] * 200), engines=2)
    batches = all_batches(ledger)
    lost = {row for b in batches if b.engine == "engine-0" for row in rows(b)}
    lose_engine(ledger, "engine-0")
    assert ledger.next_batch() is None, "the other engine isn't idle, and is kept for the suspects"
    for batch in batches:
        if batch.engine == "engine-1":
            finish(ledger, batch)
    alone = next_batch(ledger)
    assert len(alone.samples) == 1
    assert alone.samples[0].row in lost
    assert ledger.next_batch() is None, "nothing joins a suspect"


def test_engine_kept_for_a_suspect_gets_nothing_until_it_is_idle() -> None:
    ledger = with_crew(make_ledger([10] * 200, batch_samples=1), engines=2)
    next_batch(ledger)
    batch = next_batch(ledger)
    lose_engine(ledger, "engine-0")
    assert ledger.next_batch() is None, "engine-1 has room for a batch, but isn't idle"
    finish(ledger, batch)
    assert rows(next_batch(ledger)) == [0]


def test_engines_beyond_the_number_of_suspects_go_on() -> None:
    ledger = with_crew(make_ledger([10] * 400, batch_samples=1), engines=3)
    all_batches(ledger)
    lose_engine(ledger, "engine-0")
    ledger.add_engine("engine-3", "node-3")
    ledger.add_engine("engine-4", "node-4")
    ledger.add_engine("engine-5", "node-5")
    fresh = all_batches(ledger)
    assert [len(b.samples) for b in fresh] == [1, 1, 1, 1]
    assert sorted(b.engine for b in fresh) == ["engine-3", "engine-4", "engine-5", "engine-5"]


def test_poison_ends_failed_after_two_deaths_alone_and_neighbours_come_through() -> None:
    ledger = with_crew(make_ledger([10] * 30, batch_samples=8))
    deaths = 0
    while batches := all_batches(ledger):
        for batch in batches:
            if 5 in rows(batch) and batch.engine in ledger.engines:
                deaths += 1
                lose_engine(ledger, batch.engine)
                ledger.add_engine(f"again-{deaths}", "node-0")
            elif ledger.engines:
                finish_if_open(ledger, batch)
    assert deaths == 3
    assert ledger.rows.state(5) == State.FAILED
    assert "poison" in (ledger.rows.reason(5) or "")
    assert ledger.counts().written == 29


def lose_engine(ledger: Ledger, name: str, blame: bool = True) -> None:
    """The engine dies and its batches are given up, as the carrier does once the writer has let go of them."""
    batches = tuple(ledger.engines[name].batches)
    ledger.engine_lost(name, blame)
    for batch_id in batches:
        assert ledger.batch_lost(batch_id)


def finish_if_open(ledger: Ledger, batch: Dispatch) -> None:
    if ledger.captured(batch.batch_id, outcomes(batch)):
        ledger.moved(batch.batch_id)
        ledger.written(batch.batch_id, rows(batch))


def test_node_that_was_taken_away_makes_no_suspects() -> None:
    ledger = with_crew(make_ledger([10] * 8))
    size = len(next_batch(ledger).samples)
    lose_engine(ledger, "engine-0", blame=False)
    ledger.add_engine("engine-1", "node-1")
    assert len(next_batch(ledger).samples) == size > 1


def test_suspect_that_comes_through_is_cleared() -> None:
    ledger = with_crew(make_ledger([10]))
    for name in ("engine-0", "engine-1"):  # in company, then once alone
        next_batch(ledger)
        lose_engine(ledger, name)
        ledger.add_engine(f"engine-{int(name[-1]) + 1}", "node-0")
    finish(ledger, next_batch(ledger))
    ledger.writer_lost("writer-0")
    ledger.add_writer("writer-1", "node-0")
    for name in ("engine-2", "engine-3"):  # once more in company, then once alone
        next_batch(ledger)
        lose_engine(ledger, name)
        ledger.add_engine(f"engine-{int(name[-1]) + 1}", "node-0")
    assert ledger.rows.state(0) == State.PENDING


def test_rows_of_a_dead_engine_stay_in_flight_until_their_batch_is_given_up() -> None:
    ledger = with_crew(make_ledger([10]), engines=2)
    batch = next_batch(ledger)
    ledger.engine_lost("engine-0")
    assert ledger.next_batch() is None
    assert ledger.rows.state(0) == State.IN_FLIGHT
    assert not ledger.captured(batch.batch_id, outcomes(batch))
    assert ledger.batch_lost(batch.batch_id)
    assert rows(next_batch(ledger)) == [0]


def test_shard_that_found_no_space_is_collected_again_by_the_same_writer() -> None:
    ledger = with_crew(make_ledger([10, 0]))
    finish(ledger, next_batch(ledger))
    ledger.shard_lost("writer-0", [0, 1])
    assert ledger.rows.state(0) == State.PENDING
    assert next_batch(ledger).writer == "writer-0"


def test_death_after_the_answer_takes_nothing_back() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    ledger.captured(batch.batch_id, outcomes(batch))
    lose_engine(ledger, "engine-0")
    ledger.moved(batch.batch_id)
    assert ledger.written(batch.batch_id, [0])
    assert ledger.rows.state(0) == State.WRITTEN


def test_written_rows_of_a_lost_writer_are_pending_again_unless_committed() -> None:
    ledger = with_crew(make_ledger([10] * 3, batch_samples=1, batches_per_engine=3), writers=1)
    for _ in range(3):
        finish(ledger, next_batch(ledger))
    ledger.committed([1])
    ledger.writer_lost("writer-0")
    assert [ledger.rows.state(row) for row in range(3)] == [State.PENDING, State.COMMITTED, State.PENDING]


def test_loss_of_one_writer_leaves_the_rows_of_another() -> None:
    ledger = with_crew(make_ledger([10] * 4, batch_samples=2, batch_tokens=20), engines=2, writers=2)
    batches = all_batches(ledger)
    for batch in batches:
        finish(ledger, batch)
    assert {b.writer for b in batches} == {"writer-0", "writer-1"}
    ledger.writer_lost("writer-1")
    for batch in batches:
        expected = State.WRITTEN if batch.writer == "writer-0" else State.PENDING
        assert all(ledger.rows.state(row) == expected for row in rows(batch))


def test_new_writer_under_the_name_of_a_lost_one_answers_for_its_own_rows_only() -> None:
    ledger = with_crew(make_ledger([10]))
    batch = next_batch(ledger)
    ledger.captured(batch.batch_id, outcomes(batch))
    ledger.moved(batch.batch_id)
    ledger.writer_lost("writer-0")
    ledger.add_writer("writer-0", "node-0")
    ledger.written(batch.batch_id, [0])
    assert ledger.rows.state(0) == State.PENDING


def test_manifest_outweighs_everything() -> None:
    ledger = with_crew(make_ledger([10, 9, 8, 7], batch_samples=1, retries=0))
    finish(ledger, next_batch(ledger), "bad_states")
    in_flight = next_batch(ledger)
    ledger.committed([0, 1, 3])
    ledger.committed([1])
    assert [ledger.rows.state(r) for r in range(4)] == [State.COMMITTED] * 2 + [
        State.PENDING,
        State.COMMITTED,
    ]
    assert ledger.events["duplicate"] == 1
    finish(ledger, in_flight, "bad_states")
    assert ledger.rows.state(1) == State.COMMITTED
    assert [rows(b) for b in all_batches(ledger)] == [[2]]
    assert ledger.rows.committed_tokens == 26


def test_failure_rate_forgets_what_is_older_than_its_window() -> None:
    rate = FailureRate(limit=2, window_s=60)
    for now_s in (0, 10, 20):
        rate.record(now_s)
    assert rate.exceeded(20)
    assert not rate.exceeded(65)


# ---- where the states of some tokens are stored


def kept_ledger(tokens: Sequence[int], kept: Sequence[int], **limits: Any) -> Ledger:
    """As `make_ledger`, with so many tokens of each row stored."""
    bounds = {"batch_tokens": 100, "batch_bytes": 10_000, "batch_samples": 8, "batches_per_engine": 2}
    lengths, stored = np.array(tokens, dtype=np.int32), np.array(kept, dtype=np.int32)
    every = Limits(**{**bounds, "in_flight_bytes": 10_000, **limits})
    return with_crew(Ledger(lengths, lengths == 0, BYTES_PER_TOKEN, every, kept=stored))


def test_permits_are_of_the_bytes_that_are_stored_and_balance_is_of_the_tokens_that_are_read() -> None:
    ledger = kept_ledger([50, 40, 30], [5, 4, 3])
    batch = next_batch(ledger)
    assert [(s.tokens, s.kept) for s in batch.samples] == [(50, 5), (40, 4)]
    assert ledger.permits.used() == {"node-0": 9 * BYTES_PER_TOKEN}
    assert ledger.engines["engine-0"].tokens == 90


def test_a_row_that_is_read_whole_and_stored_in_part_is_no_giant() -> None:
    batch = next_batch(kept_ledger([5000, 10], [20, 10], in_flight_bytes=200))
    assert [s.row for s in batch.samples] == [0]
    with pytest.raises(ResourceError, match="row 1 has 30 tokens, whose states take 300 bytes"):
        kept_ledger([5000, 30], [20, 30], in_flight_bytes=200)


def test_batches_never_take_more_than_the_permits_however_unevenly_rows_are_stored() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 60, 300)
    kept = np.where(rng.random(300) < 0.1, tokens, 1)
    ledger = kept_ledger(tokens.tolist(), kept.tolist(), in_flight_bytes=700, batch_bytes=400)
    done = 0
    while not ledger.settled:
        batch = next_batch(ledger)
        assert len(batch.samples) == 1 or sum(s.kept for s in batch.samples) * BYTES_PER_TOKEN <= 400
        assert ledger.permits.used()["node-0"] <= 700
        ledger.captured(batch.batch_id, outcomes(batch))
        ledger.moved(batch.batch_id)
        ledger.written(batch.batch_id, [s.row for s in batch.samples])
        done += len(batch.samples)
    assert done == 300
