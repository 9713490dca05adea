"""The engine of `bench_gpu`: an hsdump engine that also prefills with the hook switched off, and throws away.

All arms of a comparison run in one engine process, so that nothing but the capture differs between them:
``plain`` sends requests that switch the model's collector off and copy nothing, ``discard`` reads every captured
value on the host and keeps none, and a run's batches come through the methods that a coordinator calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench")]

from gpu_weights import run_with_hook  # noqa: E402

from actors.capture.forwards import CAPTURED, OFF  # noqa: E402
from actors.capture.session import CaptureSession  # noqa: E402
from actors.engine import EngineActor  # noqa: E402
from actors.messages import Batch, BatchRecord, EngineSpec  # noqa: E402

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pass:
    """One pass over some samples.

    Attributes:
        tokens: of all samples.
        seconds: from the first request to the last answer, and to the last state where states are captured.
        rows: captured and read.
    """

    tokens: int
    seconds: float
    rows: int

    @property
    def tokens_per_s(self) -> float:
        """Speed."""
        return self.tokens / self.seconds


class TokenWindow:
    """Bounds the tokens that an engine has been given and not answered: it never starves, nor is it swamped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = asyncio.Condition()

    async def take(self, tokens: int) -> None:
        """Waits until ``tokens`` fit."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._used or self._used + tokens <= self._limit)
            self._used += tokens

    async def give_back(self, tokens: int) -> None:
        """They are answered."""
        async with self._changed:
            self._used -= tokens
            self._changed.notify_all()


class _ReadAndDrop:
    """Reads every value of every state once, and keeps none."""

    def __init__(self) -> None:
        self.rows = 0
        self.lost_reason = ""
        self.largest = 0

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        self.rows += len(ids)
        self.largest = max(self.largest, *(int(state.max()) for state in states))

    def lost(self, rid: str, reason: str) -> None:
        self.lost_reason = reason

    def found(self, kind: str, finding: dict[str, Any]) -> None:
        """A check in the scheduler process; none is asked for."""


class BenchSession(CaptureSession):
    """A capture session that can also be asked for passes."""

    _passes = 0

    def start_pass(self, samples: list[Array], captured: bool, window_tokens: int) -> Future[Pass]:
        """Prefills ``samples`` in their order, at most ``window_tokens`` at a time."""
        self._passes += 1
        prefix = f"{CAPTURED if captured else OFF}bench-{self._passes}:"
        done: Future[Any] = self._host.post(self._pass(samples, prefix, captured, window_tokens))
        return done

    def start_profile(self, folder: str, activities: list[str], samples: list[Array]) -> Future[Pass]:
        """As a captured pass, with a profiler trace of each scheduler process in ``folder``."""
        done: Future[Any] = self._host.post(self._profile(folder, activities, samples))
        return done

    async def _pass(self, samples: list[Array], prefix: str, captured: bool, window_tokens: int) -> Pass:
        engine, intake, sink = self._host.engine, self._host.intake, _ReadAndDrop()
        window = TokenWindow(window_tokens)
        rids = [f"{prefix}{i}" for i in range(len(samples))]

        async def prefill(ids: Array, rid: str) -> None:
            try:
                answer = await engine.prefill(ids.tolist(), rid)
            finally:
                await window.give_back(len(ids))
            read = answer["meta_info"]["prompt_tokens"]
            if read != len(ids) or answer["meta_info"].get("cached_tokens"):
                raise RuntimeError(
                    f"{rid}: {len(ids)} tokens were sent, the engine says {answer['meta_info']}"
                )

        started = time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        for ids, rid in zip(samples, rids, strict=True):
            if captured:
                intake.route(rid, sink)
            await window.take(len(ids))
            tasks.append(asyncio.create_task(prefill(ids, rid)))
        await asyncio.gather(*tasks)
        if captured:
            await asyncio.wrap_future(intake.fence())
        seconds = time.monotonic() - started
        for rid in rids:
            intake.forget(rid)
        tokens = sum(map(len, samples))
        if captured and (sink.rows != tokens or sink.lost_reason):
            raise RuntimeError(f"{sink.rows} rows of {tokens} tokens were captured; {sink.lost_reason}")
        return Pass(tokens, seconds, sink.rows)

    async def _profile(self, folder: str, activities: list[str], samples: list[Array]) -> Pass:
        from sglang.srt.managers.io_struct import ProfileReq

        manager = self._host.engine.engine.tokenizer_manager
        request = ProfileReq(output_dir=folder, activities=activities, with_stack=False, record_shapes=False)
        await manager.start_profile(request)
        try:
            return await self._pass(samples, f"{CAPTURED}bench-profile:", True, 1 << 17)
        finally:
            await manager.stop_profile()


class BenchEngine(EngineActor):
    """The engine actor of the benchmark."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._session: BenchSession = BenchSession(self._spec, run_with_hook)
        self._answered: list[tuple[float, float, int]] = []

    async def one_pass(self, rows: list[int], captured: bool, window_tokens: int) -> Pass:
        """Prefills prepared rows, in this order."""
        samples = [self._prompts.table.load(row).token_ids for row in rows]
        return await asyncio.wrap_future(self._session.start_pass(samples, captured, window_tokens))

    async def profile(self, rows: list[int], folder: str, activities: list[str]) -> Pass:
        """A captured pass with a profiler trace in ``folder``."""
        samples = [self._prompts.table.load(row).token_ids for row in rows]
        return await asyncio.wrap_future(self._session.start_profile(folder, activities, samples))

    async def capture(self, batch: Batch) -> BatchRecord:
        """As every engine's, and remembers when it was asked and answered."""
        asked = time.time()
        record = await super().capture(batch)
        self._answered.append((asked, time.time(), batch.tokens))
        return record

    async def take_answered(self) -> list[tuple[float, float, int]]:
        """When each batch since the last call was asked for and answered (Unix time), and its tokens."""
        answered, self._answered = self._answered, []
        return answered

    async def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of this process and of SGLang's, by the process's name."""
        import psutil

        me = psutil.Process(os.getpid())
        found = {"actor": sum(me.cpu_times()[:2])}
        for child in me.children(recursive=True):
            times = child.cpu_times()
            found[f"{child.name()}-{child.pid}"] = times.user + times.system
        return found
