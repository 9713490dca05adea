"""What is committed is kept as columns: the memory of a run's end and of its resume doesn't go by Python objects."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_dumps import IDENTITY, LAYOUT

from storage.account import check_account
from storage.committed import counting, read_places
from storage.dump import create_dump, finalise
from storage.files import Store
from storage.layout import manifest_key
from storage.manifest import Manifest, ManifestSample, committed_samples, read_manifests
from storage.reader import open_dump
from storage.table import Outcome, outcome_table

SAMPLES = 400


def dump_of(folder: Path, shards: int) -> Store:
    """Manifests alone, as many samples in each."""
    store = Store(str(folder))
    create_dump(store, IDENTITY, LAYOUT, {})
    for shard in range(shards):
        samples = tuple(
            ManifestSample(row, f"sample {row}", 0, 5, 5, 0, ("0" * 16,) * 3, "0" * 16)
            for row in range(shard * SAMPLES, (shard + 1) * SAMPLES)
        )
        manifest = Manifest(shard, "run", "writer", LAYOUT, samples, ())
        store.put_if_absent(manifest_key(shard), manifest.to_bytes())
    return store


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("work", [lambda s: finalise(s, []), lambda s: check_account(s)])
def test_a_committed_sample_more_takes_no_python_objects(
    tmp_path: Path, work: Callable[[Store], object]
) -> None:
    few, many = dump_of(tmp_path / "few", 20), dump_of(tmp_path / "many", 60)
    for store in (few, many):
        finalise(store, [])
    grown = peak_bytes(lambda: work(many)) - peak_bytes(lambda: work(few))
    assert grown / (40 * SAMPLES) < 200, "bytes for each sample more; an object takes a thousand"


def test_columns_say_what_the_manifests_say(tmp_path: Path) -> None:
    store = dump_of(tmp_path, 3)
    late = (ManifestSample(7, "sample 7", 3, 5, 5, 99, ("0" * 16,) * 3, "0" * 16),)
    store.put_if_absent(manifest_key(9), Manifest(9, "run", "w", LAYOUT, late, ()).to_bytes())
    places = counting(read_places(store)).to_pylist()
    found = committed_samples(read_manifests(store))
    assert [p["row"] for p in places] == list(found)
    for place in places:
        committed = found[place["row"]]
        assert place["shard"] == committed.shard
        for name in ("sample_id", "tokens", "first_slot", "offset"):
            assert place[name] == getattr(committed.sample, name)
    assert len(read_places(store, known={0, 1, 2})) == 1


def test_a_table_is_old_as_soon_as_a_manifest_has_a_row_that_it_has_not(tmp_path: Path) -> None:
    store = dump_of(tmp_path, 2)
    finalise(store, [])
    assert len(open_dump(store.url, check=False)) == 2 * SAMPLES
    copy = (ManifestSample(3, "sample 3", 0, 5, 5, 0, ("0" * 16,) * 3, "0" * 16),)
    store.put_if_absent(manifest_key(5), Manifest(5, "run", "w", LAYOUT, copy, ()).to_bytes())
    assert len(open_dump(store.url, check=False).samples) == 2 * SAMPLES
    new = (ManifestSample(2 * SAMPLES, "new", 0, 5, 5, 0, ("0" * 16,) * 3, "0" * 16),)
    store.put_if_absent(manifest_key(6), Manifest(6, "run", "w", LAYOUT, new, ()).to_bytes())
    assert "new" in open_dump(store.url, check=False)


def test_outcomes_as_a_table_are_those_given_one_by_one(tmp_path: Path) -> None:
    store = dump_of(tmp_path, 1)
    outcomes = [Outcome(SAMPLES + i, f"late {i}", "failed", f"reason {i}") for i in range(3)]
    finalise(store, outcomes[::-1])
    one = pq.read_table(tmp_path / "samples.parquet")
    finalise(store, outcome_table(outcomes))
    assert pq.read_table(tmp_path / "samples.parquet") == one
    assert one["reason"].to_pylist()[-3:] == ["reason 0", "reason 1", "reason 2"]
    assert np.array_equal(one["row"].to_numpy(), np.arange(SAMPLES + 3))
