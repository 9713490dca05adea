"""Size and speed of the codecs on states of a real model, for `bench_storage`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.codecs import CODECS, THREADS, ChunkEncoder, decode_chunk
from storage.errors import OutputError
from storage.layout import Layout
from storage.reader import open_dump

ENOUGH_BYTES = 64 << 20


def print_codecs(dump_url: str) -> None:
    """Prints what each codec makes of a dump's states."""
    try:
        dump = open_dump(dump_url)
    except OutputError:
        print(
            f"no codecs tried: there is no dump at {dump_url}; `make demo` makes one, or name one by --states"
        )
        return
    layout = dump.layout
    chunks: list[npt.NDArray[Any]] = []
    for sample in dump:
        states = (
            sample.stack()
            .transpose(0, 1)
            .contiguous()
            .view(torch.int16 if layout.itemsize == 2 else torch.int32)
        )
        for state in states.numpy():
            whole = len(state) // layout.chunk_rows * layout.chunk_rows
            chunks += np.split(state[:whole], max(whole // layout.chunk_rows, 1)) if whole else []
        if len(chunks) * layout.chunk_bytes >= ENOUGH_BYTES:
            break
    print(
        f"\ncodecs on {len(chunks)} inner chunks of {dump_url} (H = {layout.hidden_size}), {THREADS} threads"
    )
    print(f"{'codec':<16} {'size':>6} {'write MB/s':>11} {'read MB/s':>10}   read: one thread")
    for codec in CODECS[1:]:
        size, encode, decode = _try(codec, layout, chunks)
        print(f"{codec:<16} {size:>6.3f} {encode:>11.0f} {decode:>10.0f}")


def _try(codec: str, layout: Layout, chunks: Sequence[npt.NDArray[Any]]) -> tuple[float, float, float]:
    """Size over the original's, and encoding and decoding speed in MB/s of states."""
    total = len(chunks) * layout.chunk_bytes
    encoder = ChunkEncoder(codec, layout.itemsize)
    start_s = time.perf_counter()
    encoded = list(encoder.encode(chunks))
    encode_s = time.perf_counter() - start_s
    encoder.close()
    out = np.empty(layout.chunk_bytes, np.uint8)
    start_s = time.perf_counter()
    for data in encoded:
        decode_chunk(codec, layout.itemsize, data, out)
    decode_s = time.perf_counter() - start_s
    return sum(d.size for d in encoded) / total, total / encode_s / 1e6, total / decode_s / 1e6
