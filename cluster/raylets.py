"""A cluster of several nodes on this machine, to rehearse on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from ray.cluster_utils import Cluster

from actors.failures import one_line
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
    cluster = Cluster()
    try:
        try:
            cluster.add_node(include_dashboard=False, dashboard_port=_free_port(), **node)
            for _ in range(nodes - 1):
                cluster.add_node(**node)
        except Exception as error:  # Ray raises bare Exceptions when its processes don't come up
            raise ResourceError(
                f"{nodes} nodes don't start on this machine: {one_line(error)} Take fewer --nodes, or try again when "
                "it has less to do"
            ) from error
        yield cluster.address
    finally:
        cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
