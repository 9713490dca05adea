"""The writers that `bench_storage` puts beside each other. Each leaves its samples durable below a folder."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import tensorstore
import torch
import zarr

from storage.aligned import aligned_memory
from storage.dump import create_dump
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import SampleHead, ShardWriter
from storage.zarr_metadata import hidden_array_metadata

RAW_WRITE_BYTES = 8 << 20
RAW_DEPTH = 2
SHARD_BYTES = 1 << 30
GZIP_LEVEL = 6

States = np.ndarray[Any, Any]
"""One sample: uint16 [K, T, H], bits of bfloat16, as an engine's segments hold it."""
Writer = Callable[[Path, Layout, Sequence[States]], None]


def raw(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """As many bytes out of one buffer in huge pages with O_DIRECT, one file a shard: what the disk does.

    Two writes at a time into space that was allocated before, as that is the fastest way.
    """
    source = aligned_memory(RAW_WRITE_BYTES)
    source[:] = np.resize(samples[0].view(np.uint8).ravel(), RAW_WRITE_BYTES)
    _raw(folder, layout, samples, lambda at, count: source.data[:count])


def raw_copied(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """The same, each write of bytes that were copied into its buffer just before: the least that new data takes."""
    source = max(samples, key=lambda states: states.nbytes).view(np.uint8).ravel()
    pieces = max(source.size // RAW_WRITE_BYTES, 1)
    buffers = threading.local()

    def copied(at: int, count: int) -> memoryview:
        if not hasattr(buffers, "mine"):
            buffers.mine = aligned_memory(RAW_WRITE_BYTES)
        start = at // RAW_WRITE_BYTES % pieces * RAW_WRITE_BYTES
        given = source[start : start + count]
        np.copyto(buffers.mine[: given.size], given)
        return buffers.mine.data[:count]

    _raw(folder, layout, samples, copied)


def _raw(
    folder: Path, layout: Layout, samples: Sequence[States], piece: Callable[[int, int], memoryview]
) -> None:
    with ThreadPoolExecutor(RAW_DEPTH) as pool:
        for number, shard in enumerate(_shards(layout, samples)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
            fd = os.open(folder / f"{number}", flags, 0o644)
            size = sum(layout.sample_bytes(s.shape[1]) for s in shard)
            os.posix_fallocate(fd, 0, size)

            def write(at: int, fd: int = fd, size: int = size) -> None:
                os.pwrite(fd, piece(at, min(RAW_WRITE_BYTES, size - at)), at)

            list(pool.map(write, range(0, size, RAW_WRITE_BYTES)))
            os.fsync(fd)
            os.close(fd)
    _fsync(folder)


def prepare(folder: Path, layout: Layout) -> None:
    """Makes an empty dump, which happens once and not once a shard."""
    folder.mkdir()
    create_dump(Store(str(folder)), Identity({}, {}, {}, {}), layout, {})


def hsdump_hashed(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """The product: claims, shards, token columns, manifests."""
    writer = ShardWriter(Store(str(folder)), layout, "bench", "writer-0", SHARD_BYTES)
    for row, states in enumerate(samples):
        tokens = states.shape[1]
        writer.place(SampleHead(row, str(row), np.zeros(tokens, np.int32), np.ones(tokens, np.uint8)))
        writer.write(row, 0, states)
        writer.finish(row)
    writer.seal_all()


def hsdump(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """The product with its hashing of states switched off, which only this bench can do."""
    with mock.patch("storage.open_shard.StateDigest", _NoDigest):
        hsdump_hashed(folder, layout, samples)


class _NoDigest:
    def update(self, data: Any) -> None:
        """Looks at nothing."""

    def hexdigest(self) -> str:
        """No hash."""
        return "0" * 16


def zarr_python_sharded(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """zarr-python, the same chunks and shards; each shard is put together in memory and written by one call.

    The samples follow each other without regard for the shards, since zarr-python takes several times as long
    for a shard that isn't written whole.
    """
    rows = sum(layout.slots(s.shape[1]) for s in samples) * layout.chunk_rows
    array = zarr.create_array(
        str(folder / "hidden"),
        shape=(rows, layout.num_states, layout.hidden_size),
        dtype="uint16",
        chunks=(layout.chunk_rows, 1, layout.hidden_size),
        shards=(layout.shard_rows, layout.num_states, layout.hidden_size),
        compressors=None,
        config={"write_empty_chunks": True},
    )
    for begin in range(0, rows, layout.shard_rows):
        end = min(begin + layout.shard_rows, rows)
        whole = np.zeros((end - begin, layout.num_states, layout.hidden_size), np.uint16)
        for start, states in _places(layout, samples):
            low, high = max(begin, start), min(end, start + states.shape[1])
            if low < high:
                whole[low - begin : high - begin] = states[:, low - start : high - start].transpose(1, 0, 2)
        array[begin:end] = whole
    _fsync_tree(folder)


def tensorstore_sharded(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """tensorstore, the same chunks and shards, one transaction a shard; it fsyncs by itself."""
    shards = list(_shards(layout, samples))
    metadata = hidden_array_metadata(layout, len(shards))
    kvstore = {"driver": "file", "path": f"{folder}/hidden/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    array = tensorstore.open(spec, create=True).result()
    for number, shard in enumerate(shards):
        transaction = tensorstore.Transaction()
        view = array.with_transaction(transaction)
        for place, states in _places(layout, shard):
            start = number * layout.shard_rows + place
            view[start : start + states.shape[1]].write(states.transpose(1, 0, 2)).result()
        transaction.commit_async().result()


def safetensors_per_sample(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """One .safetensors file a sample, all fsynced at the end."""
    for number, states in enumerate(samples):
        safetensors.torch.save_file({"hidden_states": _tensor(states)}, folder / f"{number}.safetensors")
    _fsync_tree(folder)


def torch_per_sample(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """One torch.save a sample, all fsynced at the end."""
    for number, states in enumerate(samples):
        torch.save({"hidden_states": _tensor(states)}, folder / f"{number}.pt")
    _fsync_tree(folder)


def ckpt_gz(folder: Path, layout: Layout, samples: Sequence[States]) -> None:
    """One torch.save a sample through gzip, all fsynced at the end."""
    for number, states in enumerate(samples):
        with gzip.open(folder / f"{number}.ckpt.gz", "wb", compresslevel=GZIP_LEVEL) as file:
            torch.save({"hidden_states": _tensor(states)}, file)
    _fsync_tree(folder)


PREPARE = {"hsdump": prepare, "hsdump-hashed": prepare}
"""What is done before the clock runs, instead of making an empty folder."""
WRITERS: dict[str, Writer] = {
    "raw": raw,
    "raw-copied": raw_copied,
    "hsdump": hsdump,
    "hsdump-hashed": hsdump_hashed,
    "zarr-python-sharded": zarr_python_sharded,
    "tensorstore": tensorstore_sharded,
    "safetensors": safetensors_per_sample,
    "torch-save": torch_per_sample,
    "ckpt-gz": ckpt_gz,
}


def _shards(layout: Layout, samples: Sequence[States]) -> Iterator[list[States]]:
    """The samples as they fall into shards."""
    shard: list[States] = []
    slots = 0
    for states in samples:
        need = layout.slots(states.shape[1])
        if slots + need > layout.shard_slots:
            yield shard
            shard, slots = [], 0
        shard.append(states)
        slots += need
    yield shard


def _places(layout: Layout, shard: Sequence[States]) -> Iterator[tuple[int, States]]:
    start = 0
    for states in shard:
        yield start, states
        start += layout.slots(states.shape[1]) * layout.chunk_rows


def _tensor(states: States) -> torch.Tensor:
    return torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)


def _fsync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
