"""A shard number has one owner for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.claims import claim_next, first_free, holds
from storage.files import Store
from storage.layout import claim_key, manifest_key


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path) if request.param == "local" else f"memory://{request.node.name}")


def test_racing_writers_get_different_numbers(store: Store) -> None:
    barrier = threading.Barrier(8)

    def claim(writer: int) -> list[int]:
        barrier.wait()
        return [claim_next(store, "run", f"writer-{writer}", 0) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim, range(8)))
    assert sorted(n for numbers in claimed for n in numbers) == list(range(40))
    for writer, numbers in enumerate(claimed):
        assert all(holds(store, n, "run", f"writer-{writer}") for n in numbers)


def test_a_resume_starts_past_the_largest_claim_or_manifest(store: Store) -> None:
    assert first_free(store) == 0
    claim_next(store, "run", "writer-0", 11)
    assert first_free(store) == 12
    store.put_if_absent(manifest_key(30), b"{}")
    assert first_free(store) == 31
    assert claim_next(store, "next run", "writer-0", first_free(store)) == 31


def test_a_claim_is_held_by_one_writer_of_one_run(store: Store) -> None:
    shard = claim_next(store, "run", "writer-0", 0)
    assert holds(store, shard, "run", "writer-0")
    assert not holds(store, shard, "run", "writer-1")
    assert not holds(store, shard, "next run", "writer-0")
    store.replace(claim_key(shard), b"half a cla")
    assert not holds(store, shard, "run", "writer-0")
    store.delete(claim_key(shard))
    assert not holds(store, shard, "run", "writer-0")
