"""This machine as a node of the cluster that `collect` would start on it, without starting one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import psutil

from actors.capture.engine import gpus_visible
from cluster.placement import Node

_STORE_SHARE = 0.3
_STORE_MOST_BYTES = 200 * 10**9
_SHM_SHARE = 0.95
"""How Ray sizes an object store that nobody gave a size: of the free memory, at most, and of /dev/shm (see
DEFAULT_OBJECT_STORE_MEMORY_PROPORTION in its ray_constants.py)."""


def this_machine(object_store_bytes: int | None) -> Node:
    """The node that a local cluster would have.

    Args:
        object_store_bytes: of the run file; None is Ray's default.
    """
    available = psutil.virtual_memory().available
    shared = shutil.disk_usage("/dev/shm").total
    default = min(_STORE_SHARE * available, _STORE_MOST_BYTES, _SHM_SHARE * shared)
    store = object_store_bytes or int(default)
    return Node(
        node_id="this machine",
        hostname=socket.gethostname(),
        address="127.0.0.1",
        cpus=os.cpu_count() or 1,
        gpus=gpus_visible(),
        object_store_bytes=store,
        memory_bytes=max(0, available - store),
    )


def gpu_bytes() -> int | None:
    """Memory of this machine's smallest GPU; None where there is none."""
    if not gpus_visible():
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return min(int(line) for line in answer.stdout.split()) << 20
