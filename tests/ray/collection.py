"""A dump of made-up prompts, and a driver just large enough to lead a run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import zarr

from actors.balance import Limits
from actors.coordinator import Coordinator, CoordinatorSpec, RunSummary
from actors.messages import CaptureSpec, EngineSpec, WriterSpec
from actors.synthetic import SyntheticEngine, synthetic_states
from actors.writer import CONCURRENCY_GROUPS, WriterActor
from storage.dump import create_dump
from storage.errors import StorageFull
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.prompts import PreparedSummary
from storage.prompts.parts import PartWriter, write_prepared
from storage.prompts.spec import PreparedRow

LAYOUT = Layout(states=(1, 3, "final"), hidden_size=32, chunk_rows=8, shard_rows=2048)


def sample_id(row: int) -> str:
    return f"sample {row}"


def make_dump(path: Path, lengths: Sequence[int]) -> Store:
    """A dump with prepared rows of the given lengths; a row of length 0 is skipped as broken."""
    store = Store(str(path))
    parts = PartWriter(store)
    for row, length in enumerate(lengths):
        ids = np.arange(row, row + length, dtype=np.int32)
        mask = (ids % 2).astype(np.uint8)
        parts.add(PreparedRow(row, row, sample_id(row), ids, mask, None if length else "broken"), None)
    kept = [n for n in lengths if n]
    summary = PreparedSummary(
        identity={},
        source_url="made up",
        source_rows=len(lengths),
        rows=len(lengths),
        to_collect=len(kept),
        skipped=len(lengths) - len(kept),
        tokens=sum(kept),
        supervised_tokens=0,
        longest_tokens=max(kept),
        parts=parts.close(),
    )
    write_prepared(store, summary)
    create_dump(store, Identity({}, {}, {}, {}), LAYOUT, {})
    return store


def check_dump(path: Path, lengths: Sequence[int]) -> dict[str, dict[int, str]]:
    """Compares every committed row with the generator, by stock zarr; returns status -> row -> reason."""
    table = pq.read_table(path / "samples.parquet").to_pylist()
    assert [r["row"] for r in table] == list(range(len(lengths)))
    hidden = zarr.open_array(str(path / "hidden"), mode="r")
    ids = zarr.open_array(str(path / "tokens" / "token_ids"), mode="r")
    found: dict[str, dict[int, str]] = {"committed": {}, "skipped": {}, "failed": {}}
    for record in table:
        row, length = record["row"], lengths[record["row"]]
        found[record["status"]][row] = record["reason"]
        if record["status"] == "committed":
            start = record["array_start"]
            states = hidden[start : start + length]
            expected = synthetic_states(sample_id(row), length, LAYOUT)
            assert np.array_equal(states.transpose(1, 0, 2), expected), f"row {row} differs"
            assert np.array_equal(ids[start : start + length], np.arange(row, row + length))
    return found


class Full(WriterActor):
    """A writer on a file system without space, for its first puts or for ever."""

    puts_that_fail: float = float("inf")

    @ray.method(concurrency_group="io")
    def put(self, batch: Any, index: int, segment: Any) -> None:
        if self.puts_that_fail > 0:
            self.puts_that_fail -= 1
            raise StorageFull("no space left")
        super().put(batch, index, segment)


class FullForAWhile(Full):
    puts_that_fail = 5


class RaisesOnRow100(SyntheticEngine):
    """An engine with a bug that one row brings out before anything of its batch is there."""

    async def capture(self, batch: Any) -> Any:
        if any(sample.row == 100 for sample in batch.samples):
            raise ValueError("row 100 brings it out")
        return await super().capture(batch)


@dataclass
class SmallDriver:
    """Creates and replaces engines and writers; what `cluster` does, without anything else.

    Attributes:
        faults: of the first engines in turn.
    """

    store: Store
    faults: Sequence[dict[str, Any]] = ()
    replacement_faults: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    writer_spec: dict[str, Any] = field(default_factory=dict)
    writer_class: Any = WriterActor
    engine_class: Any = SyntheticEngine
    handles: dict[str, Any] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    made: int = 0

    def begin(self, engines: int = 2, writers: int = 1) -> None:
        limits = {
            "batch_tokens": 200,
            "batch_bytes": 1 << 20,
            "batch_samples": 8,
            "batches_per_engine": 2,
            "in_flight_bytes": 4 << 20,
        } | self.limits
        spec = CoordinatorSpec(
            self.store.url, "run", LAYOUT, Limits(**limits), **({"tick_s": 0.2} | self.spec)
        )
        self.coordinator = ray.remote(Coordinator).options(num_cpus=0).remote(spec)
        self.run = self.coordinator.run.remote()
        self.loss = self.coordinator.next_loss.remote()
        for _ in range(writers):
            self.add_writer()
        for i in range(engines):
            self.add_engine(self.faults[i] if i < len(self.faults) else {})

    def add_engine(self, faults: dict[str, Any]) -> str:
        capture = CaptureSpec((1, 3), True, False, 4, LAYOUT)
        spec = EngineSpec(
            name=self._name("engine"),
            kind="synthetic",
            prompts_url=self.store.url,
            run_id="run",
            model_path="",
            dtype="bfloat16",
            gpus=0,
            replicas=1,
            trust_remote_code=False,
            capture=capture,
            ring_bytes=0,
            log_dir="",
            load_timeout_s=60,
            stall_timeout_s=60,
            server_args=faults,
        )
        handle = ray.remote(self.engine_class).options(num_cpus=0).remote(spec)
        self.handles[spec.name] = handle
        ray.get(self.coordinator.add_engine.remote(ray.get(handle.start.remote()), handle))
        return spec.name

    def add_writer(self) -> str:
        spec = WriterSpec(
            name=self._name("writer"),
            dump_url=self.store.url,
            run_id="run",
            **({"shard_bytes": 64 << 10, "shard_age_s": 60, "idle_s": 60} | self.writer_spec),
        )
        make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS, num_cpus=0)(self.writer_class)
        handle = make.options(allow_out_of_order_execution=True).remote(spec)
        self.handles[spec.name] = handle
        ray.get(self.coordinator.add_writer.remote(ray.get(handle.start.remote()), handle))
        return spec.name

    def status(self) -> Any:
        return ray.get(self.coordinator.status.remote())

    def end(self, timeout_s: float = 90, replace: bool = True) -> RunSummary:
        """Replaces what is lost until the run has ended."""
        while True:
            ready, _ = ray.wait([self.run, self.loss], num_returns=1, timeout=timeout_s)
            assert ready, f"the run hangs: {self.status()}"
            if self.run in ready:
                summary: RunSummary = ray.get(self.run)
                return summary
            self._replace(replace)

    def _replace(self, replace: bool) -> None:
        losses = ray.get(self.loss)
        self.loss = self.coordinator.next_loss.remote()
        for loss in losses:
            self.losses.append(loss)
            if replace and loss.role == "engine":
                self.add_engine(self.replacement_faults)
            elif replace:
                self.add_writer()

    def go_on(self) -> None:
        """Ends the wait of engines that hold."""
        ray.get([h.go_on.remote() for name, h in self.handles.items() if name.startswith("engine")])

    def wait_until(self, condition: Any) -> Any:
        """Asks for the status until ``condition`` holds of it."""
        while True:
            status = self.status()
            if condition(status):
                return status
            assert not ray.wait([self.run], timeout=0)[0], "the run ended before"

    def _name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made}"
