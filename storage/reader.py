"""Reading a dump: samples by number or by id, their states, token ids and masks."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from storage.committed import counting, read_places
from storage.dump import DumpHeader, read_header
from storage.encoded import IndexCache, read_states
from storage.errors import CorruptDump
from storage.files import Store
from storage.identity import Identity
from storage.layout import TOKEN_COLUMNS, Layout, State, hidden_key, token_key
from storage.manifest import ManifestSample
from storage.read_check import ReadCheck
from storage.read_memory import ReadMemory
from storage.table import committed_table, current_table

TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NEAR_IDS_AMONG = 20_000
"""Ids that are compared for the hint in a KeyError: enough to help, few enough to be quick."""


read_memory = ReadMemory()


def adjacent_runs(ks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits positions along K into runs that follow each other, each of which is one range of bytes.

    Returns:
        (place of the run's first position in ``ks``, that position, positions in the run) for each run.
    """
    runs: list[tuple[int, int, int]] = []
    for place, k in enumerate(ks):
        if runs and runs[-1][1] + runs[-1][2] == k:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((place, k, 1))
    return runs


def states_tensor(raw: np.ndarray[Any, np.dtype[np.uint8]], layout: Layout) -> torch.Tensor:
    """Stored bytes [n] as a flat tensor of the model's element type, without a copy."""
    bits = torch.from_numpy(raw.view(np.int16 if layout.itemsize == 2 else np.int32))
    return bits.view(TORCH_TYPES[layout.dtype])


