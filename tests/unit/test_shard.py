"""Shards by hand are what stock zarr-python and tensorstore read, and nothing is committed by accident."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore
import xxhash
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from made_dumps import IDENTITY, LAYOUT, head_of, make_dump, states_of, write_whole

from storage.claims import claim_next, claimed_shards
from storage.codecs import CODECS
from storage.dump import create_dump, finalise, grow
from storage.errors import AlreadyExists, LeaseLost, RowMismatch, StorageError, StorageFull
from storage.files import Store
from storage.layout import MISSING, Layout, claim_key, hidden_key, manifest_key
from storage.manifest import Manifest, read_manifest, read_manifests
from storage.shard import ShardWriter


def open_with_tensorstore(path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, open=True).result()


def new_writer(
    tmp_path: Path, shard_bytes: int = 1 << 30, layout: Layout = LAYOUT
) -> tuple[Store, ShardWriter]:
    store = Store(str(tmp_path))
    create_dump(store, IDENTITY, layout, {})
    return store, ShardWriter(store, layout, "run", "writer-0", shard_bytes)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Layout, int, list[tuple[int, list[int], bool]]]:
    """A layout, shard_bytes, and for each sample its length, its cuts, and whether it is given up."""
    layout = Layout(
        states=draw(st.sampled_from([(0,), (1, 3), (0, 2, "final", "final_normed")])),
        hidden_size=draw(st.sampled_from([3, 16, 512])),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        chunk_rows=4,
        shard_rows=32,
        codec=draw(st.sampled_from(CODECS)),
    )
    samples = []
    for _ in range(draw(st.integers(1, 8))):
        tokens = draw(st.integers(1, 32))
        cuts = draw(st.sets(st.sampled_from(range(0, tokens, 4))))
        samples.append((tokens, sorted(cuts | {0}), draw(st.integers(0, 4)) == 0))
    return layout, draw(st.sampled_from([1, 4 * layout.sample_bytes(8), 1 << 30])), samples


@settings(max_examples=40, deadline=None)
@given(plan=plans(), seed=st.integers(0, 1000))
def test_zarr_and_tensorstore_read_the_bytes_that_were_written(
    plan: tuple[Layout, int, list[tuple[int, list[int], bool]]], seed: int
) -> None:
    layout, shard_bytes, samples = plan
    with tempfile.TemporaryDirectory() as folder:
        store, writer = new_writer(Path(folder), shard_bytes, layout)
        write_interleaved(writer, layout, samples, seed)
        writer.seal_all()
        manifests = read_manifests(store)
        kept = {row for row, (_, _, dropped) in enumerate(samples) if not dropped}
        assert {s.row for m in manifests for s in m.samples} == kept
        assert {r for info in writer.take_sealed() for r in info.rows} == kept
        grow(store, max((m.shard for m in manifests), default=0) + 1)
        for manifest in manifests:
            check_missing_slots(Path(folder), manifest)
            for reader in (
                zarr.open_array(f"{folder}/hidden"),
                open_with_tensorstore(Path(folder) / "hidden"),
            ):
                check_samples(reader, layout, manifest)
            check_token_columns(Path(folder), manifest)


def write_interleaved(
    writer: ShardWriter, layout: Layout, samples: list[tuple[int, list[int], bool]], seed: int
) -> None:
    """Writes segments of up to three samples at a time in a random order, each sample's own in theirs."""
    rng = np.random.default_rng(seed)
    waiting = list(enumerate(samples))
    active: list[tuple[int, int, list[int], bool]] = []
    while waiting or active:
        if waiting and (len(active) < 3):
            row, (tokens, cuts, dropped) = waiting.pop(0)
            writer.place(head_of(row, tokens))
            active.append((row, tokens, cuts, dropped))
            continue
        at = int(rng.integers(len(active)))
        row, tokens, cuts, dropped = active[at]
        start, rest = cuts[0], cuts[1:]
        states = states_of(layout, row, tokens)[:, start : rest[0] if rest else tokens]
        writer.write(row, start, np.ascontiguousarray(states))
        active[at] = (row, tokens, rest, dropped)
        if not rest:
            active.pop(at)
            if dropped:
                writer.drop(row)
            else:
                writer.finish(row)


