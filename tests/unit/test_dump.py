"""The root, its identity, manifests, and how a run is finished."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zarr
from made_dumps import IDENTITY, LAYOUT, make_dump, states_of, write_whole

from storage.dump import create_dump, finalise, grow, open_or_create, read_header
from storage.errors import AlreadyExists, CorruptDump, IdentityMismatch, IncompleteRun, OutputError
from storage.files import Store
from storage.identity import Identity
from storage.layout import manifest_key
from storage.manifest import Manifest, committed_samples, read_manifest, read_manifests
from storage.shard import ShardWriter
from storage.table import Account, Outcome, read_account


def test_an_identity_lists_each_field_that_differs() -> None:
    other = Identity(
        model={"path": "/models/tiny", "dtype": "float16"},
        capture={**IDENTITY.capture, "boundaries": (0, 3)},
        prompts={},
        engine={"server_args": {"mem": 1}},
    )
    assert IDENTITY.differences(Identity.from_json(IDENTITY.to_json())) == []
    assert IDENTITY.differences(other) == [
        "capture.boundaries: [0, 2] here, [0, 3] in the dump",
        "engine.server_args.mem: not set here, 1 in the dump",
        'model.dtype: "bfloat16" here, "float16" in the dump',
        'prompts.digest: "abc" here, not set in the dump',
    ]


def test_where_a_model_of_the_hub_is_cached_doesnt_count() -> None:
    hub = {"source": "owner/name", "revision": "c0ffee"}
    here = dataclasses.replace(IDENTITY, model={**hub, "path": "/home/a/c0ffee"})
    there = dataclasses.replace(IDENTITY, model={**hub, "path": "/home/b/c0ffee"})
    assert here.differences(there) == []
    moved_on = dataclasses.replace(there, model={**there.model, "revision": "f00d"})
    assert here.differences(moved_on) == ['model.revision: "c0ffee" here, "f00d" in the dump']


def test_tuples_and_lists_are_the_same_identity() -> None:
    capture = {**IDENTITY.capture, "boundaries": (0, 2)}
    assert dataclasses.replace(IDENTITY, capture=capture).differences(IDENTITY) == []


def test_a_second_start_resumes_and_another_run_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = open_or_create(store, IDENTITY, LAYOUT, {"hsdump": "1"})
    again = open_or_create(store, IDENTITY, LAYOUT, {"hsdump": "2"})
    assert (again.layout, again.identity, again.versions) == (LAYOUT, IDENTITY, {"hsdump": "1"})
    assert first == again
    with pytest.raises(AlreadyExists):
        create_dump(store, IDENTITY, LAYOUT, {})
    other = dataclasses.replace(IDENTITY, prompts={"digest": "def"})
    with pytest.raises(IdentityMismatch, match=r'prompts.digest: "def" here, "abc" in the dump'):
        open_or_create(store, other, LAYOUT, {})
    compressed = dataclasses.replace(LAYOUT, codec="zstd")
    with pytest.raises(IdentityMismatch, match=r"codec none, .* asks for zstd; .*set writers.codec to none"):
        open_or_create(store, IDENTITY, compressed, {})


def test_no_dump_and_a_broken_root_are_told_apart(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(OutputError, match="there is no dump here"):
        read_header(store)
    for root in (b"{", b'{"attributes": {}}', b'{"attributes": {"format": "other"}}', b"[]"):
        store.replace("zarr.json", root)
        with pytest.raises(CorruptDump, match=r"zarr.json isn't the root"):
            read_header(store)


def test_boundary_n_is_the_final_state(tmp_path: Path) -> None:
    header = read_header(make_dump(tmp_path, [3]))
    assert header.num_layers == 4
    assert header.resolve(4) == "final"
    assert [header.resolve(s) for s in (0, 3, "final")] == [0, 3, "final"]
    assert header.model_path == "/models/tiny"


def test_growing_never_shrinks_and_heals_missing_arrays(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [3], finish=False)
    grow(store, 9)
    grow(store, 4)
    assert zarr.open_array(f"{tmp_path}/hidden").shape[0] == 9 * LAYOUT.shard_rows
    store.delete("hidden/zarr.json")
    grow(store, 1)
    assert zarr.open_array(f"{tmp_path}/hidden").shape[0] == LAYOUT.shard_rows


def test_a_finished_dump_has_one_row_for_each_prepared_row(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5, 9, 30, 64], skipped=[1])
    table = pq.read_table(tmp_path / "samples.parquet")
    assert pq.read_metadata(tmp_path / "samples.parquet").row_group(0).column(0).compression == "ZSTD"
    assert table["status"].to_pylist() == ["committed", "skipped", "committed", "committed"]
    assert table["tokens"].to_pylist() == [5, None, 30, 64]
    assert table["reason"].to_pylist() == [None, "too long", None, None]
    places = committed_samples(read_manifests(store))
    for record in table.to_pylist():
        if record["status"] == "committed":
            place = places[record["row"]]
            assert record["shard"] == place.shard
            assert record["offset"] == place.sample.offset
            assert record["array_start"] == LAYOUT.array_start(place.shard, place.sample.first_slot)
    shards = max(m.shard for m in read_manifests(store)) + 1
    assert zarr.open_array(f"{tmp_path}/hidden").shape[0] == shards * LAYOUT.shard_rows


def test_a_finished_dump_is_recognised_by_its_account(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5, 9, 30], skipped=[1], finish=False)
    assert read_account(store) is None
    account = finalise(store, [Outcome(1, "b", "failed", "engine died twice")])
    assert account == Account(rows=3, committed=2, skipped=0, failed=1, tokens=35, kept=35)
    assert read_account(store) == account
    store.replace("samples.parquet", b"PAR1 no")
    with pytest.raises(CorruptDump, match="built from the manifests"):
        read_account(store)


def test_a_row_without_manifest_or_outcome_stops_the_end(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5, 9, 30], skipped=[1], finish=False)
    with pytest.raises(IncompleteRun, match="row 1 is neither"):
        finalise(store, [])
    with pytest.raises(CorruptDump, match="no manifest has it"):
        finalise(store, [Outcome(1, "b", "committed", "")])
    assert not store.exists("samples.parquet")


def test_a_committed_row_stays_committed_whatever_its_outcome_says(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5], finish=False)
    assert finalise(store, [Outcome(0, "a", "failed", "writer was given up")]).committed == 1


def test_of_two_copies_of_a_row_the_lowest_shard_counts(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5, 6], finish=False)
    late = ShardWriter(store, LAYOUT, "run", "writer-9", 1)
    write_whole(late, 0, states_of(LAYOUT, 0, 5))
    late.seal_all()
    manifests = read_manifests(store)
    assert [[s.row for s in m.samples] for m in manifests] == [[0, 1], [0]]
    for order in (manifests, manifests[::-1]):
        assert [(row, c.shard) for row, c in committed_samples(order).items()] == [(0, 0), (1, 0)]
    assert finalise(store, []).committed == 2


def test_manifests_survive_json_and_known_ones_are_left_out(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [20, 20, 20], shard_bytes=1)
    manifests = read_manifests(store)
    assert [m.shard for m in manifests] == [0, 1, 2]
    assert Manifest.from_json(json.loads(manifests[0].to_bytes())) == manifests[0]
    assert [m.shard for m in read_manifests(store, known={0, 2})] == [1]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"manifest_version": 2}', b'{"manifest_version": 1, "shard": 0}']
)
def test_a_manifest_that_is_not_one_is_named(tmp_path: Path, data: bytes) -> None:
    store = make_dump(tmp_path, [5])
    store.replace(manifest_key(0), data)
    with pytest.raises(CorruptDump, match=r"manifest/0.json isn't a readable manifest"):
        read_manifests(store)


def test_a_manifest_of_another_shard_is_refused(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5])
    store.put_if_absent(manifest_key(3), store.read(manifest_key(0)))
    with pytest.raises(CorruptDump, match="of shard 0"):
        read_manifest(store, 3)
