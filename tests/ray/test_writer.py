"""What a writer makes of the segments of samples that failed; called directly, without a cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
from storage.manifest import read_manifests

LENGTHS = [70, 20]
FAILED = SampleFailure("bad_states", "state 1, token 3 has non-finite values")


def batch_in_small_segments() -> Batch:
    """Row 0 over two segments and a part of the third, which it shares with row 1."""
    segments = plan_segments(LENGTHS, LAYOUT, 32 * LAYOUT.bytes_per_token)
    assert [[p.sample for p in s] for s in segments] == [[0], [0], [0, 1]]
    return Batch("b", tuple(SampleRef(i, 1, n) for i, n in enumerate(LENGTHS)), segments)


def segment_of(batch: Batch, index: int) -> np.ndarray:
    parts = [
        synthetic_states(sample_id(p.sample), LENGTHS[p.sample], LAYOUT)[:, p.token_start :][:, : p.rows]
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