def check_samples(array: Any, layout: Layout, manifest: Manifest) -> None:
    for sample in manifest.samples:
        start = layout.array_start(manifest.shard, sample.first_slot)
        end = start + layout.slots(sample.tokens) * layout.chunk_rows
        found = array[start:end]
        found = np.asarray(found.read().result() if hasattr(found, "read") else found)
        expected = states_of(layout, sample.row, sample.tokens)
        assert np.array_equal(found[: sample.tokens].transpose(1, 0, 2), expected)
        assert not found[sample.tokens :].any()
        for k in range(layout.num_states):
            rows = np.ascontiguousarray(found[:, k])
            assert xxhash.xxh3_64_hexdigest(rows) == sample.xxh3[k]


def check_missing_slots(folder: Path, manifest: Manifest) -> None:
    layout = manifest.layout
    data = (folder / hidden_key(manifest.shard)).read_bytes()
    entries = np.frombuffer(data[-layout.index_bytes : -4], "<u8").reshape(layout.shard_slots, -1, 2)
    taken = {s.first_slot + i for s in manifest.samples for i in range(layout.slots(s.tokens))}
    for slot in range(layout.shard_slots):
        assert np.all((entries[slot] == MISSING) == (slot not in taken))


def check_token_columns(folder: Path, manifest: Manifest) -> None:
    group = zarr.open_group(str(folder))
    for sample in manifest.samples:
        start = manifest.layout.array_start(manifest.shard, sample.first_slot)
        head = head_of(sample.row, sample.tokens)
        assert np.array_equal(group["tokens/token_ids"][start : start + sample.tokens], head.token_ids)
        assert np.array_equal(group["tokens/loss_mask"][start : start + sample.tokens], head.loss_mask)


def test_the_whole_dump_opens_as_a_zarr_group(tmp_path: Path) -> None:
    make_dump(tmp_path, [5, 9, 30, 64], skipped=[1])
    group = zarr.open(str(tmp_path))
    assert dict(group.attrs)["identity"]["model"]["path"] == "/models/tiny"
    assert dict(group.attrs)["bytes_per_token"] == 3 * 16 * 2
    assert group["hidden"].shape[1:] == (3, 16)
    assert set(group["tokens"].array_keys()) == {"token_ids", "loss_mask"}


def test_a_shard_is_full_at_shard_bytes_or_when_a_sample_does_not_fit(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path, shard_bytes=LAYOUT.sample_bytes(40))
    write_whole(writer, 0, states_of(LAYOUT, 0, 30))
    assert writer.take_sealed() == []
    write_whole(writer, 1, states_of(LAYOUT, 1, 10))
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(0, 1)]
    write_whole(writer, 2, states_of(LAYOUT, 2, 30))
    write_whole(writer, 3, states_of(LAYOUT, 3, 60))  # 32 + 60 > 64 rows, though bytes would allow it
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(2,), (3,)]
    assert [m.shard for m in read_manifests(store)] == [0, 1, 2]


def test_a_full_shard_is_sealed_even_where_no_other_can_be_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer = new_writer(tmp_path)

    def only_the_first(store: Store, run_id: str, name: str, first: int) -> int:
        if first > 0:
            raise StorageFull("no space left")
        return claim_next(store, run_id, name, first)

    monkeypatch.setattr("storage.claims.claim_next", only_the_first)
    write_whole(writer, 0, states_of(LAYOUT, 0, 60))
    with pytest.raises(StorageFull):
        writer.place(head_of(1, 30))
    writer.settle()
    assert [sealed.rows for sealed in writer.take_sealed()] == [(0,)]


def test_a_shard_is_claimed_while_the_one_before_it_is_filled(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path)
    writer.place(head_of(0, 40))
    assert claimed_shards(store) == [0]
    writer.place(head_of(1, 8))  # 48 of 64 rows
    assert writer._claims._coming is not None
    assert writer._claims._coming.result() == 1
    writer.place(head_of(2, 20))  # doesn't fit
    assert claimed_shards(store) == [0, 1]


@pytest.mark.parametrize("deletable", [True, False])
def test_a_claim_that_was_not_used_is_given_back_or_stays_empty(
    deletable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 50))
    if not deletable:
        monkeypatch.setattr(Store, "delete", Mock(side_effect=StorageError("no answer")))
    writer.seal_all()
    assert [sealed.rows for sealed in writer.take_sealed()] == [(0,)]
    assert claimed_shards(store) == ([0] if deletable else [0, 1])
    write_whole(writer, 1, states_of(LAYOUT, 1, 50))
    monkeypatch.undo()
    writer.seal_all()
    assert [m.shard for m in read_manifests(store)] == [0, 1 if deletable else 2]


