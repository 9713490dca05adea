"""An engine without a model: states made from (sample id, position, state), to rehearse runs and faults.

It answers the same calls as the real one and imports neither torch nor SGLang.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import xxhash
from numpy.typing import NDArray

from actors.figures import Figures
from actors.messages import (
    Batch,
    BatchAnswers,
    BatchRecord,
    EngineInfo,
    EngineSpec,
    Piece,
    SampleFailure,
    SampleOutcome,
    SampleRef,
)
from actors.patience import Patience
from actors.questions import Ask, Prompts
from storage.errors import ConfigError
from storage.layout import Layout
from storage.prompts import Reply

_ONE_UP = 0x3C00
_VARYING = 0x83FF
"""Bits that vary: the sign and the ten lowest. With `_ONE_UP` set, a pattern is finite and not zero as
bfloat16 (magnitude 2**-7 to 2), as float16 (1 to 2) and as the upper half of a float32."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


def synthetic_states(sample_id: str, tokens: int, layout: Layout) -> NDArray[Any]:
    """The states of a whole sample: [K, T, H] in the layout's storage dtype, finite and nowhere zero."""
    return synthetic_rows(sample_id, np.arange(tokens, dtype=np.int32), layout)


def synthetic_rows(sample_id: str, positions: NDArray[np.int32], layout: Layout) -> NDArray[Any]:
    """A sample's states at some tokens: [K, rows, H] for positions [rows].

    Any two of sample, state and position differ in nearly every row, so a row in a wrong place shows.
    """
    seed = np.uint64(xxhash.xxh3_64_intdigest(sample_id.encode()))
    k = np.arange(layout.num_states, dtype=np.uint64)[:, None]
    position = positions.astype(np.uint64)[None, :]
    of_row = _mix(seed + _STEP * (position * np.uint64(layout.num_states) + k + np.uint64(1)))
    of_column = _mix(np.arange(layout.hidden_size, dtype=np.uint64) * _STEP)
    bits = of_row.astype(np.uint16)[:, :, None] + of_column.astype(np.uint16)
    bits &= np.uint16(_VARYING)
    bits |= np.uint16(_ONE_UP)
    if layout.itemsize == 2:
        return bits
    return bits.astype(np.uint32) << np.uint32(16)


def _quantised(states: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """A piece [K, rows, H] of bits as codes and scales, flat; see `actors.pieces`."""
    import torch  # not at the top: whoever stores states as they are does without

    from storage.float8 import quantise

    k, rows, h = states.shape
    signed = torch.from_numpy(states.reshape(k * rows, h).view(f"i{states.itemsize}"))
    codes, scales = quantise(signed.view(getattr(torch, dtype)))
    return np.concatenate([codes.numpy().ravel(), scales.numpy().view(np.uint8)])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def synthetic_reply(row: int, ask: Ask) -> Reply:
    """A made-up answer: some of the prompt's own tokens, as many as the seed says, the same for every call.

    Where it has as many tokens as it may, it counts as cut.
    """
    drawn = _mix(_STEP * (np.arange(ask.max_new_tokens + 1, dtype=np.uint64) + np.uint64(ask.seed)))
    tokens = 1 + int(drawn[0] % np.uint64(ask.max_new_tokens))
    ids = ask.token_ids[(drawn[1 : tokens + 1] % np.uint64(ask.token_ids.size)).astype(np.int64)]
    return Reply(row, ids, "length" if tokens == ask.max_new_tokens else "stop")


@dataclass(frozen=True)
class SyntheticFaults:
    """How a synthetic engine behaves; the keys of ``engine.args``.

    Attributes:
        tokens_per_s: speed; 0 is as fast as it can.
        jitter: share by which the time of a sample varies, 0 to 1; the same for a sample in every run.
        die_at_sample: the process dies when it meets its k-th sample; 0 never.
        die_on_ids: it dies whenever it meets one of these samples.
        bad_rows: these prepared rows come back as bad states (not a number), always.
        short_rows: these come back with one token too few, always.
        hang_at_sample: it answers, and makes no progress any more, from its k-th sample on; 0 never.
        hold_at_sample: it waits before its k-th sample until `SyntheticEngine.go_on` is called; 0 never.
        engines: names of the engines that the faults above are for; empty is all.
    """

    tokens_per_s: float = 0.0
    jitter: float = 0.0
    die_at_sample: int = 0
    die_on_ids: tuple[str, ...] = ()
    bad_rows: tuple[int, ...] = ()
    short_rows: tuple[int, ...] = ()
    hang_at_sample: int = 0
    hold_at_sample: int = 0
    engines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.tokens_per_s >= 0 and 0 <= self.jitter <= 1):
            raise ConfigError(
                f"engine.args of a synthetic engine: tokens_per_s is {self.tokens_per_s} and jitter {self.jitter}; "
                "give a speed from 0 and a share from 0 to 1"
            )

    def of(self, engine: str) -> SyntheticFaults:
        """What the engine of that name does: the whole plan, or only its speed."""
        if not self.engines or engine in self.engines:
            return self
        return SyntheticFaults(self.tokens_per_s, self.jitter)

    def seconds(self, sample_id: str, tokens: int) -> float:
        """How long a sample takes."""
        if not self.tokens_per_s:
            return 0.0
        share = xxhash.xxh3_64_intdigest(f"speed of {sample_id}".encode()) / 2**64  # 0 to 1
        return tokens / self.tokens_per_s * (1 + self.jitter * (2 * share - 1))


