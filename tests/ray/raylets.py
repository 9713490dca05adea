"""A cluster of several raylets on this host, and a command that runs on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from collect_support import Collecting
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from run_files import made_up_run_file

from actors.synthetic import synthetic_states
from storage import open_dump

TOKENS = 40
PATIENT = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180"}
"""Environment of a cluster that starts on a busy machine."""


def made_up_run(folder: Path, rows: int, engine: dict[str, Any], **sections: Any) -> Path:
    """A run file for a synthetic engine on the CPU, with its prompts; the output is ``folder/dump``."""
    prompts = [
        {"id": f"s{i}", "input_ids": [i % 4000] * TOKENS, "loss_mask": [1] * TOKENS} for i in range(rows)
    ]
    limits = {"limits": {"batch_samples": 4, "inflight_bytes": 20 << 20}}
    return made_up_run_file(folder, prompts, engine=engine, **(limits | sections))


def assert_complete(folder: Path, rows: int) -> None:
    """Every row is there once, and some of them equal the generator."""
    dump = open_dump(str(folder / "dump"))
    assert sorted(sample.row for sample in dump) == list(range(rows))
    for i in (0, rows // 2, rows - 1):
        sample = dump[f"s{i}"]
        expected = synthetic_states(sample.sample_id, TOKENS, dump.layout)
        bits = sample.stack().transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, expected)


class Raylets:
    """Several raylets; the head has no CPU for engines, like the head of a GPU cluster."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address: str = self._cluster.address
        ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        self._gcs = GcsClient(address=self.address)

    def add(self) -> Any:
        """One more node, with one CPU; it has a ``node_id``."""
        return self._cluster.add_node(num_cpus=1)

    def drain(self, node: Any, *, within_s: float = 0, only_if_idle: bool = False) -> bool:
        """What an autoscaler or a cloud's notice does; whether Ray accepts it."""
        by_ms = int((time.time() + within_s) * 1000) if within_s else 0
        accepted, _ = self._gcs.drain_node(node.node_id, 1 if only_if_idle else 2, "a test", by_ms)
        return bool(accepted)

    def alive(self, node: Any) -> bool:
        return any(n["NodeID"] == node.node_id and n["Alive"] for n in ray.nodes())

    def actor(self, name: str) -> Any:
        """A run's actor, by its name."""
        (found,) = (a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"] == name)
        return ray.get_actor(name, namespace=found["namespace"])

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def raylets() -> Iterator[Raylets]:
    cluster = Raylets()
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def collecting_on(cluster: Raylets, run: Path) -> Iterator[Collecting]:
    """``hsdump collect`` on the cluster, ended with the context."""
    collecting = Collecting(run, "--address", cluster.address)
    try:
        yield collecting
    finally:
        collecting.end()