def test_a_fuller_shard_waits_for_its_unfinished_sample(tmp_path: Path) -> None:
    _, writer = new_writer(tmp_path)
    states = states_of(LAYOUT, 0, 40)
    writer.place(head_of(0, 40))
    writer.write(0, 0, np.ascontiguousarray(states[:, :20]))
    write_whole(writer, 1, states_of(LAYOUT, 1, 60))
    assert writer.take_sealed() == []
    writer.write(0, 20, np.ascontiguousarray(states[:, 20:]))
    writer.finish(0)
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(0,)]
    writer.seal_all()
    assert [s.rows for s in writer.take_sealed()] == [(1,)]


def test_the_next_shard_is_written_while_one_is_sealed_and_a_sample_counts_from_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = new_writer(tmp_path, shard_bytes=1)
    put, begun, goes_on = Store.put_if_absent, threading.Event(), threading.Event()

    def wait_before_manifest(self: Store, key: str, data: bytes) -> None:
        if key == manifest_key(0):
            begun.set()
            assert goes_on.wait(60)
        put(self, key, data)

    monkeypatch.setattr(Store, "put_if_absent", wait_before_manifest)
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    assert begun.wait(60)
    writer.place(head_of(1, 8))
    writer.write(1, 0, np.ascontiguousarray(states_of(LAYOUT, 1, 8)[:, :4]))
    assert writer.take_sealed() == []
    assert not store.exists(manifest_key(0))
    goes_on.set()
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(0,)]
    writer.write(1, 4, np.ascontiguousarray(states_of(LAYOUT, 1, 8)[:, 4:]))
    writer.finish(1)
    writer.seal_all()
    assert [[s.row for s in m.samples] for m in read_manifests(store)] == [[0], [1]]


def test_a_seal_that_failed_is_told_once_and_the_other_shards_are_committed(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path, shard_bytes=LAYOUT.sample_bytes(8))
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    store.put_if_absent(hidden_key(0), b"another's")
    write_whole(writer, 1, states_of(LAYOUT, 1, 4))  # shard 0 is full
    with pytest.raises(AlreadyExists, match="hidden/c/0/0/0"):
        writer.settle()
    write_whole(writer, 2, states_of(LAYOUT, 2, 4))
    store.put_if_absent(hidden_key(1), b"another's")
    writer.place(head_of(3, 60))
    write_whole(writer, 4, states_of(LAYOUT, 4, 8))  # shard 2; shard 1 is done when row 3 is given up
    writer.drop(3)
    with pytest.raises(AlreadyExists, match="hidden/c/1/0/0"):
        writer.seal_all()
    writer.settle()
    assert [[s.row for s in m.samples] for m in read_manifests(store)] == [[4]]


def test_rows_that_are_missing_out_of_order_or_misshapen_are_refused(tmp_path: Path) -> None:
    _, writer = new_writer(tmp_path)
    states = states_of(LAYOUT, 0, 10)
    with pytest.raises(RowMismatch, match="no place"):
        writer.write(0, 0, states)
    writer.place(head_of(0, 10))
    for start, bad, message in [
        (4, states[:, :4], "in order"),
        (0, states_of(LAYOUT, 0, 11), "in order"),
        (0, states[:, :3], "multiple of 4"),
        (0, states[:2], "wanted is uint16"),
        (0, states.view(np.float16), "wanted is uint16"),
    ]:
        with pytest.raises(RowMismatch, match=message):
            writer.write(0, start, bad)
    writer.write(0, 0, np.ascontiguousarray(states[:, :8]))
    with pytest.raises(RowMismatch, match="states of 8 tokens came, 10 are to be stored"):
        writer.finish(0)
    with pytest.raises(RowMismatch, match="from 1 to 64"):
        writer.place(head_of(1, 65))


def test_a_row_that_is_placed_again_replaces_its_unsealed_copy(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 7, 10))
    write_whole(writer, 1, states_of(LAYOUT, 1, 5))
    write_whole(writer, 0, states_of(LAYOUT, 0, 10))
    writer.seal_all()
    manifest = read_manifest(store, 0)
    assert [s.row for s in manifest.samples] == [1, 0]
    check_samples(zarr.open_array(f"{tmp_path}/hidden"), LAYOUT, manifest)


def test_shards_are_sealed_by_age_and_by_idleness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    _, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    now_s = 109.0
    writer.seal_older_than(age_s=60, idle_s=10)
    assert writer.take_sealed() == []
    now_s = 110.0
    writer.seal_older_than(age_s=60, idle_s=10)
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(0,)]
    write_whole(writer, 1, states_of(LAYOUT, 1, 4))
    writer.place(head_of(2, 4))
    now_s = 170.0
    writer.seal_older_than(age_s=60, idle_s=1000)
    assert writer.take_sealed() == []  # row 2 is still on its way
    writer.drop(2)
    writer.settle()
    assert [s.rows for s in writer.take_sealed()] == [(1,)]


