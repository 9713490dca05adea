"""Reading states of a shard whose inner chunks are compressed: the index first, then the chunks' ranges."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from storage.codecs import Bytes, decode_chunk
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import MISSING, Layout, hidden_key

MERGE_GAP_BYTES = 256 << 10
"""Chunks that are so near to each other are read together."""

KEEP_INDEX_BYTES = 32 << 20
"""Of indices that an open dump remembers: those of a thousand shards of four states and the default size."""

Entries = npt.NDArray[np.uint64]
"""(offset, length) of inner chunks, [slots, K, 2]."""


def read_index(store: Store, layout: Layout, shard: int) -> Entries:
    """The index of a committed shard, checked against its checksum.

    Returns:
        [slots of the shard, K, (offset, length)], `MISSING` for chunks that aren't there.

    Raises:
        FileNotFoundError: there is no such shard.
        CorruptDump: the index is damaged.
        StorageError: it can't be read.
    """
    key = hidden_key(shard)
    size = store.size(key)
    if size is None:
        raise FileNotFoundError(store.where(key))
    if size < layout.index_bytes:
        raise CorruptDump(f"{store.where(key)} has {size} bytes, less than its index of {layout.index_bytes}")
    footer = store.read_range(key, size - layout.index_bytes, layout.index_bytes)
    if struct.unpack("<I", footer[-4:])[0] != google_crc32c.value(footer[:-4]):
        raise CorruptDump(f"the index of {store.where(key)} is damaged; restore the object from a copy")
    return np.frombuffer(footer[:-4], "<u8").reshape(layout.shard_slots, layout.num_states, 2)


class IndexCache:
    """The indices of the shards that were read lately: a shard never changes. Picklable, safe under threads.

    Args:
        store: the dump.
        layout: its geometry.
        keep_bytes: memory that they may take; one is always kept.
    """

    def __init__(self, store: Store, layout: Layout, keep_bytes: int = KEEP_INDEX_BYTES) -> None:
        self._store, self._layout = store, layout
        self._keep = max(keep_bytes // layout.index_bytes, 1)
        self._shards: OrderedDict[int, Entries] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": OrderedDict()}

    def of(self, shard: int) -> Entries:
        """The index of a shard; returns and raises as `read_index`."""
        found = self._shards.get(shard)
        if found is None:
            found = self._shards[shard] = read_index(self._store, self._layout, shard)
            while len(self._shards) > self._keep:
                self._shards.popitem(last=False)
        return found


def read_states(store: Store, layout: Layout, shard: int, entries: Entries, out: Bytes) -> None:
    """Reads and decodes chunks, with one request for those that are near to each other.

    Args:
        store: the dump.
        layout: its geometry.
        shard: the shard that holds them.
        entries: their places, [..., 2].
        out: their bytes one after another, in the order of ``entries``.

    Raises:
        CorruptDump: a chunk is missing or damaged.
        StorageError: the shard can't be read.
    """
    flat = entries.reshape(-1, 2)
    chunks = out.reshape(len(flat), layout.chunk_bytes)
    if np.any(flat == MISSING):
        raise CorruptDump(f"{store.where(hidden_key(shard))} lacks chunks that its manifest lists")
    order = np.argsort(flat[:, 0], kind="stable")
    for group in _groups(flat, order):
        start = int(flat[group[0], 0])
        end = int(flat[group[-1]].sum())
        data = np.empty(end - start, np.uint8)
        store.read_range_into(hidden_key(shard), start, data.data)
        for at in group:
            offset, length = int(flat[at, 0]) - start, int(flat[at, 1])
            try:
                decode_chunk(layout.codec, layout.itemsize, data[offset : offset + length], chunks[at])
            except ValueError as exc:
                where = store.where(hidden_key(shard))
                raise CorruptDump(f"{where}, chunk at byte {start + offset}: {exc}") from exc


def _groups(flat: Entries, order: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Splits chunks in the order of their bytes wherever the gap before one is large."""
    ends = flat[order].sum(axis=1)
    gaps = flat[order[1:], 0].astype(np.int64) - ends[:-1].astype(np.int64)
    return np.split(order, np.flatnonzero(gaps > MERGE_GAP_BYTES) + 1)
