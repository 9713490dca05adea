"""Dumps as an EAGLE-3 run leaves them, with ids that no file name should hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from made_dumps import states_of

from storage.dump import create_dump, finalise
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import SampleHead, ShardWriter

LAYOUT = Layout(states=(2, 15, 27, "final", "final_normed"), hidden_size=16, chunk_rows=4, shard_rows=64)
IDENTITY = Identity(
    model={"path": "/models/tiny", "source": "tiny/llama", "architecture": "LlamaForCausalLM"},
    capture={"num_layers": 30, "hidden_size": 16},
    prompts={"digest": "abc"},
    engine={},
)
IDS = ("../../etc/passwd", ".", "a/b\\c:d", "x" * 300, "ein Stück 文 🙂", "", "plain")
LENGTHS = (5, 9, 30, 7, 20, 3, 11)
VOCAB = 50


def head_of(row: int, tokens: int) -> SampleHead:
    """Token ids below `VOCAB` and a mask, the same for the same row."""
    rng = np.random.default_rng(100 + row)
    token_ids = rng.integers(0, VOCAB, tokens, np.int32)
    return SampleHead(
        row, IDS[row % len(IDS)] + "+" * (row // 7), token_ids, rng.integers(0, 2, tokens, np.uint8)
    )


def make_export_dump(
    folder: Path, layout: Layout = LAYOUT, lengths: Sequence[int] = LENGTHS, identity: Identity = IDENTITY
) -> str:
    """A finished dump whose row i has ``lengths[i]`` tokens; its URL."""
    store = Store(str(folder))
    create_dump(store, identity, layout, {"hsdump": "0.1.0"})
    writer = ShardWriter(store, layout, "run", "writer-0", 20_000)
    for row, tokens in enumerate(lengths):
        writer.place(head_of(row, tokens))
        writer.write(row, 0, states_of(layout, row, tokens))
        writer.finish(row)
    writer.seal_all()
    finalise(store, [])
    return store.url


def without(*states: object, **changes: Any) -> Layout:
    """`LAYOUT` without some states, or with other fields."""
    kept = tuple(s for s in LAYOUT.states if s not in states)
    return replace(LAYOUT, **{"states": kept, **changes})
