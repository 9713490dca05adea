"""States as 8-bit floats: the formula, what a dump of them holds, and what a reader makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from made_dumps import IDENTITY, LAYOUT, head_of, make_dump, states_of

from actors.capture.join import BatchJoin
from actors.capture.statistics import StateStatistics
from actors.messages import Batch, SampleRef, plan_segments
from actors.pieces import split_segment
from storage import DumpStream, open_dump
from storage.account import check_account
from storage.dump import create_dump, finalise
from storage.errors import CorruptDump, OutputError, RowMismatch
from storage.export.form import ExportSample
from storage.export.formats import FORMATS
from storage.export.selection import select
from storage.export.work import DumpSource
from storage.files import Store
from storage.float8 import EXPECTED_ERROR, largest_error, quantise, rounded
from storage.layout import Layout
from storage.reference import compare, per_token_error
from storage.removal import remove_dump
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

LENGTHS = [9, 30, 5, 64, 17]
FLOAT8 = replace(LAYOUT, encoding="float8")

# Beside its arrays a dump holds objects of its own, which zarr lists with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")


def values_of(row: int, tokens: int, layout: Layout = LAYOUT) -> torch.Tensor:
    """What the model computed: bfloat16 [K, T, H]."""
    return torch.from_numpy(states_of(layout, row, tokens).view(np.int16)).view(torch.bfloat16)


def quantised(row: int, tokens: int, layout: Layout = LAYOUT) -> tuple[np.ndarray, np.ndarray]:
    """Codes [K, T, H] and scales [K, T]."""
    flat = values_of(row, tokens, layout).reshape(-1, layout.hidden_size)
    codes, scales = quantise(flat)
    shape = (layout.num_states, tokens)
    return codes.numpy().reshape(*shape, -1), scales.numpy().reshape(shape)


def make_float8_dump(folder: Path, layout: Layout = FLOAT8) -> str:
    store = Store(str(folder))
    create_dump(store, IDENTITY, layout, {"hsdump": "0.1.0"})
    writer = ShardWriter(store, layout, "run", "writer-0", 2000)
    for row, tokens in enumerate(LENGTHS):
        codes, scales = quantised(row, tokens, layout)
        writer.place(head_of(row, tokens))
        cut = min(tokens, 8)
        writer.write(row, 0, np.ascontiguousarray(codes[:, :cut]), scales[:, :cut])
        if tokens > cut:
            writer.write(row, cut, np.ascontiguousarray(codes[:, cut:]), scales[:, cut:])
        writer.finish(row)
    writer.seal_all()
    finalise(store, [])
    return store.url


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    largest=st.sampled_from([1e-30, 1.0, 1e4]),
)
def test_no_token_is_off_by_more_than_the_format_allows(rows, largest):
    x = torch.tensor(rows) * largest
    codes, scales = quantise(x)
    assert ((codes & 0x7F) != 0x7F).all(), "a code isn't a number"
    assert (scales > 0).all()
    error = (rounded(x).double() - x.double()).norm(dim=-1)
    assert (error <= largest_error(4) * x.double().norm(dim=-1) * (1 + 1e-6) + 1e-36).all()


def test_the_largest_of_a_token_is_kept_and_rounding_is_to_the_nearest_code():
    x = torch.tensor([[448.0, 17.0, -0.3, 0.0]])
    codes, scales = quantise(x)
    assert scales.tolist() == [1.0]
    # 17 lies between the codes 16 and 18 and goes to the even one; -0.3 between -0.28125 and -0.3125.
    assert codes.view(torch.float8_e4m3fn).float().tolist() == [[448.0, 16.0, -0.3125, 0.0]]


def test_the_error_of_ordinary_states_is_the_one_that_is_expected_of_them():
    torch.manual_seed(0)
    x = torch.randn(2000, 1024)
    massive = x.clone()
    massive[:, 7] *= 1000  # the rest is small against the scale, and rounded no worse for it
    for values in (x, massive):
        median = per_token_error(rounded(values)[:, 8:], values[:, 8:]).median()
        assert 0.5 * EXPECTED_ERROR < float(median) < EXPECTED_ERROR
        assert float(per_token_error(rounded(values), values).max()) < largest_error(1024)


@pytest.mark.parametrize("codec", ["none", "lz4-bitshuffle"])
def test_a_reader_gives_the_model_s_type_and_codes_on_request(tmp_path, codec):
    dump = open_dump(make_float8_dump(tmp_path, replace(FLOAT8, codec=codec)))
    for row, tokens in enumerate(LENGTHS):
        codes, scales = quantised(row, tokens)
        sample = dump[row]
        found, found_scales = sample.codes()
        np.testing.assert_array_equal(found.numpy(), codes.swapaxes(0, 1))
        np.testing.assert_array_equal(found_scales.numpy(), scales.T)
        x = values_of(row, tokens).reshape(-1, LAYOUT.hidden_size)
        made = rounded(x).reshape(3, tokens, -1).to(torch.bfloat16)
        assert torch.equal(sample.stack().transpose(0, 1), made)
        assert torch.equal(sample.states("final"), made[2])
        picked, picked_scales = sample.codes(["final", 0])
        np.testing.assert_array_equal(picked.numpy(), codes[[2, 0]].swapaxes(0, 1))
        np.testing.assert_array_equal(picked_scales.numpy(), scales[[2, 0]].T)
        assert torch.equal(sample.token_ids.int(), torch.from_numpy(head_of(row, tokens).token_ids))


def test_other_readers_get_codes_and_scales(tmp_path):
    url = make_float8_dump(tmp_path)
    group = zarr.open_group(url, mode="r")
    assert (group.attrs["element_type"], group.attrs["format_version"]) == ("float8_e4m3fn", 2)
    assert group.attrs["bytes_per_token"] == 3 * (16 + 4)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{url}/scales/"}}
    other = tensorstore.open(spec, read=True).result()
    for record in open_dump(url).samples.to_pylist():
        codes, scales = quantised(record["row"], record["tokens"])
        rows = slice(record["array_start"], record["array_start"] + record["tokens"])
        np.testing.assert_array_equal(group["hidden"][rows].swapaxes(0, 1), codes)
        np.testing.assert_array_equal(group["scales"][rows], scales.T)
        np.testing.assert_array_equal(other[rows].read().result(), scales.T)


def test_a_pack_holds_the_model_s_type(tmp_path):
    url = make_float8_dump(tmp_path)
    (first, *_) = DumpStream(url, pack_tokens=64)
    dump = open_dump(url)
    expected = torch.cat([dump[row].stack() for row in first["rows"]])
    assert first["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(first["hidden_states"], expected)


def test_every_byte_is_accounted_for_and_checked(tmp_path):
    url = make_float8_dump(tmp_path)
    store = Store(url)
    found = check_account(store)
    assert found.problems == ()
    assert found.states_bytes == sum(LENGTHS) * 3 * (16 + 4)
    assert [p for item in work_items(store) for p in run_item(item).problems] == []


@pytest.mark.parametrize(("value", "what"), [(0x7F, "not finite at 1 tokens"), (0x01, "xxh3 is")])
def test_a_code_that_is_no_number_or_another_one_is_found(tmp_path, value, what):
    url = make_float8_dump(tmp_path)
    sample = open_dump(url)[1]
    path = tmp_path / f"hidden/c/{sample.shard}/0/0"
    data = bytearray(path.read_bytes())
    data[sample.offset] = value
    path.write_bytes(data)
    assert any(what in p.what for item in work_items(Store(url)) for p in run_item(item).problems)
    with pytest.raises(CorruptDump, match="isn't what was committed"):
        open_dump(url)[1].stack()


@pytest.mark.parametrize(("value", "what"), [(math.nan, "isn't a positive number"), (2.0, "xxh3 is")])
def test_another_scale_is_found(tmp_path, value, what):
    url = make_float8_dump(tmp_path)
    sample = open_dump(url)[1]
    path = tmp_path / f"scales/c/{sample.shard}/0"
    scales = np.fromfile(path, "<f4").reshape(-1, 3)
    scales[sample.first_slot * LAYOUT.chunk_rows + 3, 1] = value
    scales.tofile(path)
    problems = [p.what for item in work_items(Store(url)) for p in run_item(item).problems]
    assert any(p.startswith("state 2: ") and what in p for p in problems)
    assert not any(p.startswith(("state 0: ", "state final: ")) for p in problems)
    with pytest.raises(CorruptDump, match="state 2"):
        open_dump(url)[1].states(2)


def test_states_without_scales_and_scales_without_codes_are_refused(tmp_path):
    for name, layout, scales in (("a", FLOAT8, None), ("b", LAYOUT, np.ones((3, 9), np.float32))):
        create_dump(Store(str(tmp_path / name)), IDENTITY, layout, {})
        writer = ShardWriter(Store(str(tmp_path / name)), layout, "run", "writer-0", 3000)
        writer.place(head_of(0, 9))
        with pytest.raises(RowMismatch, match="scales are"):
            writer.write(0, 0, np.ones((3, 9, 16), layout.storage_dtype), scales)


def test_codes_of_a_dump_that_has_none_are_an_error(tmp_path):
    make_dump(tmp_path, [9])
    with pytest.raises(OutputError, match="holds bfloat16 and no codes"):
        open_dump(str(tmp_path))[0].codes()


def test_an_export_gets_the_model_s_type(tmp_path):
    layout = Layout((2, 15, 27, "final", "final_normed"), 16, chunk_rows=4, encoding="float8")
    dump = open_dump(make_float8_dump(tmp_path, layout))
    selection = select(dump.header, FORMATS["specforge"], None)
    sample: ExportSample = DumpSource(dump, selection).sample(1)
    assert sample.aux.dtype == torch.bfloat16
    assert torch.equal(sample.final, dump[1].states("final_normed"))


def test_joining_rounds_each_token_and_measures_what_rounding_took():
    layout = Layout((0, 3, "final"), hidden_size=64, chunk_rows=4, shard_rows=4096)
    stored = replace(layout, encoding="float8")
    lengths = [70, 33]
    batch = Batch(
        "b", tuple(SampleRef(i, 1, n, n) for i, n in enumerate(lengths)), plan_segments(lengths, stored, 8000)
    )
    statistics = StateStatistics(layout)
    ids = [np.zeros(n, np.int32) for n in lengths]
    join = BatchJoin(batch, stored, ids, None, statistics.measured)
    for i, n in enumerate(lengths):
        states = list(states_of(layout, i, n))
        statistics.look(states)
        for start, end in ((20, n), (0, 20)):
            join.put(i, start, [state[start:end] for state in states], ids[i][start:end])
    assert join.complete
    for s, pieces in enumerate(batch.segments):
        for piece, codes, scales in split_segment(join.take(s), pieces, stored):
            whole, whole_scales = quantised(piece.sample, lengths[piece.sample], layout)
            rows = slice(piece.start, piece.start + piece.rows)
            np.testing.assert_array_equal(codes, whole[:, rows])
            np.testing.assert_array_equal(scales, whole_scales[:, rows])
    for found in statistics.summary().values():
        assert 0.5 * EXPECTED_ERROR < found["float8_error_quantiles"]["0.5"] < EXPECTED_ERROR


def test_the_reference_allows_for_rounding_and_still_finds_a_neighbouring_layer():
    torch.manual_seed(0)
    boundaries = {str(b): torch.randn(50, 256) for b in range(4)}
    for b in range(1, 4):
        boundaries[str(b)] = boundaries[str(b - 1)] + 0.06 * boundaries[str(b)]
    reference = {**boundaries, "final": boundaries["3"] + 0.1, "final_normed": boundaries["3"]}
    right = rounded(boundaries["2"])
    assert compare(2, right, 4, reference, quantised=True).passed
    assert not compare(2, right, 4, reference).passed
    off = compare(2, rounded(boundaries["1"]), 4, reference, quantised=True)
    assert not off.passed
    assert off.nearest == "1"


def test_a_dump_is_removed_with_its_scales(tmp_path):
    store = Store(make_float8_dump(tmp_path / "dump"))
    remove_dump(store)
    assert not list(tmp_path.iterdir())
