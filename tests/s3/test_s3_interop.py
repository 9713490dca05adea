"""More programs read a dump in S3, and a stream over one; zarr-python and tensorstore are in test_remote_dump.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import obstore.store
import pytest
import torch
import xarray
import zarr
import zarr.storage
from made_dumps import LAYOUT, make_dump, states_of
from torch.utils.data import DataLoader

import storage
from storage.layout import Layout

# Beside its arrays a dump holds objects of its own, which zarr lists with a warning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning"),
    pytest.mark.filterwarnings("ignore:Successfully reconstructed a store:RuntimeWarning"),
]
LENGTHS = [5, 9, 30, 64, 17]


@pytest.fixture
def url(s3: Any, bucket: str) -> str:
    url = f"s3://{bucket}/dump"
    make_dump(url, LENGTHS, skipped=[1])
    return url


def stored(bucket: str, endpoint: str) -> zarr.storage.ObjectStore[Any]:
    opened = obstore.store.S3Store(
        bucket, prefix="dump", endpoint=endpoint, client_options={"allow_http": True}
    )
    return zarr.storage.ObjectStore(opened, read_only=True)


def assert_same(url: str, hidden: Any, layout: Layout = LAYOUT) -> None:
    dump = storage.open_dump(url)
    assert len(dump) == len(LENGTHS) - 1
    for sample in dump:
        start = layout.array_start(sample.shard, sample.first_slot)
        sent = states_of(layout, sample.row, sample.tokens).transpose(1, 0, 2)
        assert np.array_equal(np.asarray(hidden[start : start + sample.tokens]), sent)


def test_zarrs_reads_it(url: str, bucket: str, s3_endpoint: str) -> None:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        assert zarr.registry.get_pipeline_class().__name__ == "ZarrsCodecPipeline"
        assert_same(url, zarr.open_group(stored(bucket, s3_endpoint), mode="r")["hidden"])


def test_xarray_reads_it(url: str, bucket: str, s3_endpoint: str) -> None:
    opened = xarray.open_zarr(
        stored(bucket, s3_endpoint), consolidated=False, chunks=None, mask_and_scale=False
    )
    assert_same(url, opened["hidden"])


def test_a_stream_reads_it_in_spawned_workers(url: str) -> None:
    stream = storage.DumpStream(url, shuffle=True, states=[2])
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    items = list(loader)
    assert [item["row"] for item in items] == [item["row"] for item in stream]
    assert sorted(item["row"] for item in items) == [0, 2, 3, 4]
    for item in items:
        sent = states_of(LAYOUT, item["row"], LENGTHS[item["row"]])[1:2].transpose(1, 0, 2)
        bits = item["hidden_states"].contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, sent)
