"""The life of one engine: its thread, its processes, the proof at its start, and its death.

SGLang lives in one thread with an event loop of its own, for as long as the process: its constructor blocks
for the whole load, and its children end with the thread that spawned them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import storage.errors
from actors.capture import adapter, cpu, flags
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
from actors.capture.hook import HookSpec
from actors.capture.intake import Intake, drain_threads
from actors.capture.leftovers import unname_progress_lock
from actors.capture.model_info import check_same_model, read_model_info
from actors.capture.proof import PROBE_TOKENS, report_lines
from actors.capture.prove import prove
from actors.capture.stand_in import SecondProof
from actors.messages import EngineSpec
from actors.models import local_model
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


class EngineHost:
    """One engine and the thread that it lives in.

    Args:
        spec: how to start it.
        scheduler_function: what every scheduler process runs.
        on_dead: called once, from any thread, when a started engine is gone.
        second_proof: what is done about states that the identity check can't prove; it may block.
    """

    def __init__(
        self,
        spec: EngineSpec,
        scheduler_function: SchedulerFunction,
        on_dead: Callable[[HsdumpError], None],
        second_proof: SecondProof,
    ) -> None:
        self.spec = spec
        self._function = scheduler_function
        self._on_dead = on_dead
        self._second_proof = second_proof
        self._started: Future[SessionInfo] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-sglang", daemon=True)
        self._others: frozenset[int] = frozenset()
        self._foreign_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engine: EngineProcess | None = None
        self._intake: Intake | None = None
        self.max_tokens = 0
        self._dead: HsdumpError | None = None
        self._closing = False
        self._lock = threading.Lock()

    @property
    def engine(self) -> EngineProcess:
        """The engine; only after its start."""
        assert self._engine is not None
        return self._engine

    @property
    def heard_ms(self) -> int:
        """When its processes were last heard of; 0 before there are any."""
        return self._engine.heard_ms if self._engine is not None else 0

    @property
    def intake(self) -> Intake:
        """Where its states arrive; only after its start."""
        assert self._intake is not None
        return self._intake

    @property
    def intake_or_none(self) -> Intake | None:
        """The intake, or None before there is one."""
        return self._intake

    @property
    def phase(self) -> str:
        """What it does on its way to work, for a person."""
        if self._started.done():
            return "ready"
        if self._engine is not None:
            return "proving the capture"
        return "starting processes" if self._intake is None else "loading the model"

    @property
    def dead(self) -> HsdumpError | None:
        """Why a started engine is gone, if it is."""
        return self._dead

    def start(self) -> Future[SessionInfo]:
        """Loads the model and proves the capture; see `CaptureSession.start`."""
        if not self._thread.is_alive():
            self._thread.start()
            threading.Thread(
                target=self._enforce_deadline, name=f"{self.spec.name}-load", daemon=True
            ).start()
        return self._started

    def check_alive(self) -> None:
        """Returns while the engine can work.

        Raises:
            EngineDead: one of its processes is gone, or it hasn't started.
        """
        if self._dead is not None:
            raise self._dead if isinstance(self._dead, EngineDead) else EngineDead(str(self._dead))
        if not self._started.done() or self._started.exception() is not None or self._closing:
            raise EngineDead(f"{self.spec.name} isn't running")

    def post(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Runs a coroutine in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def abort_all(self) -> None:
        """Has SGLang give up every request."""
        if self._engine is not None and self._dead is None:
            self._loop.call_soon_threadsafe(self._engine.abort_all)

    def close(self) -> None:
        """From now on nothing that ends is news."""
        self._closing = True

    def shutdown(self) -> None:
        """Ends the engine's processes and its thread."""
        self.close()
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
            self.post(self._watch())
            self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):  # it is asked to stop once more
            self._loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        close_sockets(self._foreign_sockets)
        self._loop.close()

    def _construct(self) -> None:
        # A hub's model is fetched, unless it's here.
        where = local_model(self.spec.model_path, self.spec.revision)
        spec = self.spec = replace(self.spec, model_path=where)
        prepare_process()
        unname_progress_lock()
        self._others = descendants()
        self._foreign_sockets.update(open_sockets())
        self._model = read_model_info(spec.model_path)
        check_same_model(self._model, spec)
        check_gpus(spec)
        if spec.gpus == 0:
            cpu.prepare_environment()
        arguments = flags.server_args(spec, adapter.installed_fields())
        layout = spec.capture.layout
        self._intake = Intake(layout, flags.ring_bytes(spec), self._process_gone, drain_threads())
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
        self.max_tokens = self._engine.max_sample_tokens

    async def _prove(self) -> SessionInfo:
        import sglang

        assert self._engine is not None
        assert self._intake is not None
        length = min(PROBE_TOKENS, self.max_tokens, flags.chunk_tokens(self.spec))
        report = await prove(self._engine, self._intake, self.spec, self._model, length)
        report = await asyncio.to_thread(self._second_proof, self.spec, self._function, report)
        report["memory"] = memory = flags.capture_memory(self.spec)
        gib = {name: round(size / 2**30, 2) for name, size in memory.items()}
        for line in (*report_lines(report), f"capture takes at most {gib} GiB on each replica"):
            logger.info("%s", line)
        if report["warning"]:
            logger.warning("%s: %s", self.spec.name, report["warning"])
        return SessionInfo(
            tuple(int(h["pid"]) for h in report["processes"]),
            self.max_tokens,
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
            error = EngineDead(f"{self.spec.name}: SGLang didn't start: {error}; see {self.spec.log_dir}")
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
            self._started.exception(timeout=self.spec.load_timeout_s)
        except TimeoutError:
            self._fail_start(
                EngineDead(
                    f"{self.spec.name} wasn't ready {self.spec.load_timeout_s:.0f} s after its start; see "
                    f"{self.spec.log_dir}, or raise engine.start_timeout_s"
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
        self._dead = EngineDead(f"{self.spec.name}: {said}; see {self.spec.log_dir}")
        logger.error("%s", self._dead)
        if not self._started.done():
            self._fail_start(self._dead)
        self._on_dead(self._dead)


def _reported(failure: Mapping[str, Any]) -> HsdumpError:
    """The error that a scheduler process reported, by its class's name."""
    kind = getattr(storage.errors, str(failure["error"]), EngineDead)
    if not (isinstance(kind, type) and issubclass(kind, HsdumpError)):
        kind = EngineDead
    error: HsdumpError = kind(str(failure["message"]))
    return error
