"""Memory of reads is used again, and never while somebody still looks at it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.read_memory import SMALL_BYTES, ReadMemory, memory_bytes

LARGE = 3 * SMALL_BYTES


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def test_pages_come_back_when_the_last_reference_goes() -> None:
    memory = ReadMemory()
    array = memory.take(LARGE)
    where = address(array)
    del array
    assert memory.idle_bytes >= LARGE
    assert address(memory.take(LARGE - 5)) == where


def look(kind: str, array: np.ndarray[Any, Any]) -> Any:
    if kind == "slice":
        return array[100:200]
    if kind == "view":
        return array.view(np.int16)[4:90]
    if kind == "tensor":
        return torch.from_numpy(array)[10:90]
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)[8:90]


def values(held: Any) -> list[float]:
    return (held.float() if isinstance(held, torch.Tensor) else held).tolist()


@pytest.mark.parametrize("kind", ["slice", "view", "tensor", "tensor of a view"])
def test_what_somebody_still_looks_at_is_never_given_out_again(kind: str) -> None:
    memory = ReadMemory()
    array = memory.take(LARGE)
    array[:] = 7
    held = look(kind, array)
    expected = values(held)
    del array
    gc.collect()
    assert memory.idle_bytes == 0
    for _ in range(4):
        memory.take(LARGE)[:] = 1
    assert values(held) == expected


def test_idle_memory_is_bounded_and_small_reads_take_none() -> None:
    memory = ReadMemory(keep_bytes=3 * LARGE)
    arrays = [memory.take(LARGE) for _ in range(6)]
    del arrays
    assert 0 < memory.idle_bytes <= 3 * LARGE
    few = ReadMemory()
    few.take(10)
    assert few.idle_bytes == 0


def test_a_large_piece_is_not_wasted_on_a_short_read() -> None:
    memory = ReadMemory()
    memory.take(64 * SMALL_BYTES)
    short = memory.take(SMALL_BYTES)
    assert memory.idle_bytes == 64 * SMALL_BYTES
    assert short.size == SMALL_BYTES


def test_threads_never_share_a_piece() -> None:
    memory = ReadMemory()
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            array = memory.take(SMALL_BYTES + mark)
            array[:64] = mark
            array[-64:] = mark
            if not (array[:64] == mark).all() or not (array[-64:] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_writes_to_pages_of_its_own() -> None:
    memory = ReadMemory()
    array = memory.take(LARGE)
    array[:] = 3
    pid = os.fork()
    if pid == 0:
        array[:] = 9
        memory.take(LARGE)[:] = 9
        os._exit(0)
    os.waitpid(pid, 0)
    assert (array == 3).all()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max\n", None), (f"{1 << 30}\n", 1 << 30), (f"{1 << 60}\n", None), (None, None)],
)
def test_a_container_has_no_more_memory_than_its_limit(
    limit: str | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = Path("/proc/meminfo").read_text().split()
    machine_bytes = int(meminfo[meminfo.index("MemTotal:") + 1]) << 10
    monkeypatch.setattr("storage.read_memory.MEMORY_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert memory_bytes() == (expected or machine_bytes)
