"""A writer: takes segments out of the object store and puts them into its open shards.

It runs as a Ray actor with two concurrency groups. Everything that touches a shard goes through the group
``io`` with one thread, so the shard writer needs no lock; ``ping`` has a thread of its own and answers while a
large write goes on.

When the storage fails, the writer waits here until it works again, holding the segment that it was given, so that
permits hold back the dispatch and nobody dies. A shard in which a write failed can't be mended: the samples
in it are reported as lost and collected again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from functools import cached_property

import ray

from actors.figures import Figures, timed
from actors.logs import log_to_file
from actors.messages import (
    Batch,
    BatchRecord,
    Piece,
    SampleFailure,
    SampleOutcome,
    SealedShard,
    WriteAck,
    WriterInfo,
    WriterSpec,
)
from actors.patience import Patience
from actors.pieces import Array, Scales, row_width, split_segment
from storage.dump import read_header
from storage.errors import RowMismatch, StorageError
from storage.files import Store
from storage.localdisk import TEMPORARIES
from storage.prompts import PromptTable
from storage.shard import SampleHead, ShardWriter

CONCURRENCY_GROUPS = {"io": 1, "control": 1}
"""For ``ray.remote(concurrency_groups=...)``; the driver passes it when it creates a writer."""


class WriterActor:
    """Owns some shards of one dump; created by the driver, named ``writer-0``, ``writer-1``, ..."""

    def __init__(self, spec: WriterSpec) -> None:
        log_to_file(spec.log_dir, spec.name)
        self._spec = spec
        self._store = Store(spec.dump_url)
        self._patience = Patience(spec.storage_timeout_s)
        self._layout = self._patience.call(lambda: read_header(self._store)).layout
        self._shards = ShardWriter(self._store, self._layout, spec.run_id, spec.name, spec.shard_bytes)
        self._placed: dict[str, dict[int, int]] = {}  # batch -> row -> tokens that were put
        self.figures_now = Figures()
        self._broken: dict[str, set[int]] = {}  # batch -> rows of which a part is lost
        self._written: set[int] = set()  # finished rows that aren't sealed
        self._sealed: list[SealedShard] = []  # and, with the lost rows, not told yet
        self._lost: set[int] = set()

    @cached_property
    def _prompts(self) -> PromptTable:
        """There may be none before the first batch comes: the model writes a part of it."""
        return PromptTable(self._store)

    def __repr__(self) -> str:
        return f"{self._spec.name} @ {socket.gethostname()}"

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """What this writer waits for, one line for a person; empty while all is well."""
        return self._patience.trouble

    @ray.method(concurrency_group="control")
    def figures(self) -> Figures:
        """How it spent its time so far."""
        return self.figures_now

    @ray.method(concurrency_group="control")
    def start(self) -> WriterInfo:
        """Says where this writer runs; answered once its constructor has finished."""
        return WriterInfo(
            name=self._spec.name,
            node_id=ray.get_runtime_context().get_node_id(),
            hostname=socket.gethostname(),
            actor_pid=os.getpid(),
        )

    @ray.method(concurrency_group="io")
    @timed("write_s")
    def put(self, batch: Batch, index: int, segment: Array) -> None:
        """Writes one segment of a batch to its place.

        Args:
            batch: the batch that the segment belongs to.
            index: position of the segment in ``batch.segments``.
            segment: flat array of the layout's storage dtype, `actors.pieces`, a view of the object store: it is
                read and let go before this returns. Empty where every piece's sample failed.

        Raises:
            RowMismatch: the segment has another size than its pieces.
            StorageFull: no space is left.
            StorageError: the storage failed for too long.
        """
        if segment.size == 0:
            return
        self.figures_now = self.figures_now.more("written_bytes", segment.nbytes)
        wanted = sum(piece.rows for piece in batch.segments[index]) * row_width(self._layout)
        if segment.size != wanted:
            raise RowMismatch(
                f"segment {index} of batch {batch.batch_id} holds {segment.size} values, its pieces take {wanted}"
            )
        for piece, states, scales in split_segment(segment, batch.segments[index], self._layout):
            self._put_piece(batch, piece, states, scales)

    def _put_piece(self, batch: Batch, piece: Piece, states: Array, scales: Scales | None) -> None:
        placed = self._placed.setdefault(batch.batch_id, {})
        row = batch.samples[piece.sample].row
        while row not in self._broken.get(batch.batch_id, ()):
            if piece.start != placed.get(row, 0):
                return  # an earlier segment was empty: this sample failed, another one here didn't
            try:
                if row not in placed:
                    self._place(row)
                    placed[row] = 0
                self._shards.write(row, piece.start, states, scales)
            except StorageError as error:
                if piece.start == 0:
                    placed.pop(row, None)  # all that was written of it is here: it is written again
                self._after_storage_failure(error)
            else:
                placed[row] = piece.start + piece.rows
                return

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def finish(self, batch: Batch, record: BatchRecord) -> WriteAck:
        """Keeps the batch's good samples and gives up the failed ones; all its segments were put before.

        Raises:
            StorageFull: no space is left; the whole batch is lost.
            StorageError: the storage failed for too long.
        """
        placed = self._placed.setdefault(batch.batch_id, {})
        failed = []
        try:
            for outcome in record.outcomes:
                while outcome.row in placed:  # it isn't any more when it is lost
                    try:
                        failure = self._finish_row(outcome)
                    except StorageError as error:
                        self._after_storage_failure(error)
                        continue
                    del placed[outcome.row]
                    if failure is not None:
                        failed.append(SampleOutcome(outcome.row, outcome.attempt, failure))
        finally:
            self._placed.pop(batch.batch_id, None)
            broken = self._broken.pop(batch.batch_id, set())
        self._lost |= broken
        return self._ack([outcome.row for outcome in record.outcomes], failed)

    def _finish_row(self, outcome: SampleOutcome) -> SampleFailure | None:
        """Keeps or drops one sample; returns why it couldn't be kept."""
        failure = None
        if outcome.failure is None:
            try:
                self._shards.finish(outcome.row)
                self._written.add(outcome.row)
                return None
            except RowMismatch as error:
                failure = SampleFailure("row_mismatch", str(error))
        self._shards.drop(outcome.row)
        return failure

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def tick(self) -> WriteAck:
        """Seals what has been open or idle for too long; raises as `finish`."""
        try:
            self._shards.seal_older_than(self._spec.shard_age_s, self._spec.idle_s)
        except StorageError as error:
            self._after_storage_failure(error)
        return self._ack()

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def seal(self) -> WriteAck:
        """Commits everything that is finished; unfinished samples are given up. Raises as `finish`."""
        self._placed.clear()
        self._broken.clear()
        while True:
            try:
                self._shards.seal_all()
            except StorageError as error:
                self._after_storage_failure(error)
            else:
                return self._ack()

    # ---- when the storage fails

    def _after_storage_failure(self, error: StorageError) -> None:
        """Waits until the storage works again, and notes what was lost.

        Raises:
            StorageError: waiting doesn't help or has lasted too long.
        """
        try:
            self._patience.until_works(self._probe, error)
        finally:
            self._note_losses()

    def _probe(self) -> None:
        key = f"{TEMPORARIES}/probe-{self._spec.run_id}-{self._spec.name}"
        self._store.replace(key, b"works")
        self._store.delete(key)

    def _note_losses(self) -> None:
        """What is neither sealed nor in an open shard went down with a shard."""
        with contextlib.suppress(StorageError):  # a second shard that failed is one of these losses
            self._shards.settle()
        self._note_sealed()
        lost = {row for row in self._written if not self._shards.has(row)}
        self._written -= lost
        self._lost |= lost
        for batch_id, placed in self._placed.items():
            for row in [row for row in placed if not self._shards.has(row)]:
                del placed[row]
                self._broken.setdefault(batch_id, set()).add(row)

    def _note_sealed(self) -> None:
        for shard in self._shards.take_sealed():
            self._written.difference_update(shard.rows)
            self._sealed.append(SealedShard(shard.shard, self._spec.name, shard.rows, shard.stored_bytes))
            self._patience.succeeded()

    def _ack(self, rows: Iterable[int] = (), failed: Iterable[SampleOutcome] = ()) -> WriteAck:
        """The answer to a call about ``rows``, with all news since the one before."""
        self._note_sealed()
        sealed, self._sealed = tuple(self._sealed), []
        lost, self._lost = tuple(self._lost), set()
        just_sealed = {row for shard in sealed for row in shard.rows}
        kept = tuple(row for row in rows if row in self._written or row in just_sealed)
        return WriteAck(kept, sealed, tuple(failed), lost)

    # ---- a batch

    def _place(self, row: int) -> None:
        prompt = self._prompts.load(row)
        self._shards.place(SampleHead(row, prompt.sample_id, prompt.token_ids, prompt.loss_mask))
