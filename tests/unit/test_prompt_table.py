"""The prepared table over several parts and row groups."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from storage.errors import CorruptDump, OutputError
from storage.files import Store
from storage.prompts import PreparedSummary, PromptTable, parts
from storage.prompts.parts import PartWriter, prepared_key, write_prepared
from storage.prompts.spec import PreparedRow


def rows_of(count: int) -> list[PreparedRow]:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        skipped = i % 5 == 3
        length = 0 if skipped else int(rng.integers(1, 40))
        ids = rng.integers(0, 1000, length).astype(np.int32)
        mask = rng.integers(0, 2, length).astype(np.uint8)
        rows.append(PreparedRow(i, 2 * i, f"s{i}", ids, mask, "too odd" if skipped else None))
    return rows


def write(store: Store, rows: list[PreparedRow]) -> PreparedSummary:
    writer = PartWriter(store)
    for row in rows:
        writer.add(row, None)
    summary = PreparedSummary({}, "x", len(rows), len(rows), 0, 0, 0, 0, 0, parts=writer.close())
    write_prepared(store, summary)
    return summary


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_GROUP_TOKENS", 100)
    monkeypatch.setattr(parts, "_GROUP_ROWS", 7)
    monkeypatch.setattr(parts, "_PART_BYTES", 4000)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("where", ["local", "memory"])
def test_rows_come_back_in_any_order(tmp_path: Path, where: str) -> None:
    store = Store(str(tmp_path) if where == "local" else "memory://table-any-order")
    rows = rows_of(200)
    summary = write(store, rows)
    assert len(summary.parts) > 3
    table = PromptTable(store)
    assert len(table) == 200
    assert table.tokens.tolist() == [r.token_ids.size for r in rows]
    assert table.tokens.dtype == np.int32
    assert table.status.tolist() == [int(r.skip_reason is not None) for r in rows]
    assert table.status.dtype == np.uint8
    for i in np.random.default_rng(1).permutation(200):
        got, want = table.load(int(i)), rows[i]
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.loss_mask.tolist() == want.loss_mask.tolist()
        assert (got.row, got.source_row, got.sample_id) == (want.row, want.source_row, want.sample_id)
        assert got.skip_reason == want.skip_reason
        assert (got.token_ids.dtype, got.loss_mask.dtype) == (np.int32, np.uint8)
    skipped = [(r["row"], r["sample_id"], r["skip_reason"]) for r in table.skipped().to_pylist()]
    assert skipped == [(r.row, r.sample_id, "too odd") for r in rows if r.skip_reason]
    assert table.sample_ids(np.array([150, 3])).to_pylist() == [rows[150].sample_id, rows[3].sample_id]
    assert table.column("sample_id").to_pylist() == [r.sample_id for r in rows]


@pytest.mark.usefixtures("small_parts")
def test_row_groups_are_small_enough_for_one_range_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for part in write(Store(str(tmp_path)), rows_of(100)).parts:
        file = pq.ParquetFile(tmp_path / part.key)
        for group in range(file.num_row_groups):
            read = file.read_row_group(group)
            assert read.num_rows <= 7
            assert sum(read["tokens"].to_pylist()) <= 100


def test_rows_outside_the_table_are_refused(tmp_path: Path) -> None:
    write(Store(str(tmp_path)), rows_of(3))
    table = PromptTable(Store(str(tmp_path)))
    for row in (-1, 3):
        with pytest.raises(IndexError, match=f"row {row} of 3"):
            table.load(row)


def test_only_a_complete_preparation_opens(tmp_path: Path) -> None:
    writer = PartWriter(Store(str(tmp_path)))
    writer.add(rows_of(1)[0], None)
    writer.close()
    with pytest.raises(OutputError, match="no complete preparation"):
        PromptTable(Store(str(tmp_path)))


@pytest.mark.parametrize("damage", ["missing", "cut", "rubbish"])
def test_damaged_parts_are_named(tmp_path: Path, damage: str) -> None:
    summary = write(Store(str(tmp_path)), rows_of(20))
    part = tmp_path / summary.parts[0].key
    data = part.read_bytes()
    part.unlink()
    if damage != "missing":
        part.write_bytes(data[:-10] if damage == "cut" else b"x" * len(data))
    with pytest.raises(CorruptDump, match=r"part-00000\.parquet"):
        PromptTable(Store(str(tmp_path)))


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    Store(str(tmp_path)).replace(prepared_key(), b'{"rows": 3}')
    with pytest.raises(CorruptDump, match=r"_prepared\.json"):
        PromptTable(Store(str(tmp_path)))


def test_the_summary_survives_its_json(tmp_path: Path) -> None:
    summary = write(Store(str(tmp_path)), rows_of(20))
    assert PreparedSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert pickle.loads(pickle.dumps(summary)) == summary
