"""A dump in an object store is the same dump, for us and for stock readers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import obstore.store
import pytest
import tensorstore
import torch
import zarr
import zarr.storage
from made_dumps import LAYOUT, make_dump, states_of

from storage.account import check_account
from storage.dataset import DumpDataset
from storage.errors import StorageError
from storage.files import Store
from storage.layout import hidden_key, manifest_key
from storage.manifest import read_manifests
from storage.reader import open_dump
from storage.verify import run_item, work_items

LENGTHS = [5, 30, 64, 17]


def test_a_dump_is_written_read_and_verified(dump_url: str) -> None:
    store = make_dump(dump_url, LENGTHS, skipped=[1])
    dump = open_dump(dump_url)
    assert [sample.tokens for sample in dump] == [5, 64, 17]
    for sample in dump:
        expected = states_of(LAYOUT, sample.row, sample.tokens)
        for k, state in enumerate(LAYOUT.states):
            bits = sample.states(state).contiguous().view(torch.int16).numpy()
            assert np.array_equal(bits.view(np.uint16), expected[k])
    assert [run_item(item).problems for item in work_items(store)] == [()] * len(read_manifests(store))
    assert check_account(store).problems == ()


def test_the_objects_are_those_of_a_local_dump(dump_url: str, tmp_path: Path) -> None:
    remote = make_dump(dump_url, LENGTHS, finish=False)
    local = make_dump(tmp_path / "dump", LENGTHS, finish=False)
    for shard in range(len(read_manifests(local))):
        for key in (hidden_key(shard), manifest_key(shard)):
            assert remote.read(key) == local.read(key)


def test_zarr_reads_it_through_obstore_and_fsspec(s3: Any, bucket: str, s3_endpoint: str) -> None:
    url = f"s3://{bucket}/dump"
    store = make_dump(url, LENGTHS)
    through_obstore = zarr.storage.ObjectStore(
        obstore.store.S3Store(bucket, prefix="dump", client_options={"allow_http": True}), read_only=True
    )
    through_fsspec = zarr.storage.FsspecStore.from_url(
        url, storage_options={"endpoint_url": s3_endpoint}, read_only=True
    )
    for opened in (through_obstore, through_fsspec):
        check_array(store, zarr.open_group(opened, mode="r")["hidden"])


def test_tensorstore_reads_it(s3: Any, bucket: str, s3_endpoint: str) -> None:
    store = make_dump(f"s3://{bucket}/dump", LENGTHS)
    kvstore = {
        "driver": "s3",
        "bucket": bucket,
        "path": "dump/hidden/",
        "endpoint": s3_endpoint,
        "aws_region": "us-east-1",
    }
    check_array(store, tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result())


def check_array(store: Store, array: Any) -> None:
    for manifest in read_manifests(store):
        for sample in manifest.samples:
            start = LAYOUT.array_start(manifest.shard, sample.first_slot)
            found = array[start : start + sample.tokens]
            found = np.asarray(found.read().result() if hasattr(found, "read") else found)
            assert np.array_equal(found.transpose(1, 0, 2), states_of(LAYOUT, sample.row, sample.tokens))


def total_tokens(url: str) -> int:
    return sum(len(item["input_ids"]) for item in DumpDataset(url))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes_read_what_their_parent_has_open(s3: Any, bucket: str, method: str) -> None:
    url = make_dump(f"s3://{bucket}/dump", LENGTHS).url
    assert total_tokens(url) == sum(LENGTHS)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(total_tokens, [url, url]) == [sum(LENGTHS)] * 2


def read_root(url: str) -> str:
    try:
        return repr(Store(url).read("zarr.json"))
    except StorageError as error:
        return str(error)


def test_a_forked_process_is_told_to_use_spawn_instead_of_waiting_for_ever(s3: Any, bucket: str) -> None:
    url = make_dump(f"s3://{bucket}/dump", [5]).url
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert 'multiprocessing_context="spawn"' in pool.apply_async(read_root, [url]).get(timeout=30)
