"""Objects in real object store servers appear whole, once, and only when they are committed."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import part_sink
from storage.errors import AlreadyExists, CorruptDump, OutputError
from storage.files import Store

RACERS = 16


def test_what_was_put_can_be_read_listed_replaced_and_deleted(dump_url: str) -> None:
    store = Store(dump_url)
    assert store.list("a") == []
    assert store.size("a/1") is None
    store.put_if_absent("a/1", b"0123456789")
    store.put_if_absent("a/b/2", b"nested")
    with pytest.raises(AlreadyExists, match="a/1"):
        store.put_if_absent("a/1", b"other")
    assert store.list("a") == [("a/1", 10)]
    assert store.read_range("a/1", 2, 3) == b"234"
    assert store.read_range("a/1", 2, 0) == b""
    for offset in (8, 10, 100):
        with pytest.raises(CorruptDump, match=f"ends at byte {max(offset, 10)}"):
            store.read_range("a/1", offset, 5)
    store.replace("a/1", b"new")
    assert (store.read("a/1"), store.size("a/1"), store.exists("a/1")) == (b"new", 3, True)
    store.delete("a/1")
    store.delete("a/1")
    assert not store.exists("a/1")
    for call in (
        lambda: store.read("a/1"),
        lambda: store.read_range("a/1", 0, 1),
        lambda: store.open_read("a/1"),
    ):
        with pytest.raises(FileNotFoundError, match="a/1"):
            call()


def test_of_racing_writers_one_puts_an_object(dump_url: str) -> None:
    for round_ in range(3):
        barrier = threading.Barrier(RACERS)

        def put(racer: int, round_: int = round_, barrier: threading.Barrier = barrier) -> bool:
            store = Store(dump_url)
            store.exists("x")  # so that nothing but the put itself is left
            barrier.wait()
            try:
                store.put_if_absent(f"manifest/{round_}.json", str(racer).encode())
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(put, range(RACERS)))
        assert won.count(True) == 1
        assert Store(dump_url).read(f"manifest/{round_}.json") == str(won.index(True)).encode()


def test_all_pages_of_a_folder_are_listed(dump_url: str) -> None:
    store = Store(dump_url)
    keys = sorted(f"claims/{i}.json" for i in range(2_300))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.replace(key, b"{}"), keys))
    assert store.list("claims") == [(key, 2) for key in keys]


def test_an_object_in_parts_is_written_in_any_order(dump_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_sink, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(part_sink, "_idle", [])
    monkeypatch.setattr("storage.remote.PART_BYTES", 5 << 20)
    monkeypatch.setattr("storage.remote.READ_BYTES", 3 << 20)
    monkeypatch.setattr(part_sink, "HELD_PARTS", 1)
    store = Store(dump_url)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 255, 33_000_001, np.uint8)
    sink = store.object_sink("hidden/c/0/0/0")
    for start in rng.permutation(range(0, data.size, 1_234_567)):
        sink.write_at(int(start), data[start : start + 1_234_567])
    assert not store.exists("hidden/c/0/0/0")
    sink.commit(data.size)
    assert store.read("hidden/c/0/0/0") == data.tobytes()
    assert store.read_range("hidden/c/0/0/0", 1000, 20_000_000) == data[1000:20_001_000].tobytes()


@pytest.mark.parametrize("length", [100, 11 << 20])
def test_a_sink_never_overwrites_and_an_aborted_one_leaves_nothing(
    dump_url: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_sink, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(part_sink, "_idle", [])
    monkeypatch.setattr("storage.remote.PART_BYTES", 5 << 20)
    store = Store(dump_url)
    first, second, third = (store.object_sink("o") for _ in range(3))
    for value, sink in enumerate((first, second, third)):
        sink.write_at(0, np.full(length, value, np.uint8))
    third.abort()
    third.abort()
    first.commit(length)
    with pytest.raises(AlreadyExists):
        second.commit(length)
    assert store.read("o") == bytes(length)


def test_an_aborted_upload_is_removed(s3: Any, bucket: str) -> None:
    store = Store(f"s3://{bucket}")
    sink = store.object_sink("o")
    sink.write_at(0, np.ones(40 << 20, np.uint8))
    assert len(s3.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1
    sink.abort()
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    assert store.list("") == []


def test_a_file_in_a_bucket_can_be_read_by_pyarrow(dump_url: str) -> None:
    table = pa.table({"a": np.arange(300_000), "b": np.random.default_rng(0).random(300_000)})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=10_000)
    store = Store(dump_url)
    store.replace("prompts/0.parquet", buffer.getvalue().to_pybytes())
    with store.open_read("prompts/0.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(7).equals(table.slice(70_000, 10_000))


def test_a_store_that_was_used_can_be_pickled(dump_url: str) -> None:
    store = Store(dump_url)
    store.put_if_absent("x", b"1")
    assert pickle.loads(pickle.dumps(store)).read("x") == b"1"


def test_a_missing_bucket_is_named(s3: Any) -> None:
    store = Store("s3://no-such-bucket-here/dump")
    with pytest.raises(OutputError, match="no such bucket"):
        store.put_if_absent("x", b"")
    with pytest.raises(OutputError, match="no such bucket"):
        store.replace("x", b"")
    assert not store.exists("x")
