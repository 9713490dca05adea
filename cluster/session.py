"""The Ray cluster that a command runs on: one that is there, or a local one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray

from storage.errors import ConfigError, ResourceError

NAMESPACE = "hsdump-"
"""Start of the Ray namespace of a run's actors; its run id follows."""
_SHM_MIN_BYTES = 512 << 20
_REACH_S = 10.0
_DASHBOARD = Path(ray.__file__).parent / "dashboard/client/build"
"""The dashboard's pages; an installation may come without them, and then Ray doesn't start with the dashboard."""


@dataclass(frozen=True)
class Session:
    """A connection to a cluster.

    Attributes:
        own: started by this command, and gone with it.
        dashboard_url: where the Ray dashboard is, if it runs.
        log_dir: folder for the engines' full logs, on each node.
    """

    own: bool
    dashboard_url: str | None
    log_dir: Path


@contextlib.contextmanager
def connect(
    address: str | None, object_store_bytes: int | None, namespace: str | None = None
) -> Iterator[Session]:
    """Connects to a cluster for as long as the context lasts.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, or starts a local one.
        object_store_bytes: object store of a local one; None is Ray's default.
        namespace: of the actors' names; None is one of its own that nobody knows.

    Raises:
        ConfigError: the address is of a Ray client server.
        ResourceError: no cluster at the address, or a local one doesn't start.
    """
    where = address or os.environ.get("RAY_ADDRESS")
    # That token authentication is on is in docs/security.md; a warning at every start is noise.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if where:
        _require_reachable(where)
    else:
        _require_shared_memory(object_store_bytes)
    try:
        if where:
            context = ray.init(
                address=where, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING
            )
        else:
            context = ray.init(
                address="local",
                namespace=namespace,
                object_store_memory=object_store_bytes,
                dashboard_host="127.0.0.1",
                include_dashboard=_DASHBOARD.exists(),
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except Exception as error:  # Ray raises bare Exceptions when its processes don't come up
        what = f"no Ray cluster answers at {where}" if where else "a local Ray cluster doesn't start"
        said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # To Ray, a cluster that asks for a token is one that doesn't answer.
        raise ResourceError(
            f"{what}: {said[-1].strip()}. Start one with `ray start --head`, set RAY_AUTH_MODE=token if it asks for a "
            "token, or leave --address out"
        ) from error
    try:
        url = context.dashboard_url
        session_dir = Path(context.address_info["session_dir"])
        yield Session(
            own=not where,
            dashboard_url=f"http://{url}" if url else None,
            log_dir=session_dir / "logs" / "hsdump",
        )
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Ray itself would try for minutes, and end the process."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address}: a run can't be driven through Ray Client; submit it to the cluster with "
            "`ray job submit -- python -m cluster collect RUN.yaml`"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # `auto`, which Ray looks up itself
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: {error}. Check the address (the head's GCS port, 6379 unless "
            "changed), or leave --address and RAY_ADDRESS out to start a local cluster"
        ) from error


def _require_shared_memory(object_store_bytes: int | None) -> None:
    """Ray would fall back to disk without a word when /dev/shm can't hold the object store."""
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    need = object_store_bytes or _SHM_MIN_BYTES
    if free < need:
        raise ResourceError(
            f"/dev/shm has {free / 2**20:.0f} MiB free, the object store needs {need / 2**20:.0f} MiB: enlarge it "
            "(docker run --shm-size=8g), or set limits.object_store_bytes lower"
        )
