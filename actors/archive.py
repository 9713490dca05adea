"""The coordinator's dealings with the dump itself: read at the start, kept readable meanwhile, finished at the end."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pyarrow as pa

from actors.ledger import Ledger
from actors.messages import SealedShard
from actors.patience import Patience
from actors.rows import Rows, State
from actors.run_messages import CoordinatorSpec
from storage.claims import first_free, revoke
from storage.committed import read_places
from storage.dump import finalise, grow
from storage.errors import CorruptDump, StorageError
from storage.files import Store
from storage.manifest import committed_shards
from storage.prompts import PromptTable
from storage.table import OUTCOMES, Account

logger = logging.getLogger(__name__)

_SPARE_SHARDS = 64
"""Shards by which the arrays' shape is kept ahead of what is sealed."""


class Archive:
    """One dump. Everything that touches the storage runs in a thread, and waits there for one that fails.

    Args:
        spec: of the coordinator.

    Attributes:
        tokens: of all rows that are to be collected.
        stored_bytes: of the shards sealed in this coordinator's life.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        self._store = Store(spec.dump_url)
        self._patience = Patience(spec.full_timeout_s)
        self._sealed_up_to = -1
        self._capacity = 0
        self.tokens = 0
        self.stored_bytes = 0

    @property
    def url(self) -> str:
        """Where the dump is."""
        return self._store.url

    async def load(self) -> tuple[Ledger, frozenset[int]]:
        """The ledger, from the prompts and the manifests, and the shards that have a manifest.

        Raises:
            ResourceError: a sample needs more bytes than may be in flight on a node.
            StorageError: the dump can't be read, for too long.
        """
        return await asyncio.to_thread(self._patience.call, self._load)

    def _load(self) -> tuple[Ledger, frozenset[int]]:
        spec = self._spec
        self._table = PromptTable(self._store)
        # Writers of earlier runs may be stopped rather than dead: what they haven't committed is collected here.
        revoke(self._store, spec.layout, spec.run_id, lambda claim: claim.run_id != spec.run_id)
        shards = frozenset(committed_shards(self._store))
        committed = read_places(self._store)["row"].to_numpy()
        kept = self._table.kept(spec.layout.keep)
        self._stateless = np.flatnonzero((self._table.status == 0) & (kept == 0))
        skipped = (self._table.status != 0) | (kept == 0)
        self.tokens = int(self._table.tokens[~skipped].sum(dtype=np.int64))
        ledger = Ledger(
            self._table.tokens,
            skipped,
            spec.layout.bytes_per_token,
            spec.limits,
            spec.generation,
            committed=committed,
            kept=kept,
        )
        self._sealed_up_to = first_free(self._store) - 1
        return ledger, shards

    def sealed(self, shard: SealedShard) -> None:
        """A writer has committed a shard."""
        self.stored_bytes += shard.stored_bytes
        self._sealed_up_to = max(self._sealed_up_to, shard.shard)

    async def grow(self) -> None:
        """Keeps the arrays' shape ahead of what is sealed, for readers while the run goes on."""
        if self._sealed_up_to + _SPARE_SHARDS // 2 < self._capacity:
            return
        capacity = self._sealed_up_to + 1 + _SPARE_SHARDS
        try:
            await asyncio.to_thread(grow, self._store, capacity)
        except StorageError as error:  # the end of the run writes the exact shape anyhow
            logger.warning("the arrays' shape couldn't be grown: %s", error)
        self._capacity = capacity

    async def finalise(self, ledger: Ledger) -> Account:
        """Ends the dump of a finished run.

        Raises:
            CorruptDump: the manifests disagree with the ledger.
            StorageError: writing failed, for too long.
        """
        counts = ledger.counts()
        account = await asyncio.to_thread(
            self._patience.call, lambda: finalise(self._store, self._outcomes(ledger.rows))
        )
        if (account.rows, account.committed) != (counts.total, counts.committed):
            raise CorruptDump(
                f"{self.url}: {account.committed} of {account.rows} rows are committed by the "
                f"manifests, {counts.committed} of {counts.total} by the ledger; run the same command again"
            )
        return account

    def _outcomes(self, rows: Rows) -> pa.Table:
        """Rows that are in no shard, with their reasons."""
        skipped = self._table.skipped()
        before = [
            skipped["row"],
            skipped["sample_id"],
            pa.repeat("skipped", len(skipped)),
            skipped["skip_reason"],
        ]
        why = f"no token's states are to be stored (capture.keep: {self._spec.layout.keep})"
        stateless = [
            self._stateless,
            self._table.sample_ids(self._stateless),
            pa.repeat("skipped", len(self._stateless)),
            pa.repeat(why, len(self._stateless)),
        ]
        tables = [pa.table(before, schema=OUTCOMES), pa.table(stateless, schema=OUTCOMES)]
        reasons = dict(rows.reasons())
        if reasons:
            which = np.fromiter(reasons, np.int64)
            status = ["failed" if rows.state(row) == State.FAILED else "skipped" for row in reasons]
            now = [which, self._table.sample_ids(which), status, list(reasons.values())]
            tables.append(pa.table(now, schema=OUTCOMES))
        return pa.concat_tables(tables)
