"""A capture engine as its actor drives it: start, submit, watch, shut down.

SGLang lives in one thread with an event loop of its own, for as long as the process: its constructor blocks
for the whole load, and its children end with the thread that spawned them. Every public method may be called
from any thread and returns at once, `shutdown` aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import storage.errors
from actors.capture import cpu, flags
from actors.capture.engine import (
    EngineProcess,
    SchedulerFunction,
    check_gpus,
    close_sockets,
    descendants,
    end_processes,
    open_sockets,
    prepare_process,
)
from actors.capture.hook import HookSpec, run_scheduler_with_hook
from actors.capture.intake import Intake
from actors.capture.job import CaptureJob
from actors.capture.leftovers import unname_progress_lock
from actors.capture.model_info import check_same_model, read_model_info
from actors.capture.proof import PROBE_TOKENS, report_lines
from actors.capture.prove import prove
from actors.messages import Batch, EngineSpec
from storage.errors import EngineDead, HsdumpError, ProofFailed

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0


@dataclass(frozen=True)
class SessionInfo:
    """What a started engine says of itself.

    Attributes:
        process_ids: of the scheduler processes.
        max_sample_tokens: longest sample that the engine takes.
        engine_version: SGLang's.
        capture_report: the start-up proof.
    """

    process_ids: tuple[int, ...]
    max_sample_tokens: int
    engine_version: str
    capture_report: Mapping[str, Any]


class CaptureSession:
    """One engine.

    Args:
        spec: how to start it.
        scheduler_function: what every scheduler process runs.
    """

    def __init__(
        self, spec: EngineSpec, scheduler_function: SchedulerFunction = run_scheduler_with_hook
    ) -> None:
        self._spec = spec
        self._function = scheduler_function
        self._started: Future[SessionInfo] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-sglang", daemon=True)
        self._others: frozenset[int] = frozenset()
        self._foreign_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engine: EngineProcess | None = None
        self._intake: Intake | None = None
        self._tasks: dict[CaptureJob, Future[None]] = {}
        self._answers = 0
        self._serial = 0
        self._max_tokens = 0
        self._dead: HsdumpError | None = None
        self._closing = False
        self._lock = threading.Lock()

    def start(self) -> Future[SessionInfo]:
        """Loads the model and proves the capture.

        Returns:
            Done when the engine may get work. It fails with a `UserError` for something to mend,
            `ProofFailed` where states would be wrong, and `EngineDead` where SGLang didn't come up within
            ``load_timeout_s``.
        """
        if not self._thread.is_alive():
            self._thread.start()
            threading.Thread(
                target=self._enforce_deadline, name=f"{self._spec.name}-load", daemon=True
            ).start()
        return self._started

    def submit(self, batch: Batch, token_ids: Sequence[np.ndarray[Any, Any]]) -> CaptureJob:
        """Hands a batch to the engine.

        Args:
            batch: the samples and their segments.
            token_ids: int32 [T] for each sample.

        Raises:
            EngineDead: there is no engine any more.
        """
        self.check_alive()
        assert self._intake is not None
        with self._lock:
            self._serial += 1
            serial = self._serial
        job = CaptureJob(batch, self._spec.capture.layout, token_ids, self._spec.run_id, serial)
        job.route(self._intake)
        with self._lock:
            self._tasks[job] = self._post(self._capture(job))
        if self._dead is not None:  # it died since the check above
            self._break_off(self._dead)
        return job

    def progress(self) -> int:
        """A counter that moves whenever states arrive or the engine answers."""
        return self._answers + (self._intake.progress if self._intake else 0)

    def ring_wait_s(self) -> float:
        """Seconds that forwards have waited for room in the rings so far."""
        return self._intake.ring_wait_s if self._intake else 0.0

    def check_alive(self) -> None:
        """Returns while the engine can work.

        Raises:
            EngineDead: one of its processes is gone, or it hasn't started.
        """
        if self._dead is not None:
            raise self._dead if isinstance(self._dead, EngineDead) else EngineDead(str(self._dead))
        if not self._started.done() or self._started.exception() is not None or self._closing:
            raise EngineDead(f"{self._spec.name} isn't running")

    def abort_all(self) -> None:
        """Gives up every batch in flight; their futures are cancelled."""
        if self._engine is not None and self._dead is None:
            self._loop.call_soon_threadsafe(self._engine.abort_all)
        self._break_off(None)

    def shutdown(self) -> None:
        """Ends the engine's processes and its thread."""
        self._closing = True
        self._break_off(EngineDead(f"{self._spec.name} was shut down"))
        if self._intake is not None:
            self._intake.close()
        if self._engine is not None:
            self._engine.end()
        elif self._thread.is_alive():
            end_processes(self._others)
        self._stop_loop()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        """The engine's thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._construct()
            self._started_with(self._loop.run_until_complete(self._prove()))
        except Exception as error:
            self._fail_start(error)
        else:
            self._post(self._watch())
            self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):  # it is asked to stop once more
            self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        close_sockets(self._foreign_sockets)
        self._loop.close()

    def _construct(self) -> None:
        spec = self._spec
        prepare_process()
        unname_progress_lock()
        self._others = descendants()
        self._foreign_sockets.update(open_sockets())
        self._model = read_model_info(spec.model_path)
        check_same_model(self._model, spec)
        check_gpus(spec)
        if spec.gpus == 0:
            cpu.prepare_environment()
        arguments = flags.server_args(spec, flags.installed_fields())
        layout = spec.capture.layout
        self._intake = Intake(layout, flags.ring_bytes(spec), self._process_gone)
        stem = str(Path(spec.log_dir).absolute() / spec.name)
        hook = HookSpec(
            self._intake.address,
            self._intake.token,
            spec.capture,
            stem,
            self._model.vocab_size,
            spec.gpus == 0,
        )
        self._engine = EngineProcess(arguments, self._function, hook)
        self._max_tokens = self._engine.max_sample_tokens

    async def _prove(self) -> SessionInfo:
        import sglang

        assert self._engine is not None
        assert self._intake is not None
        length = min(PROBE_TOKENS, self._max_tokens, flags.chunk_tokens(self._spec))
        report = await prove(self._engine, self._intake, self._spec, self._model, length)
        report["memory"] = memory = flags.capture_memory(self._spec)
        gib = {name: round(size / 2**30, 2) for name, size in memory.items()}
        for line in (*report_lines(report), f"capture takes at most {gib} GiB on each replica"):
            logger.info("%s", line)
        return SessionInfo(
            tuple(int(h["pid"]) for h in report["processes"]),
            self._max_tokens,
            str(sglang.__version__),
            report,
        )

    def _stop_loop(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _started_with(self, info: SessionInfo) -> None:
        with self._lock:
            if not self._started.done():
                self._started.set_result(info)

    def _fail_start(self, error: Exception) -> None:
        """Says why there is no engine: what a scheduler process reported first, if one did."""
        failures = self._intake.failures if self._intake else []
        if failures and not isinstance(error, ProofFailed):
            error = _reported(failures[0])
        elif not isinstance(error, HsdumpError):
            logger.debug("starting SGLang failed", exc_info=error)
            error = EngineDead(f"{self._spec.name}: SGLang didn't start: {error}; see {self._spec.log_dir}")
        self._closing = True
        with self._lock:
            if not self._started.done():
                self._started.set_exception(error)
        if self._intake is not None:
            self._intake.close()
        if self._engine is not None:
            self._engine.end()
        else:
            end_processes(self._others)
        # A proof that waits for a dead engine would wait for ever.
        self._stop_loop()

    def _enforce_deadline(self) -> None:
        try:
            self._started.exception(timeout=self._spec.load_timeout_s)
        except TimeoutError:
            self._fail_start(
                EngineDead(
                    f"{self._spec.name} wasn't ready {self._spec.load_timeout_s:.0f} s after its start; see "
                    f"{self._spec.log_dir}, or raise engine.load_timeout_s"
                )
            )

    async def _watch(self) -> None:
        while not self._closing and self._dead is None:
            await asyncio.sleep(WATCH_EVERY_S)
            gone = self._engine.dead_child() if self._engine else None
            if gone and not self._closing:
                self._process_gone(gone)

    def _process_gone(self, said: str) -> None:
        """A process of the engine is gone: whatever waits for it is told so."""
        if self._closing or self._dead is not None:
            return
        self._dead = EngineDead(f"{self._spec.name}: {said}; see {self._spec.log_dir}")
        logger.error("%s", self._dead)
        if not self._started.done():
            self._fail_start(self._dead)
        self._break_off(self._dead)

    def _break_off(self, error: HsdumpError | None) -> None:
        with self._lock:
            tasks, self._tasks = self._tasks, {}
        for job, task in tasks.items():
            assert self._intake is not None
            job.break_off(self._intake, error)
            task.cancel()

    async def _capture(self, job: CaptureJob) -> None:
        assert self._intake is not None
        await asyncio.gather(*(self._prefill(job, i) for i in range(len(job.rids))))
        answered = time.monotonic()
        if not job.join.complete:
            await asyncio.wrap_future(self._intake.fence())
        job.finish(self._spec.name, self._intake, answered)
        with self._lock:
            self._tasks.pop(job, None)

    async def _prefill(self, job: CaptureJob, sample: int) -> None:
        assert self._engine is not None
        ids = job.token_ids[sample]
        if len(ids) != job.batch.samples[sample].tokens or len(ids) == 0:
            text = f"{len(ids)} token ids were given for {job.batch.samples[sample].tokens} rows"
            return job.fail(sample, "row_mismatch", text)
        if len(ids) > self._max_tokens:
            text = f"{len(ids)} tokens, and this engine takes at most {self._max_tokens}"
            return job.fail(sample, "too_long", text)
        try:
            answer = await self._engine.prefill(ids.tolist(), job.rids[sample])
        except Exception as error:
            return job.fail(sample, "engine", f"the engine refused the request: {error}")
        self._answers += 1
        return job.judge(sample, answer)

    def _post(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _reported(failure: Mapping[str, Any]) -> HsdumpError:
    """The error that a scheduler process reported, by its class's name."""
    kind = getattr(storage.errors, str(failure["error"]), EngineDead)
    if not (isinstance(kind, type) and issubclass(kind, HsdumpError)):
        kind = EngineDead
    error: HsdumpError = kind(str(failure["message"]))
    return error
