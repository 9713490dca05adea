"""Other programs open the same dump and get the same bytes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore
import torch
import xarray
import xxhash
import zarr
from made_dumps import IDENTITY, head_of, make_dump, states_of

import storage
from storage.account import check_account
from storage.dump import create_dump, finalise
from storage.errors import OutputError
from storage.files import Store
from storage.layout import Layout
from storage.verify import run_item, work_items

# Beside its arrays a dump holds objects of its own, which zarr lists with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")

LENGTHS = [5, 9, 30, 64, 1, 17]
SKIPPED = 1
LAYOUTS = {
    codec: Layout(states=(0, 2, "final"), hidden_size=16, chunk_rows=4, shard_rows=64, codec=codec)
    for codec in ("none", "lz4-bitshuffle", "zstd")
}


def zarr_python(url: str, name: str) -> Any:
    return zarr.open_group(url, mode="r")[name]


def zarrs(url: str, name: str) -> Any:
    """zarr-python over the Rust library's codec pipeline."""
    assert zarr.registry.get_pipeline_class().__name__ == "ZarrsCodecPipeline"
    return zarr.open_group(url, mode="r")[name]


def tensorstore_zarr3(url: str, name: str) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{url}/{name}/"}}
    array = tensorstore.open(spec, read=True).result()

    class Read:
        shape = array.shape

        def __getitem__(self, which: Any) -> Any:
            return array[which].read().result()

    return Read()


def xarray_zarr(url: str, name: str) -> Any:
    tree = xarray.open_datatree(url, engine="zarr", consolidated=False, chunks=None, mask_and_scale=False)
    return tree[name]


READERS: dict[str, Callable[[str, str], Any]] = {
    "zarr-python": zarr_python,
    "zarrs": zarrs,
    "tensorstore": tensorstore_zarr3,
    "xarray": xarray_zarr,
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for codec, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(codec)
        make_dump(folder, LENGTHS, layout=layout, skipped=[SKIPPED], shard_bytes=layout.sample_bytes(40))
        made[codec] = str(folder)
    return made


@pytest.mark.parametrize("codec", list(LAYOUTS))
@pytest.mark.parametrize("reader", list(READERS))
def test_another_reader_gets_what_ours_gets(urls: dict[str, str], reader: str, codec: str) -> None:
    url, layout = urls[codec], LAYOUTS[codec]
    pipeline = "zarrs.ZarrsCodecPipeline" if reader == "zarrs" else zarr.config.get("codec_pipeline.path")
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        hidden, token_ids, loss_mask = (
            READERS[reader](url, name) for name in ("hidden", "tokens/token_ids", "tokens/loss_mask")
        )
        read = 0
        for sample in storage.open_dump(url):
            start = layout.array_start(sample.shard, sample.first_slot)
            rows = slice(start, start + sample.tokens)
            sent = states_of(layout, sample.row, sample.tokens).transpose(1, 0, 2)
            assert np.array_equal(np.asarray(hidden[rows]), sent)
            ours = sample.stack().contiguous().view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(np.asarray(hidden[rows]), ours)
            head = head_of(sample.row, sample.tokens)
            assert np.array_equal(np.asarray(token_ids[rows]), head.token_ids)
            assert np.array_equal(np.asarray(loss_mask[rows]), head.loss_mask)
            padding = slice(rows.stop, start + layout.slots(sample.tokens) * layout.chunk_rows)
            assert not np.asarray(hidden[padding]).any()
            read += 1
        assert read == len(LENGTHS) - 1


def test_xarray_names_the_dimensions(urls: dict[str, str]) -> None:
    tree = xarray.open_datatree(urls["none"], engine="zarr", consolidated=False, chunks=None)
    assert tree["hidden"].dims == ("token", "state", "hidden")
    assert tree["tokens/token_ids"].dims == ("token",)
    assert tree["hidden"].attrs == {"element_type": "bfloat16", "states": [0, 2, "final"]}
    assert tree.attrs["bytes_per_token"] == 3 * 16 * 2


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_tensorstore_reads_bfloat16_once_the_metadata_says_so(
    urls: dict[str, str], tmp_path: Path, codec: str
) -> None:
    """The change that the format's page describes: two words of metadata, not a byte of data."""
    copy = tmp_path / "copy"
    shutil.copytree(urls[codec], copy)
    metadata = json.loads((copy / "hidden/zarr.json").read_text())
    assert metadata["data_type"] == "uint16"
    metadata["data_type"] = "bfloat16"
    (copy / "hidden/zarr.json").write_text(json.dumps(metadata))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{copy}/hidden/"}}
    array = tensorstore.open(spec, read=True).result()
    assert array.dtype == tensorstore.bfloat16
    for sample in storage.open_dump(urls[codec]):
        start = LAYOUTS[codec].array_start(sample.shard, sample.first_slot)
        values = array[start : start + sample.tokens].read().result().astype(np.float32)
        assert np.array_equal(values, sample.stack().float().numpy())
        ours = storage.open_dump(str(copy))[sample.sample_id]  # our reader doesn't mind
        assert torch.equal(ours.stack(), sample.stack())


def test_a_newer_version_is_refused_with_the_version_that_it_needs(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5])
    root = json.loads(store.read("zarr.json"))
    root["attributes"]["format_version"] = 9
    root["attributes"]["versions"] = {"hsdump": "7.2.0"}
    store.replace("zarr.json", json.dumps(root).encode())
    with pytest.raises(
        OutputError, match=r"format version 9.* reads versions up to \d; .* hsdump 7\.2\.0 or newer"
    ):
        storage.open_dump(str(tmp_path))


