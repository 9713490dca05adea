"""The zarr v3 metadata of a dump's groups and arrays. Pure, no I/O.

Shape legend: S shard rows, C inner chunk rows, K states, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.codecs import chunk_codecs
from storage.layout import SCALE_TYPE, Layout


def hidden_array_metadata(layout: Layout, shards: int) -> dict[str, Any]:
    """``hidden/zarr.json``: unsigned bits [shards * S, K, H], shard (S, K, H), inner chunk (C, 1, H)."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shards * layout.shard_rows, layout.num_states, layout.hidden_size],
        "data_type": layout.storage_dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [layout.shard_rows, layout.num_states, layout.hidden_size]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [layout.chunk_rows, 1, layout.hidden_size],
                    "codecs": chunk_codecs(layout.codec, layout.itemsize),
                    "index_codecs": [
                        {"name": "bytes", "configuration": {"endian": "little"}},
                        {"name": "crc32c"},
                    ],
                    "index_location": "end",
                },
            }
        ],
        "dimension_names": ["token", "state", "hidden"],
        "attributes": {"element_type": layout.element_type, "states": list(layout.states)},
    }


def token_array_metadata(layout: Layout, column: str, shards: int) -> dict[str, Any]:
    """``tokens/<column>/zarr.json``: one value a stored token, one chunk a shard, uncompressed."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shards * layout.shard_rows],
        "data_type": layout.token_columns[column],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.shard_rows]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["token"],
        "attributes": {},
    }


def scales_array_metadata(layout: Layout, shards: int) -> dict[str, Any]:
    """``scales/zarr.json``: float32 [shards * S, K], one chunk a shard, uncompressed; of quantised states."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shards * layout.shard_rows, layout.num_states],
        "data_type": SCALE_TYPE.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [layout.shard_rows, layout.num_states]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": ["token", "state"],
        "attributes": {"states": list(layout.states)},
    }


def group_metadata(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
