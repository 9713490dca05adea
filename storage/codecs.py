"""How inner chunks are compressed: standard zarr v3 codecs, so that stock readers open the dump. No I/O.

`none` stores chunks as they are; then every offset follows from the manifest. With a codec chunks differ in
length and only the shard's index knows where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from numcodecs import Blosc, Zstd

CODECS = ("none", "lz4-bitshuffle", "zstd")
"""Values of a layout's ``codec``. lz4-bitshuffle is Blosc's LZ4 at level 1 over transposed bits; zstd is
Zstandard at level 1."""
LEVEL = 1
THREADS = min(4, os.cpu_count() or 1)
GROUP_CHUNKS = 32
"""Chunks that are encoded ahead of the one that is written."""

Bytes = npt.NDArray[np.uint8]


def chunk_codecs(codec: str, itemsize: int) -> list[dict[str, Any]]:
    """Codecs of an inner chunk in zarr v3 metadata (zarr-specs, core codecs; zarr-extensions, zstd).

    Args:
        codec: one of `CODECS`.
        itemsize: bytes of a stored element.
    """
    found: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if codec == "lz4-bitshuffle":
        configuration: Mapping[str, Any] = {
            "cname": "lz4",
            "clevel": LEVEL,
            "shuffle": "bitshuffle",
            "typesize": itemsize,
            "blocksize": 0,
        }
        found.append({"name": "blosc", "configuration": configuration})
    elif codec == "zstd":
        found.append({"name": "zstd", "configuration": {"level": LEVEL, "checksum": False}})
    return found


def _numcodec(codec: str, itemsize: int) -> Any:
    if codec == "lz4-bitshuffle":
        return Blosc("lz4", LEVEL, Blosc.BITSHUFFLE, typesize=itemsize)
    return Zstd(LEVEL)


class ChunkEncoder:
    """Encodes inner chunks in a few threads.

    Args:
        codec: one of `CODECS` but ``none``.
        itemsize: bytes of a stored element.
    """

    def __init__(self, codec: str, itemsize: int) -> None:
        self._codec = _numcodec(codec, itemsize)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="encode")

    def encode(self, chunks: Sequence[npt.NDArray[Any]]) -> Iterator[Bytes]:
        """The encoded chunks in their order; `GROUP_CHUNKS` of them are held at a time.

        Args:
            chunks: each contiguous.
        """
        for start in range(0, len(chunks), GROUP_CHUNKS):
            group = chunks[start : start + GROUP_CHUNKS]
            for data in self._pool.map(self._codec.encode, group):
                yield np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def decode_chunk(codec: str, itemsize: int, data: Bytes, out: Bytes) -> None:
    """Decodes one inner chunk into ``out``, which it fills.

    Args:
        codec: one of `CODECS` but ``none``.
        itemsize: bytes of a stored element.
        data: the encoded chunk.
        out: the chunk's bytes, contiguous and writable.

    Raises:
        ValueError: the data isn't a chunk of that codec and that size.
    """
    try:
        if codec == "lz4-bitshuffle":
            _check_blosc(data, out.size)
        _numcodec(codec, itemsize).decode(data, out)
    except (RuntimeError, ValueError) as exc:
        raise ValueError(f"{data.size} bytes aren't a chunk of {out.size} bytes in {codec}: {exc}") from exc


def _check_blosc(data: Bytes, size: int) -> None:
    """Holds Blosc's header (c-blosc, README_CHUNK_FORMAT) against what is there; its decoder trusts it."""
    if data.size < 16:
        raise ValueError("its header is cut off")
    decoded, _, encoded = np.frombuffer(data, "<u4", 3, 4)
    if (decoded, encoded) != (size, data.size):
        raise ValueError(f"its header says {encoded} bytes for {decoded}")
