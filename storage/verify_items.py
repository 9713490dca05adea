"""What a check of a dump is divided into: one picklable item a shard, of all samples or of some."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage.dump import read_header
from storage.errors import CorruptDump
from storage.files import Store
from storage.manifest import READ_THREADS, committed_shards, read_manifest


@dataclass(frozen=True)
class VerifyItem:
    """One shard to check.

    Attributes:
        dump_url: the dump.
        shard: number of a shard that has a manifest.
        rows: samples whose states are read; None for all.
        bytes: bytes of states to be read, padding included.
    """

    dump_url: str
    shard: int
    rows: frozenset[int] | None
    bytes: int


def work_items(store: Store, sample_fraction: float = 1.0, seed: int = 0) -> list[VerifyItem]:
    """One item for each committed shard, in the order of their numbers.

    Args:
        store: the dump.
        sample_fraction: share of the samples whose states are read, at least one; indices, token ids, masks and
            manifests are checked of all.
        seed: of the choice.

    Raises:
        OutputError: there is no dump.
        StorageError: it can't be read.
    """
    layout = read_header(store).layout
    shards = committed_shards(store)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        kept = dict(zip(shards, pool.map(lambda shard: _listed_rows(store, shard), shards), strict=True))
    places = [(shard, row) for shard in shards for row in kept[shard]]
    if sample_fraction < 1:
        count = min(max(math.ceil(sample_fraction * len(places)), 1), len(places))
        chosen = np.random.default_rng(seed).choice(len(places), count, replace=False)
        places = [places[i] for i in chosen.tolist()]
    rows: dict[int, set[int]] = {shard: set() for shard in shards}
    for shard, row in places:
        rows[shard].add(row)
    return [
        VerifyItem(
            store.url,
            shard,
            None if len(rows[shard]) == len(kept[shard]) else frozenset(rows[shard]),
            sum(layout.sample_bytes(kept[shard][row]) for row in rows[shard]),
        )
        for shard in shards
    ]


def _listed_rows(store: Store, shard: int) -> dict[int, int]:
    """Prepared row -> R; nothing for a manifest that can't be read, which `run_item` reports."""
    try:
        return {sample.row: sample.kept for sample in read_manifest(store, shard).samples}
    except (CorruptDump, FileNotFoundError):
        return {}
