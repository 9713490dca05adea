"""Nodes join, drain and are let go while a run goes on: the command on a cluster of several raylets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from raylets import Raylets, assert_complete, collecting_on, made_up_run, raylets

pytestmark = pytest.mark.slow

ROWS = 60
HELD = {"args": {"hold_at_sample": 10}}
"""Each engine waits there until the test has acted."""


@pytest.fixture
def cluster() -> Iterator[Raylets]:
    with raylets() as made:
        yield made


def test_node_that_joins_gets_work_and_one_that_drains_is_left_in_order(cluster: Raylets, tmp_path: Path):
    first = cluster.add()
    # Slow enough that what the second engine does first, maybe through the first one's writer, is over when it waits.
    held = {"args": {"tokens_per_s": 100.0, "hold_at_sample": 25}}
    with collecting_on(cluster, made_up_run(tmp_path, ROWS, held)) as collecting:
        collecting.until("engine-0: its states are made up")
        cluster.add()
        collecting.until("engine-1: its states are made up")
        assert cluster.drain(first, within_s=3600)
        collecting.until("engine-0 gets no more work")
        ray.get(cluster.actor("engine-0").go_on.remote())
        while cluster.alive(first):  # nothing is left on it: Ray takes it out by itself
            time.sleep(0.2)
        ray.get(cluster.actor("engine-1").go_on.remote())
        assert collecting.wait() == 0, collecting.text
    assert "is gone" not in collecting.text
    assert_complete(tmp_path, ROWS)


def test_what_isnt_done_when_a_node_has_to_go_is_done_elsewhere(cluster: Raylets, tmp_path: Path):
    first = cluster.add()
    run = made_up_run(tmp_path, ROWS, HELD, limits={"batch_samples": 4, "losses_per_hour": 1})
    with collecting_on(cluster, run) as collecting:
        collecting.until("engine-0: its states are made up")
        cluster.add()
        collecting.until("engine-1: its states are made up")
        assert cluster.drain(first, within_s=6)
        collecting.until("engine-0 is given up: it didn't get done on .* in time")
        ray.get(cluster.actor("engine-1").go_on.remote())
        assert collecting.wait() == 0, collecting.text
    assert f"{ROWS} rows = {ROWS} committed" in collecting.text
    assert_complete(tmp_path, ROWS)


def test_nodes_without_work_can_be_taken_while_the_last_samples_are_under_way(
    cluster: Raylets, tmp_path: Path
):
    nodes = {name.node_id: name for name in (cluster.add(), cluster.add())}
    with collecting_on(cluster, made_up_run(tmp_path, ROWS, {"args": {"hold_at_sample": 31}})) as collecting:
        released = collecting.until(r"(engine-\d) gets no more work: everything is handed out").group(1)
        stays = cluster.actor({"engine-0": "engine-1", "engine-1": "engine-0"}[released])
        busy = ray.get(stays.start.remote()).node_id
        (idle,) = (node for node_id, node in nodes.items() if node_id != busy)
        while not cluster.drain(idle, only_if_idle=True):  # refused as long as anything runs there
            time.sleep(0.2)
        assert not cluster.drain(nodes[busy], only_if_idle=True)
        ray.get(stays.go_on.remote())
        assert collecting.wait() == 0, collecting.text
    assert_complete(tmp_path, ROWS)
