"""Which node gets an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.placement import Node, free_places, gpus_per_engine, place_engines
from storage.errors import ResourceError


def node(name: str, gpus: int = 0, cpus: int = 8) -> Node:
    return Node(name, f"host-{name}", "127.0.0.1", cpus, gpus, 1 << 30)


def test_auto_fills_every_node_with_gpus():
    assert sorted(place_engines([node("a", 8), node("b", 4), node("head")], 4, "auto")) == ["a", "a", "b"]


def test_auto_on_cpus_is_one_engine_a_node():
    assert sorted(place_engines([node("a"), node("b")], 0, "auto")) == ["a", "b"]


def test_a_count_is_spread_over_the_nodes_with_the_most_room():
    assert sorted(place_engines([node("a", 8), node("b", 8)], 2, 2)) == ["a", "b"]


def test_only_what_is_missing_is_placed_beside_running_engines():
    nodes = [node("a", 8), node("b", 8)]
    assert place_engines(nodes, 8, 2, taken=["a"]) == ["b"]
    assert place_engines(nodes, 8, 2, taken=["a", "b"]) == []


def test_an_engine_on_a_node_that_is_gone_doesnt_count():
    assert place_engines([node("b", 8)], 8, 1, taken=["gone"]) == ["b"]


@pytest.mark.parametrize(("gpus", "count"), [(16, "auto"), (8, 3), (1, 17)])
def test_what_doesnt_fit_is_refused_with_what_the_cluster_has(gpus, count):
    with pytest.raises(ResourceError, match=r"The cluster has host-a \(127.0.0.1\): 8 GPUs, 8 CPUs"):
        place_engines([node("a", 8), node("b", 8)], gpus, count)


def test_gpus_are_used_where_there_are_any():
    assert gpus_per_engine("auto", [node("head"), node("a", 2)]) == 1
    assert gpus_per_engine("auto", [node("head")]) == 0
    assert gpus_per_engine(8, [node("head")]) == 8


def test_a_draining_node_gets_nothing_and_its_engines_count_as_long_as_they_are_there():
    nodes = [node("a", 8), replace(node("b", 8), drains_by_unix_s=1e12)]
    assert place_engines(nodes, 8, "auto") == ["a"]
    assert place_engines(nodes, 8, 2, taken=["b"]) == ["a"]
    with pytest.raises(ResourceError, match="2 asked for"):
        place_engines(nodes, 8, 2)


def test_as_many_as_fit_are_placed_where_a_run_can_wait_for_the_rest():
    assert free_places([node("a", 8)], 8, 3) == ["a"]
    assert free_places([], 8, 3) == []
