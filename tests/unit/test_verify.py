"""Every way in which a dump can be wrong is found, and the samples that it hits are named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from made_dumps import IDENTITY, LAYOUT, make_dump, states_of, write_whole

from storage.account import check_account
from storage.dump import create_dump
from storage.errors import OutputError
from storage.files import Store
from storage.layout import Layout, hidden_key, manifest_key, token_key
from storage.manifest import read_manifest
from storage.shard import ShardWriter
from storage.table import Account
from storage.verify import Problem, run_item, work_items

LENGTHS = [5, 9, 30, 7, 20, 3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two shards: rows 0, 2, 3 and rows 4, 5; row 1 is skipped."""
    made = make_dump(tmp_path, LENGTHS, skipped=[1], shard_bytes=LAYOUT.sample_bytes(44))
    assert [[s.row for s in read_manifest(made, shard).samples] for shard in (0, 1)] == [[0, 2, 3], [4, 5]]
    return made


def problems_of(store: Store) -> list[Problem]:
    return [problem for item in work_items(store) for problem in run_item(item).problems]


def rows_of(problems: list[Problem]) -> set[int]:
    return {p.row for p in problems if p.row is not None}


def edit(store: Store, key: str, change: str, at: int) -> None:
    """Deletes, flips or cuts the object at byte ``at``."""
    data = bytearray(store.read(key))
    if change == "delete":
        del data[at]
    elif change == "flip":
        data[at] ^= 1
    else:
        del data[at:]
    store.replace(key, bytes(data))


def offset_of(store: Store, row: int, k: int, byte: int) -> int:
    """Where a byte of a state of a row of shard 0 is."""
    sample = next(s for s in read_manifest(store, 0).samples if s.row == row)
    return LAYOUT.run_offset(sample.offset, LAYOUT.slots(sample.tokens), k, 0) + byte


def test_a_good_dump_has_no_problems_and_every_byte_was_read(store: Store) -> None:
    items = work_items(store)
    assert pickle.loads(pickle.dumps(items)) == items
    findings = [run_item(item) for item in items]
    assert [f.problems for f in findings] == [(), ()]
    assert [(f.samples, f.tokens) for f in findings] == [(3, 42), (2, 23)]
    assert sum(f.bytes for f in findings) == sum(LAYOUT.sample_bytes(LENGTHS[r]) for r in (0, 2, 3, 4, 5))
    account = check_account(store, expected_rows=6)
    assert account.problems == ()
    assert account.account == Account(rows=6, committed=5, skipped=1, failed=0, tokens=65, kept=65)
    assert account.states_bytes == 65 * 3 * 16 * 2


