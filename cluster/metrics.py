"""What Prometheus and Grafana see of a run, through Ray. Set from each status, never for a sample.

Ray puts ``ray_`` before each name and ``_total`` after a counter's. docs/metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from ray.util.metrics import Counter, Gauge

from actors.run_messages import MemberStatus
from cluster.pace import Pace, Where

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hsdump_rows": ("Prepared rows by state; their sum doesn't change.", ("state",)),
    "hsdump_tokens": ("Tokens of the rows to collect: all, or committed.", ("kind",)),
    "hsdump_in_flight_bytes": ("Permits in use: bytes of states in flight, by node.", ("node",)),
    "hsdump_permit_bytes": ("Permits of a node: most bytes of states in flight.", ("node",)),
    "hsdump_engines": ("Engines that have work, that have none, and that load.", ("state",)),
    "hsdump_writers": ("Writers that live.", ()),
    "hsdump_outstanding_tokens": ("Tokens that an engine was given and hasn't answered.", ("engine",)),
    "hsdump_incoming_bytes": ("Bytes that were dispatched to a writer and aren't there yet.", ("writer",)),
    "hsdump_paused": ("1 while nothing is dispatched, as when the output is full.", ()),
    "hsdump_bottleneck": ("1 for what bounds the speed just now, 0 for the others.", ("where",)),
}
"""Name -> (help, tags). Units are in the names; what has none is a count."""

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hsdump_captured_tokens": ("Tokens that engines answered, retries included.", ()),
    "hsdump_answer_tokens": ("Tokens that the model said in the pass of its answers.", ()),
    "hsdump_stored_bytes": ("Bytes of committed shards.", ()),
    "hsdump_written_bytes": ("Bytes of states that a writer was given.", ("writer",)),
    "hsdump_engine_busy_seconds": ("Time in which an engine had work.", ("engine",)),
    "hsdump_engine_waiting_seconds": (
        "Time in which an engine had no work although rows were waiting.",
        ("engine",),
    ),
    "hsdump_ring_wait_seconds": ("Time that forwards waited for room in the ring.", ("engine",)),
    "hsdump_write_seconds": ("Time that a writer spent putting segments into shards.", ("writer",)),
    "hsdump_seal_seconds": ("Time that a writer spent ending batches and committing shards.", ("writer",)),
    "hsdump_problems": ("What went wrong and was tried again or given up, by class.", ("class",)),
    "hsdump_restarts": ("Engines, writers and coordinators that were replaced.", ("role",)),
}
"""Name -> (help, tags); Prometheus sees them with ``_total``."""


class RunMetrics:
    """A run's metrics; made once Ray is connected.

    Args:
        run_id: tag of every one of them, since a cluster may have several runs.
    """

    def __init__(self, run_id: str) -> None:
        tags = {"run": run_id}
        self._gauges = {n: _made(Gauge, n, text, keys, tags) for n, (text, keys) in GAUGES.items()}
        self._counters = {n: _made(Counter, n, text, keys, tags) for n, (text, keys) in COUNTERS.items()}
        self._seen: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, pace: Pace, hosts: Mapping[str, str], loading: int) -> None:
        """Sets everything from one status.

        Args:
            pace: of the run, with its status.
            hosts: node id -> name.
            loading: engines that load.
        """
        status = pace.status
        for state, rows in asdict(status.counts).items():
            self._set("hsdump_rows", rows, state=state)
        self._set("hsdump_tokens", status.tokens, kind="all")
        self._set("hsdump_tokens", status.committed_tokens, kind="committed")
        for node in {*status.in_flight_bytes, *(e.node_id for e in status.engines)}:
            name = hosts.get(node, node)
            self._set("hsdump_in_flight_bytes", status.in_flight_bytes.get(node, 0), node=name)
            self._set("hsdump_permit_bytes", status.in_flight_limit_bytes, node=name)
        working = sum(e.batches > 0 for e in status.engines)
        counts = {"working": working, "waiting": len(status.engines) - working, "loading": loading}
        for state, engines in counts.items():
            self._set("hsdump_engines", engines, state=state)
        self._set("hsdump_writers", len(status.writers))
        self._set("hsdump_paused", int(status.paused is not None))
        for where in get_args(Where):
            self._set("hsdump_bottleneck", int(pace.bottleneck == where), where=where)
        if status.task == "answer":
            self._reach("hsdump_answer_tokens", status.answer_tokens)
        else:
            self._reach("hsdump_captured_tokens", status.captured_tokens)
            self._reach("hsdump_stored_bytes", status.stored_bytes)
        for kind, count in status.events.items():
            self._reach("hsdump_problems", count, **{"class": kind})
        for engine in status.engines:
            self._engine(engine)
        for writer in status.writers:
            self._writer(writer)

    def restarted(self, role: str) -> None:
        """An engine, a writer or the coordinator was replaced."""
        self._counters["hsdump_restarts"].inc(1, tags={"role": role})

    def _engine(self, engine: MemberStatus) -> None:
        self._set("hsdump_outstanding_tokens", engine.tokens, engine=engine.name)
        self._reach("hsdump_engine_busy_seconds", engine.busy_s, engine=engine.name)
        self._reach("hsdump_engine_waiting_seconds", engine.waiting_s, engine=engine.name)
        if engine.figures is not None:
            self._reach("hsdump_ring_wait_seconds", engine.figures.ring_wait_s, engine=engine.name)

    def _writer(self, writer: MemberStatus) -> None:
        self._set("hsdump_incoming_bytes", writer.incoming_bytes, writer=writer.name)
        if writer.figures is not None:
            self._reach("hsdump_written_bytes", writer.figures.written_bytes, writer=writer.name)
            self._reach("hsdump_write_seconds", writer.figures.write_s, writer=writer.name)
            self._reach("hsdump_seal_seconds", writer.figures.seal_s, writer=writer.name)

    def _set(self, name: str, value: float, **tags: str) -> None:
        self._gauges[name].set(value, tags=tags)

    def _reach(self, name: str, value: float, **tags: str) -> None:
        """Counts up to a value that only grows; one that shrank is of a new process, and all of it is new."""
        key = (name, tuple(sorted(tags.items())))
        before = self._seen.get(key, 0.0)
        more = value - before if value >= before else value
        self._seen[key] = value
        if more > 0:  # Ray refuses to count nothing
            self._counters[name].inc(more, tags=tags)


def _made(kind: Any, name: str, text: str, keys: tuple[str, ...], tags: dict[str, str]) -> Any:
    metric = kind(name, description=text, tag_keys=("run", *keys))
    metric.set_default_tags(tags)
    return metric
