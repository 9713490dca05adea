"""An engine: one SGLang server inside one Ray actor on one node.

The actor itself holds no model and no CUDA context: SGLang's processes do. It hands batches over, gives their
segments out as return values (a call's return values are owned by the caller and outlive this process), and
exits hard when its engine is dead, since a live actor round a dead engine would fail every batch that comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

import ray

from actors.capture.intake import Array
from actors.capture.job import CaptureJob
from actors.capture.session import CaptureSession
from actors.figures import Figures
from actors.logs import log_to_file
from actors.messages import Batch, BatchAnswers, BatchRecord, EngineInfo, EngineSpec
from actors.patience import Patience
from actors.questions import Prompts
from storage.errors import EngineDead, StorageError

logger = logging.getLogger(__name__)

_ALIVE_EVERY_S = 1.0


class EngineActor:
    """Asynchronous actor; created by the driver, named ``engine-0``, ``engine-1``, ..."""

    def __init__(self, spec: EngineSpec) -> None:
        log_to_file(spec.log_dir, spec.name)
        self._spec = spec
        self._prompts = Prompts(spec.prompts_url)
        self._session = CaptureSession(spec)
        self._jobs: dict[str, asyncio.Future[CaptureJob]] = {}
        self._unread: dict[str, int] = {}
        self._patience = Patience(spec.storage_timeout_s)
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"{self._spec.name} @ {socket.gethostname()}"

    async def start(self) -> EngineInfo:
        """Loads the model and proves the capture; answers when the engine may get work.

        Raises:
            ProofFailed: captured states would be wrong.
            CaptureRefused: the model or a flag isn't accepted.
            EngineDead: SGLang didn't come up.
        """
        info = await asyncio.wrap_future(self._session.start())
        self._watch = asyncio.create_task(self._exit_when_dead())
        return EngineInfo(
            name=self._spec.name,
            node_id=ray.get_runtime_context().get_node_id(),
            hostname=socket.gethostname(),
            actor_pid=os.getpid(),
            process_ids=info.process_ids,
            max_sample_tokens=info.max_sample_tokens,
            engine_version=info.engine_version,
            capture_report=info.capture_report,
        )

    async def phase(self) -> str:
        """What it does on its way to work, for a person; answers while `start` goes on."""
        return self._session.phase

    async def capture(self, batch: Batch) -> BatchRecord:
        """Prefills a batch; answers when every segment of it is ready.

        The record is small; the states are fetched with `segment`, which may be called before, meanwhile or
        after, exactly once for each segment.
        """
        keep = self._spec.capture.layout.keep
        rows, positions = await asyncio.to_thread(self._patience.call, lambda: self._prompts.of(batch, keep))
        job = self._session.submit(batch, [row.token_ids for row in rows], positions)
        self._job(batch.batch_id).set_result(job)
        return await asyncio.wrap_future(job.record())

    async def answer(self, batch: Batch) -> BatchAnswers:
        """Has the model answer rows of ``prompts/asked``; nothing is captured meanwhile."""
        asks = await asyncio.to_thread(self._patience.call, lambda: self._prompts.questions.of(batch))
        job = self._session.ask(batch, asks, self._prompts.questions.sampling)
        return await asyncio.wrap_future(job.record())

    async def segment(self, batch_id: str, index: int) -> Array:
        """One segment of a batch as soon as its rows are there.

        Returns:
            Flat array of the layout's storage dtype, [sum of K x rows x H]; empty when all its samples failed.
        """
        # Shielded: who gives up one segment doesn't give up the others.
        job = await asyncio.shield(self._job(batch_id))
        array = await asyncio.wrap_future(job.segment(index))
        job.forget(index)
        left = self._unread.setdefault(batch_id, job.num_segments) - 1
        self._unread[batch_id] = left
        if left == 0:
            del self._unread[batch_id], self._jobs[batch_id]
        return array

    async def ping(self) -> int:
        """A counter that moves whenever the engine makes progress, or waits for the storage that prompts are in."""
        return self._session.progress() + self._patience.pauses

    async def figures(self) -> Figures:
        """How it spent its time so far, and what the states looked like."""
        alarms = self._session.alarms
        return Figures(
            ring_wait_s=self._session.ring_wait_s(),
            states=self._session.statistics.summary(),
            alarms=alarms.count,
            last_alarm=f"{self._sample(alarms.last_row)}: {alarms.last}" if alarms.count else "",
        )

    async def abort_all(self) -> None:
        """Gives up everything in flight; for a coordinator that replaces another."""
        self._session.abort_all()
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()
        self._unread.clear()

    async def shutdown(self) -> None:
        """Ends SGLang's processes."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._session.shutdown)

    def _sample(self, row: int | None) -> str:
        """A row's sample for a person; the row itself while its id can't be read."""
        try:
            return f"sample {self._prompts.table.load(int(row or 0)).sample_id}"
        except StorageError:
            return f"row {row}"

    def _job(self, batch_id: str) -> asyncio.Future[CaptureJob]:
        if batch_id not in self._jobs:
            self._jobs[batch_id] = asyncio.get_running_loop().create_future()
        return self._jobs[batch_id]

    async def _exit_when_dead(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            try:
                self._session.check_alive()
            except EngineDead as error:
                logger.error("%s: %s; exiting so that it is replaced", self._spec.name, error)
                logging.shutdown()
                sys.stderr.flush()
                os._exit(1)
