"""Removes what dead writers left behind, and nothing else.

Leftovers are temporary objects, and data objects of shards that no manifest commits. Nobody can tell from the
storage alone whether a writer is dead or only slow, so every claim that isn't committed is revoked first (see
`storage.claims`). A writer that is alive after all fails at its seal; whichever manifest came first counts. So
repair is safe at any time, and only wastes work while a run is writing: its open shards are collected again. A
resume is the dump's only owner and repairs before its writers start.

Claims stay, because a shard's number is never used again, and so does everything that isn't ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from storage.claims import claimed_shards, revoke
from storage.dump import read_header
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import ALL_TOKEN_COLUMNS, hidden_key, manifest_key, scales_key, token_key
from storage.localdisk import PUT_SUFFIX, SINK_SUFFIX, TEMPORARIES
from storage.manifest import READ_THREADS, Manifest, committed_shards, read_manifest

Sized = tuple[str, int]
"""An object's key and its bytes."""
REPAIRER = "repair"
"""Run's name in the manifests that revoke."""


@dataclass(frozen=True)
class Leftovers:
    """What a repair does.

    Attributes:
        open: shards that are claimed and not committed; their claims are revoked.
        data: data objects to be removed, by shard; each shard is revoked before.
        temporaries: temporary objects to be removed.
        unreadable: manifests that can't be read; their shards are left as they are.
    """

    open: tuple[int, ...]
    data: Mapping[int, tuple[Sized, ...]]
    temporaries: tuple[Sized, ...]
    unreadable: tuple[str, ...]

    @property
    def objects(self) -> list[Sized]:
        """All objects to be removed."""
        return [*self.temporaries, *(item for shard in self.data.values() for item in shard)]


def plan_repair(
    claimed: Collection[int],
    committed: Mapping[int, Manifest | None],
    data: Mapping[int, Sequence[Sized]],
    temporaries: Sequence[Sized],
) -> Leftovers:
    """Decides what is a leftover; pure.

    Args:
        claimed: shards that have a claim.
        committed: shards that have a manifest, with None for one that can't be read.
        data: shard -> its data objects, for shards that no readable manifest with samples commits.
        temporaries: what is in the folder of temporary objects.
    """
    unreadable = tuple(manifest_key(shard) for shard, manifest in committed.items() if manifest is None)
    keep = {shard for shard, manifest in committed.items() if manifest is None or manifest.samples}
    left = {shard: tuple(found) for shard, found in data.items() if found and shard not in keep}
    uncommitted = sorted(set(claimed) - set(committed))
    return Leftovers(tuple(uncommitted), left, tuple(t for t in temporaries if _is_ours(t[0])), unreadable)


def find_leftovers(store: Store) -> Leftovers:
    """Looks at a dump and changes nothing.

    Raises:
        OutputError: there is no dump.
        StorageError: it can't be read.
    """
    read_header(store)
    claimed, shards = claimed_shards(store), committed_shards(store)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        committed = dict(zip(shards, pool.map(lambda shard: _readable(store, shard), shards), strict=True))
        suspects = [n for n in claimed if n not in committed or _is_empty(committed[n])]
        data = dict(zip(suspects, pool.map(lambda shard: _data_objects(store, shard), suspects), strict=True))
    return plan_repair(claimed, committed, data, store.list(TEMPORARIES))


def remove_leftovers(store: Store, found: Leftovers) -> list[Sized]:
    """Revokes and removes; what was committed since `find_leftovers` stays.

    Returns:
        The objects that were removed.

    Raises:
        StorageError: writing or removing failed; what was done is done, and the rest is for the next repair.
    """
    revoke(store, read_header(store).layout, REPAIRER, lambda claim: True)
    gone = list(found.temporaries)
    for shard, objects in found.data.items():
        if _is_empty(_readable(store, shard)):
            gone += objects
    for key, _ in gone:
        store.delete(key)
    store.remove_sinks()  # and what can't be listed: unfinished uploads
    return gone


def _is_empty(manifest: Manifest | None) -> bool:
    return manifest is not None and not manifest.samples


def _is_ours(key: str) -> bool:
    name = PurePosixPath(key)
    return name.suffix in (PUT_SUFFIX, SINK_SUFFIX) or name.name.startswith("probe-")


def _readable(store: Store, shard: int) -> Manifest | None:
    try:
        return read_manifest(store, shard)
    except CorruptDump:
        return None


def _data_objects(store: Store, shard: int) -> list[Sized]:
    keys = [hidden_key(shard), scales_key(shard), *(token_key(column, shard) for column in ALL_TOKEN_COLUMNS)]
    return [(key, size) for key in keys if (size := store.size(key)) is not None]
