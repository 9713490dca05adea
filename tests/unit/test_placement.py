"""Which node gets an engine."""

from __future__ import annotations

import pytest

from cluster.placement import Node, gpus_per_engine, place_engines
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
