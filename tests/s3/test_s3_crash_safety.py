"""A writer to an object store that is killed at any moment; the local disk's is in tests/unit/test_crash_safety.py."""

from __future__ import annotations

import random
import signal
from typing import Any

from test_crash_safety import (
    assert_every_sample_is_what_was_sent,
    assert_nothing_committed_is_wrong,
    run_writer,
)

from storage.account import check_account
from storage.files import Store
from storage.manifest import read_manifests
from storage.repair import Leftovers, find_leftovers, remove_leftovers

ROWS = 20
CRASHES = 12


def test_a_writer_to_s3_killed_at_any_moment_loses_nothing_and_leaves_only_leftovers(
    s3: Any, bucket: str
) -> None:
    """Kills between two requests, and at random moments within them, however slow the machine is."""
    rng = random.Random(7)
    store = Store(f"s3://{bucket}/dump")
    store.put_if_absent("notes.txt", b"a person's")
    assert run_writer(store.url, 100, "before", ROWS) == -signal.SIGKILL
    assert find_leftovers(store).objects, "a shard without its manifest is what a crash leaves"
    assert run_writer(store.url, 101, "after", ROWS) == -signal.SIGKILL
    committed = assert_nothing_committed_is_wrong(store)
    assert committed, "the shard of the first manifest"
    for seed in range(CRASHES):
        crash_at = rng.randrange(20, 70) if seed % 2 else -rng.randrange(100, 900)
        assert run_writer(store.url, seed, crash_at, ROWS) in (-signal.SIGKILL, 0)
        now = assert_nothing_committed_is_wrong(store)
        assert committed <= now
        committed = now
    assert run_writer(store.url, 1000, 0, ROWS) == 0
    assert_every_sample_is_what_was_sent(store.url, ROWS)
    assert check_account(store, expected_rows=ROWS).problems == ()
    remove_leftovers(store, find_leftovers(store))
    assert find_leftovers(store) == Leftovers((), {}, (), ())
    assert_only_the_dump_is_left(s3, bucket, store)


def assert_only_the_dump_is_left(s3: Any, bucket: str, store: Store) -> None:
    listed = s3.list_objects_v2(Bucket=bucket, Prefix="dump/")
    assert not listed["IsTruncated"]
    found = {item["Key"].removeprefix("dump/") for item in listed["Contents"]}
    manifests = read_manifests(store)
    columns = ("hidden", "tokens", "tokens/token_ids", "tokens/loss_mask")
    expected = {"zarr.json", "samples.parquet", "notes.txt", *(f"{folder}/zarr.json" for folder in columns)}
    expected |= {f"{folder}/{m.shard}.json" for m in manifests for folder in ("claims", "manifest")}
    expected |= {item.key for m in manifests for item in m.objects}
    assert found == expected
