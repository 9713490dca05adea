"""Damage done to a dump under its readers and writers: each is a clear error that names the object."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_dumps import IDENTITY, LAYOUT, make_dump, states_of, write_whole

import storage
from storage.account import check_account
from storage.dump import create_dump, finalise
from storage.errors import CorruptDump, StorageError
from storage.files import Store
from storage.layout import hidden_key, manifest_key, token_key
from storage.manifest import read_manifest
from storage.repair import find_leftovers, remove_leftovers
from storage.shard import ShardWriter
from storage.table import Outcome
from storage.verify import Problem, run_item, work_items

LENGTHS = [5, 9, 30, 7, 20, 3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two shards: rows 0 to 2 and rows 3 to 5."""
    made = make_dump(tmp_path / "dump", LENGTHS, shard_bytes=LAYOUT.sample_bytes(44))
    assert [[s.row for s in read_manifest(made, shard).samples] for shard in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
    return made


def problems_of(store: Store) -> list[Problem]:
    return [problem for item in work_items(store) for problem in run_item(item).problems]


def test_a_file_that_shrinks_under_an_open_reader(store: Store) -> None:
    dump = storage.open_dump(store.url)
    dump[2].stack()
    os.truncate(f"{store.url}/{hidden_key(0)}", dump[2].offset + 10)
    with pytest.raises(CorruptDump, match=rf"{hidden_key(0)} ends at byte {dump[2].offset + 10}"):
        dump[2].stack()
    with pytest.raises(CorruptDump, match=rf"{hidden_key(0)} ends at byte"):
        list(storage.DumpStream(store.url))
    assert any(hidden_key(0) in p.what for p in problems_of(store))


def test_a_manifest_cut_in_half(store: Store) -> None:
    key = manifest_key(1)
    store.replace(key, store.read(key)[: store.size(key) // 2])
    dump = storage.open_dump(store.url)  # samples.parquet names the samples
    dump[0].stack()
    with pytest.raises(CorruptDump, match=rf"{key} isn't a readable manifest"):
        dump[3].stack()
    assert key in problems_of(store)[0].what
    assert any(key in p.what for p in check_account(store).problems)
    store.delete("samples.parquet")
    with pytest.raises(CorruptDump, match=rf"{key} isn't a readable manifest"):
        storage.open_dump(store.url)
    assert find_leftovers(store).unreadable == (key,)
    with pytest.raises(CorruptDump, match=key):
        finalise(store, [])


def test_a_manifest_that_is_gone(store: Store) -> None:
    dump = storage.open_dump(store.url)
    store.delete(manifest_key(1))
    with pytest.raises(CorruptDump, match=rf"{manifest_key(1)} is gone"):
        dump[3].states(0)


def swap(one: Path, other: Path) -> None:
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_shard_swapped_for_another_of_the_same_shape(tmp_path: Path, pickled: bool) -> None:
    """Sizes, places and indices agree; only the hashes know."""
    store = make_dump(tmp_path / "dump", [8, 8, 8, 8], shard_bytes=LAYOUT.sample_bytes(16))
    dump = storage.open_dump(store.url)
    swap(tmp_path / "dump" / hidden_key(0), tmp_path / "dump" / hidden_key(1))
    sample = pickle.loads(pickle.dumps(dump[0])) if pickled else dump[0]
    for read in (lambda: sample.states(2), lambda: sample.stack(["final", 0]), sample.stack):
        with pytest.raises(CorruptDump, match=rf"{hidden_key(0)}: state \w+ of sample 'sample 0"):
            read()
    with pytest.raises(CorruptDump, match=hidden_key(0)):
        storage.DumpDataset(store.url)[0]
    with pytest.raises(CorruptDump, match=hidden_key(0)):
        list(storage.DumpStream(store.url))
    problems = problems_of(store)
    assert {p.row for p in problems} == {0, 1, 2, 3}
    unchecked = storage.open_dump(store.url, check=False)
    assert torch.equal(unchecked[0].stack(), storage.DumpDataset(store.url, check=False)[0]["hidden_states"])


def test_a_whole_shard_swapped_with_its_manifest_left_behind(store: Store) -> None:
    swap(Path(store.url, hidden_key(0)), Path(store.url, hidden_key(1)))
    with pytest.raises(CorruptDump, match=hidden_key(0)):
        storage.open_dump(store.url)[0].stack()
    assert any(hidden_key(0) in p.what for p in problems_of(store))


@pytest.mark.parametrize("column", ["token_ids", "loss_mask"])
def test_a_swapped_token_column(tmp_path: Path, column: str) -> None:
    store = make_dump(tmp_path / "dump", [8, 8, 8, 8], shard_bytes=LAYOUT.sample_bytes(16))
    swap(tmp_path / "dump" / token_key(column, 0), tmp_path / "dump" / token_key(column, 1))
    sample = storage.open_dump(store.url)[0]
    sample.stack()
    for read in (lambda: sample.token_ids, lambda: sample.loss_mask):
        with pytest.raises(CorruptDump, match=rf"tokens/{column}/c/0"):
            read()
    with pytest.raises(CorruptDump, match=rf"tokens/{column}/c/0"):
        list(storage.DumpStream(store.url, pack_tokens=32))


def test_a_table_that_names_another_place_than_the_manifest(store: Store) -> None:
    dump = storage.open_dump(store.url)
    dump.places.offset[0] += LAYOUT.chunk_bytes
    with pytest.raises(CorruptDump, match=rf"{manifest_key(0)} doesn't have row 0 with"):
        dump[0].stack()


def test_more_that_was_committed_after_the_table_was_built_is_seen(tmp_path: Path) -> None:
    """A finished dump with failed rows is taken up again, and its run dies before it is finished again."""
    store = make_dump(tmp_path, LENGTHS, skipped=[1, 3], finish=False)
    finalise(store, [Outcome(row, f"sample {row}", "failed", "too slow") for row in (1, 3)])
    assert [sample.row for sample in storage.open_dump(str(tmp_path))] == [0, 2, 4, 5]
    writer = ShardWriter(store, LAYOUT, "run-2", "writer-0", 1 << 30)
    write_whole(writer, 3, states_of(LAYOUT, 3, 7))
    writer.seal_all()
    dump = storage.open_dump(str(tmp_path))
    assert [sample.row for sample in dump] == [0, 2, 3, 4, 5]
    assert dump.samples["status"].to_pylist() == ["committed"] * 5


def test_later_copies_and_revoked_shards_do_not_outdate_the_table(store: Store) -> None:
    late = ShardWriter(store, LAYOUT, "run", "writer-9", 1)
    write_whole(late, 0, states_of(LAYOUT, 0, 5))
    late.seal_all()
    never = ShardWriter(store, LAYOUT, "run", "writer-10", 1 << 30)
    write_whole(never, 1, states_of(LAYOUT, 1, 9))
    remove_leftovers(store, find_leftovers(store))
    assert storage.open_dump(store.url).samples["status"].type == "string"
    assert [sample.shard for sample in storage.open_dump(store.url)] == [0, 0, 0, 1, 1, 1]
    assert storage.open_dump(store.url).samples.schema.metadata is not None  # the table itself


NOBODY = 65534


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Takes the right to write below ``root``: from the folders, or, since modes don't stop root, from us."""
    folders = [root, *(p for p in root.rglob("*") if p.is_dir())]
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    else:
        for folder in folders:
            folder.chmod(0o555)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o755)


def test_a_folder_that_may_not_be_written_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        store = make_dump(root / "dump", LENGTHS)
        idle = ShardWriter(store, LAYOUT, "run", "writer-8", 1 << 30)
        write_whole(idle, 6, states_of(LAYOUT, 6, 5))
        writer = ShardWriter(store, LAYOUT, "run", "writer-9", 1)
        with read_only(root):
            with pytest.raises(
                StorageError, match=rf"writing {root}/dump/claims/\d+.json failed: .*Permission denied"
            ):
                write_whole(writer, 0, states_of(LAYOUT, 0, 5))
            with pytest.raises(
                StorageError, match=rf"writing {root}/dump/(hidden|tokens/\w+)/c/\d+.* failed: .*Permission"
            ):
                idle.seal_all()
            with pytest.raises(StorageError, match=rf"{root}/dump/.*Permission denied"):
                remove_leftovers(store, find_leftovers(store))
            with pytest.raises(
                StorageError, match=rf"writing {root}/new/zarr.json failed: .*Permission denied"
            ):
                create_dump(Store(str(root / "new")), IDENTITY, LAYOUT, {})
            storage.open_dump(store.url)[0].stack()
            assert problems_of(store) == []
        assert len(storage.open_dump(store.url)) == len(LENGTHS)
