"""What the manifests commit, as columns: a million samples take some tens of megabytes here, not gigabytes.

`storage.manifest` reads one shard's manifest into objects; whoever needs all of them needs this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.files import Store
from storage.layout import manifest_key
from storage.manifest import READ_THREADS, Manifest, committed_shards, parse_manifest

PLACES = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("kept", pa.int32(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("first_slot", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
    ]
)
"""One row a copy of a sample, with the names and meanings of `ManifestSample`."""


def manifest_places(manifest: Manifest) -> pa.Table:
    """The `PLACES` of one shard's samples."""
    samples = manifest.samples
    return pa.table(
        {
            "row": [s.row for s in samples],
            "sample_id": [s.sample_id for s in samples],
            "tokens": [s.tokens for s in samples],
            "kept": [s.kept for s in samples],
            "shard": np.full(len(samples), manifest.shard, np.int32),
            "first_slot": [s.first_slot for s in samples],
            "offset": [s.offset for s in samples],
        },
        schema=PLACES,
    )


def read_places(store: Store, known: Collection[int] = ()) -> pa.Table:
    """The `PLACES` of every copy that a manifest names, in the order of the shards.

    Args:
        store: the dump.
        known: shards whose manifests are left out.

    Raises:
        CorruptDump: a manifest isn't readable.
        StorageError: the dump can't be read.
    """
    shards = [shard for shard in committed_shards(store) if shard not in known]
    blocks = []
    with ThreadPoolExecutor(READ_THREADS) as pool:
        # Bytes are read in parallel, block by block; what is parsed is ten times as large, so it is one shard's
        # at a time.
        for start in range(0, len(shards), READ_THREADS):
            block = shards[start : start + READ_THREADS]
            read = zip(block, pool.map(lambda n: store.read(manifest_key(n)), block), strict=True)
            blocks.append(concat(manifest_places(parse_manifest(data, store, n)) for n, data in read))
    blocks.reverse()
    places = concat(blocks.pop() for _ in range(len(blocks)))  # so that nobody else holds what is freed there
    pa.default_memory_pool().release_unused()  # the blocks', half as much again, which nobody needs soon
    return places


def concat(places: Iterable[pa.Table]) -> pa.Table:
    """Several tables of `PLACES`, perhaps none, as one."""
    pieces = pa.concat_tables([PLACES.empty_table(), *places])
    columns = []
    for name in PLACES.names:  # column by column, each freed at once: the whole is never held twice
        columns.append(pieces[name].combine_chunks())
        pieces = pieces.drop_columns(name)
    return pa.table(columns, schema=PLACES)


def counting(places: pa.Table) -> pa.Table:
    """Of several copies of a row the one in the lowest shard, in the order of the rows."""
    return places.take(counting_order(places))


def counting_order(places: pa.Table) -> npt.NDArray[np.int64]:
    """Which rows of ``places`` `counting` takes, in its order."""
    row, shard = places["row"].to_numpy(), places["shard"].to_numpy()
    order = np.lexsort((shard, row))
    first = np.ones(order.size, np.bool_)
    first[1:] = row[order][1:] != row[order][:-1]
    counted: npt.NDArray[np.int64] = order[first]
    return counted
