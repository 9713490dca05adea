"""Reads past the page cache: the same samples, whatever the file system and the ranges allow."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made_dumps import make_dump

import storage
from storage import localdisk
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import Layout, hidden_key
from storage.verify import run_item, work_items

WIDE = Layout(states=(0, 2), hidden_size=512, shard_rows=2048)
"""Chunks of 32 KiB, so that what is stored of a sample is whole blocks."""
LENGTHS = [600, 7, 1100, 1500]


@pytest.fixture
def url(tmp_path: Path) -> str:
    make_dump(tmp_path, LENGTHS, WIDE, shard_bytes=1 << 30)
    probe = tmp_path / "probe"
    probe.write_bytes(b"")
    if localdisk.open_direct(probe, os.O_RDONLY) is None:
        pytest.skip("this file system has no O_DIRECT")
    return str(tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """(past the page cache, bytes) of each read, as the operating system is asked."""
    real, made = os.preadv, []

    def recorded(fd: int, buffers: Sequence[Any], offset: int) -> int:
        count = real(fd, buffers, offset)
        made.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), count))
        return count

    monkeypatch.setattr(os, "preadv", recorded)
    return made


def damage_last_sample(url: str, damage: str) -> None:
    """Flips a bit in its last token, or cuts the shard there."""
    sample = storage.open_dump(url)[3]
    path = Path(url) / hidden_key(sample.shard)
    data = bytearray(path.read_bytes())
    last = WIDE.run_offset(sample.offset, WIDE.slots(1500), 1, 1499)
    if damage == "flipped":
        data[last] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:last])


def test_states_are_read_past_the_page_cache_and_small_ranges_through_it(
    url: str, reads: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = [item["hidden_states"] for item in storage.DumpStream(url)]
    assert not any(direct for direct, _ in reads)
    reads.clear()
    monkeypatch.setattr(localdisk, "DIRECT_READ_BYTES", 1 << 20)
    found = [item["hidden_states"] for item in storage.DumpStream(url, page_cache=False)]
    assert all(torch.equal(a, b) for a, b in zip(cached, found, strict=True))
    large = [WIDE.sample_bytes(n) for n in LENGTHS if WIDE.sample_bytes(n) >= 1 << 20]
    assert sum(count for direct, count in reads if direct) == sum(large)
    assert max(count for direct, count in reads if direct) == 1 << 20


@pytest.mark.parametrize(("spare_bytes", "past"), [(0, False), (-1, True)])
def test_a_dump_of_more_than_half_of_the_memory_is_read_past_the_page_cache(
    spare_bytes: int, past: bool, url: str, reads: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_bytes = 2 * sum(LENGTHS) * WIDE.bytes_per_token + spare_bytes
    monkeypatch.setattr("storage.reader.memory_bytes", lambda: memory_bytes)
    for read_all in (storage.DumpStream(url), storage.DumpDataset(url), storage.open_dump(url)):
        reads.clear()
        for number, sample in enumerate(read_all):
            if isinstance(sample, storage.Sample):
                sample.stack()
            if number == len(LENGTHS) - 1:
                break
        assert any(direct for direct, _ in reads) == past


def test_verify_reads_states_from_the_disk(url: str, reads: list[tuple[bool, int]]) -> None:
    store = Store(url)
    for item in work_items(store):
        reads.clear()
        assert run_item(item).problems == ()
        assert sum(count for direct, count in reads if direct) == item.bytes
    damage_last_sample(url, "flipped")
    assert [problem.row for item in work_items(store) for problem in run_item(item).problems] == [3]


def test_an_object_store_has_no_page_cache_and_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_dump("memory://opened-once", LENGTHS, WIDE).url
    opened = []
    monkeypatch.setattr(
        "storage.reader.Store", lambda *given, **options: opened.append(given) or Store(*given)
    )
    assert len(storage.open_dump(url, page_cache=False)) == len(LENGTHS)
    assert opened == [(url,)]


def test_a_dataset_and_one_state_are_the_same_past_the_page_cache(url: str) -> None:
    direct = storage.open_dump(url, page_cache=False)
    for mine, its in zip(storage.DumpDataset(url, [2], page_cache=False), direct, strict=True):
        assert torch.equal(mine["hidden_states"][:, 0], its.states(2))
        assert torch.equal(storage.open_dump(url)[its.sample_id].states(2), its.states(2))


def test_where_direct_reads_are_refused_the_page_cache_is_used(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def refuse_direct(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    assert len(list(storage.DumpStream(url, page_cache=False))) == len(LENGTHS)


@pytest.mark.parametrize(
    ("damage", "told"), [("flipped", "isn't what was committed"), ("cut", "ends at byte")]
)
def test_damage_is_noticed_past_the_page_cache_too(url: str, damage: str, told: str) -> None:
    sample = storage.open_dump(url, page_cache=False)[3]
    damage_last_sample(url, damage)
    with pytest.raises(CorruptDump, match=told):
        sample.stack()
