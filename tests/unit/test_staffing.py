"""Which engines may go at the end of a run, which writers are missing, and how many losses are borne."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from actors.rows import Counts
from actors.run_messages import MemberStatus, Status
from cluster.fleet import Member
from cluster.losses import LossBudget
from cluster.placement import missing_writers
from cluster.release import has_enough, idle_engines
from storage.errors import IncompleteRun


def status(pending: int, **batches: int) -> Status:
    engines = tuple(MemberStatus(name, "node", n) for name, n in batches.items())
    counts = Counts(pending=pending, in_flight=0, written=0, committed=100, skipped=0, failed=0)
    return Status(
        counts=counts,
        tokens=1000,
        committed_tokens=900,
        captured_tokens=900,
        stored_bytes=0,
        in_flight_bytes={},
        in_flight_limit_bytes=1,
        engines=engines,
        writers=(),
        events={},
        last_problem=None,
        paused=None,
    )


def test_everybody_stays_while_something_is_pending():
    assert not has_enough(False, status(1, a=0, b=1), batch_samples=4)
    assert has_enough(False, status(0, a=0, b=1), batch_samples=4)


def test_a_few_samples_that_come_back_are_left_to_the_engines_that_are_there():
    assert has_enough(True, status(12, a=0), batch_samples=4)
    assert not has_enough(True, status(13, a=0), batch_samples=4)
    assert has_enough(True, status(24, a=0, b=0), batch_samples=4)


def test_everybody_stays_for_the_capture_that_follows_the_answers():
    assert not has_enough(True, replace(status(0, a=0, b=0), task="answer"), batch_samples=4)


def test_idle_and_loading_engines_go_and_busy_ones_stay():
    started = {"a": True, "b": True, "c": False}
    assert idle_engines(status(0, a=0, b=2), started) == ["a", "c"]
    assert idle_engines(status(0, a=1, b=2), started) == ["c"]


def test_one_engine_that_has_started_always_stays():
    assert idle_engines(status(0, a=0, b=0), {"a": True, "b": True}) == ["b"]
    assert idle_engines(status(0), {"c": False, "d": False}) == []


def test_writers_are_missing_where_engines_are():
    assert missing_writers(["a", "a", "b"], ["a"], 2) == ["a", "b", "b"]
    assert missing_writers(["a"], ["a", "a", "gone"], 1) == []


def test_a_node_on_which_nothing_starts_is_given_up_and_the_others_go_on():
    losses = LossBudget(100, 1e9)
    losses.started("good", 1.0)
    assert [losses.failed_start("bad", "engine-1", "why", 1.0) for _ in range(3)] == [False, False, True]
    assert not losses.failed_start("good", "engine-2", "why", 1.0)


def test_a_start_that_works_makes_up_for_those_that_failed():
    losses = LossBudget(100, 1e9)
    losses.started("a", 1.0)
    for _ in range(3):
        assert not losses.failed_start("a", "engine-1", "why", 1.0)
        assert not losses.failed_start("a", "engine-1", "why", 1.0)
        losses.started("a", 1.0)


def test_a_run_ends_when_nothing_ever_starts():
    losses = LossBudget(100, 1e9)
    losses.failed_start("a", "engine-0", "why", 1.0)
    losses.failed_start("b", "engine-1", "why", 1.0)
    with pytest.raises(IncompleteRun, match="3 starts in a row failed, the last one of engine-2: the reason"):
        losses.failed_start("c", "engine-2", "the reason", 1.0)


def test_loading_again_is_bounded_and_loading_first_is_not():
    losses = LossBudget(100, reload_s=100.0)
    losses.started("a", 1000.0)
    losses.engine_lost()
    losses.started("a", 60.0)
    losses.started("b", 1000.0)  # a node that joined
    with pytest.raises(
        IncompleteRun, match=r"more than limits\.reload_s = 100 s .* the last of it into engine-3: why"
    ):
        losses.failed_start("a", "engine-3", "why", 41.0)


def test_losses_are_borne_for_an_hour():
    losses = LossBudget(2, 1e9)
    for now_s in (0.0, 1.0, 3601.5, 3602.0):
        losses.lost("engine-0", "why", now_s)
    with pytest.raises(IncompleteRun, match=r"limits\.losses_per_hour = 2"):
        losses.lost("engine-0", "why", 3603.0)


def test_a_member_has_until_shortly_before_its_node_goes():
    member = Member("engine-0", "node", None, None, 0.0, math.inf)
    now_s = time.monotonic()
    member.leave(time.time() + 60)
    assert not member.overdue(now_s + 49)
    assert member.overdue(now_s + 51)
    member.leave(time.time() + 6)
    assert not member.overdue(now_s + 3.5)
    assert member.overdue(now_s + 4.5)
    member.leave(None)
    assert not member.overdue(now_s + 1e9)
