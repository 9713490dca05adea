"""One shard while it is written: places for samples, bytes to their places, and the seal."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.codecs import ChunkEncoder
from storage.errors import RowMismatch
from storage.files import Store
from storage.layout import (
    POSITIONS,
    SCALE_TYPE,
    Layout,
    ShardIndex,
    hidden_key,
    manifest_key,
    scales_key,
    token_key,
)
from storage.manifest import Manifest, ManifestObject, ManifestSample, hidden_digest, tokens_digest
from storage.sinks import ByteArray, ObjectSink

StateDigest = xxhash.xxh3_64
"""What states are hashed with."""
PIECE_BYTES = 256 << 10
"""Bytes that are hashed and then copied at a time: they are still in the cache for the second."""


@dataclass(frozen=True)
class SampleHead:
    """What is known of a sample before its states come.

    Attributes:
        row: prepared row.
        sample_id: its id, any text.
        token_ids: int32 [T].
        loss_mask: uint8 [T], 0 or 1.
    """

    row: int
    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]

    def __str__(self) -> str:
        return f"row {self.row} ({self.sample_id!r})"


@dataclass
class OpenSample:
    """A sample that has its place.

    Attributes:
        head: what it is.
        positions: int32 [R], the tokens whose states are stored.
        first_slot: first inner chunk along the token axis, counted inside the shard.
        slots: inner chunks along the token axis.
        offset: where its bytes start in the shard; -1 until the first of compressed ones are written.
        hashes: a running xxh3 for each state.
        chunks: places of its inner chunks, [slots, K, (offset, length)], where they are compressed.
        scales: float32 [R, K] where states are quantised, as far as they were written.
        rows: states of so many tokens were written.
        finished: it was declared whole.
    """

    head: SampleHead
    positions: npt.NDArray[np.int32]
    first_slot: int
    slots: int
    offset: int
    hashes: list[Any]
    chunks: npt.NDArray[np.uint64] | None = None
    scales: npt.NDArray[np.float32] | None = None
    rows: int = 0
    finished: bool = False

    @property
    def kept(self) -> int:
        """R."""
        return int(self.positions.size)

    def column(self, name: str) -> npt.NDArray[Any]:
        """What a token column holds of it, [R]."""
        if name == POSITIONS:
            return self.positions
        values: npt.NDArray[Any] = getattr(self.head, name)[self.positions]
        return values


class OpenShard:
    """A claimed shard, before it is sealed.

    Attributes:
        shard: its number.
        samples: prepared row -> sample, in the order of their bytes.
        body_bytes: bytes given to samples before compression, those of dropped ones included.
        closing: it takes no more samples.
        opened_s: monotonic time of its opening.
        touched_s: monotonic time of the last write.
    """

    def __init__(self, shard: int, layout: Layout, sink: ObjectSink) -> None:
        self.shard = shard
        self.samples: dict[int, OpenSample] = {}
        self.body_bytes = 0
        self.closing = False
        self.opened_s = self.touched_s = time.monotonic()
        self._layout, self._sink = layout, sink
        self._next_slot = 0
        self._encoder = None if layout.codec == "none" else ChunkEncoder(layout.codec, layout.itemsize)
        self._encoded_bytes = 0

    @property
    def free_slots(self) -> int:
        """Slots that no sample has."""
        return self._layout.shard_slots - self._next_slot

    @property
    def unfinished(self) -> list[int]:
        """Rows of samples that aren't whole."""
        return [row for row, sample in self.samples.items() if not sample.finished]

    def reserve(self, head: SampleHead, positions: npt.NDArray[np.int32]) -> None:
        """Gives a sample its place; the caller has checked that it fits."""
        layout = self._layout
        slots = layout.slots(positions.size)
        hashes = [StateDigest() for _ in layout.states]
        sample = OpenSample(head, positions, self._next_slot, slots, self.body_bytes, hashes)
        if self._encoder is not None:
            sample.offset = -1
            sample.chunks = np.zeros((slots, layout.num_states, 2), np.uint64)
        if layout.quantised:
            sample.scales = np.zeros((positions.size, layout.num_states), np.float32)
        self.samples[head.row] = sample
        self._next_slot += slots
        self.body_bytes += layout.sample_bytes(positions.size)

    def write(
        self, sample: OpenSample, start: int, states: npt.NDArray[Any], scales: npt.NDArray[np.float32] | None
    ) -> None:
        """Writes a segment [K, rows, H] of a sample to its place, with its scales; see `ShardWriter.write`."""
        self._check(sample, start, states, scales)
        layout = self._layout
        sample.rows += states.shape[1]
        whole = sample.rows == sample.kept
        padding = sample.slots * layout.chunk_rows - sample.kept if whole else 0
        pad_bytes = padding * layout.row_bytes
        if self._encoder is not None:
            self._write_encoded(self._encoder, sample, start, states, pad_bytes)
        else:
            for k in range(layout.num_states):
                offset = layout.run_offset(sample.offset, sample.slots, k, start)
                self._write_run(sample.hashes[k], offset, _bytes_of(states[k]), pad_bytes)
        if sample.scales is not None and scales is not None:
            sample.scales[start : start + states.shape[1]] = scales.T
            if whole:
                for k, digest in enumerate(sample.hashes):
                    digest.update(np.ascontiguousarray(sample.scales[:, k], SCALE_TYPE).tobytes())
        self.touched_s = time.monotonic()

    def _write_run(self, digest: Any, offset: int, run: ByteArray, pad_bytes: int) -> None:
        for start in range(0, run.size, PIECE_BYTES):
            piece = run[start : start + PIECE_BYTES]
            last = start + piece.size == run.size
            digest.update(piece)
            self._sink.write_at(offset + start, piece, pad_bytes if last else 0)
        digest.update(bytes(pad_bytes))

    def _write_encoded(
        self,
        encoder: ChunkEncoder,
        sample: OpenSample,
        start: int,
        states: npt.NDArray[Any],
        pad_bytes: int,
    ) -> None:
        """Appends a segment's chunks, state by state; nobody knows how long those of later segments will be."""
        layout = self._layout
        assert sample.chunks is not None
        if sample.offset < 0:
            sample.offset = self._encoded_bytes
        for k in range(layout.num_states):
            run = _bytes_of(states[k])
            sample.hashes[k].update(run)
            sample.hashes[k].update(bytes(pad_bytes))
            slot = start // layout.chunk_rows
            for data in encoder.encode(_chunks(run, layout.chunk_bytes)):
                self._sink.write_at(self._encoded_bytes, data)
                sample.chunks[slot, k] = self._encoded_bytes, data.size
                self._encoded_bytes += data.size
                slot += 1

    def _check(
        self, sample: OpenSample, start: int, states: npt.NDArray[Any], scales: npt.NDArray[np.float32] | None
    ) -> None:
        layout = self._layout
        k, h, dtype = layout.num_states, layout.hidden_size, layout.storage_dtype
        if states.ndim != 3 or (states.shape[0], states.shape[2]) != (k, h) or states.dtype != dtype:
            raise RowMismatch(
                f"{sample.head}: states are {states.dtype} {list(states.shape)}, "
                f"wanted is {dtype} [{k}, rows, {h}]"
            )
        given = None if scales is None else scales.shape
        if given != (states.shape[:2] if layout.quantised else None):
            raise RowMismatch(
                f"{sample.head}: scales are {given} for states {states.shape} (encoding {layout.encoding})"
            )
        end = start + states.shape[1]
        if start != sample.rows or end > sample.kept or states.shape[1] == 0:
            raise RowMismatch(
                f"{sample.head}: states of tokens {start} to {end} came after {sample.rows} of "
                f"{sample.kept} tokens to store; each token must come once, in order"
            )
        if end != sample.kept and end % layout.chunk_rows:
            raise RowMismatch(
                f"{sample.head}: a segment ends at token {end}, which is neither the sample's end "
                f"({sample.kept}) nor a multiple of {layout.chunk_rows}"
            )

    def seal(self, store: Store, run_id: str, writer: str) -> Manifest:
        """Makes the data appear, then the manifest, and returns that.

        Raises:
            AlreadyExists: one of the objects is there already.
            StorageError: writing failed.
        """
        index = ShardIndex(self._layout)
        for sample in self.samples.values():
            if sample.chunks is not None:
                index.add_chunks(sample.first_slot, sample.chunks)
            else:
                index.add(sample.first_slot, sample.slots, sample.offset)
        footer = index.to_bytes()
        end = self.body_bytes if self._encoder is None else self._encoded_bytes
        size = end + len(footer)
        self._sink.write_at(end, np.frombuffer(footer, np.uint8))
        # All at once: syncs that meet share a commit of the file system's journal.
        layout = self._layout
        with ThreadPoolExecutor(len(layout.token_columns) + 1) as pool:
            putting = [pool.submit(self._put_column, store, column) for column in layout.token_columns]
            if layout.quantised:
                putting.insert(0, pool.submit(self._put_scales, store))
            self._sink.commit(size)
            columns = [put.result() for put in putting]
        samples = tuple(_manifest_sample(sample, self._layout) for sample in self.samples.values())
        states = ManifestObject(hidden_key(self.shard), size, hidden_digest(samples, footer))
        manifest = Manifest(self.shard, run_id, writer, self._layout, samples, (states, *columns))
        store.put_if_absent(manifest_key(self.shard), manifest.to_bytes())
        return manifest

    def abort(self) -> None:
        """Forgets what was written; nothing happens after a seal."""
        self._sink.abort()
        if self._encoder is not None:
            self._encoder.close()

    def _put_scales(self, store: Store) -> ManifestObject:
        layout = self._layout
        values = np.zeros((layout.shard_rows, layout.num_states), SCALE_TYPE)
        for sample in self.samples.values():
            start = sample.first_slot * layout.chunk_rows
            values[start : start + sample.kept] = sample.scales
        return _put(store, scales_key(self.shard), values.tobytes())

    def _put_column(self, store: Store, column: str) -> ManifestObject:
        values = np.zeros(
            self._layout.shard_rows, np.dtype(self._layout.token_columns[column]).newbyteorder("<")
        )
        for sample in self.samples.values():
            start = sample.first_slot * self._layout.chunk_rows
            values[start : start + sample.kept] = sample.column(column)
        return _put(store, token_key(column, self.shard), values.tobytes())


