"""Engines and writers that leave while the run goes on: in order if there is time, else they are given up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.calls import Calls
from cluster.fleet import Fleet, Member
from cluster.report import say

_SHUTDOWN_S = 30.0


class Farewells:
    """Sees members off.

    Args:
        fleet: they are taken out of it.
        calls: of the driver's loop.

    Attributes:
        coordinator: who leads the run.
    """

    def __init__(self, fleet: Fleet, calls: Calls) -> None:
        self._fleet = fleet
        self._calls = calls
        self.coordinator: Any = None

    def leave(self, member: Member, why: str, by_unix_s: float | None = None) -> None:
        """Has a member end what it has, and then its process.

        Args:
            member: of the fleet.
            why: for a person.
            by_unix_s: shortly before then what isn't done is given up; None waits for ever.
        """
        say(f"{member.name} gets no more work: {why}")
        if member.info is None:
            self._calls.forget(member.started)
            self._fleet.remove(member.name)
            return
        member.leave(by_unix_s)
        engine = self._fleet.is_engine(member.name)
        drain = self.coordinator.drain_engine if engine else self.coordinator.drain_writer
        self._calls.expect(drain.remote(member.name), partial(self._on_left, member))

    def enforce(self, now_s: float, hosts: Mapping[str, str]) -> None:
        """Gives up who should be gone by ``now_s``; ``hosts`` are nodes' names for a person."""
        for member in self._fleet.all():
            if member.leaving and member.overdue(now_s):
                member.leave(None)
                where = hosts.get(member.node_id, "a node that is gone")
                reason = f"it didn't get done on {where} in time"
                say(f"{member.name} is given up: {reason}")
                given_up = self.coordinator.evict.remote(member.name, reason)
                self._calls.expect(given_up, partial(self._remove, member.name))

    def _on_left(self, member: Member, ref: ray.ObjectRef) -> None:
        try:
            ray.get(ref)
        except RayError:
            return  # the coordinator died: whoever replaces it sees to who was leaving
        if member.name not in self._fleet:
            return
        if not self._fleet.is_engine(member.name):
            self._fleet.remove(member.name)
            return
        # SGLang's processes end in order; what doesn't is killed by the deadline.
        member.leave(time.time() + _SHUTDOWN_S)
        self._calls.expect(member.handle.shutdown.remote(), partial(self._remove, member.name))

    def _remove(self, name: str, ref: ray.ObjectRef) -> None:
        self._fleet.remove(name)