def test_unknown_attributes_are_left_alone(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [5])
    root = json.loads(store.read("zarr.json"))
    root["attributes"]["curator"] = {"name": "somebody"}
    store.replace("zarr.json", json.dumps(root).encode())
    assert len(storage.open_dump(str(tmp_path))) == 1


def test_a_dump_that_the_page_alone_tells_how_to_write_is_read(tmp_path: Path) -> None:
    """Nothing of `storage` writes here but JSON and bytes as docs/format.md describes them."""
    chunk_rows, slots, hidden, states, tokens = 4, 16, 16, 2, 6
    values = np.random.default_rng(0).integers(1, 30_000, (states, 8, hidden)).astype("<u2")
    values[:, tokens:] = 0
    ids, mask = np.arange(tokens, dtype="<i4"), np.ones(tokens, "u1")
    chunk_bytes = chunk_rows * hidden * 2
    index = np.full((slots, states, 2), 2**64 - 1, "<u8")
    for slot in range(2):
        for k in range(states):
            index[slot, k] = (k * 2 + slot) * chunk_bytes, chunk_bytes
    footer = index.tobytes() + struct.pack("<I", google_crc32c.value(index.tobytes()))
    columns = {"token_ids": np.zeros(64, "<i4"), "loss_mask": np.zeros(64, "u1")}
    columns["token_ids"][:tokens], columns["loss_mask"][:tokens] = ids, mask
    digests = [xxhash.xxh3_64_hexdigest(state.tobytes()) for state in values]
    objects = {"hidden/c/0/0/0": values.tobytes() + footer}
    objects |= {f"tokens/{name}/c/0": column.tobytes() for name, column in columns.items()}
    hashes = {key: xxhash.xxh3_64_hexdigest(data) for key, data in objects.items()}
    hashes["hidden/c/0/0/0"] = xxhash.xxh3_64_hexdigest(bytes.fromhex("".join(digests)) + footer)
    layout = {
        "states": [3, "final"],
        "hidden_size": hidden,
        "dtype": "bfloat16",
        "chunk_rows": 4,
        "shard_rows": 64,
    }
    create_dump(Store(str(tmp_path)), IDENTITY, Layout.from_json(layout), {})  # the metadata of the arrays
    sample = {"row": 0, "sample_id": "one", "first_slot": 0, "tokens": tokens, "offset": 0, "xxh3": digests}
    sample["tokens_xxh3"] = xxhash.xxh3_64_hexdigest(ids.tobytes() + mask.tobytes())
    manifest = {"manifest_version": 1, "shard": 0, "run_id": "r", "writer": "w", "layout": layout}
    manifest["objects"] = [{"key": k, "bytes": len(objects[k]), "xxh3": hashes[k]} for k in objects]
    manifest["samples"] = [sample]
    objects["manifest/0.json"] = json.dumps(manifest).encode()
    for key, data in objects.items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    finalise(Store(str(tmp_path)), [])
    read = storage.open_dump(str(tmp_path))["one"]
    bits = read.stack().transpose(0, 1).contiguous().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits, values[:, :tokens])
    assert read.token_ids.tolist() == ids.tolist()
    store = Store(str(tmp_path))
    assert [run_item(item).problems for item in work_items(store)] == [()]
    assert check_account(store).problems == ()
