"""Writing shards: bytes go straight to their final place in a zarr v3 shard object.

A writer keeps one shard open for new samples and any number of fuller ones until their last unfinished sample
is in. Sealing puts the token columns and the states together, and then the manifest; a sample counts from
that moment. A shard is sealed while the next one is written: it is committed once `ShardWriter.take_sealed` tells
so, and a seal that fails is told by a later call.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.claims import ClaimAhead, holds
from storage.errors import LeaseLost, RowMismatch, StorageError
from storage.files import Store
from storage.layout import Layout, hidden_key
from storage.open_shard import OpenSample, OpenShard, SampleHead
from storage.sealer import SealedInfo, Sealer

__all__ = ["SampleHead", "SealedInfo", "ShardWriter"]

CLAIM_AT = 0.75
"""Share of a shard that is taken when the next one is claimed: early enough for an object store's answer, and late
enough that most claims are used."""


class ShardWriter:
    """Puts samples into shards of one dump. Not thread-safe: one thread calls it.

    Memory: a few buffers of 4 MiB for each open shard and for the one that is sealed. Nothing is kept of the
    states (for object stores see `storage.part_sink`).

    `place`, `write`, `finish` and `seal_older_than` begin by raising the LeaseLost or StorageError of a seal that has
    failed meanwhile: that shard's samples are lost and must be written again.

    Args:
        store: the dump.
        layout: its geometry.
        run_id: the run.
        writer: this writer's name, unique in the run.
        shard_bytes: a shard takes no more samples once its states have this many bytes.
    """

    def __init__(self, store: Store, layout: Layout, run_id: str, writer: str, shard_bytes: int) -> None:
        self._store, self._layout = store, layout
        self._run_id, self._writer = run_id, writer
        self._shard_bytes = shard_bytes
        self._open: list[OpenShard] = []
        self._sealer = Sealer(self._seal)
        self._claims = ClaimAhead(store, run_id, writer)

    def place(self, head: SampleHead) -> None:
        """Reserves a sample's slots; an earlier copy of the row that isn't sealed yet is given up.

        Raises:
            RowMismatch: nothing of the sample is stored, more than a shard holds, or its columns differ in length.
            LeaseLost, StorageError: a seal has failed, or a new shard can't be opened.
        """
        self._sealer.check()
        layout, tokens = self._layout, int(head.token_ids.size)
        if head.loss_mask.size != tokens:
            raise RowMismatch(
                f"{head} has {tokens} token ids and {head.loss_mask.size} mask values; give as many"
            )
        positions = layout.keep.positions(head.loss_mask)
        if not 0 < positions.size <= layout.shard_rows:
            raise RowMismatch(
                f"{head} has {tokens} tokens, and states of {positions.size} are to be stored (keep: {layout.keep}); "
                f"that must be from 1 to {layout.shard_rows}, the rows of a shard"
            )
        self.drop(head.row)
        shard = self._shard_for(layout.slots(positions.size))
        shard.reserve(head, positions)
        if self._nearly_full(shard):
            self._claims.start()

    def write(
        self, row: int, start: int, states: npt.NDArray[Any], scales: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Writes some rows of a placed sample; its segments come in the order of their tokens.

        Args:
            row: prepared row.
            start: stored tokens before the segment's first; a multiple of the layout's chunk_rows.
            states: [K, rows, H] of the storage dtype, C order; copied before this returns. ``rows`` is a
                multiple of chunk_rows except in the sample's last segment.
            scales: float32 [K, rows] where states are quantised.

        Raises:
            RowMismatch: the row isn't placed, or the segment isn't the next one or has another shape or type.
            LeaseLost: a seal has failed.
            StorageError: the same, or writing failed; the shard's samples are lost and must be written again.
        """
        self._sealer.check()
        shard, sample = self._placed(row)
        try:
            shard.write(sample, start, states, scales)
        except StorageError:
            self._open.remove(shard)
            shard.abort()  # on a full disk this also gives its space back
            raise

    def finish(self, row: int) -> None:
        """Declares a sample whole; it is committed when its shard is sealed, which may begin now.

        Raises:
            RowMismatch: the row isn't placed, or some of its rows are missing.
            LeaseLost, StorageError: a seal has failed.
        """
        self._sealer.check()
        shard, sample = self._placed(row)
        if sample.rows != sample.kept:
            raise RowMismatch(
                f"{sample.head}: states of {sample.rows} tokens came, {sample.kept} are to be stored"
            )
        sample.finished = True
        self._seal_if_done(shard)

    def drop(self, row: int) -> None:
        """Gives up a sample of an open shard: its slots stay missing chunks. Unknown rows are ignored."""
        shard = self._find(row)
        if shard is not None:
            del shard.samples[row]
            self._seal_if_done(shard)

    def has(self, row: int) -> bool:
        """Whether the row has a place in a shard that is still open."""
        return self._find(row) is not None

    def take_sealed(self) -> list[SealedInfo]:
        """Shards that were committed since the last call."""
        return self._sealer.take()

    def settle(self) -> None:
        """Waits until nothing is being sealed.

        Raises:
            LeaseLost, StorageError: a seal has failed.
        """
        self._sealer.settle()

    def seal_all(self) -> None:
        """Seals every shard that holds finished samples and waits for it; unfinished samples are given up.

        A shard that was claimed ahead is given back.

        Raises:
            LeaseLost, StorageError: a seal has failed; the other shards are sealed all the same.
        """
        for shard in list(self._open):
            for row in shard.unfinished:
                del shard.samples[row]
            shard.closing = True
            self._seal_if_done(shard)
        self._claims.release()
        self._sealer.settle()

    def seal_older_than(self, age_s: float, idle_s: float) -> None:
        """Begins to seal shards that were opened ``age_s`` ago or had nothing written for ``idle_s``.

        Shards with unfinished samples take no new ones and are sealed when the last is finished or dropped.

        Raises:
            LeaseLost, StorageError: a seal has failed.
        """
        self._sealer.check()
        now_s = time.monotonic()
        for shard in list(self._open):
            if now_s - shard.opened_s >= age_s or now_s - shard.touched_s >= idle_s:
                shard.closing = True
                self._seal_if_done(shard)

    def abort(self) -> None:
        """Forgets what is open; a seal that is under way goes on."""
        while self._open:
            self._open.pop().abort()

    def _find(self, row: int) -> OpenShard | None:
        return next((shard for shard in self._open if row in shard.samples), None)

    def _placed(self, row: int) -> tuple[OpenShard, OpenSample]:
        shard = self._find(row)
        if shard is None:
            raise RowMismatch(f"row {row} has no place in an open shard; place it before writing to it")
        return shard, shard.samples[row]

    def _takes_no_more(self, shard: OpenShard) -> bool:
        return shard.closing or shard.body_bytes >= self._shard_bytes or shard.free_slots == 0

    def _nearly_full(self, shard: OpenShard) -> bool:
        return (
            shard.body_bytes >= CLAIM_AT * self._shard_bytes
            or shard.free_slots <= (1 - CLAIM_AT) * self._layout.shard_slots
        )

    def _shard_for(self, slots: int) -> OpenShard:
        newest = self._open[-1] if self._open else None
        if newest is not None:
            if newest.free_slots >= slots and not self._takes_no_more(newest):
                return newest
            newest.closing = True
        try:
            return self._claim_shard()
        finally:
            # Only now: syncs of a seal would hold up those of the claim, while the disk still has buffers to write.
            if newest is not None:
                self._seal_if_done(newest)

    def _claim_shard(self) -> OpenShard:
        number = self._claims.take()
        shard = OpenShard(number, self._layout, self._store.object_sink(hidden_key(number)))
        self._open.append(shard)
        return shard

    def _seal_if_done(self, shard: OpenShard) -> None:
        if shard.unfinished or not self._takes_no_more(shard):
            return
        self._open.remove(shard)
        if shard.samples:
            self._sealer.start(shard)
        else:
            shard.abort()

    def _seal(self, shard: OpenShard) -> SealedInfo:
        """Commits a shard, or forgets it; runs in the sealer's thread."""
        try:
            if not holds(self._store, shard.shard, self._run_id, self._writer):
                raise LeaseLost(
                    f"shard {shard.shard} of {self._store.url} isn't claimed by {self._writer} of run "
                    f"{self._run_id} any more; its {len(shard.samples)} samples are left to whoever collects "
                    "them now"
                )
            manifest = shard.seal(self._store, self._run_id, self._writer)
        finally:
            shard.abort()
        stored_bytes = sum(o.bytes for o in manifest.objects)
        return SealedInfo(shard.shard, tuple(s.row for s in manifest.samples), stored_bytes)
