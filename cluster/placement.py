"""Which node gets an engine: arithmetic over what the cluster has. Pure but for `read_nodes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from storage.errors import ResourceError


@dataclass(frozen=True)
class Node:
    """One node of the cluster.

    Attributes:
        gpus: GPUs that Ray counts there.
        object_store_bytes: size of its object store.
        memory_bytes: memory beside that, as Ray counts it; 0 where nobody says.
    """

    node_id: str
    hostname: str
    address: str
    cpus: int
    gpus: int
    object_store_bytes: int
    memory_bytes: int = 0


def read_nodes() -> list[Node]:
    """The living nodes of the cluster that this process is connected to."""
    return [
        Node(
            node_id=n["NodeID"],
            hostname=n["NodeManagerHostname"],
            address=n["NodeManagerAddress"],
            cpus=int(n["Resources"].get("CPU", 0)),
            gpus=int(n["Resources"].get("GPU", 0)),
            object_store_bytes=int(n["Resources"].get("object_store_memory", 0)),
            memory_bytes=int(n["Resources"].get("memory", 0)),
        )
        for n in ray.nodes()
        if n["Alive"]
    ]


def describe(nodes: Sequence[Node]) -> str:
    """One line that says what the cluster has."""
    return ", ".join(f"{n.hostname} ({n.address}): {n.gpus} GPUs, {n.cpus} CPUs" for n in nodes)


def gpus_per_engine(asked: int | str, nodes: Sequence[Node]) -> int:
    """Resolves ``auto``: 1 where any node has a GPU, else 0, the CPU."""
    if asked == "auto":
        return 1 if any(n.gpus for n in nodes) else 0
    return int(asked)


def place_engines(nodes: Sequence[Node], gpus: int, count: int | str, taken: Sequence[str] = ()) -> list[str]:
    """Node ids for engines, one entry an engine; nodes with the most room first.

    Args:
        nodes: living nodes.
        gpus: GPUs of one engine; 0 means one engine a node, on its CPUs.
        count: engines in all, or ``auto`` for as many as fit.
        taken: node ids of engines that run already; they use up room and count.

    Returns:
        Node ids for further engines; empty when there are enough.

    Raises:
        ResourceError: no engine fits anywhere, or fewer than ``count`` do; says what the cluster has.
    """
    room = {n.node_id: (n.gpus // gpus if gpus else int(n.cpus > 0)) for n in nodes}
    alive = [node_id for node_id in taken if node_id in room]
    for node_id, used in Counter(alive).items():
        room[node_id] = max(0, room[node_id] - used)
    fits = sum(room.values())
    wanted = fits if count == "auto" else max(0, int(count) - len(alive))
    if wanted > fits or (fits == 0 and not alive):
        what = f"{gpus} GPUs" if gpus else "a CPU"
        raise ResourceError(
            f"engines: {max(wanted, 1)} asked for with {what} each, {fits} fit. The cluster has {describe(nodes)}. "
            "Lower engine.count or engine.gpus (0 runs on the CPU), or add nodes."
        )
    places: list[str] = []
    while len(places) < wanted:
        best = max(room, key=lambda n: room[n])
        places.append(best)
        room[best] -= 1
    return places
