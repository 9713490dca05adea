"""Dumps that hold the states of some tokens: what is stored, what a reader gets, and what a check finds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from made_dumps import IDENTITY, LAYOUT, head_of, states_of

from cluster.verify import verify
from storage import DumpDataset, DumpStream, open_dump
from storage.account import check_account
from storage.dump import create_dump, finalise
from storage.errors import CorruptDump, OutputError, RowMismatch
from storage.export.formats import FORMATS
from storage.export.selection import select
from storage.files import Store
from storage.keep import Keep
from storage.layout import Layout
from storage.prompts import PreparedSummary
from storage.prompts.parts import PartWriter, prepared_key, write_prepared
from storage.prompts.spec import PreparedRow
from storage.removal import remove_dump
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

LENGTHS = [9, 30, 5, 64, 17]
KEEPS = ["supervised", "last:6"]

# Beside its arrays a dump holds objects of its own, which zarr lists with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")


def kept_tokens(keep: str, row: int) -> np.ndarray:
    mask = head_of(row, LENGTHS[row]).loss_mask
    return np.flatnonzero(mask) if keep == "supervised" else np.arange(LENGTHS[row])[-6:]


def make_kept_dump(folder: Path, keep: str, layout: Layout = LAYOUT) -> str:
    """Row i has ``LENGTHS[i]`` tokens, of which the states of `kept_tokens` are stored."""
    store = Store(str(folder))
    layout = replace(layout, keep=Keep.parse(keep))
    create_dump(store, IDENTITY, layout, {"hsdump": "0.1.0"})
    parts, writer = PartWriter(store), ShardWriter(store, layout, "run", "writer-0", 3000)
    for row, tokens in enumerate(LENGTHS):
        head = head_of(row, tokens)
        parts.add(PreparedRow(row, row, head.sample_id, head.token_ids, head.loss_mask), None)
        writer.place(head)
        writer.write(row, 0, np.ascontiguousarray(states_of(layout, row, tokens)[:, kept_tokens(keep, row)]))
        writer.finish(row)
    rows = len(LENGTHS)
    summary = PreparedSummary(
        {}, "x", rows, rows, rows, 0, sum(LENGTHS), 0, max(LENGTHS), parts=parts.close()
    )
    write_prepared(store, summary)
    writer.seal_all()
    finalise(store, [])
    return store.url


def bits(states: torch.Tensor) -> np.ndarray:
    """[R, K, H] as stored bits [K, R, H]."""
    return states.transpose(0, 1).contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("text", ["all", "supervised", "last:1", "last:512"])
def test_a_policy_is_written_as_it_is_read(text):
    assert str(Keep.parse(text)) == text


@pytest.mark.parametrize("text", ["", "last", "last:0", "last:-3", "first:2", "supervised:2", "all "])
def test_other_policies_are_refused_with_what_is_known(text):
    with pytest.raises(ValueError, match="isn't all, supervised or last:N"):
        Keep.parse(text)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_sample_has_whole_tokens_and_the_states_at_its_positions(tmp_path, keep, codec):
    dump = open_dump(make_kept_dump(tmp_path, keep, replace(LAYOUT, codec=codec)))
    for row, tokens in enumerate(LENGTHS):
        sample, head, positions = dump[row], head_of(row, tokens), kept_tokens(keep, row)
        assert (sample.tokens, sample.kept) == (tokens, len(positions))
        assert sample.positions.tolist() == positions.tolist()
        assert sample.token_ids.tolist() == head.token_ids.tolist()
        assert sample.loss_mask.int().tolist() == head.loss_mask.tolist()
        expected = states_of(LAYOUT, row, tokens)[:, positions]
        np.testing.assert_array_equal(bits(sample.stack()), expected)
        np.testing.assert_array_equal(bits(sample.states("final")[:, None])[0], expected[2])


@pytest.mark.parametrize("keep", KEEPS)
def test_stock_zarr_reads_states_positions_and_token_ids_of_the_same_rows(tmp_path, keep):
    url = make_kept_dump(tmp_path, keep)
    group = zarr.open_group(url, mode="r")
    for record in open_dump(url).samples.to_pylist():
        row, positions = record["row"], kept_tokens(keep, record["row"])
        rows = slice(record["array_start"], record["array_start"] + record["kept"])
        head = head_of(row, LENGTHS[row])
        assert group["tokens/positions"][rows].tolist() == positions.tolist()
        assert group["tokens/token_ids"][rows].tolist() == head.token_ids[positions].tolist()
        assert group["tokens/loss_mask"][rows].tolist() == head.loss_mask[positions].tolist()
        states = states_of(LAYOUT, row, LENGTHS[row])[:, positions]
        np.testing.assert_array_equal(group["hidden"][rows].transpose(1, 0, 2), states)


def test_only_such_a_dump_is_of_the_second_version(tmp_path):
    make_kept_dump(tmp_path / "some", "supervised")
    create_dump(Store(str(tmp_path / "all")), IDENTITY, LAYOUT, {})
    versions = [
        zarr.open_group(tmp_path / name, mode="r").attrs["format_version"] for name in ("some", "all")
    ]
    assert versions == [2, 1]


def test_items_and_packs_say_of_which_token_each_row_is(tmp_path):
    url = make_kept_dump(tmp_path, "supervised")
    items = {item["row"]: item for item in DumpDataset(url)}
    for pack in DumpStream(url, pack_tokens=64, shuffle=True):
        assert sum(len(items[row]["input_ids"]) for row in pack["rows"]) == len(pack["input_ids"])
        of_rows = torch.cat([items[row]["input_ids"][items[row]["positions"]] for row in pack["rows"]])
        assert torch.equal(pack["input_ids"][pack["positions"]], of_rows)
        assert torch.equal(
            pack["hidden_states"], torch.cat([items[row]["hidden_states"] for row in pack["rows"]])
        )


@pytest.mark.parametrize("keep", KEEPS)
def test_the_account_is_of_tokens_and_the_size_of_those_that_are_stored(tmp_path, keep, capsys):
    url = make_kept_dump(tmp_path, keep)
    kept = sum(len(kept_tokens(keep, row)) for row in range(len(LENGTHS)))
    found = check_account(Store(url))
    assert found.problems == ()
    assert (found.account.tokens, found.account.kept) == (sum(LENGTHS), kept)
    assert found.states_bytes == kept * LAYOUT.bytes_per_token
    findings = [run_item(item) for item in work_items(Store(url))]
    assert [p for f in findings for p in f.problems] == []
    assert sum(f.kept for f in findings) == kept
    verify(url, reference=0, model=None, trust_remote_code=False, address=None, sample_fraction=1.0, seed=0)
    assert f"{sum(LENGTHS)} tokens, states of {kept} (keep: {keep}) x {LAYOUT.bytes_per_token} bytes" in (
        capsys.readouterr().out
    )


def problems_of(folder: Path) -> list[str]:
    return [p.what for item in work_items(Store(str(folder))) for p in run_item(item).problems]


def test_changed_positions_are_found_by_reader_and_check(tmp_path):
    url = make_kept_dump(tmp_path, "last:6")
    sample = open_dump(url)[1]
    path = tmp_path / f"tokens/positions/c/{sample.shard}"
    values = np.fromfile(path, "<i4")
    values[sample.first_slot * LAYOUT.chunk_rows] -= 1
    values.tofile(path)
    with pytest.raises(CorruptDump, match="positions of sample"):
        _ = open_dump(url)[1].positions
    assert any("positions: xxh3 isn't" in what for what in problems_of(tmp_path))


def test_positions_that_the_policy_does_not_take_are_found(tmp_path, monkeypatch):
    with monkeypatch.context() as at_writing:
        at_writing.setattr(Keep, "positions", lambda self, mask: np.arange(5, dtype=np.int32))
        at_writing.setattr("test_keep.kept_tokens", lambda keep, row: np.arange(5))
        make_kept_dump(tmp_path, "last:5")
    # Four of five: the row of five tokens is stored whole either way.
    assert sum("aren't those that keep: last:5 takes" in what for what in problems_of(tmp_path)) == 4


def test_other_prompts_than_those_that_were_collected_are_found(tmp_path):
    make_kept_dump(tmp_path / "dump", "supervised")
    make_kept_dump(tmp_path / "other", "last:6")  # the same prompts, and then others:
    store = Store(str(tmp_path / "dump"))
    parts = PartWriter(Store(str(tmp_path / "other")))
    for row, tokens in enumerate(LENGTHS):
        head = head_of(row, tokens)
        parts.add(PreparedRow(row, row, head.sample_id, head.token_ids + 1, head.loss_mask), None)
    parts.close()
    shutil.copy(tmp_path / "other/prompts/part-00000.parquet", tmp_path / "dump/prompts/part-00000.parquet")
    size = (tmp_path / "dump/prompts/part-00000.parquet").stat().st_size
    record = json.loads(store.read(prepared_key()))
    record["parts"][0]["size_bytes"] = size
    store.replace(prepared_key(), json.dumps(record).encode())
    with pytest.raises(CorruptDump, match="or prompts/"):
        _ = open_dump(store.url)[0].token_ids
    assert sum("its prompt's token_ids" in what for what in problems_of(tmp_path / "dump")) == len(LENGTHS)


def test_a_sample_of_which_nothing_is_stored_is_refused_by_the_writer(tmp_path):
    layout = replace(LAYOUT, keep=Keep("supervised"))
    create_dump(Store(str(tmp_path)), IDENTITY, layout, {})
    writer = ShardWriter(Store(str(tmp_path)), layout, "run", "writer-0", 3000)
    head = replace(head_of(0, 9), loss_mask=np.zeros(9, np.uint8))
    with pytest.raises(RowMismatch, match=r"9 tokens, and states of 0 are to be stored \(keep: supervised\)"):
        writer.place(head)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_export_refuses_it_and_names_the_option(tmp_path, name):
    url = make_kept_dump(
        tmp_path, "supervised", Layout((2, 15, 27, "final", "final_normed"), 16, chunk_rows=4)
    )
    with pytest.raises(OutputError, match=r"capture\.keep: all"):
        select(open_dump(url).header, FORMATS[name], None)


def test_a_dump_is_removed_with_its_positions(tmp_path):
    store = Store(make_kept_dump(tmp_path / "dump", "last:6"))
    remove_dump(store)
    assert not list(tmp_path.iterdir())
