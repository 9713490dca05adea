"""The engines and writers of a run.

The driver owns them, because an actor dies with its creator and a dead coordinator must not cost every node a
reload of the model.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engine import EngineActor
from actors.failures import one_line
from actors.messages import EngineInfo, EngineSpec, WriterInfo, WriterSpec
from actors.synthetic import SyntheticEngine
from actors.writer import CONCURRENCY_GROUPS, WriterActor

logger = logging.getLogger(__name__)

_NO_GPU = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
"""``num_gpus=0`` alone doesn't hide a node's GPUs from a process."""

_SHUTDOWN_WAIT_S = 20.0
_WRITER_START_S = 120.0
_GIVE_UP_BEFORE_S = 10.0
"""What is left on a leaving node so long before it goes, or in the last third of a short notice, is given up."""


@dataclass
class Member:
    """One engine or writer and where it is in its life.

    Attributes:
        info: None until it has started.
        created: ``time.monotonic()`` of its creation.
        deadline: by when it must have started, or be gone if it is leaving.
        started_s: ``time.monotonic()`` of when it had started.
        known: the coordinator was told of it.
        leaving: it was told to; nobody is started in its place on its account.
    """

    name: str
    node_id: str
    handle: Any
    started: ray.ObjectRef
    created: float
    deadline: float
    info: EngineInfo | WriterInfo | None = None
    started_s: float = 0.0
    known: bool = False
    leaving: bool = False

    def start(self, info: EngineInfo | WriterInfo) -> None:
        """It has started."""
        self.info = info
        self.started_s = time.monotonic()

    def leave(self, by_unix_s: float | None) -> None:
        """It is leaving, and given up some seconds before ``by_unix_s``; None gives it all the time."""
        self.leaving = True
        left_s = math.inf if by_unix_s is None else by_unix_s - time.time()
        self.deadline = time.monotonic() + left_s - min(_GIVE_UP_BEFORE_S, left_s / 3)

    def overdue(self, now_s: float) -> bool:
        """Whether it should have started, or be gone, by ``now_s``."""
        return (self.leaving or self.info is None) and now_s > self.deadline


class Fleet:
    """Creates engines and writers, and remembers which of them live.

    Args:
        engine: what every engine has in common; name and log folder are filled in.
        writer: what every writer has in common.
    """

    def __init__(self, engine: EngineSpec, writer: WriterSpec) -> None:
        self._engine = engine
        self._writer = writer
        self._made = {"engine": 0, "writer": 0}
        self.engines: dict[str, Member] = {}
        self.writers: dict[str, Member] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.engines or name in self.writers

    def add_engine(self, node_id: str, prompts_url: str | None = None) -> Member:
        """Starts an engine on a node; its ``started`` resolves to an EngineInfo, minutes later.

        Args:
            node_id: the node.
            prompts_url: folder that holds prompts/ there, where it isn't the dump itself.
        """
        prompts_url = prompts_url or self._engine.prompts_url
        spec = replace(self._engine, name=self._name("engine"), prompts_url=prompts_url)
        cls = SyntheticEngine if spec.kind == "synthetic" else EngineActor
        handle = (
            ray.remote(cls)
            .options(
                name=spec.name,
                num_gpus=spec.gpus,
                num_cpus=0 if spec.gpus else 1,
                max_restarts=0,
                max_task_retries=0,
                runtime_env=None if spec.gpus else _NO_GPU,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(spec)
        )
        member = _member(spec.name, node_id, handle, spec.load_timeout_s)
        self.engines[spec.name] = member
        return member

    def add_writer(self, node_id: str) -> Member:
        """Starts a writer on a node; its ``started`` resolves to a WriterInfo."""
        spec = replace(self._writer, name=self._name("writer"))
        handle = (
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WriterActor)
            .options(
                name=spec.name,
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                # Or a put whose segment is still being computed would hold up every later call.
                allow_out_of_order_execution=True,
                runtime_env=_NO_GPU,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(spec)
        )
        member = _member(spec.name, node_id, handle, _WRITER_START_S)
        self.writers[spec.name] = member
        return member

    def remove(self, name: str) -> Member | None:
        """Forgets a dead member and makes sure that its process is gone; None when it isn't known."""
        member = self.engines.pop(name, None) or self.writers.pop(name, None)
        if member is not None:
            ray.kill(member.handle)
        return member

    def is_engine(self, name: str) -> bool:
        """Whether ``name`` is a living engine rather than a writer."""
        return name in self.engines

    def all(self) -> tuple[Member, ...]:
        """Every member, writers first."""
        return (*self.writers.values(), *self.engines.values())

    def ready(self) -> list[Member]:
        """Members that have started, writers first."""
        return [m for m in self.all() if m.info is not None]

    def staying_engines(self) -> list[Member]:
        """Engines that weren't told to leave."""
        return [m for m in self.engines.values() if not m.leaving]

    def staying_writers(self) -> list[Member]:
        """Writers that weren't told to leave."""
        return [m for m in self.writers.values() if not m.leaving]

    def quiesce(self) -> None:
        """Gives up what the engines have in flight and commits what the writers hold.

        For a new coordinator: it starts from the manifests alone.
        """
        calls = [m.handle.abort_all.remote() for m in self.engines.values() if m.info is not None]
        calls += [m.handle.seal.remote() for m in self.writers.values() if m.info is not None]
        for call in calls:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                # A member that died meanwhile is found by the new coordinator, like any other death.
                logger.warning("a member didn't come to rest: %s", one_line(error))

    def shutdown(self) -> None:
        """Ends every member, engines first so that SGLang's processes go in order."""
        calls = [m.handle.shutdown.remote() for m in self.engines.values() if m.info is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_SHUTDOWN_WAIT_S)
        for name in (*self.engines, *self.writers):
            self.remove(name)

    def _name(self, kind: str) -> str:
        number = self._made[kind]
        self._made[kind] += 1
        return f"{kind}-{number}"


def _member(name: str, node_id: str, handle: Any, start_timeout_s: float) -> Member:
    now = time.monotonic()
    return Member(name, node_id, handle, handle.start.remote(), now, now + start_timeout_s)