def test_there_must_be_a_dump(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        work_items(Store(str(tmp_path)))


def test_one_deleted_byte_names_each_sample_from_there_on(store: Store) -> None:
    edit(store, hidden_key(0), "delete", offset_of(store, 2, 1, 100))
    problems = problems_of(store)
    assert rows_of(problems) == {2, 3}
    size = Store.size(store, hidden_key(0))
    assert size is not None
    assert any(f"has {size} bytes, its manifest says {size + 1}" in p.what for p in problems)
    assert {p.sample_id for p in problems if p.row == 3} == {"sample 3/../é"}


@pytest.mark.parametrize(("row", "k"), [(0, 0), (2, 1), (3, 2)])
def test_one_flipped_bit_names_its_sample_and_state(store: Store, row: int, k: int) -> None:
    edit(store, hidden_key(0), "flip", offset_of(store, row, k, 3))
    problems = problems_of(store)
    assert [p.row for p in problems] == [row]
    assert f"state {LAYOUT.states[k]}: xxh3 is" in problems[0].what


def test_a_bit_flipped_in_the_padding_is_found(store: Store) -> None:
    edit(store, hidden_key(0), "flip", offset_of(store, 0, 0, LAYOUT.row_bytes * 8 - 1))
    assert rows_of(problems_of(store)) == {0}


@pytest.mark.parametrize(("change", "from_end"), [("delete", 1), ("flip", 1), ("flip", 200), ("delete", 200)])
def test_damage_in_the_index_names_the_samples_that_zarr_cannot_read(
    store: Store, change: str, from_end: int
) -> None:
    size = store.size(hidden_key(0))
    assert size is not None
    edit(store, hidden_key(0), change, size - from_end)
    problems = problems_of(store)
    assert rows_of(problems) == {0, 2, 3}
    assert all("index" in p.what for p in problems if p.row is not None)


def test_a_shard_that_was_cut_short_names_what_is_gone(store: Store) -> None:
    edit(store, hidden_key(0), "cut", offset_of(store, 3, 0, 1))
    problems = problems_of(store)
    assert any(p.row == 3 and "ends at byte" in p.what for p in problems)


def test_a_missing_shard_names_all_its_samples(store: Store) -> None:
    store.delete(hidden_key(1))
    problems = problems_of(store)
    assert rows_of(problems) == {4, 5}
    assert all("hidden/c/1/0/0 is missing" in p.what for p in problems)


@pytest.mark.parametrize(("change", "rows"), [("delete", {2, 3}), ("flip", {2})])
def test_damaged_token_columns_name_their_samples(store: Store, change: str, rows: set[int]) -> None:
    first_slot = next(s for s in read_manifest(store, 0).samples if s.row == 2).first_slot
    edit(store, token_key("token_ids", 0), change, first_slot * LAYOUT.chunk_rows * 4 + 2)
    problems = problems_of(store)
    assert rows_of(problems) == rows
    assert any(p.row is None and "tokens/token_ids/c/0: xxh3" in p.what for p in problems)


def test_a_removed_manifest_is_found_in_the_account(store: Store) -> None:
    store.delete(manifest_key(1))
    assert problems_of(store) == []
    account = check_account(store)
    assert rows_of(list(account.problems)) == {4, 5}
    assert all("no manifest has it" in p.what for p in account.problems)


def test_a_damaged_manifest_is_a_finding_and_not_a_crash(store: Store) -> None:
    text = store.read(manifest_key(0)).decode()
    store.replace(manifest_key(0), text[:-20].encode())
    assert "isn't a readable manifest" in problems_of(store)[0].what
    assert rows_of(list(check_account(store).problems)) == {0, 2, 3}
    xxh3 = read_manifest(store, 1).samples[0].xxh3[0]
    store.replace(manifest_key(1), store.read(manifest_key(1)).replace(xxh3.encode(), b"0" * 16))
    assert any("doesn't follow from its samples" in p.what for p in problems_of(store))


def test_rows_must_add_up_to_what_was_prepared(store: Store) -> None:
    problems = check_account(store, expected_rows=7).problems
    assert [p.what for p in problems] == ["7 rows were prepared, samples.parquet accounts for 6"]


def test_an_unfinished_dump_is_said_to_be_one(tmp_path: Path) -> None:
    store = make_dump(tmp_path, LENGTHS, skipped=[1], finish=False)
    findings = check_account(store, expected_rows=6)
    assert findings.account.committed == 5
    assert ["5 of 6 rows" in p.what for p in findings.problems] == [True]


def test_the_invariant_of_bytes_a_token_is_checked(store: Store) -> None:
    root = json.loads(store.read("zarr.json"))
    root["attributes"]["bytes_per_token"] += 1
    store.replace("zarr.json", json.dumps(root).encode())
    assert any("the root says 97 bytes a token" in p.what for p in check_account(store).problems)


def committed_with(tmp_path: Path, layout: Layout, value: int, where: tuple[object, ...]) -> list[Problem]:
    store = Store(str(tmp_path))
    create_dump(store, IDENTITY, layout, {})
    writer = ShardWriter(store, layout, "run", "writer-0", 1 << 30)
    states = states_of(layout, 0, 10)
    states[where] = value
    write_whole(writer, 0, states)
    write_whole(writer, 1, states_of(layout, 1, 10))
    writer.seal_all()
    return problems_of(store)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", 0x7FC0),
        ("bfloat16", 0xFF80),
        ("float16", 0x7C00),
        ("float16", 0xFE00),
        ("float32", 0x7F800000),
        ("float32", 0xFFC00000),
    ],
)
def test_values_that_are_not_finite_are_found(tmp_path: Path, dtype: str, bits: int) -> None:
    layout = Layout((1, 2), hidden_size=16, dtype=dtype, chunk_rows=4, shard_rows=64)
    problems = committed_with(tmp_path, layout, bits, (1, 7, 3))
    assert [(p.row, p.what) for p in problems] == [(0, "state 2: not finite at 1 tokens, first at token 7")]


@pytest.mark.parametrize("bits", [0x0000, 0x8000])
def test_an_all_zero_state_is_found(tmp_path: Path, bits: int) -> None:
    problems = committed_with(tmp_path, LAYOUT, bits, (1,))
    assert [(p.row, p.what) for p in problems] == [(0, "state 2: all zero")]
    assert np.float16(0) == np.array(0x8000, np.uint16).view(np.float16)


def test_shards_are_read_in_bounded_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.verify_states.LOOK_BYTES", 3 * LAYOUT.row_bytes)
    assert problems_of(store) == []
    edit(store, hidden_key(0), "flip", offset_of(store, 2, 1, 20 * LAYOUT.row_bytes))
    assert rows_of(problems_of(store)) == {2}
