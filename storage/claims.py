"""Who may write which shard: a shard number has one owner for ever, decided by a put-if-absent.

A number is claimed before the first byte of its shard and never reused, so that a writer that was given up
and wakes up late meets its own numbers only. Dead claims cost a small file each; removing one is never right once its
shard was opened, because its number could be given out again while its old owner still writes.

A writer is given up by revoking its claims: whoever takes over puts an empty manifest in each shard that it
hasn't committed. Manifests are put if absent, so either the old owner's is there, and its samples are
committed, or the empty one, and the old owner can never commit that shard, whenever it wakes up.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from storage.errors import AlreadyExists, StorageError
from storage.files import Store
from storage.layout import Layout, claim_key, manifest_key
from storage.manifest import Manifest


@dataclass(frozen=True)
class Claim:
    """Who owns a shard's number.

    Attributes:
        shard: the number.
        run_id: the owner's run.
        writer: its name, unique in the run.
    """

    shard: int
    run_id: str
    writer: str


def claim_next(store: Store, run_id: str, writer: str, first: int) -> int:
    """Claims the lowest free shard number from ``first`` upwards and returns it.

    Args:
        store: the dump.
        run_id: the run that the writer belongs to.
        writer: the writer's name, unique in the run.
        first: where to start; `first_free` of a moment ago saves requests.

    Raises:
        StorageError: the claim can't be written.
    """
    shard = first
    while True:
        claim = {"shard": shard, "run_id": run_id, "writer": writer}
        try:
            store.put_if_absent(claim_key(shard), json.dumps(claim).encode())
        except AlreadyExists:
            shard += 1
        else:
            return shard


class ClaimAhead:
    """A writer's numbers, each claimed in a thread while the shard before it is still being filled.

    A claim is two syncs of a disk that others use as well, or a request to an object store, and a writer that waits
    for it writes nothing. Not thread-safe itself: one thread calls it.

    Args:
        store: the dump.
        run_id: the run that the writer belongs to.
        writer: the writer's name, unique in the run.
    """

    def __init__(self, store: Store, run_id: str, writer: str) -> None:
        self._store, self._run_id, self._writer = store, run_id, writer
        self._first: int | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="claim")
        self._coming: Future[int] | None = None

    def start(self) -> None:
        """Begins to claim a number, unless one waits to be taken."""
        if self._coming is None:
            self._coming = self._pool.submit(self._claim)

    def take(self) -> int:
        """A claimed number, waiting for it if need be.

        Raises:
            StorageError: the claim couldn't be written; another call tries again.
        """
        self.start()
        coming, self._coming = self._coming, None
        assert coming is not None
        return coming.result()

    def release(self) -> None:
        """Gives back a number that waits to be taken; on an object store, or where that fails, it stays claimed.

        An object store may carry a removal out so late that it meets the next owner's claim, and lets uploads of two
        owners replace each other. On a local disk an object is never replaced.
        """
        coming, self._coming = self._coming, None
        if coming is None or self._store.local_root is None:
            return
        with contextlib.suppress(StorageError):
            self._first = coming.result()
            self._store.delete(claim_key(self._first))

    def _claim(self) -> int:
        first = first_free(self._store) if self._first is None else self._first
        number = claim_next(self._store, self._run_id, self._writer, first)
        self._first = number + 1
        return number


def claimed_shards(store: Store) -> list[int]:
    """Numbers that have a claim, ascending."""
    return sorted(_numbers(store, "claims"))


def first_free(store: Store) -> int:
    """The number after the largest that was ever claimed or committed."""
    return max(_numbers(store, "claims") | _numbers(store, "manifest"), default=-1) + 1


def holds(store: Store, shard: int, run_id: str, writer: str) -> bool:
    """Whether ``shard`` is claimed by this writer of this run, and it may still commit it.

    The answer may be old when it is used; what decides is that the manifest is put if absent.
    """
    owner = _read_claim(store, shard)
    return owner == Claim(shard, run_id, writer) and not store.exists(manifest_key(shard))


def revoke(store: Store, layout: Layout, run_id: str, gone: Callable[[Claim], bool]) -> tuple[int, ...]:
    """Ends the leases of writers that were given up: none of them can commit a shard any more.

    What they committed before stays; read the manifests after this call, not before it.

    Args:
        store: the dump.
        layout: its geometry.
        run_id: the run that revokes, for the record.
        gone: says whose claims to revoke; claims of committed shards aren't asked about.

    Returns:
        The shards that will stay empty.

    Raises:
        StorageError: the storage failed; some claims may not be revoked.
    """
    revoked = []
    for shard in sorted(_numbers(store, "claims") - _numbers(store, "manifest")):
        claim = _read_claim(store, shard)
        if claim is not None and not gone(claim):
            continue
        empty = Manifest(shard, run_id, "", layout, (), ())
        try:
            store.put_if_absent(manifest_key(shard), empty.to_bytes())
        except AlreadyExists:
            continue  # its owner was faster: the shard is committed
        revoked.append(shard)
    return tuple(revoked)


def _numbers(store: Store, folder: str) -> set[int]:
    names = (PurePosixPath(key).stem for key, _ in store.list(folder))
    return {int(name) for name in names if name.isdecimal()}


def _read_claim(store: Store, shard: int) -> Claim | None:
    """The claim, None when it is missing or unreadable, so that nobody holds it."""
    try:
        data = json.loads(store.read(claim_key(shard)))
        return Claim(shard, str(data["run_id"]), str(data["writer"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
