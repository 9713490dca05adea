"""The engines and writers of a run: handles, watchdog, losses. The driver creates and owns them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from actors.budgets import FailureRate
from actors.failures import Failure, Fault, classify
from actors.figures import Figures
from actors.ledger import Ledger
from actors.messages import EngineInfo, WriteAck, WriterInfo
from actors.run_messages import CoordinatorSpec, Loss
from storage.claims import Claim, revoke
from storage.errors import CorruptDump, StorageError
from storage.files import Store
from storage.manifest import Manifest, read_manifests

logger = logging.getLogger(__name__)

_GONE_WITHIN_S = 10.0
_FIGURES_WITHIN_S = 1.0
_HOUR_S = 3600.0


@dataclass(eq=False)
class Member:
    """An engine or a writer.

    Attributes:
        handle: of its actor.
        watch: the task that looks after it.
        pulse: the task that sees whether a writer still answers.
        progress: an engine's counter when it was last seen moving.
        progressed_s: when that was.
        lost: it is being given up, was, or has left.
    """

    name: str
    node_id: str
    handle: Any
    watch: asyncio.Task[None] | None = None
    pulse: asyncio.Task[None] | None = None
    progress: int = -1
    progressed_s: float = 0.0
    lost: bool = False


class Crew:
    """Looks after the members and tells ledger and driver of every loss.

    Args:
        spec: of the coordinator.
        ledger: told of additions and losses.
        absorb: takes every acknowledgement of a writer.
        trouble: takes a failure that pauses the run.
        wake: called when there may be something new to dispatch.
        spawn: runs a coroutine in a task whose exception ends the run.
    """

    def __init__(
        self,
        spec: CoordinatorSpec,
        ledger: Ledger,
        absorb: Callable[[WriteAck], None],
        trouble: Callable[[Failure], None],
        wake: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._spec = spec
        self._spawn = spawn
        self._store = Store(spec.dump_url)
        self._ledger = ledger
        self._absorb = absorb
        self._trouble = trouble
        self._wake = wake
        self._losses: list[Loss] = []
        self._lost = asyncio.Event()
        self._closed = False
        self.engines: dict[str, Member] = {}
        self.writers: dict[str, Member] = {}
        self.rate = FailureRate(spec.infrastructure_per_hour, _HOUR_S)
        self.known_shards: set[int] = set()
        self.last_problem: str | None = None
        self._waiting: dict[str, str] = {}

    def add_engine(self, info: EngineInfo, handle: Any) -> None:
        """An engine is ready."""
        self._ledger.add_engine(info.name, info.node_id)
        member = Member(info.name, info.node_id, handle, progressed_s=_now_s())
        self.engines[info.name] = member
        member.watch = self._spawn(self._watch_engine(member))

    def add_writer(self, info: WriterInfo, handle: Any) -> None:
        """A writer is ready."""
        self._ledger.add_writer(info.name, info.node_id)
        member = Member(info.name, info.node_id, handle)
        self.writers[info.name] = member
        member.watch = self._spawn(self._watch_writer(member))
        member.pulse = self._spawn(self._feel_pulse(member))

    def dismiss_engine(self, name: str) -> None:
        """A drained engine that has nothing in flight is no longer part of the run."""
        self._ledger.dismiss_engine(name)
        self._dismiss(self.engines.pop(name))

    def dismiss_writer(self, name: str) -> None:
        """A drained writer that has committed everything is no longer part of the run."""
        self._ledger.dismiss_writer(name)
        self._dismiss(self.writers.pop(name))

    def _dismiss(self, member: Member) -> None:
        member.lost = True  # whoever waits for its answer asks the ledger about it no more
        self._waiting.pop(member.name, None)
        _cancel(member)

    @property
    def waiting(self) -> str | None:
        """What a writer waits for, and with it the samples that are on their way to it; None if none does."""
        return next(iter(self._waiting.values()), None)

    async def next_losses(self) -> tuple[Loss, ...]:
        """Waits for losses that weren't told yet; empty once the run has ended."""
        while not self._losses and not self._closed:
            await self._lost.wait()
        losses, self._losses = tuple(self._losses), []
        if not self._closed:
            self._lost.clear()
        return losses

    async def figures(self) -> dict[str, Figures]:
        """What the members say of their work; who doesn't answer in time is left out."""
        members = (*self.engines.values(), *self.writers.values())
        calls = [asyncio.wait_for(_await(m.handle.figures.remote()), _FIGURES_WITHIN_S) for m in members]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {m.name: a for m, a in zip(members, answers, strict=True) if isinstance(a, Figures)}

    def close(self) -> None:
        """Ends the watching; what waits in `next_losses` returns."""
        self._closed = True
        self._lost.set()
        for member in (*self.engines.values(), *self.writers.values()):
            _cancel(member)

    def infrastructure_failed(self, reason: str) -> None:
        """Counts a failure that is no sample's fault."""
        self.rate.record(_now_s())
        self.last_problem = reason
        logger.warning("%s", reason)

    # ---- losses

    def engine_lost(self, member: Member, failure: Failure) -> None:
        """The engine is dead or useless: what it had goes back to pending."""
        if member.lost:
            return
        member.lost = True
        del self.engines[member.name]
        self._kill(member)
        self._ledger.engine_lost(member.name, blame=not failure.preempted)
        self._report(member, "engine", failure)

    async def writer_lost(self, member: Member, failure: Failure) -> None:
        """The writer is dead or useless: what it had written and not sealed goes back to pending."""
        if member.lost:
            return
        member.lost = True
        del self.writers[member.name]
        self._waiting.pop(member.name, None)
        self._ledger.drain_writer(member.name)
        self._kill(member)
        # Its last seal may have succeeded without the answer.
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(_await(member.handle.ping.remote()), _GONE_WITHIN_S)
        for manifest in await self._last_manifests(member.name):
            self.known_shards.add(manifest.shard)
            self._ledger.committed(sample.row for sample in manifest.samples)
        self._ledger.writer_lost(member.name)
        self._report(member, "writer", failure)

    def heard(self, member: Member, ack: WriteAck) -> None:
        """Takes a writer's answer."""
        self._absorb(ack)
        if ack.lost and not member.lost:
            logger.warning("%s lost a shard to the storage: %d samples again", member.name, len(ack.lost))
            self._ledger.shard_lost(member.name, ack.lost)
            self._wake()

    async def _last_manifests(self, writer: str) -> list[Manifest]:
        """Revokes a writer's claims and reads the manifests that weren't known; a failing storage is waited for."""
        spec = self._spec

        def gone(claim: Claim) -> bool:
            return (claim.run_id, claim.writer) == (spec.run_id, writer)

        deadline_s, pause_s = _now_s() + self._spec.full_timeout_s, 1.0
        while True:
            try:
                # A process that is stopped or out of reach may not be dead; from here on it can't commit.
                await asyncio.to_thread(revoke, self._store, spec.layout, spec.run_id, gone)
                return await asyncio.to_thread(read_manifests, self._store, frozenset(self.known_shards))
            except StorageError as error:
                if isinstance(error, CorruptDump) or _now_s() + pause_s > deadline_s:
                    raise
                logger.warning("manifests can't be read, trying again in %.0f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 30.0)

    def _report(self, member: Member, role: Any, failure: Failure) -> None:
        reason = f"{member.name} is lost: {failure.reason}"
        if failure.preempted:
            logger.warning("%s (its node was pre-empted)", reason)
        else:
            self.infrastructure_failed(reason)
        self._losses.append(Loss(member.name, role, member.node_id, failure.reason, failure.preempted))
        self._lost.set()
        self._wake()

    @staticmethod
    def _kill(member: Member) -> None:
        _cancel(member)
        ray.kill(member.handle)

    # ---- watching

    async def _watch_engine(self, member: Member) -> None:
        every_s = min(self._spec.tick_s, self._spec.stall_timeout_s / 4)
        while True:
            await asyncio.sleep(every_s)
            try:
                progress = await asyncio.wait_for(_await(member.handle.ping.remote()), every_s)
            except RayError as error:
                self.engine_lost(member, _as_member(classify(error)))
                return
            except TimeoutError:
                progress = member.progress
            engine = self._ledger.engines[member.name]
            if progress != member.progress or not engine.batches:
                member.progress, member.progressed_s = progress, _now_s()
            elif (stalled_s := _now_s() - member.progressed_s) > self._spec.stall_timeout_s:
                reason = f"no progress for {stalled_s:.0f} s with {len(engine.batches)} batches in flight"
                self.engine_lost(member, Failure(Fault.MEMBER, reason))
                return

    async def _watch_writer(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._spec.tick_s)
            if not await self.ask_writer(member, member.handle.tick.remote):
                return

    async def _feel_pulse(self, member: Member) -> None:
        """Gives up a writer whose process answers nothing: stopped or out of reach, Ray doesn't call it dead.

        A thread of its own answers, however long a write or a seal takes.
        """
        while True:
            await asyncio.sleep(self._spec.tick_s)
            try:
                waits = await asyncio.wait_for(
                    _await(member.handle.ping.remote()), self._spec.stall_timeout_s
                )
                self._note_waiting(member, waits)
            except RayError:
                return  # its death is seen by whoever waits for its work
            except TimeoutError:
                reason = f"no answer for {self._spec.stall_timeout_s:.0f} s"
                await self.writer_lost(member, Failure(Fault.MEMBER, reason))
                return

    def _note_waiting(self, member: Member, waits: str) -> None:
        """Remembers what a writer says that it waits for; empty if for nothing."""
        if waits:
            self._waiting[member.name] = f"{member.name} waits: {waits}"
            self.last_problem = self._waiting[member.name]
        elif self._waiting.pop(member.name, None):
            logger.warning("%s goes on", member.name)

    async def ask_writer(self, member: Member, call: Callable[[], Any]) -> bool:
        """Makes a call that answers with a `WriteAck` and no batch; False if the writer is lost."""
        try:
            ack: WriteAck = await _await(call())
        except RayError as error:
            failure = classify(error)
            if failure.fault is Fault.FULL:
                self._trouble(failure)
                return not member.lost
            await self.writer_lost(member, _as_member(failure))
            return False
        self.heard(member, ack)
        return not member.lost


def _as_member(failure: Failure) -> Failure:
    """A control call has no sample and no argument to blame."""
    return Failure(Fault.MEMBER, failure.reason, failure.preempted)


async def _await(ref: Awaitable[Any]) -> Any:
    return await ref


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _cancel(member: Member) -> None:
    for task in (member.watch, member.pulse):
        if task is not None and task is not asyncio.current_task():
            task.cancel()
