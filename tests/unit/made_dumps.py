"""Small dumps with known contents, for the tests of storage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.dump import create_dump, finalise
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import SampleHead, ShardWriter
from storage.table import Outcome

LAYOUT = Layout(states=(0, 2, "final"), hidden_size=16, chunk_rows=4, shard_rows=64)
IDENTITY = Identity(
    model={"path": "/models/tiny", "dtype": "bfloat16"},
    capture={"boundaries": [0, 2], "final": True, "final_normed": False, "num_layers": 4},
    prompts={"digest": "abc"},
    engine={},
)


def states_of(layout: Layout, row: int, tokens: int) -> np.ndarray[Any, Any]:
    """Bits of normally distributed values [K, T, H], the same for the same row."""
    rng = np.random.default_rng(row)
    values = rng.standard_normal((layout.num_states, tokens, layout.hidden_size), np.float32)
    if layout.dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if layout.dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def head_of(row: int, tokens: int) -> SampleHead:
    rng = np.random.default_rng(row)
    token_ids = rng.integers(0, 1000, tokens, np.int32)
    return SampleHead(row, f"sample {row}/../é", token_ids, rng.integers(0, 2, tokens, np.uint8))


def write_whole(writer: ShardWriter, row: int, states: np.ndarray[Any, Any]) -> None:
    writer.place(head_of(row, states.shape[1]))
    writer.write(row, 0, states)
    writer.finish(row)


def make_dump(
    url: str | Path,
    lengths: Sequence[int],
    layout: Layout = LAYOUT,
    shard_bytes: int = 20_000,
    skipped: Sequence[int] = (),
    finish: bool = True,
) -> Store:
    """A dump whose row i has ``lengths[i]`` tokens and `states_of` it; rows in ``skipped`` are skipped."""
    store = Store(str(url))
    create_dump(store, IDENTITY, layout, {"hsdump": "0.1.0"})
    writer = ShardWriter(store, layout, "run", "writer-0", shard_bytes)
    for row, tokens in enumerate(lengths):
        if row not in skipped:
            write_whole(writer, row, states_of(layout, row, tokens))
    writer.seal_all()
    if finish:
        finalise(store, [Outcome(row, f"skipped {row}", "skipped", "too long") for row in skipped])
    return store
