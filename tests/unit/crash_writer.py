"""A writer process that dies on request; `test_crash_safety` starts it again and again.

    python crash_writer.py DUMP ROWS SEED CRASH_AT

It does what a resume does: repairs, asks the manifests what is missing, and writes that. Before its operation number
CRASH_AT on the storage (on local disks, the operating system's calls that change files) it kills itself, or after
-CRASH_AT milliseconds when that is negative; 0 never does, and ``before`` and ``after`` mean its first manifest.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from made_dumps import IDENTITY, LAYOUT, states_of

from storage.dump import finalise, grow, open_or_create
from storage.files import Store
from storage.manifest import committed_samples, read_manifests
from storage.repair import find_leftovers, remove_leftovers
from storage.shard import SampleHead, ShardWriter

REQUESTS = ("put_if_absent", "replace", "delete", "read", "list", "size", "object_sink")
OPERATIONS = ("pwrite", "fsync", "ftruncate", "link", "unlink", "replace", "mkdir", "open")


def tokens_of(row: int) -> int:
    return random.Random(row).randrange(1, LAYOUT.shard_rows)


def head_of(row: int) -> SampleHead:
    rng = np.random.default_rng(row)
    tokens = tokens_of(row)
    return SampleHead(
        row, f"sample {row}", rng.integers(0, 1000, tokens, "int32"), rng.integers(0, 2, tokens, "uint8")
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(operation: int, target: Any, names: Sequence[str]) -> None:
    """Counts calls of some functions and dies before the wanted one."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == operation:
                die()
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(target, name, counted(getattr(target, name)))


def die_at_a_manifest(moment: str) -> None:
    """Before it, every object of a shard is there and nothing says so; after it, the shard is committed."""
    real = Store.put_if_absent

    def put(store: Store, key: str, data: bytes) -> None:
        is_manifest = key.startswith("manifest/")
        if is_manifest and moment == "before":
            die()
        real(store, key, data)
        if is_manifest:
            die()

    Store.put_if_absent = put  # type: ignore[method-assign]


def main() -> None:
    url, rows, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    moment = sys.argv[4] if sys.argv[4] in ("before", "after") else None
    crash_at = 0 if moment else int(sys.argv[4])
    if crash_at < 0:
        timer = threading.Timer(-crash_at / 1000, die)
        timer.daemon = True
        timer.start()
    elif crash_at and "://" in url:
        die_at(crash_at, Store, REQUESTS)
    elif crash_at:
        die_at(crash_at, os, OPERATIONS)
    store, rng = Store(url), random.Random(seed)
    layout = open_or_create(store, IDENTITY, LAYOUT, {}).layout
    remove_leftovers(store, find_leftovers(store))
    if moment:
        die_at_a_manifest(moment)  # of a writer: the repair wrote some that release what was claimed
    grow(store, 1)
    committed = committed_samples(read_manifests(store))
    missing = [row for row in range(rows) if row not in committed]
    rng.shuffle(missing)
    # Two writers of one run: more than one shard is open at a time.
    writers = [
        ShardWriter(store, layout, f"run-{seed}", f"writer-{i}", LAYOUT.sample_bytes(90)) for i in range(2)
    ]
    for row in missing:
        writer = rng.choice(writers)
        states = states_of(layout, row, tokens_of(row))
        writer.place(head_of(row))
        step = LAYOUT.chunk_rows * 4
        for start in range(0, states.shape[1], step):
            writer.write(row, start, states[:, start : start + step].copy())
        writer.finish(row)
    for writer in writers:
        writer.seal_all()
    finalise(store, [])


if __name__ == "__main__":
    main()
