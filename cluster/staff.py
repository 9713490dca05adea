"""The engines and writers of a run come and go: nodes join and drain, processes die, the work ends.

Where an engine or a writer is missing follows from what the cluster has and who is there, asked again and again,
so a node that joins, a process that died and the start of a run are one case. The coordinator says who died and
who has nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.failures import one_line
from actors.messages import EngineInfo
from actors.run_messages import Loss, Status
from cluster.admission import Admission
from cluster.calls import Calls
from cluster.config import RunConfig
from cluster.demand import Demand
from cluster.farewells import Farewells
from cluster.fleet import Fleet, Member
from cluster.loading import Loading
from cluster.losses import LossBudget
from cluster.placement import Node, describe, free_places, missing_writers, read_nodes
from cluster.release import has_enough, idle_engines
from cluster.report import say
from storage.errors import EngineDead, HsdumpError, IncompleteRun

_WRITER_WAIT_S = 20.0


class Staff:
    """Keeps every usable node at work for as long as there is work.

    Args:
        config: the run file.
        fleet: creates engines and writers.
        gpus: of one engine.
        admission: judges nodes that join.
        calls: of the driver's loop.
        losses: what the run bears.
        hired: told of every engine that has started.

    Attributes:
        hosts: node id -> name, of every node that was ever there.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        gpus: int,
        admission: Admission,
        calls: Calls,
        losses: LossBudget,
        hired: Callable[[EngineInfo], None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._gpus = gpus
        self._admission = admission
        self._calls = calls
        self._losses = losses
        self._hired = hired
        self._coordinator: Any = None
        self._farewells = Farewells(fleet, calls)
        self._loading = Loading(calls)
        self._usable: set[str] = set()
        self._asked: set[str] = set()
        self._looking: set[str] = set()
        self._demand = Demand(config.engine, gpus)
        self._enough = False
        self._closed = False
        self._alone_since_s: float | None = None
        self.hosts: dict[str, str] = {}

    def begin(self, nodes: Sequence[Node], coordinator: Any) -> None:
        """Starts engines and writers on nodes that were admitted."""
        self._coordinator = self._farewells.coordinator = coordinator
        self._usable = {n.node_id for n in nodes}
        self._asked = set(self._usable)
        self.hosts.update({n.node_id: n.hostname for n in nodes})
        self._demand.raise_()
        self._fill(nodes)

    def serve(self, coordinator: Any) -> None:
        """A new coordinator leads; what was about to leave leaves at once, since nothing is in flight there."""
        self._coordinator = self._farewells.coordinator = coordinator
        for member in self._fleet.ready():
            member.known = False
            if member.leaving:
                self._fleet.remove(member.name)
        self._introduce()

    def new_prompts(self) -> None:
        """The prompt table was made: nodes that don't see the output get a copy of it."""
        self._admission.ship_prompts()

    def close(self) -> None:
        """Starts nobody any more: the run is to stop."""
        self._closed = True
        self._demand.withdraw()

    def look(self) -> None:
        """Looks at the cluster's nodes and at the clock.

        Raises:
            IncompleteRun: nothing is left to run on, or nothing starts.
        """
        nodes = read_nodes()
        self.hosts.update({n.node_id: n.hostname for n in nodes})
        for node in nodes:
            if node.draining:
                self._drain(node)
            elif node.node_id not in self._asked and not self._closed:
                self._asked.add(node.node_id)
                self._looking.add(node.node_id)
                say(f"{node} joined; looking at it")
                self._calls.expect(self._admission.ask(node), partial(self._on_answer, node))
        self._enforce_deadlines(nodes)
        self._fill(nodes)
        self._introduce()
        self._loading.look(self._fleet.engines.values())

    def relax(self, status: Status) -> None:
        """Lets engines go that have nothing to do any more, so that their nodes can be taken away."""
        self._enough = has_enough(self._enough, status, self._config.limits.batch_samples)
        if not self._enough or self._closed:
            return
        for name in idle_engines(status, {m.name: m.info is not None for m in self._fleet.staying_engines()}):
            self._demand.withdraw()
            self._farewells.leave(self._fleet.engines[name], "everything is handed out")
        needed = {m.node_id for m in self._fleet.staying_engines()}
        if self._config.writers.place == "node" and needed & {
            m.node_id for m in self._fleet.staying_writers()
        }:
            for member in self._fleet.staying_writers():
                if member.node_id not in needed:
                    self._farewells.leave(member, "its node's engines are gone")

    def on_losses(self, losses: Sequence[Loss]) -> None:
        """Takes out who died, and starts others in their places.

        Raises:
            IncompleteRun: too many died within an hour, or nothing is left to run on.
        """
        for loss in losses:
            member = self._fleet.remove(loss.name)
            if member is None:
                continue
            say(f"{loss.name} is gone: {loss.reason}")
            if isinstance(member.info, EngineInfo):
                self._losses.engine_lost()
            if not loss.preempted:
                self._losses.lost(loss.name, loss.reason, time.monotonic())
        self._fill(read_nodes())

    def loading(self) -> dict[str, float]:
        """Seconds since their start, of engines that haven't come up yet."""
        now_s = time.monotonic()
        return {m.name: now_s - m.created for m in self._fleet.engines.values() if m.info is None}

    # ---- who is missing

    def _fill(self, nodes: Sequence[Node]) -> None:
        """Starts what is missing on nodes that may be used."""
        if self._closed:
            return
        usable = [n for n in nodes if n.node_id in self._usable and not n.draining]
        if not self._enough or not self._fleet.engines:
            taken = [m.node_id for m in self._fleet.staying_engines()]
            places = free_places(usable, self._gpus, self._config.engine.count, taken)
            for node_id in places:
                self._expect(self._fleet.add_engine(node_id, self._admission.prompts_urls.get(node_id)))
            if places:
                where = ", ".join(self.hosts[p] for p in places)
                say(f"starting {len(places)} engine{'s' * (len(places) > 1)} on {where}")
        writers = self._config.writers
        wanted = [m.node_id for m in self._fleet.staying_engines()]
        if writers.place == "head":
            wanted = [ray.get_runtime_context().get_node_id()]
        present = [m.node_id for m in self._fleet.staying_writers()]
        may_have = {n.node_id for n in usable}
        for node_id in missing_writers([w for w in wanted if w in may_have], present, writers.per_node):
            self._expect(self._fleet.add_writer(node_id))
        self._wait_for_nodes(nodes)

    def _wait_for_nodes(self, nodes: Sequence[Node]) -> None:
        """Bounds the time without any engine."""
        if self._fleet.engines:
            self._alone_since_s = None
            return
        wait_s, now_s = self._config.engine.wait_for_nodes_s, time.monotonic()
        if self._alone_since_s is None:
            self._alone_since_s = now_s
            if wait_s:
                say(f"no engine is left and none fits; waiting {wait_s:.0f} s for a node")
        if now_s - self._alone_since_s >= wait_s and not self._looking & {n.node_id for n in nodes}:
            what = f"{self._gpus} GPUs" if self._gpus else "a CPU"
            unfit = [n for n in nodes if n.node_id not in self._usable]
            raise IncompleteRun(
                f"no engine is left and none with {what} fits; the cluster has {describe(nodes)}"
                f"{f', of which {len(unfit)} could not be used' if unfit else ''}. What is committed is safe: add "
                "nodes (engine.wait_for_nodes_s waits for them) and run the same command again"
            )

    def _on_answer(self, node: Node, ref: ray.ObjectRef) -> None:
        self._looking.discard(node.node_id)
        problem = self._admission.judge(node, ref)
        if problem:
            say(f"{node} isn't used: {problem}")
            return
        self._usable.add(node.node_id)
        self._fill(read_nodes())

    # ---- starts

    def _expect(self, member: Member) -> None:
        self._calls.expect(member.started, partial(self._on_started, member))

    def _on_started(self, member: Member, ref: ray.ObjectRef) -> None:
        try:
            member.start(ray.get(ref))
        except RayTaskError as error:
            cause = cause_of(error)
            if not isinstance(cause, EngineDead):
                raise cause from error
            self._failed_start(member, str(cause))
        except RayError as error:
            self._failed_start(member, one_line(error))
        else:
            if isinstance(member.info, EngineInfo):
                self._losses.started(member.node_id, time.monotonic() - member.created)
                self._hired(member.info)
            self._introduce()

    def _failed_start(self, member: Member, reason: str) -> None:
        nodes = read_nodes()
        self._fleet.remove(member.name)
        if member.node_id not in {n.node_id for n in nodes if not n.draining}:
            say(f"{member.name} didn't start: its node is gone")
        else:
            now_s = time.monotonic()
            seconds = now_s - member.created
            self._losses.lost(member.name, reason, now_s)
            if self._losses.failed_start(member.node_id, member.name, reason, seconds):
                say(f"{member.name} didn't start ({reason}); its node isn't used any more")
                self._usable.discard(member.node_id)
            else:
                say(f"{member.name} didn't start ({reason}); trying again")
        self._fill(nodes)

    def _introduce(self) -> None:
        """Makes started members known to the coordinator; a coordinator that is dead is replaced elsewhere.

        An engine waits a while for a writer on its node: what it gave to another node's would cross the network.
        """
        waited_s = time.monotonic() - _WRITER_WAIT_S
        for member in self._fleet.ready():  # writers first
            if member.known or member.leaving:
                continue
            if not isinstance(member.info, EngineInfo):
                self._coordinator.add_writer.remote(member.info, member.handle)
            elif self._has_writer(member.node_id) or member.started_s < waited_s:
                self._coordinator.add_engine.remote(member.info, member.handle)
            else:
                continue
            member.known = True

    def _has_writer(self, node_id: str) -> bool:
        place = self._config.writers.place
        return any(
            w.known and (place == "head" or w.node_id == node_id) for w in self._fleet.staying_writers()
        )

    # ---- departures

    def _drain(self, node: Node) -> None:
        for member in self._fleet.all():
            if member.node_id == node.node_id and not member.leaving:
                self._farewells.leave(member, f"its node {node} is draining", node.drains_by_unix_s)

    def _enforce_deadlines(self, nodes: Sequence[Node]) -> None:
        now_s = time.monotonic()
        self._farewells.enforce(now_s, {n.node_id: str(n) for n in nodes})
        for member in self._fleet.all():
            if member.info is None and member.overdue(now_s):
                self._calls.forget(member.started)
                self._failed_start(member, "it didn't start in time; engine.start_timeout_s is the limit")


def cause_of(error: RayTaskError) -> Exception:
    """What the remote call raised; Ray wraps it."""
    cause = error.cause
    if isinstance(cause, HsdumpError):
        return cause
    return EngineDead(f"{type(cause).__name__}: {one_line(cause)}")
