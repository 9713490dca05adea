"""Where a plan's probe runs: in a task on the node that would get the engine, or in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.capture.probe import Probe, probe
from actors.messages import EngineSpec


def probe_on(node_id: str, spec: EngineSpec, rows: Sequence[NDArray[np.int32]]) -> Probe:
    """Starts the engine where the run would, and ends it.

    Args:
        node_id: of the node, where this process is connected to a cluster.
        spec: of the engine.
        rows: token ids [T] to measure the speed with.
    """
    # On standard error: the plan may be one JSON object.
    print("starting an engine to prove its capture: a minute, longer for a large model", file=sys.stderr)
    if not ray.is_initialized():
        return probe(spec, rows)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(probe).options(
        name="probe", num_gpus=spec.gpus, num_cpus=0 if spec.gpus else 1, scheduling_strategy=where
    )
    found: Probe = ray.get(task.remote(spec, rows))
    return found


def not_probed(kind: str) -> str:
    """What a plan says in place of a probe's result; ``kind`` is engine.kind."""
    if kind == "sglang":
        return "no-go: no engine was started; mend what stands below first"
    return f"no engine was started: engine.kind is {kind}, which captures nothing"
