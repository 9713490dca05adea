"""``hsdump status``: the runs that go on on a cluster, seen from outside."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from actors.run_messages import Status
from cluster.live import view
from cluster.pace import Pace, Pacer
from cluster.placement import read_nodes
from cluster.session import NAMESPACE, connect
from cluster.watch import progress_fields
from storage.errors import ResourceError

_ANSWER_WITHIN_S = 10.0
_BETWEEN_LOOKS_S = 1.0


@dataclass(frozen=True)
class RunningRun:
    """A run as its actors' names tell it.

    Attributes:
        coordinator: name of the newest.
        engines: names of all, also of those that load.
    """

    run_id: str
    coordinator: str
    engines: tuple[str, ...]


def running_runs(named: list[Mapping[str, str]]) -> list[RunningRun]:
    """The runs among a cluster's named actors, each given as ``name`` and ``namespace``. Pure."""
    names: dict[str, list[str]] = {}
    for actor in named:
        if actor["namespace"].startswith(NAMESPACE):
            names.setdefault(actor["namespace"].removeprefix(NAMESPACE), []).append(actor["name"])
    runs = []
    for run_id, own in sorted(names.items()):
        coordinators = [name for name in own if name.startswith("coordinator-")]
        if coordinators:
            newest = max(coordinators, key=lambda name: int(name.rpartition("-")[2]))
            engines = tuple(sorted(name for name in own if name.startswith("engine-")))
            runs.append(RunningRun(run_id, newest, engines))
    return runs


def status(address: str | None, *, watch_s: float | None, as_json: bool) -> None:
    """Prints where every run on the cluster stands.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, or the cluster of this machine.
        watch_s: again so often, until no run is left; None prints once.
        as_json: one JSON object a line instead.

    Raises:
        ResourceError: there is no cluster, or no run on it.
    """
    console = Console(soft_wrap=as_json)
    with connect(address or "auto", None):
        looks = _looks(_BETWEEN_LOOKS_S if watch_s is None else watch_s)
        first = next(looks, [])
        if not first:
            raise ResourceError(
                f"no run goes on on the cluster at {address or 'this machine'}; start one with `hsdump collect`"
            )
        if watch_s is None:
            _print(console, next(looks, []) or first, as_json)  # a rate needs two looks
        elif as_json:
            for look in (first, *looks):
                _print(console, look, as_json)
        else:
            with Live(_view(first), console=console, refresh_per_second=4) as live:
                for look in looks:
                    live.update(_view(look))
            console.print("no run goes on any more")


@dataclass(frozen=True)
class _Look:
    run: RunningRun
    pace: Pace | None
    hosts: Mapping[str, str]

    @property
    def loading(self) -> list[str]:
        known = {engine.name for engine in self.pace.status.engines} if self.pace is not None else set()
        return [name for name in self.run.engines if name not in known]


def _looks(every_s: float) -> Iterator[list[_Look]]:
    """A look at all runs, again and again, until there is none."""
    pacers: dict[str, Pacer] = {}
    while True:
        runs = running_runs(ray.util.list_named_actors(all_namespaces=True))
        if not runs:
            return
        hosts = {node.node_id: node.hostname for node in read_nodes()}
        looks = []
        for run in runs:
            status = _ask(run)
            pacer = pacers.setdefault(run.run_id, Pacer())
            pace = None if status is None else pacer.look(status, time.monotonic())
            looks.append(_Look(run, pace, hosts))
        yield looks
        time.sleep(every_s)


def _ask(run: RunningRun) -> Status | None:
    """The coordinator's answer; None where it reads the dump, or died a moment ago."""
    try:
        coordinator = ray.get_actor(run.coordinator, namespace=NAMESPACE + run.run_id)
        answer: Status = ray.get(coordinator.status.remote(), timeout=_ANSWER_WITHIN_S)
    except (RayError, GetTimeoutError, ValueError):
        return None
    return answer


def _print(console: Console, looks: list[_Look], as_json: bool) -> None:
    if not as_json:
        console.print(_view(looks))
        return
    for look in looks:
        console.print(json.dumps(_fields(look)), markup=False, highlight=False)


def _fields(look: _Look) -> dict[str, Any]:
    if look.pace is None:
        return {"run_id": look.run.run_id, "event": "loading", "loading": look.loading}
    fields = progress_fields(look.pace, {})
    return {"run_id": look.run.run_id} | fields | {"loading": look.loading, "nodes": dict(look.hosts)}


def _view(looks: list[_Look]) -> RenderableType:
    parts: list[RenderableType] = []
    for look in looks:
        parts.append(Text(f"run {look.run.run_id}", style="bold"))
        if look.pace is None:
            parts.append(Text("the coordinator reads the dump, or is being replaced"))
        else:
            parts.append(view(look.pace, look.hosts, {}))
        if look.loading:
            parts.append(Text(f"loading: {', '.join(look.loading)}", style="dim"))
    return Group(*parts)
