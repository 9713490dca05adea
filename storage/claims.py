"""Who may write which shard: a shard number has one owner for ever, decided by a put-if-absent.

A number is claimed before the first byte of its shard and never reused, so that a writer that was given up
and wakes up late meets its own numbers only. Dead claims cost a small file each.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from storage.errors import AlreadyExists
from storage.files import Store
from storage.layout import claim_key


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


def first_free(store: Store) -> int:
    """The number after the largest that was ever claimed or committed."""
    names = [PurePosixPath(key).stem for folder in ("claims", "manifest") for key, _ in store.list(folder)]
    return max((int(name) for name in names if name.isdecimal()), default=-1) + 1


def holds(store: Store, shard: int, run_id: str, writer: str) -> bool:
    """Whether ``shard`` is still claimed by this writer of this run; removing a claim ends its lease."""
    try:
        claim = json.loads(store.read(claim_key(shard)))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(claim, dict) and (claim.get("run_id"), claim.get("writer")) == (run_id, writer)