def test_a_writer_whose_claim_is_gone_seals_nothing(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    store.delete(claim_key(0))
    with pytest.raises(LeaseLost, match=r"shard 0 .* writer-0 of run run"):
        writer.seal_all()
    assert not store.exists(hidden_key(0))
    assert not store.exists(manifest_key(0))
    writer.seal_all()


def test_a_late_writer_never_overwrites_a_shard(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    store.put_if_absent(hidden_key(0), b"another's")
    with pytest.raises(AlreadyExists):
        writer.seal_all()
    assert store.read(hidden_key(0)) == b"another's"
    assert not store.exists(manifest_key(0))


def test_after_a_full_disk_the_shard_is_given_up_and_a_new_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.sinks.BUFFER_BYTES", 512)
    monkeypatch.setattr("storage.sinks._idle_buffers", [])
    store, writer = new_writer(tmp_path)
    writer.place(head_of(0, 60))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "pwrite", raise_no_space)
        with pytest.raises(StorageFull, match="hidden/c/0/0/0: no space left"):
            writer.write(0, 0, states_of(LAYOUT, 0, 60))  # many buffers: the thread reports meanwhile
    assert list((tmp_path / ".tmp").iterdir()) == []  # its space is free again
    write_whole(writer, 1, states_of(LAYOUT, 1, 4))
    writer.seal_all()
    assert [(m.shard, [s.row for s in m.samples]) for m in read_manifests(store)] == [(1, [1])]


def raise_no_space(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    put = Store.put_if_absent

    def fail(self: Store, key: str, data: bytes) -> None:
        if key.startswith("manifest"):
            raise OSError(f"no {key}")
        put(self, key, data)

    monkeypatch.setattr(Store, "put_if_absent", fail)
    with pytest.raises(OSError, match=r"no manifest/0\.json"):
        writer.seal_all()
    assert all(store.exists(key) for key in (hidden_key(0), "tokens/token_ids/c/0", "tokens/loss_mask/c/0"))
    assert read_manifests(store) == []


def test_a_new_writer_starts_past_every_claim(tmp_path: Path) -> None:
    store, writer = new_writer(tmp_path)
    assert claim_next(store, "old run", "writer-0", 0) == 0
    assert claim_next(store, "old run", "writer-0", 5) == 5
    write_whole(writer, 0, states_of(LAYOUT, 0, 4))
    writer.seal_all()
    assert [m.shard for m in read_manifests(store)] == [6]


def test_segments_larger_than_a_piece_are_hashed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.open_shard.PIECE_BYTES", 100)
    store, writer = new_writer(tmp_path)
    write_whole(writer, 0, states_of(LAYOUT, 0, 33))
    writer.seal_all()
    check_samples(zarr.open_array(f"{tmp_path}/hidden"), LAYOUT, read_manifest(store, 0))


def test_memory_stores_hold_the_same_bytes(tmp_path: Path) -> None:
    local = make_dump(tmp_path, [5, 30], finish=False)
    memory = make_dump(f"memory://{tmp_path.name}", [5, 30], finish=False)
    assert memory.read(hidden_key(0)) == local.read(hidden_key(0))
    assert memory.read(manifest_key(0)) == local.read(manifest_key(0))


KILLED_MID_SHARD = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from made_dumps import *
store = Store(sys.argv[1])
create_dump(store, IDENTITY, LAYOUT, {})
writer = ShardWriter(store, LAYOUT, "run", "writer-0", 1 << 30)
write_whole(writer, 0, states_of(LAYOUT, 0, 10))
writer.place(head_of(1, 30))
writer.write(1, 0, np.ascontiguousarray(states_of(LAYOUT, 1, 30)[:, :16]))
print("mid shard", flush=True)
threading.Event().wait()
"""


def test_a_writer_killed_mid_shard_leaves_no_visible_object(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_MID_SHARD, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mid shard\n"
        process.send_signal(signal.SIGKILL)
    store = Store(str(tmp_path))
    assert store.exists(claim_key(0))
    assert not store.exists(hidden_key(0))
    assert read_manifests(store) == []
    writer = ShardWriter(store, LAYOUT, "run", "writer-1", 1 << 30)
    for row in (0, 1):
        write_whole(writer, row, states_of(LAYOUT, row, 30))
    writer.seal_all()
    finalise(store, [])
    assert [m.shard for m in read_manifests(store)] == [1]
    assert list((tmp_path / ".tmp").iterdir()) == []
