"""What engines, writers and the coordinator of a run are given. The same for a run and for its plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from actors.balance import Limits
from actors.messages import CaptureSpec, EngineSpec, WriterSpec
from actors.run_messages import CoordinatorSpec
from cluster.config import LimitsConfig
from cluster.placement import Node
from cluster.run import Run
from storage.layout import Layout

_INFLIGHT_SHARE = 0.4
"""Of a node's object store: one part in flight, one for the copy that a writer on another node pulls, and air."""
_BATCHES_PER_ENGINE = 3
"""One is prefilled, one waits, one drains: the engine never waits for a writer."""


def engine_spec(run: Run, layout: Layout, gpus: int, dump_url: str, log_dir: str) -> EngineSpec:
    """What every engine has in common; its name is filled in when it is made.

    Args:
        run: the run.
        layout: the dump's geometry.
        gpus: of one engine.
        dump_url: the dump, which holds prompts/.
        log_dir: folder for the engines' full logs, on each node.
    """
    config = run.config
    return EngineSpec(
        name="",
        kind=config.engine.kind,
        prompts_url=dump_url,
        run_id=run.run_id,
        model_path=run.files.source,
        revision=run.files.revision,
        dtype=config.model.dtype,
        gpus=gpus,
        replicas=config.engine.data_parallel,
        trust_remote_code=config.model.trust_remote_code,
        capture=CaptureSpec(
            run.boundaries,
            run.final,
            run.final_normed,
            run.model.num_layers,
            layout.computed,
            layout.encoding,
        ),
        ring_bytes=config.limits.ring_bytes,
        log_dir=log_dir,
        load_timeout_s=config.engine.start_timeout_s,
        stall_timeout_s=config.engine.stall_timeout_s,
        storage_timeout_s=config.limits.storage_timeout_s,
        server_args=config.engine.args,
    )


def writer_spec(run: Run, dump_url: str, log_dir: str) -> WriterSpec:
    """What every writer has in common; its name is filled in when it is made."""
    writers = run.config.writers
    return WriterSpec(
        name="",
        dump_url=dump_url,
        run_id=run.run_id,
        shard_bytes=writers.shard_bytes,
        shard_age_s=writers.shard_age_s,
        idle_s=writers.idle_s,
        log_dir=log_dir,
        storage_timeout_s=run.config.limits.storage_timeout_s,
    )


def in_flight_limit(limits: LimitsConfig, nodes: Sequence[Node]) -> int:
    """Bytes of states that may be in flight on each node."""
    if limits.inflight_bytes != "auto":
        return limits.inflight_bytes
    return int(_INFLIGHT_SHARE * min(n.object_store_bytes for n in nodes))


def coordinator_spec(
    run: Run, layout: Layout, nodes: Sequence[Node], dump_url: str, log_dir: str
) -> CoordinatorSpec:
    """How the run is led on these nodes."""
    limits = run.config.limits
    in_flight_bytes = in_flight_limit(limits, nodes)
    return CoordinatorSpec(
        dump_url=dump_url,
        run_id=run.run_id,
        layout=layout,
        limits=Limits(
            batch_tokens=limits.batch_tokens,
            batch_bytes=in_flight_bytes // _BATCHES_PER_ENGINE,
            batch_samples=limits.batch_samples,
            batches_per_engine=_BATCHES_PER_ENGINE,
            in_flight_bytes=in_flight_bytes,
            retries=limits.sample_retries,
            failures_in_a_row=limits.breaker_failures,
        ),
        infrastructure_per_hour=limits.losses_per_hour,
        stall_timeout_s=run.config.engine.stall_timeout_s,
        full_timeout_s=limits.storage_timeout_s,
        drain_timeout_s=limits.drain_timeout_s,
        log_dir=log_dir,
    )
