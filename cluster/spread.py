"""Runs picklable work items: over a Ray cluster where one is named, else in threads of this process.

The items of `storage.verify` read and hash, which releases the interpreter lock, so threads keep a disk busy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import ray

from cluster.session import connect

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(work: Callable[[Item], Result], items: Sequence[Item], address: str | None) -> Iterator[Result]:
    """Results as they come, in no order.

    Args:
        work: a module-level function.
        items: its arguments.
        address: of a Ray cluster; None and no RAY_ADDRESS works in this process.
    """
    if address or os.environ.get("RAY_ADDRESS"):
        with connect(address, None):
            task = ray.remote(work)
            waiting = [task.options(name=work.__name__).remote(item) for item in items]
            while waiting:
                done, waiting = ray.wait(waiting)
                yield ray.get(done[0])
        return
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()
