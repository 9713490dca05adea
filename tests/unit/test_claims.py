"""A shard number has one owner for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from made_dumps import LAYOUT, make_dump, states_of, write_whole

from storage.account import check_account
from storage.claims import claim_next, first_free, holds, revoke
from storage.dump import finalise
from storage.errors import AlreadyExists, LeaseLost
from storage.files import Store
from storage.layout import claim_key, hidden_key, manifest_key
from storage.manifest import read_manifests
from storage.reader import Dump
from storage.shard import ShardWriter
from storage.verify import run_item, work_items


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


def test_a_revoked_writer_can_not_commit_and_what_it_committed_stays(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5], finish=False)  # shard 0, committed by writer-0
    late = ShardWriter(store, LAYOUT, "run", "writer-0", 1 << 30)
    other = ShardWriter(store, LAYOUT, "run", "writer-1", 1 << 30)
    write_whole(late, 1, states_of(LAYOUT, 1, 9))
    write_whole(other, 2, states_of(LAYOUT, 2, 9))
    before = store.read(manifest_key(0))
    assert revoke(store, LAYOUT, "run", lambda claim: claim.writer == "writer-0") == (1,)
    assert revoke(store, LAYOUT, "run", lambda claim: claim.writer == "writer-0") == ()
    with pytest.raises(LeaseLost, match="shard 1"):
        late.seal_all()
    other.seal_all()
    assert store.read(manifest_key(0)) == before
    assert not store.exists(hidden_key(1))
    assert {m.shard: len(m.samples) for m in read_manifests(store)} == {0: 1, 1: 0, 2: 1}


def test_a_writer_that_is_revoked_in_the_middle_of_a_seal_does_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_dump(tmp_path, [], finish=False)
    late = ShardWriter(store, LAYOUT, "run", "writer-0", 1 << 30)
    write_whole(late, 1, states_of(LAYOUT, 1, 9))

    def look_and_be_revoked(*args: Any) -> bool:
        held = holds(*args)
        revoke(store, LAYOUT, "run", lambda claim: True)
        return held

    monkeypatch.setattr("storage.shard.holds", look_and_be_revoked)
    with pytest.raises(AlreadyExists, match=r"manifest/0\.json"):
        late.seal_all()
    assert [m.samples for m in read_manifests(store)] == [()]


def test_revoked_shards_are_no_problem_to_anybody(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5, 9], finish=False)
    claim_next(store, "run", "writer-7", first_free(store))
    revoke(store, LAYOUT, "next run", lambda claim: True)
    finalise(store, [])
    assert [run_item(item).problems for item in work_items(store)] == [(), ()]
    assert check_account(store).problems == ()
    assert [sample.tokens for sample in Dump(store)] == [5, 9]