class _Prefill:
    """A batch, its samples' ids, the tokens whose states are stored, and which samples are through."""

    def __init__(self, batch: Batch, ids: list[str], positions: list[NDArray[np.int32]]) -> None:
        self.batch = batch
        self.ids = ids
        self.positions = positions
        self.done = [asyncio.Event() for _ in batch.samples]


class SyntheticEngine:
    """Asynchronous actor with the calls of an engine.

    Args:
        spec: of the engine; ``server_args`` holds `SyntheticFaults`' fields.

    Raises:
        ConfigError: ``server_args`` holds something else.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._layout = spec.capture.layout
        try:
            self._faults = SyntheticFaults(**spec.server_args).of(spec.name)
        except TypeError as error:
            raise ConfigError(f"engine.args of a synthetic engine: {error}") from None
        self._prompts = Prompts(spec.prompts_url)
        self._patience = Patience(spec.storage_timeout_s)
        self._batches: dict[str, asyncio.Future[_Prefill]] = {}
        self._read: Counter[str] = Counter()
        self._one_by_one = asyncio.Lock()
        self._may_go_on = asyncio.Event()
        self._samples = 0
        self._progress = 0

    def __repr__(self) -> str:
        return f"{self._spec.name} @ {socket.gethostname()}"

    async def start(self) -> EngineInfo:
        """There is nothing to load."""
        return EngineInfo(
            name=self._spec.name,
            node_id=ray.get_runtime_context().get_node_id(),
            hostname=socket.gethostname(),
            actor_pid=os.getpid(),
            process_ids=(),
            max_sample_tokens=1 << 30,
            engine_version="synthetic",
            capture_report={},
        )

    async def phase(self) -> str:
        """There is only one."""
        return "ready"

    async def capture(self, batch: Batch) -> BatchRecord:
        """Takes its time over a batch and answers for each sample."""
        began_s = time.perf_counter()
        prefill = await asyncio.to_thread(self._patience.call, lambda: self._prefill_of(batch))
        self._batch(batch.batch_id).set_result(prefill)
        async with self._one_by_one:
            outcomes = []
            for sample, sample_id, done in zip(batch.samples, prefill.ids, prefill.done, strict=True):
                outcomes.append(await self._prefill(sample, sample_id, sample.tokens))
                done.set()
        prefill_s = time.perf_counter() - began_s
        return BatchRecord(batch.batch_id, self._spec.name, tuple(outcomes), prefill_s, 0.0)

    async def answer(self, batch: Batch) -> BatchAnswers:
        """Takes its time over a batch of questions and makes answers up; the faults are those of `capture`."""
        asks = await asyncio.to_thread(self._patience.call, lambda: self._prompts.questions.of(batch))
        outcomes, replies = [], []
        async with self._one_by_one:
            for sample, ask in zip(batch.samples, asks, strict=True):
                reply = synthetic_reply(sample.row, ask)
                outcomes.append(await self._prefill(sample, str(ask.seed), reply.token_ids.size))
                if outcomes[-1].failure is None:
                    replies.append(reply)
        return BatchAnswers(batch.batch_id, tuple(outcomes), tuple(replies))

    async def segment(self, batch_id: str, index: int) -> NDArray[Any]:
        """One segment of a batch once its samples are captured: its pieces one after another, storage dtype."""
        # Shielded: who gives up one segment doesn't give up the others.
        prefill = await asyncio.shield(self._batch(batch_id))
        batch = prefill.batch
        pieces = batch.segments[index]
        for piece in pieces:
            await prefill.done[piece.sample].wait()
        flat = [self._rows(prefill, piece) for piece in pieces]
        self._read[batch_id] += 1
        if self._read[batch_id] == len(batch.segments):
            del self._read[batch_id]
            self._batches.pop(batch_id, None)
        return flat[0] if len(flat) == 1 else np.concatenate(flat)

    async def ping(self) -> int:
        """Samples that it has finished, and how often it waited for the storage that prompts are in."""
        return self._progress + self._patience.pauses

    async def figures(self) -> Figures:
        """It has no ring to wait for."""
        return Figures()

    async def abort_all(self) -> None:
        """Forgets every batch; whoever waits for a segment gets a cancellation."""
        for batch in self._batches.values():
            batch.cancel()
        self._batches.clear()
        self._read.clear()

    async def go_on(self) -> None:
        """Ends the wait of ``hold_at_sample``."""
        self._may_go_on.set()

    async def shutdown(self) -> None:
        """There are no processes to end."""

    def _batch(self, batch_id: str) -> asyncio.Future[_Prefill]:
        if batch_id not in self._batches:
            self._batches[batch_id] = asyncio.get_running_loop().create_future()
        return self._batches[batch_id]

    def _prefill_of(self, batch: Batch) -> _Prefill:
        rows, positions = self._prompts.of(batch, self._layout.keep)
        return _Prefill(batch, [row.sample_id for row in rows], positions)

    async def _prefill(self, sample: SampleRef, sample_id: str, tokens: int) -> SampleOutcome:
        faults = self._faults
        self._samples += 1
        if self._samples == faults.hold_at_sample:
            await self._may_go_on.wait()
        if sample_id in faults.die_on_ids or self._samples == faults.die_at_sample:
            os._exit(1)
        if self._samples == faults.hang_at_sample:
            await asyncio.Event().wait()
        if seconds := faults.seconds(sample_id, tokens):
            await asyncio.sleep(seconds)
        self._progress += 1
        failure = SampleFailure("bad_states", "non-finite states") if sample.row in faults.bad_rows else None
        return SampleOutcome(sample.row, sample.attempt, failure)

    def _rows(self, prefill: _Prefill, piece: Piece) -> NDArray[Any]:
        """A piece, flat."""
        row = prefill.batch.samples[piece.sample].row
        positions = prefill.positions[piece.sample][piece.start : piece.start + piece.rows]
        states = synthetic_rows(prefill.ids[piece.sample], positions, self._layout)
        if row in self._faults.bad_rows:
            states.fill(np.iinfo(states.dtype).max)  # all bits set: not a number, in each of the types
        states = states[:, :-1] if row in self._faults.short_rows else states
        return (
            _quantised(states, self._layout.dtype)
            if self._spec.capture.encoding == "float8"
            else states.ravel()
        )
