"""What the settings of the local sink are worth, what syncs cost, and how fast it is where the file system offers less.

    python tests/bench/bench_sinks.py [--rounds 7] [--mib 1024] [--hidden 7168] [--dir FOLDER] [--variants NAME ...]

Each variant writes the same dump between two writes as they are shipped; ``x shipped`` is the median over the rounds of
its speed over that of its neighbours. ``--dir /dev/shm/bench`` measures tmpfs.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bench_storage import Write, make_samples, measure
from on_disk import machine, options

from storage.claims import claim_next
from storage.layout import Layout

LATE_S = 0.1
"""An object store's answer."""


def shared_memory(length: int) -> Any:
    """A buffer as `mmap.mmap` makes it by default, without huge pages."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


def nothing(*args: Any) -> None:
    """Instead of pacing or allocating."""


def sync_large(fd: int, sync: Callable[[int], None] = os.fsync) -> None:
    """Makes a shard's states durable, and nothing small."""
    if os.fstat(fd).st_size > 1 << 20:
        sync(fd)


def refused(*args: Any) -> None:
    """Instead of opening for direct writes."""


def answered_late(*args: Any) -> int:
    """A claim as an object store gives it."""
    time.sleep(LATE_S)
    return claim_next(*args)


WAITED_FOR = {"shard.ShardWriter._nearly_full": lambda writer, shard: False}
Patches = Mapping[str, Any]
"""Name below the package ``storage`` -> what is there instead."""
VARIANTS: Mapping[str, Patches] = {
    "shipped": {},
    "3 buffers": {"sinks.BUFFERS": 3},
    "7 buffers, 3 writes at a time": {"sinks.BUFFERS": 7, "sinks.DEPTH": 3},
    "9 buffers, 4 writes at a time": {"sinks.BUFFERS": 9, "sinks.DEPTH": 4},
    "6 buffers of 2 MiB": {"sinks.BUFFER_BYTES": 2 << 20, "sinks.BUFFERS": 6},
    "5 buffers of 8 MiB": {"sinks.BUFFER_BYTES": 8 << 20},
    "one write at a time": {"sinks.DEPTH": 1},
    "claims are waited for": WAITED_FOR,
    "claims answered after 0.1 s": {"claims.claim_next": answered_late},
    "claims answered after 0.1 s, waited for": {"claims.claim_next": answered_late, **WAITED_FOR},
    "nothing allocated ahead": {"sinks.has_block_device": lambda fd: False},
    "only states are synced": {"localdisk.fsync_dir": nothing, "localdisk.os.fsync": sync_large},
    "no huge pages": {"sinks.aligned_memory": shared_memory},
    "no O_DIRECT": {"sinks.open_direct": refused},
    "no O_DIRECT, not paced": {
        "sinks.open_direct": refused,
        "sinks.start_writeback": nothing,
        "sinks.finish_writeback": nothing,
    },
}


def run(write: Callable[[], Write], patches: Patches) -> Write:
    """One write with other settings."""
    with ExitStack() as stack:
        for name, value in {"sinks._idle_buffers": [], **patches}.items():
            stack.enter_context(mock.patch(f"storage.{name}", value))
        return write()


def main() -> None:
    """Runs the bench."""
    parser = options(__doc__, rounds=7, mib=1024, mib_help="states in one write, MiB")
    parser.add_argument("--hidden", type=int, default=7168, help="H")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    layout = Layout(states=(2, 16, 29, "final"), hidden_size=args.hidden)
    samples = make_samples(args.hidden, args.mib << 20)
    print(f"{machine()}; {args.rounds} rounds; H = {args.hidden}, {args.mib} MiB")
    ratios: dict[str, list[float]] = {name: [] for name in args.variants}
    writes: dict[str, list[Write]] = {name: [] for name in args.variants}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:

        def write() -> Write:
            return measure("hsdump-hashed", Path(folder) / "dump", layout, samples)

        before = run(write, {})
        turns = args.rounds * args.variants
        random.Random(0).shuffle(turns)
        for name in turns:
            found = run(write, VARIANTS[name])
            before, after = run(write, {}), before
            writes[name].append(found)
            ratios[name].append((before.wall_s + after.wall_s) / 2 / found.wall_s)
    print(f"{'variant':<40} {'MB/s':>6} {'x shipped':>9} {'CPU s/GB':>9}")
    for name, found in writes.items():
        speed = statistics.median(w.mb_per_s for w in found)
        spent = statistics.median(w.cpu_s / (w.bytes / 1e9) for w in found)
        print(f"{name:<40} {speed:>6.0f} {statistics.median(ratios[name]):>9.2f} {spent:>9.2f}")


if __name__ == "__main__":
    main()
