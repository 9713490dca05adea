"""What a writer makes of the segments of samples that failed; called directly, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collection import LAYOUT, make_dump, sample_id

from actors.messages import (
    Batch,
    BatchRecord,
    SampleFailure,
    SampleOutcome,
    SampleRef,
    WriterSpec,
    plan_segments,
)
from actors.synthetic import synthetic_states
from actors.writer import WriterActor
from storage.errors import RowMismatch, StorageDenied, StorageError, StorageFull
from storage.files import Store
from storage.manifest import read_manifests
from storage.open_shard import OpenShard

LENGTHS = [70, 20]
FAILED = SampleFailure("bad_states", "state 1, token 3 has non-finite values")


def batch_in_small_segments() -> Batch:
    """Row 0 over two segments and a part of the third, which it shares with row 1."""
    segments = plan_segments(LENGTHS, LAYOUT, 32 * LAYOUT.bytes_per_token)
    assert [[p.sample for p in s] for s in segments] == [[0], [0], [0, 1]]
    return Batch("b", tuple(SampleRef(i, 1, n, n) for i, n in enumerate(LENGTHS)), segments)


def segment_of(batch: Batch, index: int) -> np.ndarray:
    parts = [
        synthetic_states(sample_id(p.sample), LENGTHS[p.sample], LAYOUT)[:, p.start :][:, : p.rows]
        for p in batch.segments[index]
    ]
    return np.concatenate([part.ravel() for part in parts])


def written_when_row_0_fails_with_empty_segments(folder: Path, empty: set[int]) -> list[int]:
    store = make_dump(folder, LENGTHS)
    writer = WriterActor(WriterSpec("writer-0", store.url, "run", 1 << 20, 60, 60))
    batch = batch_in_small_segments()
    for index in range(3):
        nothing = np.zeros(0, np.uint16)
        writer.put(batch, index, nothing if index in empty else segment_of(batch, index))
    outcomes = (SampleOutcome(0, 1, FAILED), SampleOutcome(1, 1))
    ack = writer.finish(batch, BatchRecord("b", "engine-0", outcomes, 0.0, 0.0))
    assert ack.failed == ()
    writer.seal()
    assert [s.row for m in read_manifests(store) for s in m.samples] == list(ack.written)
    return list(ack.written)


def test_sample_that_failed_at_its_start_doesnt_take_its_neighbour_along(tmp_path: Path) -> None:
    assert written_when_row_0_fails_with_empty_segments(tmp_path, {0, 1}) == [1]


def test_sample_that_failed_in_its_middle_doesnt_take_its_neighbour_along(tmp_path: Path) -> None:
    assert written_when_row_0_fails_with_empty_segments(tmp_path, {1}) == [1]


def test_sample_that_failed_at_its_end_doesnt_take_its_neighbour_along(tmp_path: Path) -> None:
    assert written_when_row_0_fails_with_empty_segments(tmp_path, set()) == [1]


class Failing:
    """Makes some of a store's operations fail for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.error: StorageError = StorageError("the disk doesn't answer")
        self.keys = ("manifest/", ".tmp/probe")
        monkeypatch.setattr("actors.patience.FIRST_PAUSE_S", 0.001)
        for name in ("put_if_absent", "replace"):
            monkeypatch.setattr(Store, name, self._wrap(getattr(Store, name)))

    def _wrap(self, real: Any) -> Any:
        def call(store: Store, key: str, data: bytes) -> None:
            if self.left and key.startswith(self.keys):
                self.left -= 1
                raise self.error
            real(store, key, data)

        return call


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def batch_of(name: str, rows: list[int]) -> Batch:
    segments = plan_segments([LENGTHS[row] for row in rows], LAYOUT, 32 * LAYOUT.bytes_per_token)
    return Batch(name, tuple(SampleRef(row, 1, LENGTHS[row], LENGTHS[row]) for row in rows), segments)


def good(batch: Batch) -> BatchRecord:
    return BatchRecord(
        batch.batch_id, "engine-0", tuple(SampleOutcome(s.row, 1) for s in batch.samples), 0.0, 0.0
    )


