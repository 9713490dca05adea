"""Whole runs on a local cluster with synthetic engines: the coordinator, real writers, real shards.

What deaths do to a run of the real command is in tests/chaos.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from collection import LAYOUT, Full, FullForAWhile, RaisesOnRow100, SmallDriver, check_dump, make_dump

from storage.errors import IncompleteRun, ResourceError, StorageFull
from storage.manifest import read_manifests

pytestmark = pytest.mark.slow

LENGTHS = [int(n) for n in np.random.default_rng(3).integers(1, 90, 300)]
LENGTHS[17] = 0  # skipped by preparation
LENGTHS[40] = 700  # several inner chunks, longer than a batch
OPEN = {"shard_bytes": 1 << 30}
"""Of a writer: nothing is sealed before the end."""
HELD = {"hold_at_sample": 60}
"""Each engine waits there until the test has acted: what a test acts on can't be over before."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # The tests' own folder has no package: its modules reach the actors by the path.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parent}")
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        yield
        ray.shutdown()


def test_every_row_is_committed_or_skipped_and_equals_the_generator(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS))
    driver.begin(engines=2, writers=2)
    summary = driver.end()
    found = check_dump(tmp_path, LENGTHS)
    assert found["skipped"] == {17: "broken"}
    assert len(found["committed"]) == 299
    assert summary.account is not None
    assert (summary.account.rows, summary.account.committed, summary.account.failed) == (300, 299, 0)
    assert summary.stopped is None
    assert len(read_manifests(driver.store)) > 3
    assert driver.losses == []
    assert sum(summary.events.values()) == 0


def test_run_goes_on_with_the_engine_that_is_left(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[{"die_at_sample": 40}])
    driver.begin()
    driver.end(replace=False)
    assert len(check_dump(tmp_path, LENGTHS)["committed"]) == 299


def test_bad_states_are_retried_twice_and_then_fail(tmp_path: Path) -> None:
    bad = {"bad_rows": (100, 101)}
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[bad, bad])
    driver.begin()
    summary = driver.end()
    found = check_dump(tmp_path, LENGTHS)
    assert set(found["failed"]) == {100, 101}
    assert found["failed"][100] == "non-finite states (3 attempts)"
    assert len(found["committed"]) == 297
    assert summary.events["bad_states"] == 6
    assert driver.losses == []


def test_writer_that_is_stopped_is_given_up_and_can_not_commit_any_more(tmp_path: Path) -> None:
    driver = SmallDriver(
        make_dump(tmp_path, LENGTHS), faults=[HELD, HELD], spec={"stall_timeout_s": 10.0}, writer_spec=OPEN
    )
    driver.begin(writers=2)
    driver.wait_until(lambda s: s.counts.written > 20)
    stopped = ray.get(driver.handles["writer-1"].start.remote()).actor_pid
    os.kill(stopped, signal.SIGSTOP)
    driver.go_on()
    try:
        driver.end()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    assert ("writer-1", "no answer for 10 s") in [(loss.name, loss.reason) for loss in driver.losses]
    assert len(check_dump(tmp_path, LENGTHS)["committed"]) == 299
    rows = [s.row for m in read_manifests(driver.store) for s in m.samples]
    assert sorted(rows) == [row for row in range(300) if row != 17]


def test_drained_engine_gets_no_more_and_can_be_killed_without_a_loss(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[HELD, HELD])
    driver.begin()
    driver.wait_until(lambda s: s.counts.written + s.counts.committed > 20)
    name = next(n for n in driver.handles if n.startswith("engine"))
    drained = driver.coordinator.drain_engine.remote(name)
    driver.go_on()
    ray.get(drained)
    ray.kill(driver.handles[name])
    assert name not in [e.name for e in driver.status().engines]
    driver.end()
    assert driver.losses == []
    assert len(check_dump(tmp_path, LENGTHS)["committed"]) == 299


def test_stopped_run_seals_what_it_has_and_a_second_run_finishes_it(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[HELD, HELD])
    driver.begin()
    driver.wait_until(lambda s: s.counts.written + s.counts.committed > 5)
    ray.get(driver.coordinator.stop.remote("asked to"))
    driver.go_on()
    summary = driver.end()
    assert summary.stopped == "asked to"
    assert summary.account is None
    assert summary.counts.written == summary.counts.in_flight == 0
    assert 0 < summary.counts.committed < 299
    committed = {s.row for m in read_manifests(driver.store) for s in m.samples}
    assert len(committed) == summary.counts.committed

    again = SmallDriver(driver.store)
    again.begin()
    assert again.end().counts.committed == 299
    assert len(check_dump(tmp_path, LENGTHS)["committed"]) == 299
    rows = [s.row for m in read_manifests(driver.store) for s in m.samples]
    assert len(rows) == len(set(rows)), "a committed row was collected again"


def test_run_that_only_fails_is_stopped(tmp_path: Path) -> None:
    bad = {"bad_rows": tuple(range(300))}
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[bad, bad], limits={"failures_in_a_row": 30})
    driver.begin()
    with pytest.raises(IncompleteRun, match="none came through"):
        driver.end()


def test_output_without_space_for_a_while_only_delays_the_run(tmp_path: Path) -> None:
    driver = SmallDriver(
        make_dump(tmp_path, LENGTHS), writer_class=FullForAWhile, spec={"full_timeout_s": 6.0}
    )
    driver.begin()
    driver.end()
    assert len(check_dump(tmp_path, LENGTHS)["committed"]) == 299
    assert driver.losses == []


def test_output_without_space_for_too_long_ends_the_run(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), writer_class=Full, spec={"full_timeout_s": 2.0})
    driver.begin()
    with pytest.raises(StorageFull, match="had no space for 2 s"):
        driver.end()


def test_capture_that_raises_counts_against_its_samples_and_leaves_nothing_waiting(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), engine_class=RaisesOnRow100)
    driver.begin()
    driver.end()
    found = check_dump(tmp_path, LENGTHS)
    assert list(found["failed"]) == [100]
    assert found["failed"][100] == "ValueError: row 100 brings it out (3 attempts)"
    assert len(found["committed"]) == 298
    assert driver.losses == []


def test_too_many_losses_end_the_run(tmp_path: Path) -> None:
    poison = {"die_at_sample": 1}
    driver = SmallDriver(
        make_dump(tmp_path, LENGTHS), [poison, poison], poison, spec={"infrastructure_per_hour": 4}
    )
    driver.begin()
    with pytest.raises(IncompleteRun, match="within an hour"):
        driver.end()


def test_sample_that_no_budget_holds_is_refused_before_anything_runs(tmp_path: Path) -> None:
    size = 700 * LAYOUT.bytes_per_token
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), limits={"in_flight_bytes": size - 1})
    driver.begin(engines=0, writers=0)
    with pytest.raises(ResourceError, match=f"{size} bytes.*{size - 1} bytes"):
        driver.end()
