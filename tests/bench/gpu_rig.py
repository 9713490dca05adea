"""Engines and dumps for `bench_gpu`: engines live through all rounds, every round writes a copy of one dump."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from gpu_engine import BenchEngine, Pass
from gpu_models import thin_out
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.capture.flags import capture_memory
from actors.coordinator import Coordinator
from actors.messages import EngineInfo, WriterSpec
from actors.run_messages import CoordinatorSpec, RunSummary
from actors.writer import CONCURRENCY_GROUPS, WriterActor
from cluster.config import RunConfig
from cluster.placement import Node, read_nodes
from cluster.run import Run, resolve
from cluster.session import connect
from cluster.specs import coordinator_spec, engine_spec, writer_spec
from storage.dump import open_or_create
from storage.errors import IncompleteRun
from storage.files import Store
from storage.layout import Layout
from storage.prompts import PromptTable, prepare

_BLOCK_BYTES = 256 << 20


@dataclass(frozen=True)
class Speed:
    """What one arm of one round came to.

    Attributes:
        tokens_per_s: all tokens by all seconds.
        details: for the log of the rounds.
    """

    tokens_per_s: float
    details: dict[str, Any]


class Rig:
    """Started engines and what they are measured with.

    Args:
        run: a resolved run file; its output is the template.
        layout: of its dump.
        nodes: of the cluster.
        engines: their handles and infos.
        window_tokens: that an engine may have unanswered in a pass.
    """

    def __init__(
        self,
        run: Run,
        layout: Layout,
        nodes: Sequence[Node],
        engines: Sequence[tuple[Any, EngineInfo]],
        window_tokens: int,
    ) -> None:
        self.run, self.layout = run, layout
        self.engines = list(engines)
        self._nodes = list(nodes)
        self._window = window_tokens
        self._template = Path(run.config.output)
        table = PromptTable(Store(run.config.output))
        self.lengths = np.asarray(table.tokens)
        self._generation = 0

    @property
    def tokens(self) -> int:
        """Of all prepared samples."""
        return int(self.lengths.sum())

    def touch_store(self) -> None:
        """Uses as much of the object store once as a run has in flight: the first touch of memory is slow."""
        spec = coordinator_spec(self.run, self.layout, self._nodes, "", "")
        block = np.zeros(_BLOCK_BYTES, np.uint8)
        for ref in [ray.put(block) for _ in range(spec.limits.in_flight_bytes // _BLOCK_BYTES)]:
            ray.get(ref)

    def passes(self, captured: bool, tokens: int, engines: int) -> Speed:
        """One pass over about ``tokens`` tokens, dealt out to the first ``engines`` engines."""
        rows = thin_out(self.lengths, tokens)
        used = self.engines[:engines]
        before = self._cpu_seconds()
        started = time.monotonic()
        calls = [
            handle.one_pass.remote(rows[i :: len(used)], captured, self._window)
            for i, (handle, _) in enumerate(used)
        ]
        passes: list[Pass] = ray.get(calls)
        seconds = max(p.seconds for p in passes)
        done = sum(p.tokens for p in passes)
        details = {
            "tokens": done,
            "seconds": round(seconds, 3),
            "call_seconds": round(time.monotonic() - started, 3),
            "rows_captured": sum(p.rows for p in passes),
            "cpu_s": self._cpu_since(before),
        }
        return Speed(done / seconds, details)

    def pipeline(self, folder: Path, writers: int) -> Speed:
        """All samples to committed shards in ``folder``, which is removed again; first dispatch to last commit."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._template, folder)
        self._generation += 1
        run_spec = coordinator_spec(self.run, self.layout, self._nodes, str(folder), "")
        before = self._cpu_seconds()
        try:
            summary = self._lead(replace(run_spec, generation=self._generation), folder, writers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if summary.counts.committed != len(self.lengths):
            raise IncompleteRun(f"{summary.counts} of {len(self.lengths)} samples: {summary.events}")
        answered = [ray.get(handle.take_answered.remote()) for handle, _ in self.engines]
        first_s = min(asked for batches in answered for asked, _, _ in batches)
        last_s = max(at for batches in answered for _, at, _ in batches)
        details = {
            "tokens": self.tokens,
            "seconds": round(summary.work_s, 3),
            "until_last_answer_s": round(last_s - first_s, 3),
            "stored_bytes": summary.stored_bytes,
            "events": dict(summary.events),
            "batches": [
                [[round(asked - first_s, 3), round(at - first_s, 3), tokens] for asked, at, tokens in b]
                for b in answered
            ],
            "cpu_s": self._cpu_since(before),
        }
        return Speed(self.tokens / summary.work_s, details)

    def _lead(self, spec: CoordinatorSpec, folder: Path, writers: int) -> RunSummary:
        spec_of_writer = writer_spec(self.run, str(folder), "")
        members = [_start_writer(replace(spec_of_writer, name=f"writer-{i}")) for i in range(writers)]
        infos = ray.get([m.start.remote() for m in members])
        coordinator: Any = ray.remote(Coordinator).options(num_cpus=0).remote(spec)
        try:
            done = coordinator.run.remote()
            ray.get([coordinator.add_writer.remote(i, m) for i, m in zip(infos, members, strict=True)])
            ray.get([coordinator.add_engine.remote(info, handle) for handle, info in self.engines])
            summary: RunSummary = ray.get(done)
        finally:
            for actor in (coordinator, *members):
                ray.kill(actor)
        return summary

    def profile(self, folder: Path, tokens: int, gpu: bool) -> None:
        """Leaves a profiler trace of a captured pass of the first engine in ``folder``."""
        handle, _ = self.engines[0]
        rows = thin_out(self.lengths, tokens)
        ray.get(handle.profile.remote(rows, str(folder), ["GPU"] if gpu else ["CPU"]))

    def memory(self) -> dict[str, Any]:
        """What capture takes, by its own bounds."""
        _, info = self.engines[0]
        spec = engine_spec(self.run, self.layout, self.run.config.engine.gpus, "", "")  # type: ignore[arg-type]
        return {
            **capture_memory(spec),
            "bytes_per_token": self.layout.bytes_per_token,
            "max_sample_tokens": info.max_sample_tokens,
        }

    def _cpu_seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for handle, info in self.engines:
            found.update({f"{info.name} {k}": v for k, v in ray.get(handle.cpu_seconds.remote()).items()})
        return found

    def _cpu_since(self, before: dict[str, float]) -> dict[str, float]:
        now = self._cpu_seconds()
        spent = {name: round(now[name] - before.get(name, 0.0), 1) for name in now}
        return {name: seconds for name, seconds in spent.items() if seconds >= 0.1}


def _start_writer(spec: WriterSpec) -> Any:
    """A writer as `cluster.fleet` makes it, but without a name, which the one of the last round may still hold."""
    return (
        ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WriterActor)
        .options(
            num_cpus=0,
            allow_out_of_order_execution=True,
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        )
        .remote(spec)
    )


