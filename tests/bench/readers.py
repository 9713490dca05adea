"""The readers that `bench_read` puts beside each other. Each reads samples whole, in the order that it is given."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tensorstore
import torch
import zarr

import storage
from storage.aligned import aligned_memory
from storage.files import Store
from storage.layout import hidden_key
from storage.verify import run_item, work_items

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Corpus:
    """The same samples in every format.

    Attributes:
        dump: folder of the dump; raw, zarr-python and tensorstore read it too.
        safetensors: folder of one .safetensors file a sample.
        torch_save: folder of one .pt file a sample.
        samples: where each sample is in the dump, in the order of their rows.
    """

    dump: Path
    safetensors: Path
    torch_save: Path
    samples: Sequence[storage.Sample]

    def bytes_of(self, order: Sequence[int]) -> int:
        """Bytes of states, padding apart."""
        return sum(self.samples[i].tokens for i in order) * self.samples[0].header.layout.bytes_per_token


Reader = Callable[[Corpus, Sequence[int]], None]


def touch(array: np.ndarray[Any, Any]) -> None:
    """Looks at each page: a reader that only mapped a file has to read it now."""
    array.reshape(-1).view(np.uint8)[::PAGE_BYTES].max(initial=0)


def touch_tensor(tensor: torch.Tensor) -> None:
    """As `touch` for states [T, K, H], each of which is contiguous."""
    for state in tensor.transpose(0, 1).view(torch.int16).numpy():
        touch(state)


def raw(corpus: Corpus, order: Sequence[int]) -> None:
    """One pread a sample into one buffer: what the file system does."""
    _preads(corpus, order, 0)


def raw_direct(corpus: Corpus, order: Sequence[int]) -> None:
    """The same past the page cache."""
    _preads(corpus, order, os.O_DIRECT)


def _preads(corpus: Corpus, order: Sequence[int], flags: int) -> None:
    layout = corpus.samples[0].header.layout
    longest = max(layout.sample_bytes(s.tokens) for s in corpus.samples)
    buffer = _buffer(longest)
    fds = {
        n: os.open(corpus.dump / hidden_key(n), os.O_RDONLY | flags)
        for n in {s.shard for s in corpus.samples}
    }
    for sample in (corpus.samples[i] for i in order):
        view, done = buffer[: layout.sample_bytes(sample.tokens)], 0
        while done < len(view):
            done += os.preadv(fds[sample.shard], [view[done:]], sample.offset + done)
        touch(np.frombuffer(view, np.uint8))
    for fd in fds.values():
        os.close(fd)


@functools.cache
def _buffer(length: int) -> memoryview:
    """The same one in every turn: what fresh memory costs is not the file system's."""
    buffer = aligned_memory(length)
    buffer[:] = 0
    return buffer.data


def stream(corpus: Corpus, order: Sequence[int]) -> None:
    """`DumpStream`, which reads ahead in threads; it has orders of its own."""
    _stream(corpus, order, page_cache=True)


def stream_unchecked(corpus: Corpus, order: Sequence[int]) -> None:
    """The same without holding the bytes against their hashes."""
    _stream(corpus, order, page_cache=True, check=False)


def stream_direct(corpus: Corpus, order: Sequence[int]) -> None:
    """With its hashes, past the page cache."""
    _stream(corpus, order, page_cache=False)


def _stream(corpus: Corpus, order: Sequence[int], **options: Any) -> None:
    shuffle = list(order) != sorted(order)
    for item in storage.DumpStream(str(corpus.dump), shuffle=shuffle, **options):
        touch_tensor(item["hidden_states"])


def dataset(corpus: Corpus, order: Sequence[int]) -> None:
    """`DumpDataset`, one sample after the other in this thread."""
    items = storage.DumpDataset(str(corpus.dump), page_cache=True)
    for i in order:
        touch_tensor(items[i]["hidden_states"])


def verify(corpus: Corpus, order: Sequence[int]) -> None:
    """What `hsdump verify` does in one process: every shard in a thread; hashes and looks at every value."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(run_item, work_items(Store(str(corpus.dump)))):
            assert not found.problems


def zarr_python(corpus: Corpus, order: Sequence[int]) -> None:
    """The dump's array through zarr-python, a slice a sample."""
    array = zarr.open_array(str(corpus.dump / "hidden"), mode="r")
    for start, tokens in _slices(corpus, order):
        touch(array[start : start + tokens])


def tensorstore_zarr(corpus: Corpus, order: Sequence[int]) -> None:
    """The dump's array through tensorstore, a slice a sample."""
    store = {"driver": "file", "path": f"{corpus.dump}/hidden/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    for start, tokens in _slices(corpus, order):
        touch(array[start : start + tokens].read(order="C").result())


def safetensors_files(corpus: Corpus, order: Sequence[int]) -> None:
    """One file a sample."""
    for i in order:
        loaded = safetensors.torch.load_file(corpus.safetensors / f"{i}.safetensors")["hidden_states"]
        touch(loaded.view(torch.int16).numpy())


def torch_files(corpus: Corpus, order: Sequence[int]) -> None:
    """One file a sample."""
    for i in order:
        touch(torch.load(corpus.torch_save / f"{i}.pt")["hidden_states"].view(torch.int16).numpy())


def _slices(corpus: Corpus, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    layout = corpus.samples[0].header.layout
    for i in order:
        sample = corpus.samples[i]
        yield layout.array_start(sample.shard, sample.first_slot), sample.tokens


SEQUENTIAL: dict[str, Reader] = {
    "raw": raw,
    "raw-direct": raw_direct,
    "hsdump": stream,
    "hsdump-unchecked": stream_unchecked,
    "hsdump-direct": stream_direct,
    "hsdump-dataset": dataset,
    "hsdump-verify": verify,
    "zarr-python": zarr_python,
    "tensorstore": tensorstore_zarr,
    "safetensors": safetensors_files,
    "torch-load": torch_files,
}
PAST_PAGE_CACHE = frozenset({"raw-direct", "hsdump-direct", "hsdump-verify"})
"""These read from the disk, warm or not."""
RANDOM: dict[str, Reader] = {
    **SEQUENTIAL,
    "hsdump": dataset,
    "hsdump-stream": stream,
}
del RANDOM["hsdump-dataset"], RANDOM["hsdump-unchecked"], RANDOM["hsdump-verify"]
