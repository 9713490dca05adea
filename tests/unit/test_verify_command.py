"""``hsdump verify`` of parts of a dump, and what it says meanwhile."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_dumps import LAYOUT, make_dump, states_of, write_whole
from rich.console import Console

from cluster import progress
from cluster.cli import run_cli
from cluster.progress import ByteProgress, progress_line
from storage.files import Store
from storage.layout import hidden_key
from storage.manifest import read_manifests
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

LENGTHS = [5, 9, 30, 7, 20, 3, 11, 40, 1, 2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_dump(tmp_path, LENGTHS, shard_bytes=LAYOUT.sample_bytes(44))


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 10), (0.3, 3), (0.25, 3), (0.0001, 1)])
def test_a_fraction_of_the_samples_is_read(store: Store, fraction: float, count: int) -> None:
    items = work_items(store, fraction, seed=4)
    findings = [run_item(item) for item in items]
    assert sum(f.samples for f in findings) == count
    assert sum(f.bytes for f in findings) == sum(item.bytes for item in items)
    assert [item.shard for item in items] == [m.shard for m in read_manifests(store)]
    assert work_items(store, fraction, seed=4) == items


def test_other_seeds_choose_other_samples_and_all_are_chosen_some_time(store: Store) -> None:
    rows = {m.shard: {s.row for s in m.samples} for m in read_manifests(store)}
    chosen = [
        frozenset(
            row for i in work_items(store, 0.2, seed) for row in (rows[i.shard] if i.rows is None else i.rows)
        )
        for seed in range(40)
    ]
    assert len(set(chosen)) > 10
    assert frozenset().union(*chosen) == set(range(10))


def test_damage_is_found_where_it_is_read(store: Store) -> None:
    key, sample = hidden_key(0), read_manifests(store)[0].samples[1]
    data = bytearray(store.read(key))
    data[sample.offset] ^= 1
    store.replace(key, bytes(data))
    for seed in range(20):
        (item, *_) = work_items(store, 0.5, seed)
        read = item.rows is None or sample.row in item.rows
        assert {p.row for p in run_item(item).problems} == ({sample.row} if read else set())


def test_the_command_says_that_it_read_a_fraction(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["verify", store.url, "--sample-fraction", "0.3", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "account   10 rows = 10 committed + 0 skipped + 0 failed" in out
    assert "3 samples of 10 (fraction 0.3, seed 1)" in out
    assert out.endswith(
        "good      no problems in the samples that were read, 3 of 10 (fraction 0.3, seed 1)\n"
    )
    assert run_cli(["verify", store.url]) == 0
    out = capsys.readouterr().out
    assert "10 samples, 128 tokens x 96 bytes" in out
    assert out.endswith("good      no problems\n")
    assert run_cli(["verify", store.url, "--sample-fraction", "1.5"]) == 2


def test_later_copies_of_a_sample_are_no_problem(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    late = ShardWriter(store, LAYOUT, "run", "late", 1)
    write_whole(late, 0, states_of(LAYOUT, 0, 5))
    late.seal_all()
    assert run_cli(["verify", store.url]) == 0
    assert "good      no problems" in capsys.readouterr().out


def test_a_line_every_ten_seconds_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    out = io.StringIO()
    with ByteProgress(Console(file=out, width=200), "reading", 4 << 30) as shown:
        for _ in range(8):
            now_s += 4
            shown.add(1 << 29)
    assert out.getvalue().splitlines() == [
        "reading   1.5 GiB of 4.0 GiB, 128.0 MiB/s, 20 s left",
        "reading   3.0 GiB of 4.0 GiB, 128.0 MiB/s, 8 s left",
    ]


def test_a_bar_on_a_terminal_and_nothing_of_it_is_left() -> None:
    out = io.StringIO()
    with ByteProgress(Console(file=out, force_terminal=True, width=100), "reading", 1 << 20) as shown:
        shown.add(1 << 19)
    text = out.getvalue()
    assert "reading" in text
    assert "MB" in text or "MiB" in text
    assert text.rstrip().endswith("\x1b[2K")


def test_nothing_done_has_no_time_left() -> None:
    assert progress_line("reading", 0, 1 << 20, 3.0) == "reading   0 B of 1.0 MiB, 0 B/s, time left unknown"