def put_all(writer: WriterActor, batch: Batch, indices: range | None = None) -> None:
    for index in indices or range(len(batch.segments)):
        rows = [batch.samples[piece.sample].row for piece in batch.segments[index]]
        parts = [
            synthetic_states(sample_id(row), LENGTHS[row], LAYOUT)[:, p.start :][:, : p.rows]
            for row, p in zip(rows, batch.segments[index], strict=True)
        ]
        writer.put(batch, index, np.concatenate([part.ravel() for part in parts]))


def committed(store: Store) -> list[int]:
    return [sample.row for manifest in read_manifests(store) for sample in manifest.samples]


def new_writer(folder: Path, timeout_s: float = 60.0) -> tuple[Store, WriterActor]:
    store = make_dump(folder, LENGTHS)
    return store, WriterActor(
        WriterSpec("writer-0", store.url, "run", 1 << 20, 60, 60, storage_timeout_s=timeout_s)
    )


def test_shard_that_the_storage_refuses_is_told_as_lost_and_can_be_written_again(
    tmp_path: Path, failing: Failing
) -> None:
    store, writer = new_writer(tmp_path)
    batch = batch_of("b", [0, 1])
    put_all(writer, batch)
    assert writer.finish(batch, good(batch)).written == (0, 1)
    failing.left = 3
    ack = writer.seal()
    assert (set(ack.lost), ack.sealed, failing.left) == ({0, 1}, (), 0)
    assert writer.ping() == ""
    again = batch_of("c", [1, 0])
    put_all(writer, again)
    assert writer.finish(again, good(again)).written == (1, 0)
    assert [shard.rows for shard in writer.seal().sealed] == [(1, 0)]
    assert committed(store) == [1, 0]


def test_batch_in_flight_when_its_shard_is_lost_is_lost_and_not_failed(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = new_writer(tmp_path)
    batch = batch_of("b", [0, 1])
    put_all(writer, batch, range(1))
    monkeypatch.setattr(OpenShard, "write", raise_once(OpenShard.write))
    failing.left = 1
    put_all(writer, batch, range(1, 3))  # row 0 began in the lost shard; row 1 is whole in the last segment
    ack = writer.finish(batch, good(batch))
    assert (ack.written, ack.lost, ack.failed, failing.left) == ((1,), (0,), (), 0)
    writer.seal()
    assert committed(store) == [1]


def test_piece_that_the_storage_refuses_is_written_again_while_it_is_here(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = new_writer(tmp_path)
    monkeypatch.setattr(OpenShard, "write", raise_once(OpenShard.write))
    failing.left = 2
    batch = batch_of("b", [1])
    put_all(writer, batch)
    assert writer.finish(batch, good(batch)).written == (1,)
    writer.seal()
    assert committed(store) == [1]


def raise_once(real: Any) -> Any:
    left = [True]

    def call(*arguments: Any) -> None:
        if left and left.pop():
            raise StorageError("input/output error")
        real(*arguments)

    return call


def test_storage_that_fails_for_too_long_ends_the_writer(tmp_path: Path, failing: Failing) -> None:
    _, writer = new_writer(tmp_path, timeout_s=0.05)
    batch = batch_of("b", [1])
    put_all(writer, batch)
    writer.finish(batch, good(batch))
    failing.left = 1_000_000
    with pytest.raises(StorageError, match="doesn't answer"):
        writer.seal()


@pytest.mark.parametrize("error", [StorageFull("no space left"), StorageDenied("not you")])
def test_full_disk_and_refused_credentials_are_told_at_once(
    tmp_path: Path, failing: Failing, error: StorageError
) -> None:
    _, writer = new_writer(tmp_path)
    batch = batch_of("b", [1])
    put_all(writer, batch)
    writer.finish(batch, good(batch))
    failing.left, failing.error = 1, error
    with pytest.raises(type(error)):
        writer.seal()
    assert writer.tick().lost == (1,)


def test_segment_of_another_size_than_its_pieces_is_a_row_mismatch(tmp_path: Path) -> None:
    _, writer = new_writer(tmp_path)
    batch = batch_of("b", [1])
    with pytest.raises(RowMismatch, match="segment 0 of batch b holds 1824 values, its pieces take 1920"):
        writer.put(batch, 0, np.ones(19 * 3 * 32, np.uint16))
