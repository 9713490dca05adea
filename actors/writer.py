"""A writer: takes segments out of the object store and puts them into its open shards.

It runs as a Ray actor with two concurrency groups. Everything that touches a shard goes through the group
``io`` with one thread, so the shard writer needs no lock; ``ping`` has a thread of its own and answers while a
large write goes on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from actors.figures import Figures, timed
from actors.messages import (
    Batch,
    BatchRecord,
    SampleFailure,
    SampleOutcome,
    SealedShard,
    WriteAck,
    WriterInfo,
    WriterSpec,
)
from storage.dump import read_header
from storage.errors import RowMismatch
from storage.files import Store
from storage.prompts import PromptTable
from storage.shard import SampleHead, ShardWriter

CONCURRENCY_GROUPS = {"io": 1, "control": 1}
"""For ``ray.remote(concurrency_groups=...)``; the driver passes it when it creates a writer."""


class WriterActor:
    """Owns some shards of one dump; created by the driver, named ``writer-0``, ``writer-1``, ..."""

    def __init__(self, spec: WriterSpec) -> None:
        self._spec = spec
        store = Store(spec.dump_url)
        self._layout = read_header(store).layout
        self._prompts = PromptTable(store)
        self._shards = ShardWriter(store, self._layout, spec.run_id, spec.name, spec.shard_bytes)
        self._placed: dict[str, dict[int, int]] = {}  # batch -> row -> tokens that were put
        self.figures_now = Figures()
        self._calls = 0

    def __repr__(self) -> str:
        return f"{self._spec.name} @ {socket.gethostname()}"

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """A counter that moves with every call that touched a shard."""
        return self._calls

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
    def put(self, batch: Batch, index: int, segment: np.ndarray[Any, Any]) -> None:
        """Writes one segment of a batch to its place.

        Args:
            batch: the batch that the segment belongs to.
            index: position of the segment in ``batch.segments``.
            segment: flat [sum of K x rows x H] array of the layout's storage dtype, a view of the object
                store: it is read and let go before this returns. Empty where every piece's sample failed.
        """
        self._calls += 1
        if segment.size == 0:
            return
        self.figures_now = self.figures_now.more("written_bytes", segment.nbytes)
        placed = self._placed.setdefault(batch.batch_id, {})
        for piece, states in self._pieces(batch, index, segment):
            row = batch.samples[piece.sample].row
            if piece.token_start != placed.get(row, 0):
                continue  # an earlier segment was empty: this sample failed, another one here didn't
            if row not in placed:
                self._place(row)
            self._shards.write(row, piece.token_start, states)
            placed[row] = piece.token_start + piece.rows

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def finish(self, batch: Batch, record: BatchRecord) -> WriteAck:
        """Keeps the batch's good samples and gives up the failed ones; all its segments were put before."""
        self._calls += 1
        placed = self._placed.pop(batch.batch_id, {})
        written, failed = [], []
        for outcome in record.outcomes:
            if outcome.row not in placed:
                continue
            if outcome.failure is not None:
                self._shards.drop(outcome.row)
                continue
            try:
                self._shards.finish(outcome.row)
            except RowMismatch as error:
                self._shards.drop(outcome.row)
                failure = SampleFailure("row_mismatch", str(error))
                failed.append(SampleOutcome(outcome.row, outcome.attempt, failure))
            else:
                written.append(outcome.row)
        return WriteAck(tuple(written), self._sealed(), tuple(failed))

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def tick(self) -> WriteAck:
        """Seals what has been open or idle for too long."""
        self._shards.seal_older_than(self._spec.shard_age_s, self._spec.idle_s)
        return WriteAck(sealed=self._sealed())

    @ray.method(concurrency_group="io")
    @timed("seal_s")
    def seal(self) -> WriteAck:
        """Commits everything that is finished; unfinished samples are given up."""
        self._placed.clear()
        self._shards.seal_all()
        return WriteAck(sealed=self._sealed())

    def _place(self, row: int) -> None:
        prompt = self._prompts.load(row)
        self._shards.place(SampleHead(row, prompt.sample_id, prompt.token_ids, prompt.loss_mask))

    def _pieces(self, batch: Batch, index: int, segment: np.ndarray[Any, Any]) -> Sequence[tuple[Any, Any]]:
        """The pieces of a segment with their states [K, rows, H], views of ``segment``."""
        k, h = self._layout.num_states, self._layout.hidden_size
        pieces, start = [], 0
        for piece in batch.segments[index]:
            stop = start + k * piece.rows * h
            pieces.append((piece, segment[start:stop].reshape(k, piece.rows, h)))
            start = stop
        return pieces

    def _sealed(self) -> tuple[SealedShard, ...]:
        return tuple(
            SealedShard(s.shard, self._spec.name, tuple(s.rows), s.stored_bytes)
            for s in self._shards.take_sealed()
        )
