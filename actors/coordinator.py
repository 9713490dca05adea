"""The coordinator: an asynchronous shell round the ledger.

It passes references on and never touches a tensor. The driver creates engines and writers, makes them known
here, asks for losses and replaces what was lost; so the coordinator's own death costs no reload of a model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from actors.archive import Archive
from actors.balance import Dispatch
from actors.brakes import Brakes
from actors.carrier import Carrier
from actors.crew import Crew
from actors.departures import Departures
from actors.failures import Failure, Fault
from actors.figures import EngineTimes
from actors.logs import log_to_file
from actors.messages import EngineInfo, WriteAck, WriterInfo
from actors.meter import Meter, peak_memory_bytes
from actors.rows import State
from actors.run_messages import CoordinatorSpec, Loss, MemberStatus, RunSummary, Status
from storage.errors import IncompleteRun

__all__ = ["Coordinator", "CoordinatorSpec", "Loss", "RunSummary", "Status"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0

RUNTIME_ENV = {"env_vars": {"RAY_task_events_max_num_status_events_buffer_on_worker": "3000"}}
"""Of its process. Ray keeps what became of each call for the dashboard until the head takes it, three events and 6.7
KB: beside a busy head 100,000 events, 220 MB. These are more than three seconds' at full speed."""


class Coordinator:
    """Leads one run; an asynchronous Ray actor, made with ``ray.remote(Coordinator)`` by the driver.

    Call `run` first; everything else may be called at any time meanwhile.
    """

    def __init__(self, spec: CoordinatorSpec) -> None:
        log_to_file(spec.log_dir, f"coordinator-{spec.generation}")
        self._spec = spec
        self._archive: Archive = Archive(spec)
        self._news = asyncio.Event()
        self._loaded = asyncio.Event()
        self._load_failed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._carries: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._stopped: str | None = None
        self._brakes = Brakes(
            self._archive.url, spec.full_timeout_s, spec.infrastructure_per_hour, time.monotonic
        )
        self._meter = Meter()
        self._times = EngineTimes()

    def __repr__(self) -> str:
        return f"coordinator-{self._spec.generation}"

    # ---- what the driver calls

    async def run(self) -> RunSummary:
        """Runs until every row is accounted for, or `stop` was called.

        Returns:
            How it ended. Rows may have failed; the driver decides what to make of that.

        Raises:
            ResourceError: a sample needs more bytes than may be in flight on a node.
            IncompleteRun: too many failures, or a run that only fails.
            StorageFull: there was no space at the output for too long.
            StorageError: the dump can't be read or finished.
        """
        try:
            await self._load()
        except BaseException:
            self._load_failed = True
            raise
        finally:
            self._loaded.set()
        try:
            await self._lead()
            await self._come_to_rest()
            if self._error is not None:
                raise self._error
            account = await self._archive.finalise(self._ledger) if self._ledger.finished else None
            events = dict(self._ledger.events)
            work_s, cpu_s = self._meter.spent()
            return RunSummary(
                self._ledger.counts(),
                account,
                self._stopped,
                self._archive.stored_bytes,
                work_s,
                events,
                cpu_s,
                peak_memory_bytes(),
                {
                    name: self._meter.since_begin_s(at_s)
                    for name, at_s in self._ledger.engines.last_answer_s.items()
                },
            )
        finally:
            self._end()

    async def add_engine(self, info: EngineInfo, handle: Any) -> None:
        """Makes a started engine known; it gets work at once."""
        await self._ready()
        self._crew.add_engine(info, handle)
        self._wake()

    async def add_writer(self, info: WriterInfo, handle: Any) -> None:
        """Makes a started writer known."""
        await self._ready()
        self._crew.add_writer(info, handle)
        self._wake()

    async def drain_engine(self, name: str) -> None:
        """Gives the engine no more work; returns when it has nothing in flight and is no longer known."""
        await self._ready()
        await self._departures.engine(name)

    async def drain_writer(self, name: str) -> None:
        """Gives the writer no more work; returns when all it has is committed and it is no longer known."""
        await self._ready()
        await self._departures.writer(name)

    async def evict(self, name: str, reason: str) -> None:
        """Gives up an engine or a writer whose node goes away: nobody is blamed for the loss."""
        await self._ready()
        await self._departures.evict(name, reason)

    async def next_loss(self) -> tuple[Loss, ...]:
        """Waits for engines and writers that died since the last call; empty when the run has ended."""
        await self._ready()
        return await self._crew.next_losses()

    async def stop(self, reason: str) -> None:
        """Ends the run in order: nothing more is dispatched, what is in flight ends, shards are sealed.

        Returns at once; `run` returns when it is done.
        """
        self._stopped = self._stopped or reason
        self._wake()

    async def status(self) -> Status:
        """Where the run stands."""
        await self._ready()
        ledger, figures = self._ledger, await self._crew.figures()
        self._look_at_engines()
        return Status(
            counts=ledger.counts(),
            tokens=self._archive.tokens,
            committed_tokens=ledger.rows.committed_tokens,
            captured_tokens=self._captured_tokens(),
            stored_bytes=self._archive.stored_bytes,
            in_flight_bytes=ledger.permits.used(),
            in_flight_limit_bytes=ledger.permits.budget_bytes,
            engines=tuple(
                MemberStatus(
                    e.name,
                    e.node,
                    len(e.batches),
                    e.tokens,
                    e.done_samples,
                    self._times.busy_s(e.name),
                    self._times.waiting_s(e.name),
                    figures=figures.get(e.name),
                )
                for e in ledger.engines.all()
            ),
            writers=tuple(
                MemberStatus(w.name, w.node, incoming_bytes=w.size_bytes, figures=figures.get(w.name))
                for w in ledger.writers.all()
            ),
            events=dict(ledger.events),
            last_problem=self._crew.last_problem,
            paused=self._brakes.paused or self._crew.waiting,
        )

    # ---- the run

    async def _change(self) -> None:
        await self._news.wait()

    def _look_at_engines(self) -> None:
        engines = self._ledger.engines.all()
        self._times.look(
            _now_s(),
            [e.name for e in engines if e.batches],
            [e.name for e in engines if not e.batches],
            self._ledger.rows.count(State.PENDING) > 0,
        )

    async def _ready(self) -> None:
        await self._loaded.wait()
        if self._load_failed:
            raise IncompleteRun("the run could not start; its own call says why")

    async def _load(self) -> None:
        """Builds the ledger from the prompts and the manifests."""
        spec = self._spec
        self._ledger, known_shards = await self._archive.load()
        self._crew = Crew(spec, self._ledger, self._absorb, self._trouble, self._wake, self._spawn)
        self._crew.known_shards.update(known_shards)
        self._departures = Departures(self._ledger, self._crew, self._change, self._wake)
        self._work()

    def _work(self) -> None:
        """Makes what carries batches."""
        self._carrier = Carrier(self._spec.layout, self._ledger, self._crew, self._trouble, self._wake)

    def _captured_tokens(self) -> int:
        return self._carrier.captured_tokens

    def _carry(self, dispatch: Dispatch) -> Coroutine[Any, Any, None]:
        """Takes a batch to its end; who takes part is looked up now, before anybody can be lost."""
        engine, writer = self._crew.engines[dispatch.engine], self._crew.writers[dispatch.writer]
        return self._carrier.carry(dispatch, engine, writer)

    async def _keep_up(self) -> None:
        """What is done beside the dispatch."""
        await self._archive.grow()

    async def _lead(self) -> None:
        """Dispatches until the end is in sight or something stops it."""
        while not (self._error or self._stopped or self._ledger.finished):
            news = self._news  # before anything is looked at, so that no news is missed
            self._brakes.ease()
            if self._brakes.paused is None:
                if self._ledger.settled:
                    await self._seal_all()
                    continue
                for dispatch in iter(lambda: self._ledger.next_batch(_now_s()), None):
                    self._meter.begin()
                    self._carries.add(self._spawn(self._carry(dispatch)))
            self._look_at_engines()
            self._error = self._error or self._brakes.end(
                self._ledger, self._crew.last_problem, self._crew.rate.exceeded(_now_s())
            )
            await self._keep_up()
            await _wait_for(news, _LOOK_EVERY_S)

    async def _come_to_rest(self) -> None:
        """What is in flight ends, and shards are sealed."""
        if self._error is None:
            while self._carries:
                await asyncio.wait(tuple(self._carries))
        elif self._carries:
            logger.warning("the run ends: %s", self._error)
            await asyncio.wait(tuple(self._carries), timeout=self._spec.drain_timeout_s)
        if not self._ledger.finished:
            await self._seal_all()

    async def _seal_all(self) -> None:
        """Every writer commits what it has; one that leaves something out is given up."""
        members = tuple(self._crew.writers.values())
        alive = await asyncio.gather(*(self._crew.ask_writer(m, m.handle.seal.remote) for m in members))
        for member, lives in zip(members, alive, strict=True):
            if lives and not member.lost and self._brakes.paused is None and self._ledger.settled:
                rows = self._ledger.unsealed(member.name)
                if rows:
                    reason = f"it sealed everything, yet {rows} rows that it had are in no manifest"
                    await self._crew.writer_lost(member, Failure(Fault.MEMBER, reason))

    def _end(self) -> None:
        self._crew.close()
        for task in self._tasks:
            task.cancel()
        self._wake()

    # ---- what carrier and crew say

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._carries.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake()

    def _absorb(self, ack: WriteAck) -> None:
        for shard in ack.sealed:
            self._crew.known_shards.add(shard.shard)
            self._ledger.committed(shard.rows)
            self._archive.sealed(shard)
            self._meter.lap()
        if ack.sealed:
            self._brakes.works_again()
        self._wake()

    def _trouble(self, failure: Failure) -> None:
        """Pauses the dispatch for a while."""
        if failure.fault is Fault.CAPACITY:
            self._crew.infrastructure_failed(failure.reason)
        self._crew.last_problem = failure.reason
        self._brakes.pull(failure)
        logger.warning("paused: %s", failure.reason)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
