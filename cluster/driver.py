"""The driver: starts engines, writers and the coordinator, replaces what dies, and ends the run.

It decides nothing about samples. It waits for a handful of calls (actors starting, losses, status, the run
itself) and answers each with one method.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.budgets import FailureRate
from actors.capture.proof import report_lines
from actors.coordinator import Coordinator
from actors.failures import one_line
from actors.messages import EngineInfo
from actors.run_messages import CoordinatorSpec, RunSummary
from cluster.config import RunConfig
from cluster.fleet import Fleet, Member
from cluster.placement import Node, place_engines, read_nodes
from cluster.report import Pace, say
from storage.errors import EngineDead, HsdumpError, IncompleteRun, ResourceError
from storage.files import Store

logger = logging.getLogger(__name__)

REPORT_KEY = "capture_report.json"
STATUS_EVERY_S = 10.0
FAILED_STARTS = 3
"""Engines and writers that fail to start in a row, without one that starts between them, end the run."""
_TURN_S = 1.0
_HOUR_S = 3600.0
_Handler = Callable[[Any], None]


class Driver:
    """One run's life.

    Args:
        store: the dump.
        config: the run file.
        fleet: creates engines and writers.
        gpus: of one engine.
        coordinator: what the coordinator is given; its generation counts up with every replacement.
    """

    def __init__(
        self, store: Store, config: RunConfig, fleet: Fleet, gpus: int, coordinator: CoordinatorSpec
    ) -> None:
        self._store = store
        self._config = config
        self._fleet = fleet
        self._gpus = gpus
        self._spec = coordinator
        self._losses = FailureRate(config.limits.losses_per_hour, _HOUR_S)
        self._failed_starts = 0
        self._pace = Pace()
        self._waiting: dict[ray.ObjectRef, _Handler] = {}
        self._summary: RunSummary | None = None
        self._reports: dict[str, Any] = {}
        self._stop_asked = False
        self._stop_deadline: float | None = None

    def run(self, nodes: Sequence[Node], places: Sequence[str]) -> RunSummary:
        """Runs to the end.

        Args:
            nodes: of the cluster.
            places: node ids for the engines to start with.

        Raises:
            ProofFailed, CaptureRefused: captured states would be wrong; nothing was collected.
            IncompleteRun: nothing is left to run on, too much died, or it was asked to stop.
        """
        self._catch_signals()
        try:
            self._start_coordinator()
            for node_id in self._writer_places(places):
                self._started(self._fleet.add_writer(node_id))
            for node_id in places:
                self._started(self._fleet.add_engine(node_id))
            where = {n.node_id: n.hostname for n in nodes}
            hosts = ", ".join(where[p] for p in places)
            say(f"starting {len(places)} engine{'s' * (len(places) > 1)} on {hosts}")
            return self._loop()
        finally:
            self._fleet.shutdown()
            ray.kill(self._coordinator)

    def _loop(self) -> RunSummary:
        next_status = time.monotonic() + STATUS_EVERY_S
        while self._summary is None:
            ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=_TURN_S)
            for ref in ready:
                self._waiting.pop(ref)(ref)
            self._enforce_deadlines()
            if self._stop_asked and self._stop_deadline is None:
                self._stop()
            if time.monotonic() >= next_status:
                next_status += STATUS_EVERY_S
                self._await(self._coordinator.status.remote(), self._on_status)
        return self._summary

    def _await(self, ref: ray.ObjectRef, handler: _Handler) -> None:
        self._waiting[ref] = handler

    # ---- the coordinator

    def _start_coordinator(self) -> None:
        self._coordinator = (
            ray.remote(Coordinator)
            .options(
                name=f"coordinator-{self._spec.generation}", num_cpus=0, max_restarts=0, max_task_retries=0
            )
            .remote(self._spec)
        )
        self._await(self._coordinator.run.remote(), self._on_end)
        self._await(self._coordinator.next_loss.remote(), self._on_loss)

    def _on_end(self, ref: ray.ObjectRef) -> None:
        try:
            self._summary = ray.get(ref)
        except RayTaskError as error:
            raise _cause(error) from error
        except RayActorError as error:
            self._replace_coordinator(error)

    def _replace_coordinator(self, error: RayActorError) -> None:
        reason = one_line(error)
        self._spend("the coordinator", reason)
        say("the coordinator died; a new one starts from the manifests, engines go on")
        logger.warning("coordinator died: %s", reason)
        self._waiting = {r: h for r, h in self._waiting.items() if h not in (self._on_loss, self._on_status)}
        self._fleet.quiesce()
        self._spec = self._spec.next_generation()
        self._start_coordinator()
        for member in self._fleet.ready():
            self._introduce(member)

    # ---- engines and writers

    def _started(self, member: Member) -> None:
        self._await(member.started, lambda ref: self._on_started(member, ref))

    def _on_started(self, member: Member, ref: ray.ObjectRef) -> None:
        try:
            member.info = ray.get(ref)
        except RayTaskError as error:
            cause = _cause(error)
            if not isinstance(cause, EngineDead):
                raise cause from error
            self._failed_start(member, str(cause))
        except RayError as error:
            self._failed_start(member, one_line(error))
        else:
            self._failed_starts = 0
            if isinstance(member.info, EngineInfo):
                self._keep_report(member.info)
            self._introduce(member)

    def _failed_start(self, member: Member, reason: str) -> None:
        """Tries again, but not for ever: each try of a large model costs half an hour."""
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            raise IncompleteRun(
                f"{self._failed_starts} starts in a row failed, the last one of {member.name}: {reason}. What is "
                "committed is safe; mend the cause and run the same command again"
            )
        self._replace(member.name, reason)

    def _introduce(self, member: Member) -> None:
        """Makes a started member known to the coordinator; a coordinator that is dead is replaced elsewhere."""
        if isinstance(member.info, EngineInfo):
            self._coordinator.add_engine.remote(member.info, member.handle)
        else:
            self._coordinator.add_writer.remote(member.info, member.handle)

    def _keep_report(self, info: EngineInfo) -> None:
        made_up = ["its states are made up: there is no model, and nothing to prove"]
        for line in report_lines(info.capture_report) if info.capture_report else made_up:
            say(f"{info.name}: {line}")
        self._reports[info.name] = dict(info.capture_report)
        self._store.replace(REPORT_KEY, json.dumps(self._reports, indent=1).encode())

    def _on_loss(self, ref: ray.ObjectRef) -> None:
        try:
            losses = ray.get(ref)
        except RayError:
            return  # the coordinator itself died: its run call says so and is answered there
        for loss in losses:
            self._replace(loss.name, loss.reason)
        self._await(self._coordinator.next_loss.remote(), self._on_loss)

    def _replace(self, name: str, reason: str) -> None:
        """Puts another engine or writer in a dead one's place, on its node if that still lives."""
        engine = self._fleet.is_engine(name)
        member = self._fleet.remove(name)
        if member is None or self._stop_asked:
            return
        say(f"{name} died ({reason}); replacing it")
        self._spend(name, reason)
        nodes = read_nodes()
        if engine:
            taken = [m.node_id for m in self._fleet.engines.values()]
            try:
                places = place_engines(nodes, self._gpus, len(taken) + 1, taken)
            except ResourceError as error:
                self._lose_place(error)
                return
            self._started(self._fleet.add_engine(places[0]))
        else:
            alive = [n.node_id for n in nodes]
            here = member.node_id if member.node_id in alive else ray.get_runtime_context().get_node_id()
            self._started(self._fleet.add_writer(here))

    def _spend(self, name: str, reason: str) -> None:
        """Counts a loss; too many within an hour end the run."""
        now = time.monotonic()
        self._losses.record(now)
        if self._losses.exceeded(now):
            raise IncompleteRun(
                f"more than limits.losses_per_hour = {self._losses.limit} engines and writers were lost within an "
                f"hour, the last one {name}: {reason}. What is committed is safe; mend the cause and run the same "
                "command again"
            )

    def _lose_place(self, error: ResourceError) -> None:
        if self._fleet.engines:
            say(f"going on with {len(self._fleet.engines)} engines: {error}")
            return
        raise IncompleteRun(f"no engine is left and none can be started: {error}") from error

    def _writer_places(self, engine_places: Sequence[str]) -> list[str]:
        config = self._config.writers
        if config.place == "head":
            return [ray.get_runtime_context().get_node_id()] * config.per_node
        return [p for p in dict.fromkeys(engine_places) for _ in range(config.per_node)]

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for member in (*self._fleet.engines.values(), *self._fleet.writers.values()):
            if member.info is None and now > member.deadline:
                self._waiting.pop(member.started, None)
                self._failed_start(member, "it didn't start in time; engine.load_timeout_s is the limit")
        if self._stop_deadline is not None and now > self._stop_deadline:
            raise IncompleteRun(
                "stopped as asked; work in flight didn't end within limits.drain_timeout_s and is lost. What is "
                "committed is safe: the same command goes on from there"
            )

    # ---- progress and the end

    def _on_status(self, ref: ray.ObjectRef) -> None:
        try:
            line = self._pace.line(ray.get(ref))
        except RayError:
            return  # a dead coordinator is answered by `_on_end`
        loading = [m for m in self._fleet.engines.values() if m.info is None]
        if loading:
            since = max(time.monotonic() - m.created for m in loading)
            line += f"; loading for {since:.0f} s: {', '.join(m.name for m in loading)}"
        say(line)

    def _catch_signals(self) -> None:
        # After ray.init, which installs handlers of its own. A handler may only set a flag.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask_to_stop)

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        if self._stop_asked:
            raise KeyboardInterrupt
        self._stop_asked = True

    def _stop(self) -> None:
        timeout_s = self._config.limits.drain_timeout_s
        say(f"stopping: no more work is handed out; open shards are sealed within {timeout_s:.0f} s")
        self._stop_deadline = time.monotonic() + timeout_s
        self._coordinator.stop.remote("asked to stop")


def _cause(error: RayTaskError) -> Exception:
    """What the remote call raised; Ray wraps it."""
    cause = error.cause
    if isinstance(cause, HsdumpError):
        return cause
    return EngineDead(f"{type(cause).__name__}: {one_line(cause)}")
