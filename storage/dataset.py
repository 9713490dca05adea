"""A dump as torch data: the map-style dataset, and the items that it and `storage.stream` give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from storage.files import Store
from storage.layout import State
from storage.reader import Dump, open_dump
from storage.sample import Sample, read_memory, states_tensor


class LazyDump:
    """A dump that is opened on first use in each process, and pickled as its URL.

    Attributes:
        url: where it is.
        states: which states are read, in the order along K; None for all that are stored.
        check: everything that is read is held against its hash in the manifests.
        page_cache: states on a local disk are read through the page cache; None as `open_dump` decides.
    """

    def __init__(
        self, url: str, states: Sequence[State] | None, check: bool, page_cache: bool | None
    ) -> None:
        self.url = Store(url).url
        self.states = None if states is None else tuple(states)
        self.check, self.page_cache = check, page_cache
        self._dump: Dump | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dump": None}

    @property
    def dump(self) -> Dump:
        """The dump.

        Raises:
            KeyError: it doesn't hold one of ``states``.
            OutputError, CorruptDump, StorageError: it can't be opened.
        """
        if self._dump is None:
            dump = open_dump(self.url, self.check, self.page_cache)
            for state in self.states or ():
                dump.layout.state_index(dump.header.resolve(state))
            self._dump = dump
        return self._dump


def sample_item(sample: Sample, states: Sequence[State] | None) -> dict[str, Any]:
    """Reads one sample; see `DumpDataset` for the keys."""
    token_ids, loss_mask, positions = sample.columns()
    return {
        "sample_id": sample.sample_id,
        "row": sample.row,
        "input_ids": token_ids,
        "loss_mask": loss_mask,
        "positions": positions,
        "hidden_states": sample.stack(states),
    }


def packed_item(samples: Sequence[Sample], states: Sequence[State] | None) -> dict[str, Any]:
    """Reads samples into tensors that hold them after each other; see `storage.stream.DumpStream` for the keys."""
    lengths = [sample.tokens for sample in samples]
    ends, row_ends = np.cumsum(lengths), np.cumsum([sample.kept for sample in samples])
    rows = int(row_ends[-1])
    layout = samples[0].header.layout.computed
    num_states = layout.num_states if states is None else len(states)
    raw = read_memory.take(num_states * rows * layout.row_bytes)
    packed = states_tensor(raw, layout).view(num_states, rows, layout.hidden_size)
    for sample, end in zip(samples, row_ends.tolist(), strict=True):
        packed[:, end - sample.kept : end] = sample.stack(states).transpose(0, 1)
    columns = [sample.columns() for sample in samples]
    starts = [0, *ends.tolist()]
    return {
        "sample_ids": [sample.sample_id for sample in samples],
        "rows": [sample.row for sample in samples],
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "input_ids": torch.cat([token_ids for token_ids, _, _ in columns]),
        "loss_mask": torch.cat([loss_mask for _, loss_mask, _ in columns]),
        "positions": torch.cat([own + start for (_, _, own), start in zip(columns, starts, strict=False)]),
        "hidden_states": packed.transpose(0, 1),
    }


class DumpDataset(LazyDump, Dataset[dict[str, Any]]):
    """A dump as a torch map-style dataset.

    It holds only the URL until it is used, so it pickles into the workers of a DataLoader; use
    ``multiprocessing_context="spawn"`` for object stores, whose clients don't survive a fork.

    An item is a dict of ``sample_id`` (str), ``row`` (int), ``input_ids`` (int64 [T]), ``loss_mask`` (bool
    [T]), ``positions`` (int64 [R]) and ``hidden_states`` ([R, K, H] of the model's element type). R is T unless the
    dump keeps the states of some tokens only; row i of the states is of token ``positions[i]``.

    Args:
        url: local path or fsspec URL of a dump.
        states: which states, in the order along K; None for all that are stored.
        check: hold everything that is read against its hash in the manifests.
        page_cache: whether states are read through it, as in `open_dump`; None decides by the dump's size.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[State] | None = None,
        check: bool = True,
        page_cache: bool | None = None,
    ) -> None:
        super().__init__(url, states, check, page_cache)

    def __len__(self) -> int:
        return len(self.dump)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample_item(self.dump[index], self.states)
