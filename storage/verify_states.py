"""Reads the states of a shard once, in order, and says what it saw; what is read next is on its way meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.encoded import Entries, read_states
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import FLOAT8, Layout, hidden_key
from storage.localdisk import DIRECT_READ_BYTES
from storage.manifest import ManifestSample
from storage.read_memory import ReadMemory

LOOK_BYTES = 2 << 20
"""Hashed and looked at in one go: small enough to stay in the processor's cache meanwhile."""
REMOTE_READ_BYTES = 32 << 20
"""Read in one request from an object store."""
INFINITY_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000, FLOAT8: 0x7F}
"""Bits of +infinity, or of NaN where there is none: with the sign bit off, every non-finite value is at least this."""
Bytes = npt.NDArray[np.uint8]
_memory = ReadMemory()


@dataclass
class SeenState:
    """What was seen of one state of a sample.

    Attributes:
        digest: xxh3 of its bytes, padding included.
        bytes: that were read.
        bad_rows: tokens with a value that isn't finite.
        largest: bits of the largest absolute value; 0 if all are zero.
        error: why it couldn't be read to its end; None if it could.
    """

    digest: Any = field(default_factory=xxhash.xxh3_64)
    bytes: int = 0
    bad_rows: list[int] = field(default_factory=list)
    largest: int = 0
    error: CorruptDump | None = None


class StateReader:
    """Reads the states of one shard's samples.

    Args:
        store: the dump.
        layout: its geometry.
        shard: the shard's number.
        entries: where its chunks are, if they are compressed.
    """

    def __init__(self, store: Store, layout: Layout, shard: int, entries: Entries | None) -> None:
        self._store, self._layout, self._shard, self._entries = store, layout, shard, entries
        look_rows = max(LOOK_BYTES // layout.chunk_bytes, 1) * layout.chunk_rows
        self._look_bytes = look_rows * layout.row_bytes
        request_bytes = DIRECT_READ_BYTES if store.local_root else REMOTE_READ_BYTES
        self._request_bytes = max(request_bytes // self._look_bytes, 1) * self._look_bytes
        self._scratch = np.empty((look_rows, layout.hidden_size), layout.storage_dtype)

    def look(self, samples: Sequence[ManifestSample]) -> Iterator[tuple[ManifestSample, int, SeenState]]:
        """Every state of the samples, by its position along K.

        Raises:
            StorageError: the storage fails.
        """
        states = [(sample, k) for sample in samples for k in range(self._layout.num_states)]
        with ThreadPoolExecutor(1, thread_name_prefix="verify-read") as pool:
            reads = self._read_ahead(pool, states)
            for sample, k in states:
                yield sample, k, self._look_at(islice(reads, len(self._starts(sample))))

    def _starts(self, sample: ManifestSample) -> range:
        """Bytes of a state at which a request begins."""
        length = self._layout.slots(sample.kept) * self._layout.chunk_bytes
        return range(0, length, self._request_bytes)

    def _read_ahead(
        self, pool: ThreadPoolExecutor, states: Sequence[tuple[ManifestSample, int]]
    ) -> Iterator[Future[Bytes]]:
        """The requests in order; when one is handed out, the next has been made."""
        ahead: deque[Future[Bytes]] = deque()
        for sample, k in states:
            for start in self._starts(sample):
                ahead.append(pool.submit(self._read, sample, k, start))
                if len(ahead) > 1:
                    yield ahead.popleft()
        yield from ahead

    def _read(self, sample: ManifestSample, k: int, start: int) -> Bytes:
        layout = self._layout
        slots = layout.slots(sample.kept)
        # Of one size, so that the same memory is used again.
        piece = _memory.take(self._request_bytes)[: slots * layout.chunk_bytes - start]
        if self._entries is None:
            offset = layout.run_offset(sample.offset, slots, k, 0) + start
            self._store.read_range_into(hidden_key(self._shard), offset, piece.data)
        else:
            slot = sample.first_slot + start // layout.chunk_bytes
            chunks = self._entries[slot : slot + piece.size // layout.chunk_bytes, k]
            read_states(self._store, layout, self._shard, chunks, piece)
        return piece

    def _look_at(self, reads: Iterator[Future[Bytes]]) -> SeenState:
        seen, row = SeenState(), 0
        layout = self._layout
        infinity = INFINITY_BITS[layout.element_type]
        sign_off = layout.storage_dtype.type((1 << (8 * layout.itemsize - 1)) - 1)
        for read in reads:
            try:
                piece = read.result()
            except CorruptDump as exc:
                seen.error = seen.error or exc
                continue
            seen.bytes += piece.size
            for at in range(0, piece.size, self._look_bytes):
                part = piece[at : at + self._look_bytes]
                seen.digest.update(part.data)
                bits = part.view(layout.storage_dtype).reshape(-1, layout.hidden_size)
                row_max = np.bitwise_and(bits, sign_off, out=self._scratch[: len(bits)]).max(axis=1)
                seen.bad_rows += (row + np.flatnonzero(row_max >= infinity)).tolist()
                seen.largest = max(seen.largest, int(row_max.max()))
                row += len(bits)
        return seen
