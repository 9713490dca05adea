"""The engines and writers of a run.

The driver owns them, because an actor dies with its creator and a dead coordinator must not cost every node a
reload of the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
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


@dataclass
class Member:
    """One engine or writer and where it is in its life.

    Attributes:
        info: None until it has started.
        created: ``time.monotonic()`` of its creation.
        deadline: and by when it must have started.
    """

    name: str
    node_id: str
    handle: Any
    started: ray.ObjectRef
    created: float
    deadline: float
    info: EngineInfo | WriterInfo | None = None


class Fleet:
    """Creates engines and writers, and remembers which of them live.

    Args:
        engine: what every engine has in common; name and log folder are filled in.
        writer: what every writer has in common.
        prompts_urls: node id -> folder that holds prompts/ there, where it isn't the dump itself.
    """

    def __init__(self, engine: EngineSpec, writer: WriterSpec, prompts_urls: dict[str, str]) -> None:
        self._engine = engine
        self._writer = writer
        self._prompts_urls = prompts_urls
        self._made = {"engine": 0, "writer": 0}
        self.engines: dict[str, Member] = {}
        self.writers: dict[str, Member] = {}

    def add_engine(self, node_id: str) -> Member:
        """Starts an engine on a node; its ``started`` resolves to an EngineInfo, minutes later."""
        spec = replace(
            self._engine,
            name=self._name("engine"),
            prompts_url=self._prompts_urls.get(node_id, self._engine.prompts_url),
        )
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

    def ready(self) -> Iterator[Member]:
        """Members that have started, writers first."""
        for member in (*self.writers.values(), *self.engines.values()):
            if member.info is not None:
                yield member

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
