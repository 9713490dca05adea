"""Runs picklable work items: over a Ray cluster where one is named, else in threads of this process.

The items of `storage.verify` read and hash, which releases the interpreter lock, so threads keep a disk busy.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import TypeVar

import ray
from ray.exceptions import RayTaskError

from cluster.session import connect
from storage.errors import HsdumpError, OutputError

Item = TypeVar("Item")
Result = TypeVar("Result")

TASKS_AT_A_TIME = 1000
"""Handed to Ray; the next ones follow as these end."""


def spread(work: Callable[[Item], Result], items: Sequence[Item], address: str | None) -> Iterator[Result]:
    """Results as they come, in no order.

    Args:
        work: a module-level function.
        items: its arguments.
        address: of a Ray cluster; None and no RAY_ADDRESS works in this process.

    Raises:
        HsdumpError: what ``work`` raised, wherever it ran.
    """
    if address or os.environ.get("RAY_ADDRESS"):
        with connect(address, None):
            yield from _as_tasks(work, items)
        return
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()


def _as_tasks(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    # Over all nodes: each reads from its own disk or through its own network card.
    task = ray.remote(_on_a_node).options(name=work.__name__, scheduling_strategy="SPREAD")
    coming = iter(items)
    waiting = [task.remote(work, item) for item in islice(coming, TASKS_AT_A_TIME)]
    while waiting:
        (done, *_), waiting = ray.wait(waiting)
        waiting += [task.remote(work, item) for item in islice(coming, 1)]
        try:
            yield ray.get(done)
        except RayTaskError as error:
            if isinstance(error.cause, HsdumpError):
                raise error.cause from None
            raise


def _on_a_node(work: Callable[[Item], Result], item: Item) -> Result:
    try:
        return work(item)
    except OutputError as error:
        raise OutputError(
            f"on node {socket.gethostname()}: {error}. Every node of the cluster must see the dump under this path; "
            "leave --address and RAY_ADDRESS out to work on this machine alone"
        ) from None