def _put(store: Store, key: str, data: bytes) -> ManifestObject:
    store.put_if_absent(key, data)
    return ManifestObject(key, len(data), xxhash.xxh3_64_hexdigest(data))


def _bytes_of(run: npt.NDArray[Any]) -> ByteArray:
    return run.reshape(-1).view(np.uint8)


def _chunks(run: ByteArray, chunk_bytes: int) -> list[ByteArray]:
    """A run's inner chunks; the last is filled up with zeros."""
    chunks = [run[start : start + chunk_bytes] for start in range(0, run.size, chunk_bytes)]
    if chunks[-1].size < chunk_bytes:
        chunks[-1] = np.concatenate([chunks[-1], np.zeros(chunk_bytes - chunks[-1].size, np.uint8)])
    return chunks


def _manifest_sample(sample: OpenSample, layout: Layout) -> ManifestSample:
    head, whole = sample.head, layout.keep.everything
    return ManifestSample(
        row=head.row,
        sample_id=head.sample_id,
        first_slot=sample.first_slot,
        tokens=int(head.token_ids.size),
        kept=sample.kept,
        offset=sample.offset,
        xxh3=tuple(digest.hexdigest() for digest in sample.hashes),
        tokens_xxh3=tokens_digest(head.token_ids, head.loss_mask, None if whole else sample.positions),
    )
