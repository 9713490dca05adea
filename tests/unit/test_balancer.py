"""How work is dealt to engines of unequal speed: measured by their answers, on a virtual clock."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from actors.balance import Limits
from actors.ledger import Ledger
from actors.messages import SampleOutcome
from actors.pace import PACE_ANSWERS, Pace
from cluster.answering import answer_limits
from cluster.config import GenerateConfig, LimitsConfig

LIMITS = Limits(
    batch_tokens=16_384, batch_bytes=1 << 40, batch_samples=64, batches_per_engine=3, in_flight_bytes=1 << 40
)
ANSWER_S = 0.2
LENGTHS = np.exp(np.random.default_rng(1).uniform(np.log(16), np.log(32_768), 150)).astype(np.int32)


class Simulation:
    """Engines with speeds in tokens/s that do their batches one after another."""

    def __init__(self, lengths: np.ndarray, speeds: dict[str, float]) -> None:
        self.speeds = speeds
        self.ledger = Ledger(lengths.astype(np.int32), lengths == 0, 1, LIMITS)
        self.finished_s = dict.fromkeys(speeds, 0.0)
        self.batches: list[tuple[str, int, float]] = []
        self._answers: list[tuple[float, int, str, list[SampleOutcome]]] = []
        for name in speeds:
            self.ledger.add_engine(name, name)
            self.ledger.add_writer(f"writer of {name}", name)

    def run(self) -> None:
        now_s = 0.0
        while not self.ledger.settled:
            self._dispatch(now_s)
            now_s, _, batch_id, outcomes = heapq.heappop(self._answers)
            self.ledger.captured(batch_id, outcomes, now_s)
            self.ledger.moved(batch_id)
            self.ledger.written(batch_id, [o.row for o in outcomes])

    def _dispatch(self, now_s: float) -> None:
        while (batch := self.ledger.next_batch(now_s)) is not None:
            tokens = sum(s.tokens for s in batch.samples)
            begins_s = max(now_s, self.finished_s[batch.engine])
            self.finished_s[batch.engine] = begins_s + tokens / self.speeds[batch.engine]
            self.batches.append((batch.engine, tokens, begins_s))
            outcomes = [SampleOutcome(s.row, s.attempt) for s in batch.samples]
            at_s = self.finished_s[batch.engine] + ANSWER_S
            heapq.heappush(self._answers, (at_s, len(self.batches), batch.batch_id, outcomes))


def test_engines_of_unequal_speed_end_within_five_per_cent_of_their_mean() -> None:
    simulation = Simulation(LENGTHS, {"a": 5000, "b": 5000, "c": 10_000, "d": 20_000})
    simulation.run()
    ends = list(simulation.finished_s.values())
    assert max(ends) < 1.05 * np.mean(ends)
    assert max(ends) < 1.05 * LENGTHS.sum() / 40_000, "they idled"


def test_only_engine_gets_whole_batches_to_the_end() -> None:
    """Kept back, they would have nobody to go to, and it would idle between the last ones."""
    simulation = Simulation(np.full(300, 1000), {"a": 20_000})
    simulation.run()
    tokens = [tokens for _, tokens, _ in simulation.batches]
    assert tokens[:-1] == [16_000] * 18
    assert simulation.finished_s["a"] == pytest.approx(300_000 / 20_000), "it idled"


def test_engine_that_turns_slow_gets_less_to_the_end() -> None:
    simulation = Simulation(np.full(8000, 500), {"a": 20_000, "b": 20_000})
    dispatch = simulation._dispatch

    def slower_from_ten_seconds_on(now_s: float) -> None:
        if now_s > 10:
            simulation.speeds["a"] = 2000
        dispatch(now_s)

    simulation._dispatch = slower_from_ten_seconds_on  # type: ignore[method-assign]
    simulation.run()
    ends = list(simulation.finished_s.values())
    assert max(ends) < 1.05 * np.mean(ends)


def test_engine_ten_times_slower_is_not_left_with_the_end() -> None:
    simulation = Simulation(np.full(8000, 500), {"slow": 4000, "fast": 40_000})
    simulation.run()
    ends = list(simulation.finished_s.values())
    assert max(ends) < 1.05 * 4_000_000 / 44_000
    assert min(ends) > 0.95 * 4_000_000 / 44_000


def test_pace_is_believed_after_some_answers_and_follows_a_change() -> None:
    pace = Pace()
    pace.begin(100.0)
    now_s = 100.0
    for _ in range(PACE_ANSWERS):
        assert pace.tokens_per_s is None
        now_s += 2.0
        pace.answer(1000, now_s)
    assert pace.tokens_per_s == pytest.approx(500)
    for _ in range(60):
        now_s += 4.0
        pace.answer(1000, now_s)
    assert pace.tokens_per_s == pytest.approx(250, rel=0.01)


def test_time_without_work_does_not_slow_an_engine() -> None:
    pace = Pace()
    for began_s in (0.0, 1000.0, 2000.0):
        pace.begin(began_s)
        pace.answer(300, began_s + 1.0)
    assert pace.tokens_per_s == pytest.approx(300)


def test_engine_that_joins_late_counts_like_the_mean_of_the_others() -> None:
    simulation = Simulation(np.full(4000, 500), {"a": 5000, "b": 15_000})
    simulation._dispatch(0.0)
    for _ in range(40):
        now_s, _, batch_id, outcomes = heapq.heappop(simulation._answers)
        simulation.ledger.captured(batch_id, outcomes, now_s)
        simulation.ledger.moved(batch_id)
        simulation.ledger.written(batch_id, [o.row for o in outcomes])
        simulation._dispatch(now_s)
    simulation.ledger.add_engine("new", "new")
    speeds = simulation.ledger.engines.speeds()
    assert speeds["new"] == pytest.approx(10_000, rel=0.05)


def test_engines_that_work_on_many_rows_at_once_are_filled_to_the_last_row_and_alike() -> None:
    limits = LimitsConfig(batch_tokens=100_000)
    capture = Limits(limits.batch_tokens, 1 << 40, limits.batch_samples, 3, 1 << 40)
    answers = answer_limits(capture, GenerateConfig(concurrent_rows=256))
    ledger = Ledger(np.full(300, 1000, np.int32), np.zeros(300, np.bool_), 4, answers)
    for name in ("a", "b"):
        ledger.add_engine(name, name)
    ledger.add_writer("answers", "a")
    given = dict.fromkeys("ab", 0)
    while (batch := ledger.next_batch()) is not None:
        assert len(batch.samples) <= 4
        given[batch.engine] += len(batch.samples)
    assert sum(given.values()) == 300
    assert abs(given["a"] - given["b"]) <= 4
