"""Which node gets engines and writers: arithmetic over what the cluster has. Pure but for `read_nodes`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ray
from ray._private.state import state

from storage.errors import ResourceError


@dataclass(frozen=True)
class Node:
    """One node of the cluster.

    Attributes:
        gpus: GPUs that Ray counts there.
        object_store_bytes: size of its object store.
        memory_bytes: memory beside that, as Ray counts it; 0 where nobody says.
        drains_by_unix_s: until when it may still be used, where it is to leave; infinite if nobody said.
    """

    node_id: str
    hostname: str
    address: str
    cpus: int
    gpus: int
    object_store_bytes: int
    memory_bytes: int = 0
    drains_by_unix_s: float | None = None

    @property
    def draining(self) -> bool:
        """Whether it is to leave: Ray places nothing new there."""
        return self.drains_by_unix_s is not None

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


def read_nodes() -> list[Node]:
    """The living nodes of the cluster that this process is connected to."""
    draining: dict[str, int] = state.get_draining_nodes()  # ray.nodes() doesn't tell, and has no other source
    return [
        Node(
            node_id=n["NodeID"],
            hostname=n["NodeManagerHostname"],
            address=n["NodeManagerAddress"],
            cpus=int(n["Resources"].get("CPU", 0)),
            gpus=int(n["Resources"].get("GPU", 0)),
            object_store_bytes=int(n["Resources"].get("object_store_memory", 0)),
            memory_bytes=int(n["Resources"].get("memory", 0)),
            drains_by_unix_s=_deadline(draining.get(n["NodeID"])),
        )
        for n in ray.nodes()
        if n["Alive"]
    ]


def _deadline(unix_ms: int | None) -> float | None:
    """Ray says 0 for a node that drains without a deadline."""
    return None if unix_ms is None else unix_ms / 1000 if unix_ms else math.inf


def describe(nodes: Sequence[Node]) -> str:
    """One line that says what the cluster has."""
    return ", ".join(f"{n}: {n.gpus} GPUs, {n.cpus} CPUs" for n in nodes) or "no node that can be used"


def gpus_per_engine(asked: int | str, nodes: Sequence[Node]) -> int:
    """Resolves ``auto``: 1 where any node has a GPU, else 0, the CPU."""
    if asked == "auto":
        return 1 if any(n.gpus for n in nodes) else 0
    return int(asked)


def place_engines(nodes: Sequence[Node], gpus: int, count: int | str, taken: Sequence[str] = ()) -> list[str]:
    """Node ids for engines, one entry an engine; as `free_places`, but all that are asked for.

    Raises:
        ResourceError: no engine fits anywhere, or fewer than ``count`` do; says what the cluster has.
    """
    places = free_places(nodes, gpus, count, taken)
    alive = _alive(nodes, taken)
    wanted = 1 if count == "auto" else int(count)
    if len(places) + len(alive) < wanted:
        what = f"{gpus} GPUs" if gpus else "a CPU"
        raise ResourceError(
            f"engines: {wanted} asked for with {what} each, {len(places) + len(alive)} fit. The cluster has "
            f"{describe(nodes)}. Lower engine.count or engine.gpus (0 runs on the CPU), add nodes, or let the run "
            "wait for them (engine.wait_for_nodes_s)."
        )
    return places


def free_places(nodes: Sequence[Node], gpus: int, count: int | str, taken: Sequence[str] = ()) -> list[str]:
    """Node ids for further engines, one entry an engine; nodes with the most room first.

    Args:
        nodes: living nodes; those that drain get nothing.
        gpus: GPUs of one engine; 0 means one engine a node, on its CPUs.
        count: engines in all, or ``auto`` for as many as fit.
        taken: node ids of engines that run already; they use up room and count.

    Returns:
        As many as are missing and fit; empty when there are enough.
    """
    room = {n.node_id: (n.gpus // gpus if gpus else int(n.cpus > 0)) for n in nodes if not n.draining}
    alive = _alive(nodes, taken)
    for node_id, used in Counter(alive).items():
        if node_id in room:
            room[node_id] = max(0, room[node_id] - used)
    fits = sum(room.values())
    wanted = fits if count == "auto" else min(fits, max(0, int(count) - len(alive)))
    places: list[str] = []
    while len(places) < wanted:
        best = max(room, key=lambda n: room[n])
        places.append(best)
        room[best] -= 1
    return places


def _alive(nodes: Sequence[Node], taken: Sequence[str]) -> list[str]:
    ids = {n.node_id for n in nodes}
    return [node_id for node_id in taken if node_id in ids]


def missing_writers(wanted: Collection[str], present: Sequence[str], per_node: int) -> list[str]:
    """Node ids for further writers, one entry a writer.

    Args:
        wanted: nodes that need writers.
        present: node ids of the writers that there are.
        per_node: writers on each of ``wanted``.
    """
    have = Counter(present)
    return [node_id for node_id in dict.fromkeys(wanted) for _ in range(per_node - have[node_id])]
