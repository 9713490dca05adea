"""Compressed dumps: stock readers open them (see test_shard), ours reads, verifies and refuses damage."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_dumps import IDENTITY, LAYOUT, head_of, make_dump, states_of

from storage.codecs import ChunkEncoder, decode_chunk
from storage.dump import create_dump
from storage.encoded import IndexCache, read_index
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import Layout, hidden_key
from storage.manifest import read_manifest
from storage.reader import open_dump
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

LENGTHS = [5, 30, 1, 60, 33]
COMPRESSED = ["lz4-bitshuffle", "zstd"]


@pytest.fixture(params=COMPRESSED)
def layout(request: pytest.FixtureRequest) -> Layout:
    return replace(LAYOUT, hidden_size=256, shard_rows=256, codec=request.param)


def bits_of(dump_url: str, row: int) -> np.ndarray:
    states = open_dump(dump_url)[row].stack()
    return states.view(torch.int16).numpy().view(np.uint16).transpose(1, 0, 2)


def test_samples_of_a_compressed_dump_read_back_whole_and_state_by_state(
    tmp_path: Path, layout: Layout
) -> None:
    store = make_dump(tmp_path, LENGTHS, layout)
    dump = open_dump(store.url)
    for row, tokens in enumerate(LENGTHS):
        expected = states_of(layout, row, tokens)
        assert np.array_equal(bits_of(store.url, row), expected)
        two = dump[row].stack(["final", 0])
        assert two.shape == (tokens, 2, 256)
        assert two[:, 0].equal(dump[row].states("final"))
        assert two[:, 1].equal(dump[row].states(0))
        assert dump[row].states(2).equal(dump[row].stack()[:, 1])


def test_an_index_is_read_once_for_a_shard_and_the_last_few_are_kept(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def counted(store: Store, layout: Layout, shard: int) -> Any:
        reads.append(shard)
        return read_index(store, layout, shard)

    monkeypatch.setattr("storage.encoded.read_index", counted)
    store = make_dump(tmp_path, [60, 30, 60, 30, 60], layout, shard_bytes=layout.sample_bytes(80))
    dump = open_dump(store.url)
    shards = [sample.shard for sample in dump]
    assert shards == [0, 0, 1, 1, 2]
    for sample in (*dump, *dump):
        sample.stack()
    assert reads == [0, 1, 2]
    two = IndexCache(store, layout, keep_bytes=2 * layout.index_bytes)
    for shard in (0, 1, 0, 1, 2, 1, 0):
        assert np.array_equal(two.of(shard), read_index(store, layout, shard))
    assert reads[3:] == [0, 1, 2, 0]
    assert pickle.loads(pickle.dumps(dump))[0].stack().equal(dump[0].stack())


def test_a_compressed_shard_is_smaller(tmp_path: Path, layout: Layout) -> None:
    store = make_dump(tmp_path, LENGTHS, layout, shard_bytes=1 << 30)
    plain = layout.sample_bytes(5 + 3) + sum(layout.sample_bytes(n) for n in LENGTHS[1:])
    size = store.size(hidden_key(0))
    assert size is not None
    assert size - layout.index_bytes < 0.95 * plain


def test_segments_of_several_samples_may_alternate(tmp_path: Path, layout: Layout) -> None:
    store = Store(str(tmp_path))
    create_dump(store, IDENTITY, layout, {})
    writer = ShardWriter(store, layout, "run", "writer-0", 1 << 30)
    for row in (0, 1):
        writer.place(head_of(row, 22))
    for start, end in ((0, 8), (8, 12), (12, 22)):
        for row in (1, 0):
            writer.write(row, start, np.ascontiguousarray(states_of(layout, row, 22)[:, start:end]))
    for row in (0, 1):
        writer.finish(row)
    writer.seal_all()
    for row in (0, 1):
        assert np.array_equal(bits_of(store.url, row), states_of(layout, row, 22))
    assert [run_item(item).problems for item in work_items(store)] == [()]


def test_verify_passes_a_compressed_dump_and_finds_a_changed_byte(tmp_path: Path, layout: Layout) -> None:
    store = make_dump(tmp_path, LENGTHS, layout, shard_bytes=1 << 30)
    (item,) = work_items(store)
    assert run_item(item).problems == ()
    sample = read_manifest(store, 0).samples[2]
    offset, length = (int(v) for v in read_index(store, layout, 0)[sample.first_slot, 1])
    flip(store, offset + length - 3)
    assert {p.row for p in run_item(item).problems} == {2}


def test_a_damaged_index_is_named_by_reader_and_verify(tmp_path: Path, layout: Layout) -> None:
    store = make_dump(tmp_path, LENGTHS, layout, shard_bytes=1 << 30)
    flip(store, (store.size(hidden_key(0)) or 0) - layout.index_bytes + 1)
    with pytest.raises(CorruptDump, match=r"index of .*hidden/c/0/0/0 is damaged"):
        open_dump(store.url)[0].stack()
    (item,) = work_items(store)
    assert {p.row for p in run_item(item).problems} == set(range(len(LENGTHS)))


@pytest.mark.parametrize("codec", COMPRESSED)
def test_what_is_no_chunk_is_refused(codec: str) -> None:
    encoder = ChunkEncoder(codec, 2)
    chunk = np.arange(4096, dtype=np.uint16)
    (data,) = encoder.encode([chunk])
    encoder.close()
    out = np.empty(8192, np.uint8)
    decode_chunk(codec, 2, data, out)
    assert np.array_equal(out.view(np.uint16), chunk)
    for bad in (data[: data.size // 2], data[:0], np.zeros(100, np.uint8)):
        with pytest.raises(ValueError, match=f"aren't a chunk of 8192 bytes in {codec}"):
            decode_chunk(codec, 2, bad, out)
    with pytest.raises(ValueError, match="aren't a chunk"):
        decode_chunk(codec, 2, data, np.empty(4096, np.uint8))


def flip(store: Store, at: int) -> None:
    with open(f"{store.url}/{hidden_key(0)}", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x55]))
