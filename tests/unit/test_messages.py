"""Messages come out of a pickle as they went in, at a small cost for each sample."""

from __future__ import annotations

import pickle

from actors.messages import Batch, BatchRecord, SampleFailure, SampleOutcome, SampleRef, plan_segments
from storage.layout import Layout

LAYOUT = Layout(states=(1, "final"), hidden_size=4, chunk_rows=8, shard_rows=1024)


def make_batch(lengths: list[int]) -> Batch:
    refs = tuple(SampleRef(1000 + i, 1 << 16, 2 * n, n) for i, n in enumerate(lengths))
    return Batch("0-7", refs, plan_segments(lengths, LAYOUT, 16 * LAYOUT.bytes_per_token))


def test_batch_survives_a_pickle() -> None:
    batch = make_batch([5, 40, 1])
    assert len(batch.segments) == 4
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert pickle.loads(pickle.dumps(Batch("0-8", (), ()))) == Batch("0-8", (), ())


def test_record_survives_a_pickle_with_its_failures() -> None:
    failed = SampleFailure("bad_states", "state 1, token 3 has non-finite values")
    outcomes = (SampleOutcome(3, 1), SampleOutcome(9, 2, failed), SampleOutcome(4, 1))
    record = BatchRecord("0-7", "engine-0", outcomes, 0.25, 0.5)
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_pickled_sample_takes_few_bytes() -> None:
    few, many = (len(pickle.dumps(make_batch([8] * n), protocol=5)) for n in (100, 200))
    assert many - few < 100 * 24
