"""Which rows go next, to which engine and which writer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.balance import Engine, Engines, Limits, Writer, Writers
from actors.budgets import Permits
from actors.pending import PendingRows

_LEAST_PART = 4
"""A batch at the end of a run isn't cut below this part of a full one, unless that takes longer than this:"""
_LEAST_S = 0.1
_FED_S = 0.5
"""An engine with less work than this always gets more: an answer comes some time after the engine's work."""


@dataclass(frozen=True)
class Choice:
    """A batch that can be dispatched now; its rows are no longer pending.

    Attributes:
        rows: prepared rows.
        alone: a suspect, to be alone on its engine.
    """

    engine: Engine
    writer: Writer
    rows: list[int]
    alone: bool


class Balancer:
    """Chooses batches: by tokens, which cost an engine's time, and within permits for the bytes that are stored.

    Suspects first, each alone on an idle engine; as many of the least loaded engines as there are suspects
    are kept for them. Then longest first, to the engine that will have done first what it has, by the speed at
    which it has answered so far. A batch is bounded by half of the engine's share of what is pending, which goes
    by its speed, so that the end of a run isn't left to one straggler; but not below a quarter of a full
    batch or a tenth of a second, and an engine with less than a full batch or half a second to do always gets
    more. Without that the end was a row of ever smaller batches, and since a batch is answered only when its
    states are out, the GPU idled between them, for nearly two seconds in a simulation. An engine that is the only
    one gets whole batches to the end. When the permits left on a node don't hold a whole batch, the engine waits
    rather than take a scrap of one.

    Args:
        limits: bounds of a batch.
        row_bytes: int64 [n], what is stored of each row.
        token_bytes: what is stored of the mean token: where only some tokens' states are, less than of one of those.
        pending: the rows that wait.
        engines: who prefills.
        writers: who writes.
        permits: bytes in flight per node.
    """

    def __init__(
        self,
        limits: Limits,
        row_bytes: NDArray[np.int64],
        token_bytes: float,
        pending: PendingRows,
        engines: Engines,
        writers: Writers,
        permits: Permits,
    ) -> None:
        self._limits = limits
        self._row_bytes = row_bytes
        self._token_bytes = token_bytes
        self._batch_tokens = limits.tokens_per_batch(token_bytes)
        self._pending = pending
        self._engines = engines
        self._writers = writers
        self._permits = permits

    def choose(self) -> Choice | None:
        """The next batch; None while nothing can be dispatched."""
        suspects = self._pending.suspects
        free = self._engines.free(self._limits.batches_per_engine)
        if not free or not self._pending.tokens:
            return None  # the commonest answer by far: it must not cost more with every engine
        speeds = self._engines.speeds()
        free.sort(key=lambda e: e.tokens / speeds.get(e.name, 1.0))
        for place, engine in enumerate(free):
            alone = place < suspects
            if engine.batches if alone else self._busy(engine, speeds):
                continue
            writer = self._writers.nearest(engine.node)
            if writer is None:
                return None
            rows = self._suspect_for(engine, writer) if alone else self._batch_for(engine, writer, speeds)
            if rows:
                return Choice(engine, writer, rows, alone)
        return None

    @property
    def _only_engine(self) -> bool:
        """There is nobody else to keep work for."""
        return self._engines.active == 1

    def _share(self, engine: Engine, speeds: Mapping[str, float]) -> int:
        """Tokens that the engine would get if what is pending were dealt out so that all end together."""
        if not speeds:
            return self._pending.tokens // self._engines.active
        return int(self._pending.tokens * speeds[engine.name] / sum(speeds.values()))

    def _busy(self, engine: Engine, speeds: Mapping[str, float]) -> bool:
        if self._only_engine:
            return False
        fed = min(self._batch_tokens, speeds.get(engine.name, math.inf) * _FED_S)
        return engine.tokens > max(self._share(engine, speeds), fed, self._limits.fed_tokens)

    def _suspect_for(self, engine: Engine, writer: Writer) -> list[int]:
        row = self._pending.suspect()
        if row is None or self._row_bytes[row] > self._room(engine, writer):
            return []
        return [self._pending.pop_suspect()]

    def _batch_for(self, engine: Engine, writer: Writer, speeds: Mapping[str, float]) -> list[int]:
        head = self._pending.head()
        if head is None:
            return []
        longest = self._pending.tokens_of(head)
        least = min(self._batch_tokens // _LEAST_PART, speeds.get(engine.name, math.inf) * _LEAST_S)
        part = self._batch_tokens if self._only_engine else max(self._share(engine, speeds) // 2, int(least))
        left = max(longest, min(self._batch_tokens, part))
        first, most = int(self._row_bytes[head]), self._limits.bytes_per_batch
        room = self._room(engine, writer)
        whole = min(left, longest * self._limits.batch_samples) * self._token_bytes
        if room < max(first, min(whole, most)):
            return []
        room = max(first, min(room, most))
        rows: list[int] = []
        while head is not None and len(rows) < self._limits.batch_samples:
            tokens, size_bytes = self._pending.tokens_of(head), int(self._row_bytes[head])
            if tokens > left or size_bytes > room:
                break
            left -= tokens
            room -= size_bytes
            rows.append(self._pending.pop())
            head = self._pending.head()
        return rows

    def _room(self, engine: Engine, writer: Writer) -> int:
        return self._permits.room({engine.node, writer.node})