@dataclass(frozen=True)
class Sample:
    """One committed sample. Nothing is read before it is asked for, and nothing is kept.

    Attributes:
        sample_id: the id in the prompt file.
        row: prepared row.
        tokens: T.
        shard: shard that holds it.
        first_slot: first inner chunk along the token axis, inside the shard.
        offset: where its bytes start in ``hidden/c/<shard>/0/0``.
        header: the dump's header.
        store: the dump's store.
        check: holds everything that is read against the manifest's hashes; None doesn't.
        indices: where the chunks are, if they are compressed.
    """

    sample_id: str
    row: int
    tokens: int
    shard: int
    first_slot: int
    offset: int
    header: DumpHeader
    store: Store
    check: ReadCheck | None
    indices: IndexCache

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Captured boundaries, ascending; ``final`` and ``final_normed`` aren't among them."""
        return tuple(s for s in self.header.layout.states if isinstance(s, int))

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids, int64 [T], as embeddings take them."""
        return self.columns()[0]

    @property
    def loss_mask(self) -> torch.Tensor:
        """Tokens that count in a loss, bool [T]."""
        return self.columns()[1]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, int64 [T], and loss mask, bool [T].

        Raises:
            CorruptDump, StorageError: they can't be read, or aren't what was committed.
        """
        token_ids, loss_mask = (self._column(name) for name in ("token_ids", "loss_mask"))
        if self.check is not None:
            self.check.tokens(self.shard, self._listed(self.check), token_ids, loss_mask)
        return torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(loss_mask.astype(np.bool_))

    def states(self, state: State) -> torch.Tensor:
        """One state by one read of just its bytes.

        Args:
            state: a boundary, ``"final"`` or ``"final_normed"``; boundary N stands for ``"final"``.

        Returns:
            [T, H] of the model's element type, a view of the bytes that were read.

        Raises:
            KeyError: the dump doesn't hold it; the message lists what it holds.
            CorruptDump, StorageError: it can't be read, or isn't what was committed.
        """
        layout = self.header.layout
        k = layout.state_index(self.header.resolve(state))
        if layout.codec != "none":
            return self.stack([state])[:, 0]
        raw = read_memory.take(self.tokens * layout.row_bytes)
        offset = layout.run_offset(self.offset, layout.slots(self.tokens), k, 0)
        self._fill(hidden_key(self.shard), offset, raw)
        self._check_states([k], raw)
        return states_tensor(raw, layout).view(self.tokens, layout.hidden_size)

    def stack(self, states: Sequence[State] | None = None) -> torch.Tensor:
        """Several states.

        Args:
            states: which, in which order; None for all in stored order. States that are stored side by side
                and wanted in that order are one read.

        Returns:
            [T, K, H] of the model's element type, a view of what was read with the strides of [K, T, H].

        Raises:
            KeyError: the dump doesn't hold one of them.
            CorruptDump, StorageError: it can't be read, or isn't what was committed.
        """
        layout = self.header.layout
        wanted = layout.states if states is None else [self.header.resolve(s) for s in states]
        ks = [layout.state_index(s) for s in wanted]
        slots = layout.slots(self.tokens)
        run_bytes = slots * layout.chunk_bytes
        raw = read_memory.take(len(ks) * run_bytes)
        if layout.codec != "none":
            with self._must_be_there(hidden_key(self.shard)):
                entries = self.indices.of(self.shard)[self.first_slot :][:slots, ks]
                read_states(self.store, layout, self.shard, entries.swapaxes(0, 1), raw)
        else:
            for place, first, count in adjacent_runs(ks):
                into = raw[place * run_bytes : (place + count) * run_bytes]
                self._fill(hidden_key(self.shard), layout.run_offset(self.offset, slots, first, 0), into)
        self._check_states(ks, raw)
        rows = slots * layout.chunk_rows
        flat = states_tensor(raw, layout)
        return flat.view(len(ks), rows, layout.hidden_size)[:, : self.tokens].transpose(0, 1)

    def _column(self, column: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(TOKEN_COLUMNS[column]).newbyteorder("<")
        start = self.first_slot * self.header.layout.chunk_rows * dtype.itemsize
        return self._bytes(token_key(column, self.shard), start, self.tokens * dtype.itemsize).view(dtype)

    def _bytes(self, key: str, offset: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw = read_memory.take(length)
        self._fill(key, offset, raw)
        return raw

    def _fill(self, key: str, offset: int, raw: npt.NDArray[np.uint8]) -> None:
        with self._must_be_there(key):
            self.store.read_range_into(key, offset, raw.data)

    @contextlib.contextmanager
    def _must_be_there(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise CorruptDump(
                f"{self.store.where(key)} is gone, and sample {self.sample_id!r} was in it; restore it from "
                "a copy"
            ) from exc

    def _listed(self, check: ReadCheck) -> ManifestSample:
        return check.listed(self.shard, self.row, (self.tokens, self.first_slot, self.offset))

    def _check_states(self, ks: Sequence[int], raw: npt.NDArray[np.uint8]) -> None:
        if self.check is not None:
            self.check.states(self.shard, self._listed(self.check), ks, raw)


@dataclass(frozen=True)
class Places:
    """Where samples are: int64 [n] each, with the meaning that `Sample` gives the names."""

    row: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int64]
    first_slot: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]


PLACE_COLUMNS = tuple(field.name for field in fields(Places))


class Dump(Sequence[Sample]):
    """The committed samples of a dump in the order of their prepared rows. Picklable.

    Attributes:
        url: where it is.
        header: what its root says.
        samples: pyarrow table with the columns of ``samples.parquet``: every prepared row of a finished dump,
            the committed rows of an unfinished one.
        places: where the committed samples are.
    """

    def __init__(self, store: Store, check: bool = True) -> None:
        self.url = store.url
        self.header = read_header(store)
        self._store = store
        self._check = ReadCheck(store, self.header.layout) if check else None
        self._indices = IndexCache(store, self.header.layout)
        table = current_table(store)
        if table is None:
            table = committed_table(self.header.layout, counting(read_places(store)))
        self.samples: pa.Table = table
        held = table.filter(pc.equal(table["status"], "committed"))
        self._ids: list[str] = held["sample_id"].to_pylist()
        self.places = Places(*(held[name].to_numpy().astype(np.int64) for name in PLACE_COLUMNS))
        self._numbers: dict[str, int] | None = None

    @property
    def layout(self) -> Layout:
        """Geometry."""
        return self.header.layout

    @property
    def identity(self) -> Identity:
        """What the numbers come from."""
        return self.header.identity

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, which: int | str) -> Sample:  # type: ignore[override]
        """A sample by number (negative from the end) or by id.

        Raises:
            IndexError: there is no such number.
            KeyError: no committed sample has that id; the message names near ones.
        """
        number = self._number(which) if isinstance(which, str) else range(len(self))[which]
        where = {name: int(getattr(self.places, name)[number]) for name in PLACE_COLUMNS}
        return Sample(
            self._ids[number],
            **where,
            header=self.header,
            store=self._store,
            check=self._check,
            indices=self._indices,
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, which: object) -> bool:
        return which in self._by_id() if isinstance(which, str) else super().__contains__(which)

    def _by_id(self) -> dict[str, int]:
        if self._numbers is None:
            self._numbers = {sample_id: number for number, sample_id in enumerate(self._ids)}
        return self._numbers

    def _number(self, sample_id: str) -> int:
        try:
            return self._by_id()[sample_id]
        except KeyError:
            some = list(itertools.islice(self._ids, NEAR_IDS_AMONG))
            near = difflib.get_close_matches(sample_id, some, n=3) or some[:3]
            raise KeyError(
                f"{self.url} has no committed sample {sample_id!r}; among its {len(self)} ids are "
                f"{', '.join(repr(i) for i in near)}. `hsdump inspect` says why a row was skipped or failed"
            ) from None


def open_dump(url: str, check: bool = True) -> Dump:
    """Opens a dump, finished or not; of an unfinished one it shows what is committed by now.

    Args:
        url: local path or fsspec URL.
        check: hold everything that is read against its hash in the manifests.

    Raises:
        OutputError: there is no dump.
        CorruptDump, StorageError: it can't be read.
    """
    return Dump(Store(url), check)
