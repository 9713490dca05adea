"""Seals shards in a thread of its own, so that the next one is written meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from storage.open_shard import OpenShard


@dataclass(frozen=True)
class SealedInfo:
    """A shard that was committed.

    Attributes:
        shard: its number.
        rows: prepared rows in it.
        stored_bytes: bytes of its objects.
    """

    shard: int
    rows: tuple[int, ...]
    stored_bytes: int


class Sealer:
    """One seal at a time: a second one waits for the first, which bounds memory and open files.

    A disk that seals (fsync, link, manifest) takes no states for some 10 ms; written to at the same time by
    the next shard's threads it does. Not thread-safe itself: one thread calls it.

    Args:
        seal: commits one shard; runs in the thread.
    """

    def __init__(self, seal: Callable[[OpenShard], SealedInfo]) -> None:
        self._seal = seal
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[SealedInfo] | None = None
        self._sealed: list[SealedInfo] = []
        self._errors: list[BaseException] = []

    def start(self, shard: OpenShard) -> None:
        """Begins to seal a whole shard, which belongs to the thread from now on."""
        self._wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._under_way = self._pool.submit(self._seal, shard)

    def take(self) -> list[SealedInfo]:
        """Shards that were committed since the last call."""
        self._collect()
        sealed, self._sealed = self._sealed, []
        return sealed

    def check(self) -> None:
        """Raises the error of a seal that has failed since the last call; waits for none."""
        self._collect()
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]

    def settle(self) -> None:
        """Waits for the seal that is under way, then as `check`."""
        self._wait()
        self.check()

    def _wait(self) -> None:
        if self._under_way is not None:
            wait([self._under_way])
            self._collect()

    def _collect(self) -> None:
        if self._under_way is None or not self._under_way.done():
            return
        error = self._under_way.exception()
        if error is not None:
            self._errors.append(error)
        else:
            self._sealed.append(self._under_way.result())
        self._under_way = None
