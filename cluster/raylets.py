"""A cluster of several nodes on this machine, to rehearse on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ray.cluster_utils import Cluster

from storage.errors import ResourceError

_SMALLEST_STORE_BYTES = 80 << 20
_LARGEST_STORE_BYTES = 2 << 30
_SHM_SHARE = 0.5


@contextlib.contextmanager
def local_raylets(nodes: int) -> Iterator[str]:
    """Starts that many nodes with one CPU each, and gives the cluster's address.

    Raises:
        ResourceError: /dev/shm has no room for their object stores.
    """
    stat = os.statvfs("/dev/shm")
    free_bytes = stat.f_bavail * stat.f_frsize
    store_bytes = min(_LARGEST_STORE_BYTES, int(_SHM_SHARE * free_bytes / nodes))
    if store_bytes < _SMALLEST_STORE_BYTES:
        raise ResourceError(
            f"/dev/shm has {free_bytes / 2**20:.0f} MiB free, {nodes} nodes need "
            f"{nodes * _SMALLEST_STORE_BYTES / _SHM_SHARE / 2**20:.0f} MiB: take fewer --nodes, or enlarge it"
        )
    node = {"num_cpus": 1, "object_store_memory": store_bytes}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
