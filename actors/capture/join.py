"""Chunks of a batch's samples, joined by (request, position) into the batch's segments. No I/O.

Shape legend: K states, H hidden size, n rows of a chunk, T a sample's tokens, R those whose states are stored.

Chunked prefill splits a sample over forwards and mixes samples in one; a request that the engine took back
and ran again comes a second time. So a chunk's place follows from its position alone and a repeated one
replaces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from actors.capture.rooms import Errors, room_for
from actors.messages import Batch, FailureKind, Piece, SampleFailure, SampleOutcome
from actors.pieces import row_width
from storage.layout import Layout
from storage.read_memory import ReadMemory

Array = np.ndarray[Any, Any]
Place = tuple[int, int, Piece, int, int]
"""Segment, where the piece begins in it, the piece, and the stored rows lo..hi that it holds."""

TILE_BYTES = 1 << 20
"""Rows are copied and checked in tiles of about this size, so that the check reads them from the cache."""
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
"""Bits of an infinity; magnitudes from here on are infinities and NaN."""
KEPT_BYTES = 1 << 30
"""Memory of segments that is kept for the next ones: fresh memory costs twice the CPU time of the copy into it."""
_memory = ReadMemory(KEPT_BYTES)


def first_bad_row(bits: Array, dtype: str, zeros_allowed: bool = False) -> tuple[int, str] | None:
    """First row with a non-finite value or nothing but zeros, and which of both; works on the bits.

    As a signed integer the largest value of a row is its largest positive magnitude, as an unsigned one its
    largest negative; two reductions without a temporary array see everything.

    Args:
        bits: [n, H], unsigned.
        dtype: element type that the bits stand for.
        zeros_allowed: an all-zero row is no error.
    """
    limit = EXPONENT[dtype]
    sign = 1 << (bits.dtype.itemsize * 8 - 1)
    positive = bits.view(np.dtype(f"i{bits.dtype.itemsize}")).max(axis=1)
    negative = bits.max(axis=1)
    broken = (positive >= limit) | (negative >= sign + limit)
    if broken.any():
        return int(broken.argmax()), "has non-finite values"
    if not zeros_allowed:
        empty = (positive <= 0) & (negative <= sign)
        if empty.any():
            return int(empty.argmax()), "is all zeros"
    return None


def _gather(source: Array, rows: Array, out: Array) -> None:
    """Copies rows of ``source`` [n, H]; neighbours in one go, which most of them are."""
    if rows[-1] - rows[0] == len(rows) - 1:
        out[:] = source[rows[0] : rows[-1] + 1]
    else:
        out[:] = source[rows]


class BatchJoin:
    """One batch while its states arrive. `put` may be called by several threads for different rows.

    Args:
        batch: the samples and their segments.
        layout: geometry of the states as they are stored.
        token_ids: what is sent, [T] for each sample.
        positions: the tokens whose states are stored, ascending, [R] for each sample; None for all. Rows of other
            tokens must come as well, and are dropped.
        errors: hears how far states that are stored as 8-bit floats are off.
    """

    def __init__(
        self,
        batch: Batch,
        layout: Layout,
        token_ids: Sequence[Array],
        positions: Sequence[Array] | None = None,
        errors: Errors | None = None,
    ) -> None:
        self._batch = batch
        self._layout = layout
        self._token_ids = [np.asarray(ids, dtype=np.int32) for ids in token_ids]
        self._positions = positions or [np.arange(s.tokens, dtype=np.int32) for s in batch.samples]
        if [len(kept) for kept in self._positions] != [s.kept for s in batch.samples]:
            raise ValueError(f"batch {batch.batch_id}: positions aren't as many as rows are to be stored")
        self._places: list[list[tuple[int, int, Piece]]] = [[] for _ in batch.samples]
        self._missing = [0] * len(batch.segments)
        self._errors = errors
        self._width = row_width(layout)
        # Memory is taken when the first rows of a segment come: a batch that waits its turn holds none.
        self._segments: list[Array | None] = [None] * len(batch.segments)
        for s, pieces in enumerate(batch.segments):
            base = 0
            for piece in pieces:
                self._places[piece.sample].append((s, base, piece))
                base += piece.rows * self._width
                self._missing[s] += piece.rows
        self._covered = [np.zeros(s.tokens, dtype=bool) for s in batch.samples]
        self._failures: list[SampleFailure | None] = [None] * len(batch.samples)
        # A segment is handed out when no row is missing and nobody is writing to it, as one that repeats rows may be.
        self._writing = [0] * len(batch.segments)
        self._open = set(range(len(batch.segments)))
        self._lock = threading.Lock()

    def put(self, sample: int, start: int, states: Sequence[Array], ids: Array) -> list[int]:
        """Places rows of a sample.

        Args:
            sample: position in the batch.
            start: token that the first row belongs to.
            states: K arrays [n, H] of bits as they were computed, any stride between rows.
            ids: token ids that the engine read for these rows [n].

        Returns:
            Segments that became complete by it.
        """
        end = start + len(ids)
        with self._lock:
            if self._failures[sample] is not None:
                return []
            places = [place for place in self._overlaps(sample, start, end) if self._missing[place[0]]]
            for s, *_ in places:
                self._writing[s] += 1
        failure = self._place(sample, start, states, ids, places)
        with self._lock:
            for s, *_ in places:
                self._writing[s] -= 1
            self._failures[sample] = self._failures[sample] or failure
            if self._failures[sample] is not None:
                start, end = 0, len(self._covered[sample])
            return self._cover(sample, start, end)

    def fail(self, sample: int, kind: FailureKind, reason: str) -> list[int]:
        """Gives a sample up: its rows aren't waited for any more. The first failure stays.

        Returns:
            Segments that became complete by it.
        """
        with self._lock:
            self._failures[sample] = self._failures[sample] or SampleFailure(kind, reason)
            return self._cover(sample, 0, len(self._covered[sample]))

    def missing_rows(self, sample: int) -> int:
        """Rows of a sample that haven't come and are still waited for."""
        with self._lock:
            return int(np.count_nonzero(~self._covered[sample]))

    def failed(self, sample: int) -> bool:
        """Whether the sample was given up."""
        return self._failures[sample] is not None

    @property
    def complete(self) -> bool:
        """Whether every segment was handed out."""
        return not self._open

    def take(self, index: int) -> Array:
        """Hands out a complete segment's flat array, once; empty where every sample in it was given up."""
        pieces = self._batch.segments[index]
        failed = [self.failed(piece.sample) for piece in pieces]
        array, self._segments[index] = self._segments[index], None
        if array is None or all(failed):
            return np.zeros(0, dtype=self._layout.storage_dtype)
        start = 0
        for piece, lost in zip(pieces, failed, strict=True):
            stop = start + piece.rows * self._width
            if lost:
                array[start:stop] = 0  # not what the memory held before
            start = stop
        return array

    def outcomes(self) -> tuple[SampleOutcome, ...]:
        """What became of each sample, in the batch's order."""
        return tuple(
            SampleOutcome(s.row, s.attempt, failure)
            for s, failure in zip(self._batch.samples, self._failures, strict=True)
        )

    def _overlaps(self, sample: int, start: int, end: int) -> Iterator[Place]:
        """(segment, base, piece, lo, hi): pieces that hold stored rows lo..hi, which are of tokens start..end."""
        first, last = np.searchsorted(self._positions[sample], (start, end)).tolist()
        for s, base, piece in self._places[sample]:
            lo, hi = max(first, piece.start), min(last, piece.start + piece.rows)
            if lo < hi:
                yield s, base, piece, lo, hi

    def _place(
        self, sample: int, start: int, states: Sequence[Array], ids: Array, places: Sequence[Place]
    ) -> SampleFailure | None:
        """Copies rows to where they belong; says what is wrong with them."""
        end = start + len(ids)
        sent = self._token_ids[sample]
        if end > len(sent) or not np.array_equal(sent[start:end], ids):
            reason = f"rows {start}..{end} are of other tokens than the {len(sent)} that were sent"
            return SampleFailure("row_mismatch", reason)
        for s, base, piece, lo, hi in places:
            bad = self._copy(s, base, piece, lo, self._positions[sample][lo:hi], start, states)
            if bad is not None:
                return SampleFailure("bad_states", bad)
        return None

    def _copy(
        self,
        segment: int,
        base: int,
        piece: Piece,
        lo: int,
        tokens: Array,
        start: int,
        states: Sequence[Array],
    ) -> str | None:
        """Copies the rows of ``tokens``, from stored row ``lo`` on, into a piece; says what is wrong with them.

        ``states`` begin at token ``start``.
        """
        layout = self._layout.computed
        flat = self._memory_of(segment)[base : base + piece.rows * self._width]
        room = room_for(flat, self._layout, self._errors)
        step = max(1, TILE_BYTES // layout.row_bytes)
        for k, source in enumerate(states):
            # The embedding of a padding token may be zero by right.
            zeros_allowed = layout.states[k] == 0
            for a in range(0, len(tokens), step):
                some = tokens[a : a + step]
                at = lo + a - piece.start
                tile = room.tile(k, at, len(some))
                _gather(source, some - start, tile)
                bad = first_bad_row(tile, layout.dtype, zeros_allowed)
                if bad is not None:
                    return f"state {layout.states[k]}, token {some[bad[0]]} {bad[1]}"
                room.settle(k, at, tile)
        return None

    def _memory_of(self, segment: int) -> Array:
        with self._lock:
            array = self._segments[segment]
            if array is None:
                rows = sum(piece.rows for piece in self._batch.segments[segment])
                size_bytes = rows * self._layout.bytes_per_token
                array = _memory.take(size_bytes).view(self._layout.storage_dtype)
                self._segments[segment] = array
            return array

    def _cover(self, sample: int, start: int, end: int) -> list[int]:
        """Waits no more for rows; which of the sample's segments can be handed out now. The lock is held."""
        covered = self._covered[sample]
        for s, _, _, lo, hi in self._overlaps(sample, start, end):
            self._missing[s] -= int(np.count_nonzero(~covered[self._positions[sample][lo:hi]]))
        covered[start:end] = True
        mine = {s for s, *_ in self._places[sample]}
        done = sorted(s for s in mine & self._open if not self._missing[s] and not self._writing[s])
        self._open.difference_update(done)
        return done