@contextmanager
def started_rig(
    tree: dict[str, Any], engines: int, window_tokens: int, store_bytes: int, timeout_s: float
) -> Iterator[Rig]:
    """Engines on this machine, with a prepared dump at the run's output.

    Args:
        tree: a run file.
        engines: how many, each with ``engine.gpus`` GPUs.
        window_tokens: that an engine may have unanswered in a pass.
        store_bytes: object store of a cluster that is started here; not of one that RAY_ADDRESS names.
        timeout_s: longest time until all engines are up.
    """
    run = resolve(RunConfig.model_validate(tree), Path.cwd())
    store = Store(run.config.output)
    prepared = prepare(store, run.prompts)
    header = open_or_create(
        store, run.identity(prepared.identity), run.layout(prepared.longest_tokens), {"bench": "gpu"}
    )
    gpus = int(run.config.engine.gpus)
    with connect(None, store_bytes) as session:
        spec = engine_spec(run, header.layout, gpus, str(store.url), str(session.log_dir))
        node = ray.get_runtime_context().get_node_id()
        handles = [
            ray.remote(BenchEngine)
            .options(
                num_gpus=gpus,
                num_cpus=0,
                runtime_env=None if gpus else {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(replace(spec, name=f"engine-{i}", load_timeout_s=timeout_s))
            for i in range(engines)
        ]
        try:
            infos = ray.get([h.start.remote() for h in handles], timeout=timeout_s + 30)
            yield Rig(run, header.layout, read_nodes(), list(zip(handles, infos, strict=True)), window_tokens)
        finally:
            calls = [h.shutdown.remote() for h in handles]
            ray.wait(calls, num_returns=len(calls), timeout=30)
            for handle in handles:
                ray.kill(handle)


def gpu_memory_mib() -> list[int]:
    """Memory in use on each GPU, by nvidia-smi; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in answer.stdout.split()]


def median(values: Sequence[float]) -> float | None:
    """Median; None of nothing."""
    return statistics.median(values) if values else None
