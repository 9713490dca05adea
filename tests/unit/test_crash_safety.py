"""A writer that is killed at any moment loses nothing that it committed, and what it left can be told apart."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from crash_writer import head_of, tokens_of
from made_dumps import LAYOUT, states_of

import storage
from storage.account import check_account
from storage.files import Store
from storage.manifest import committed_samples, read_manifests
from storage.repair import Leftovers, find_leftovers, remove_leftovers
from storage.verify import run_item, work_items

ROWS = 60
CRASHES = 40
SCRIPT = Path(__file__).with_name("crash_writer.py")
FOREIGN = {"notes.txt": b"a person's", ".tmp/mine.txt": b"too", "hidden/c/readme": b"and this"}


def run_writer(url: str, seed: int, crash_at: int | str, rows: int = ROWS) -> int:
    """Runs the writer to its end, whichever it is, and returns its exit code."""
    command = [sys.executable, str(SCRIPT), url, str(rows), str(seed), str(crash_at)]
    paths = (str(SCRIPT.parent), str(SCRIPT.parents[2]))
    env = {**os.environ, "PYTHONPATH": ":".join(paths)}
    return subprocess.run(command, timeout=60, check=False, env=env).returncode


def assert_nothing_committed_is_wrong(store: Store) -> set[int]:
    """Every sample that a manifest lists is byte for byte what was sent, whatever else is there."""
    committed = committed_samples(read_manifests(store))
    assert [p for item in work_items(store) for p in run_item(item).problems] == []
    listed = [s.row for m in read_manifests(store) for s in m.samples]
    assert len(listed) == len(set(listed)) == len(committed)
    return set(listed)


def assert_every_sample_is_what_was_sent(url: str, rows: int = ROWS) -> None:
    dump = storage.open_dump(url)
    assert [sample.row for sample in dump] == list(range(rows))
    for sample in dump:
        sent = states_of(LAYOUT, sample.row, tokens_of(sample.row))
        assert np.array_equal(sample.stack().transpose(0, 1).view(torch.int16).numpy().view(np.uint16), sent)
        assert sample.token_ids.tolist() == head_of(sample.row).token_ids.tolist()
        assert sample.loss_mask.tolist() == head_of(sample.row).loss_mask.astype(bool).tolist()
        assert sample.sample_id == head_of(sample.row).sample_id


def test_a_writer_killed_at_any_moment_loses_nothing_and_leaves_only_leftovers(tmp_path: Path) -> None:
    """Kills before a random operation on files, so that every step between two of them is met."""
    rng = random.Random(20)
    store = Store(str(tmp_path / "dump"))
    for key, data in FOREIGN.items():
        store.put_if_absent(key, data)
    committed: set[int] = set()
    leftovers = crashes = 0
    for seed in range(CRASHES):
        assert run_writer(store.url, seed, crash_at=rng.randrange(1, 130)) == -signal.SIGKILL
        crashes += 1
        if store.exists("zarr.json"):
            now = assert_nothing_committed_is_wrong(store)
            assert committed <= now
            committed = now
            leftovers += len(find_leftovers(store).objects)
    assert crashes >= 40
    assert leftovers >= 10
    assert 5 < len(committed) < ROWS
    assert run_writer(store.url, seed=1000, crash_at=0) == 0
    assert_every_sample_is_what_was_sent(store.url)
    assert check_account(store, expected_rows=ROWS).problems == ()
    table = pq.read_table(f"{store.url}/samples.parquet")
    assert table["row"].to_pylist() == list(range(ROWS))
    remove_leftovers(store, find_leftovers(store))
    assert find_leftovers(store) == Leftovers((), {}, (), ())
    assert_only_the_dump_is_left(store)


def assert_only_the_dump_is_left(store: Store) -> None:
    assert store.local_root is not None
    found = {str(p.relative_to(store.local_root)) for p in store.local_root.rglob("*") if p.is_file()}
    manifests = read_manifests(store)
    columns = ("hidden", "tokens", "tokens/token_ids", "tokens/loss_mask")
    expected = {"zarr.json", "samples.parquet", *(f"{folder}/zarr.json" for folder in columns), *FOREIGN}
    expected |= {f"{folder}/{m.shard}.json" for m in manifests for folder in ("claims", "manifest")}
    expected |= {item.key for m in manifests for item in m.objects}
    assert found == expected
    assert {key: store.read(key) for key in FOREIGN} == FOREIGN
