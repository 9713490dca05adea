"""Objects appear whole, once, and only when they are committed."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from storage import localdisk, sinks
from storage.errors import AlreadyExists, CorruptDump, OutputError, StorageFull
from storage.files import Store

RACERS = 8


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(str(tmp_path / "dump"))
    return Store(f"memory://{tmp_path.name}-{request.node.name}")


def try_put(url: str, key: str, name: str, barrier: threading.Barrier | None = None) -> bool:
    store = Store(url)
    if barrier:
        barrier.wait()
    try:
        store.put_if_absent(key, name.encode())
    except AlreadyExists:
        return False
    return True


def race_of_processes(url: str, process: int, rounds: int) -> list[int]:
    return [i for i in range(rounds) if try_put(url, f"claims/{i}.json", str(process))]


def test_of_racing_threads_one_puts_an_object(store: Store) -> None:
    for i in range(20):
        barrier = threading.Barrier(RACERS)
        with ThreadPoolExecutor(RACERS) as pool:
            args = [(store.url, f"claims/{i}.json", str(n), barrier) for n in range(RACERS)]
            won = list(pool.map(lambda a: try_put(*a), args))
        assert won.count(True) == 1
        assert store.read(f"claims/{i}.json") == str(won.index(True)).encode()


def test_of_racing_processes_one_puts_an_object(tmp_path: Path) -> None:
    rounds = 100
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(race_of_processes, str(tmp_path), n, rounds) for n in range(3)]
        won = [f.result() for f in futures]
    assert sorted(i for w in won for i in w) == list(range(rounds))
    for process, wins in enumerate(won):
        assert all((tmp_path / f"claims/{i}.json").read_text() == str(process) for i in wins)
    assert list((tmp_path / localdisk.TEMPORARIES).iterdir()) == []


def test_what_was_put_can_be_read_listed_replaced_and_deleted(store: Store) -> None:
    assert store.list("a") == []
    assert store.size("a/1") is None
    store.put_if_absent("a/1", b"0123456789")
    store.put_if_absent("a/b/2", b"nested")
    with pytest.raises(AlreadyExists, match="a/1"):
        store.put_if_absent("a/1", b"other")
    assert store.list("a") == [("a/1", 10)]
    assert store.read_range("a/1", 2, 3) == b"234"
    with pytest.raises(CorruptDump, match="ends at byte 10"):
        store.read_range("a/1", 8, 5)
    store.replace("a/1", b"new")
    assert (store.read("a/1"), store.size("a/1"), store.exists("a/1")) == (b"new", 3, True)
    with store.open_read("a/1") as file:
        file.seek(1)
        assert file.read() == b"ew"
    store.delete("a/1")
    store.delete("a/1")
    assert not store.exists("a/1")
    with pytest.raises(FileNotFoundError):
        store.read("a/1")


def test_a_store_that_was_used_can_be_pickled(store: Store) -> None:
    store.put_if_absent("x", b"1")
    assert pickle.loads(pickle.dumps(store)).read("x") == b"1"


def test_relative_paths_and_file_urls_are_absolute_local_paths(tmp_path: Path) -> None:
    assert Store("dump").local_root == Path.cwd() / "dump"
    assert Store(f"file://{tmp_path}").url == str(tmp_path)
    assert Store("memory://a/b").local_root is None


def test_storage_without_a_sure_put_if_absent_is_refused() -> None:
    with pytest.raises(OutputError, match="put-if-absent"):
        Store("ftp://host/dump").put_if_absent("x", b"")
    with pytest.raises(OutputError, match="put-if-absent"):
        Store("ftp://host/dump").object_sink("x")


@pytest.mark.parametrize("put", ["put_if_absent", "replace"])
def test_every_folder_with_a_new_name_is_synced_after_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    store = Store(str(tmp_path / "dump"))
    store.put_if_absent("first", b"")  # so that the folder of temporary files is there
    synced: dict[Path, bool] = {}

    def note(folder: Path) -> None:
        synced[folder] = (tmp_path / "dump/a/b/c.json").exists()

    monkeypatch.setattr(localdisk, "fsync_dir", note)
    getattr(store, put)("a/b/c.json", b"{}")
    assert synced == {tmp_path / f"dump{path}": True for path in ("", "/a", "/a/b")}


def test_a_sink_puts_pieces_where_they_belong_in_any_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "BUFFER_BYTES", 8192)  # so that pieces cross buffers
    monkeypatch.setattr(sinks, "_idle_buffers", [])
    rng = np.random.default_rng(0)
    for case, sizes in enumerate([[4096, 8192, 20480, 100], [1, 4095, 4097, 3, 9000], [0, 5, 0]]):
        pieces = [rng.integers(1, 255, n, np.uint8) for n in sizes]
        pads = [4096, 7, 0, 10_000, 1][: len(pieces)]
        expected = b"".join(p.tobytes() + bytes(pad) for p, pad in zip(pieces, pads, strict=True))
        offsets = np.cumsum([0] + [p.size + pad for p, pad in zip(pieces, pads, strict=True)])
        sink = store.object_sink(f"o/{case}")
        for i in rng.permutation(len(pieces)):
            sink.write_at(int(offsets[i]), pieces[i], pads[i])
        assert not store.exists(f"o/{case}")
        sink.commit(len(expected))
        assert store.read(f"o/{case}") == expected


def test_a_sink_never_overwrites_and_an_aborted_one_leaves_nothing(store: Store) -> None:
    first, second, third = (store.object_sink("o") for _ in range(3))
    for value, sink in enumerate((first, second, third)):
        sink.write_at(0, np.full(4096, value, np.uint8))
    third.abort()
    third.abort()
    first.commit(4096)
    with pytest.raises(AlreadyExists):
        second.commit(4096)
    assert store.read("o") == bytes(4096)
    if store.local_root:
        assert list((store.local_root / localdisk.TEMPORARIES).iterdir()) == []


def test_a_sink_falls_back_where_direct_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refuse_direct(fd: int, data: memoryview, offset: int) -> int:
        if os.get_blocking(fd) and fcntl_flags(fd) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    data = np.arange(10_000, dtype=np.uint32).view(np.uint8)
    sink = Store(str(tmp_path)).object_sink("o")
    sink.write_at(0, data)
    sink.commit(data.size)
    assert (tmp_path / "o").read_bytes() == data.tobytes()


def fcntl_flags(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_whole_blocks_are_written_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    written: list[tuple[bool, int]] = []

    def recorded(fd: int, data: memoryview, offset: int) -> int:
        count = real(fd, data, offset)
        written.append((bool(fcntl_flags(fd) & os.O_DIRECT), count))
        return count

    monkeypatch.setattr(os, "pwrite", recorded)
    sink = Store(str(tmp_path)).object_sink("o")
    if localdisk.open_direct(next((tmp_path / localdisk.TEMPORARIES).iterdir()), os.O_WRONLY) is None:
        pytest.skip("this file system has no O_DIRECT")
    sink.write_at(0, np.ones(sinks.BUFFER_BYTES + 8192 + 100, np.uint8))
    sink.commit(sinks.BUFFER_BYTES + 8192 + 100)
    assert sorted(written) == [(False, 100), (True, 8192), (True, sinks.BUFFER_BYTES)]


def test_buffered_writes_leave_a_few_buffers_of_dirty_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, dirty, most = threading.Lock(), 0, 0

    def count(length: int) -> None:
        nonlocal dirty, most
        with lock:
            dirty += length
            most = max(most, dirty)

    monkeypatch.setattr(sinks, "open_direct", lambda *args: None)
    monkeypatch.setattr(sinks, "start_writeback", lambda fd, offset, length: count(length))
    monkeypatch.setattr(sinks, "finish_writeback", lambda fd, offset, length: count(-length))
    data = np.arange(20 * sinks.BUFFER_BYTES, dtype=np.uint8)
    sink = Store(str(tmp_path)).object_sink("o")
    sink.write_at(0, data)
    sink.commit(data.size)
    assert 0 < most <= 2 * sinks.DEPTH * sinks.BUFFER_BYTES
    assert (tmp_path / "o").read_bytes() == data.tobytes()


def test_space_that_was_allocated_ahead_is_given_back(tmp_path: Path) -> None:
    sink = Store(str(tmp_path)).object_sink("o")
    data = np.ones(2 * sinks.BUFFER_BYTES + 100, np.uint8)
    sink.write_at(0, data)
    sink.commit(data.size)
    stat = (tmp_path / "o").stat()
    assert stat.st_size == data.size
    assert stat.st_blocks * 512 < data.size + (1 << 20)


def test_a_full_disk_is_named_with_its_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    sink = Store(str(tmp_path)).object_sink("hidden/c/0/0/0")

    def write_100_mib() -> None:  # more than all buffers hold: a failed thread must not block the writer
        for i in range(100):
            sink.write_at(i << 20, np.zeros(1 << 20, np.uint8))
        sink.commit(100 << 20)

    with pytest.raises(StorageFull, match=r"hidden/c/0/0/0: no space left \(free bytes: \d+\)"):
        write_100_mib()
    sink.abort()
    assert not (tmp_path / "hidden").exists()


WRITE_HALF = """
import numpy as np, sys, threading
from storage.files import Store
store = Store(sys.argv[1])
sink = store.object_sink("hidden/c/0/0/0")
sink.write_at(0, np.ones(40 << 20, np.uint8))
print("half", flush=True)
threading.Event().wait()
"""


def test_a_writer_killed_half_way_leaves_no_object(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_HALF, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    store = Store(str(tmp_path))
    assert not store.exists("hidden/c/0/0/0")
    assert len(list((tmp_path / localdisk.TEMPORARIES).iterdir())) == 1
    store.remove_sinks()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
