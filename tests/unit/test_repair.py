"""What repair takes for a leftover, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_dumps import LAYOUT, make_dump, states_of, write_whole

import storage
from storage.account import check_account
from storage.claims import claim_next, first_free
from storage.errors import AlreadyExists, LeaseLost, OutputError
from storage.files import Store
from storage.layout import claim_key, hidden_key, manifest_key, token_key
from storage.manifest import committed_samples, read_manifest, read_manifests
from storage.repair import Leftovers, find_leftovers, plan_repair, remove_leftovers
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

LENGTHS = [5, 9, 30, 7]


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_dump(tmp_path, LENGTHS)


def test_a_good_dump_has_no_leftovers_and_repair_changes_nothing(store: Store, tmp_path: Path) -> None:
    before = tree(tmp_path)
    found = find_leftovers(store)
    assert found == Leftovers((), {}, (), ())
    assert remove_leftovers(store, found) == []
    assert tree(tmp_path) == before


def test_no_dump_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no dump here"):
        find_leftovers(Store(str(tmp_path)))


def test_data_without_a_manifest_and_temporaries_go_and_the_rest_stays(store: Store, tmp_path: Path) -> None:
    foreign = ("notes.txt", ".tmp/mine.txt", "hidden/c/0/0/1", "hidden/c/seven", "tokens/token_ids/c/x")
    for key in foreign:
        store.put_if_absent(key, b"a person's")
    before = tree(tmp_path)
    shard = claim_next(store, "run-0", "writer-3", first_free(store))
    left = [
        hidden_key(shard),
        token_key("token_ids", shard),
        ".tmp/0f.sink",
        ".tmp/1e.put",
        ".tmp/probe-ab-node",
    ]
    for key in left:
        store.put_if_absent(key, b"half")
    found = find_leftovers(store)
    assert found.open == (shard,)
    assert sorted(key for key, _ in found.objects) == sorted(left)
    assert all(size == 4 for _, size in found.objects)
    assert {k: v for k, v in tree(tmp_path).items() if k not in (*left, claim_key(shard))} == before
    assert sorted(key for key, _ in remove_leftovers(store, found)) == sorted(left)
    after = tree(tmp_path)
    assert {*after} - {*before} == {claim_key(shard), manifest_key(shard)}
    assert {key: after[key] for key in before} == before
    assert find_leftovers(store) == Leftovers((), {}, (), ())


def test_a_revoked_shard_holds_nothing_for_anyone(store: Store, tmp_path: Path) -> None:
    claim_next(store, "run-0", "writer-3", first_free(store))
    before = storage.open_dump(str(tmp_path)).samples
    remove_leftovers(store, find_leftovers(store))
    assert storage.open_dump(str(tmp_path)).samples == before
    assert check_account(store).problems == ()
    assert [p for item in work_items(store) for p in run_item(item).problems] == []
    assert first_free(store) == max(m.shard for m in read_manifests(store)) + 1


def test_a_writer_that_wakes_up_after_a_repair_fails_and_changes_nothing(
    store: Store, tmp_path: Path
) -> None:
    late = ShardWriter(store, LAYOUT, "run-0", "writer-3", 1 << 30)
    write_whole(late, 9, states_of(LAYOUT, 9, 6))
    remove_leftovers(store, find_leftovers(store))
    committed = committed_samples(read_manifests(store))
    with pytest.raises(LeaseLost):
        late.seal_all()
    assert committed_samples(read_manifests(store)) == committed
    assert read_manifest(store, first_free(store) - 1).samples == ()


def test_data_that_a_revoked_writer_put_too_late_is_a_leftover(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: it looked at its lease before the repair, and puts data and manifest after it."""
    late = ShardWriter(store, LAYOUT, "run-0", "writer-3", 1 << 30)
    write_whole(late, 9, states_of(LAYOUT, 9, 6))
    monkeypatch.setattr(Store, "remove_sinks", lambda self: None)
    monkeypatch.setattr("storage.shard.holds", lambda *_: True)
    found = find_leftovers(store)
    (shard,) = found.open
    remove_leftovers(store, Leftovers(found.open, {}, (), ()))  # it keeps its temporary file
    with pytest.raises(AlreadyExists, match=rf"manifest/{shard}.json"):
        late.seal_all()
    left = {hidden_key(shard), token_key("token_ids", shard), token_key("loss_mask", shard)}
    assert {key for key, _ in find_leftovers(store).objects} == left
    remove_leftovers(store, find_leftovers(store))
    assert find_leftovers(store) == Leftovers((), {}, (), ())


def test_what_was_committed_since_the_look_stays(store: Store) -> None:
    slow = ShardWriter(store, LAYOUT, "run-0", "writer-3", 1 << 30)
    write_whole(slow, 9, states_of(LAYOUT, 9, 6))
    found = find_leftovers(store)
    (shard,) = found.open
    slow.seal_all()
    taken = Leftovers(found.open, {shard: ((hidden_key(shard), 1),)}, (), ())
    assert remove_leftovers(store, taken) == []
    assert store.exists(hidden_key(shard))
    assert 9 in committed_samples(read_manifests(store))


def test_a_manifest_that_can_not_be_read_protects_its_shard(store: Store) -> None:
    store.replace(manifest_key(0), store.read(manifest_key(0))[:50])
    found = find_leftovers(store)
    assert found.unreadable == (manifest_key(0),)
    assert found.objects == []
    assert found.open == ()


def test_data_of_a_shard_that_is_committed_is_never_a_leftover(store: Store) -> None:
    manifest = read_manifest(store, 0)
    plan = plan_repair({0, 1}, {0: manifest, 1: None}, {0: [("hidden/c/0/0/0", 1)], 1: [("x", 1)]}, [])
    assert plan.objects == []
    assert plan.open == ()
