"""A collection by synthetic engines on several raylets of this host: what the scale and balance benches measure."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from numpy.typing import NDArray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.balance import Limits
from actors.coordinator import RUNTIME_ENV, Coordinator, CoordinatorSpec, RunSummary
from actors.messages import CaptureSpec, EngineSpec, WriterSpec
from actors.synthetic import SyntheticEngine
from actors.writer import CONCURRENCY_GROUPS, WriterActor
from storage.dump import create_dump
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.prompts import PreparedSummary
from storage.prompts.parts import PartWriter, write_prepared
from storage.prompts.spec import PreparedRow

ROOT = Path(__file__).parents[2]
STORE_BYTES = 100 << 20
"""Object store of each raylet."""


def sample_id(row: int) -> str:
    return f"sample {row}"


def make_dump(folder: Path, tokens: NDArray[np.int32], layout: Layout) -> Store:
    """An empty dump whose prepared rows have the given lengths; row r holds the token ids r, r + 1, ..."""
    store = Store(str(folder))
    parts = PartWriter(store)
    for row, length in enumerate(tokens.tolist()):
        ids = np.arange(row, row + length, dtype=np.int32)
        parts.add(PreparedRow(row, row, sample_id(row), ids, np.ones(length, np.uint8), None), None)
    summary = PreparedSummary(
        identity={},
        source_url="made up",
        source_rows=tokens.size,
        rows=tokens.size,
        to_collect=tokens.size,
        skipped=0,
        tokens=int(tokens.sum(dtype=np.int64)),
        supervised_tokens=int(tokens.sum(dtype=np.int64)),
        longest_tokens=int(tokens.max()),
        parts=parts.close(),
    )
    write_prepared(store, summary)
    create_dump(store, Identity({}, {}, {}, {}), layout, {})
    return store


@contextlib.contextmanager
def raylets(count: int) -> Iterator[list[str]]:
    """A cluster of so many raylets on this host; yields their node ids, the head first."""
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # like the raylets; 15 is Ray's default
    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(count - 1):
            cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        _wait_for_rest(cluster)
        head = ray.get_runtime_context().get_node_id()
        yield sorted((n["NodeID"] for n in ray.nodes() if n["Alive"]), key=lambda n: n != head)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _wait_for_rest(cluster: Cluster) -> None:
    """Until a node's daemons take less than a twentieth of a core: each starts with two that import much."""
    nodes = cluster.list_all_nodes()
    while True:
        roots = [process for node in nodes for process in node.live_processes()]
        daemons = [psutil.Process(process.pid) for _, process in roots]
        family = [p for daemon in daemons for p in (daemon, *daemon.children(recursive=True))]
        before_s, began_s = _cpu_s(family), time.monotonic()
        time.sleep(2.0)
        if _cpu_s(family) - before_s < 0.05 * len(nodes) * (time.monotonic() - began_s):
            return


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def spilled_bytes() -> int:
    """Bytes that the raylets of this cluster have spilled since they began."""
    from ray._private.internal_api import node_stats

    return sum(
        node_stats(n["NodeManagerAddress"], n["NodeManagerPort"]).store_stats.spilled_bytes_total
        for n in ray.nodes()
        if n["Alive"]
    )


@dataclass
class Collection:
    """Leads a run without faults: an engine and a writer on each node, the coordinator on the first.

    Attributes:
        speeds: tokens/s of each node's engine; 0 is as fast as it can.
    """

    store: Store
    layout: Layout
    nodes: Sequence[str]
    speeds: Sequence[float]
    limits: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int = 1 << 30
    members: list[Any] = field(default_factory=list)

    def run(self) -> RunSummary:
        limits = {
            "batch_tokens": 16_384,
            "batch_bytes": STORE_BYTES // 8,
            "batch_samples": 64,
            "batches_per_engine": 3,
            "in_flight_bytes": int(0.4 * STORE_BYTES),
        } | self.limits
        spec = CoordinatorSpec(self.store.url, "bench", self.layout, Limits(**limits))
        here = _on(self.nodes[0])
        coordinator = ray.remote(Coordinator).options(num_cpus=0, runtime_env=RUNTIME_ENV, **here)
        self.coordinator = coordinator.remote(spec)
        started = [
            self._started(i, node, speed)
            for i, (node, speed) in enumerate(zip(self.nodes, self.speeds, strict=True))
        ]
        infos = ray.get([ref for pair in started for ref in pair])
        run = self.coordinator.run.remote()
        adds = [
            (self.coordinator.add_writer if info.name.startswith("writer") else self.coordinator.add_engine)
            for info in infos
        ]
        ray.get([add.remote(i, m) for add, i, m in zip(adds, infos, self.members, strict=True)])
        summary: RunSummary = ray.get(run)
        return summary

    def end(self) -> None:
        """Ends the actors, so that another collection may follow."""
        for member in (*self.members, self.coordinator):
            ray.kill(member)

    def _started(self, number: int, node: str, speed: float) -> tuple[Any, Any]:
        writer_spec = WriterSpec(f"writer-{number}", self.store.url, "bench", self.shard_bytes, 300.0, 30.0)
        writer = (
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WriterActor)
            .options(num_cpus=0, allow_out_of_order_execution=True, **_on(node))
            .remote(writer_spec)
        )
        engine_spec = EngineSpec(
            name=f"engine-{number}",
            kind="synthetic",
            prompts_url=self.store.url,
            run_id="bench",
            model_path="",
            dtype=self.layout.dtype,
            gpus=0,
            replicas=1,
            trust_remote_code=False,
            capture=_capture(self.layout),
            ring_bytes=0,
            log_dir="",
            load_timeout_s=60,
            stall_timeout_s=600,
            server_args={"tokens_per_s": speed},
        )
        engine = ray.remote(SyntheticEngine).options(num_cpus=0, **_on(node)).remote(engine_spec)
        self.members += [writer, engine]
        return writer.start.remote(), engine.start.remote()


def _capture(layout: Layout) -> CaptureSpec:
    boundaries = tuple(state for state in layout.states if isinstance(state, int))
    return CaptureSpec(boundaries, "final" in layout.states, "final_normed" in layout.states, 61, layout)


def _on(node: str) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
