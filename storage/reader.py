"""Reading a dump: its committed samples by number or by id."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.committed import counting, read_places
from storage.dump import read_header
from storage.encoded import IndexCache
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.read_check import ReadCheck
from storage.read_memory import memory_bytes
from storage.sample import Sample
from storage.table import committed_table, current_table
from storage.whole_prompts import WholePrompts

NEAR_IDS_AMONG = 20_000
"""Ids that are compared for the hint in a KeyError: enough to help, few enough to be quick."""
CACHED_SHARE = 0.5
"""Of the memory, that a dump may take and still be read through the page cache: a larger one would be evicted before it
is read again, and other files with it."""


@dataclass(frozen=True)
class Places:
    """Where samples are: int64 [n] each, with the meaning that `Sample` gives the names."""

    row: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
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

    def __init__(self, store: Store, check: bool = True, page_cache: bool | None = None) -> None:
        self.url = store.url
        self.header = read_header(store)
        table = current_table(store)
        if table is None:
            table = committed_table(self.header.layout, counting(read_places(store)))
        self.samples: pa.Table = table
        held = table.filter(pc.equal(table["status"], "committed"))
        self._ids: list[str] = held["sample_id"].to_pylist()
        self.places = Places(*(held[name].to_numpy().astype(np.int64) for name in PLACE_COLUMNS))
        self._numbers: dict[str, int] | None = None
        if page_cache is None:
            page_cache = self.bytes <= CACHED_SHARE * memory_bytes()
        cached = page_cache or store.local_root is None  # there is none for an object store's reads
        self._store = store if cached else Store(store.url, page_cache=False)
        self._check = ReadCheck(self._store, self.layout) if check else None
        self._indices = IndexCache(self._store, self.layout)
        self._prompts = WholePrompts(self._store)

    @property
    def bytes(self) -> int:
        """Bytes of the committed states before compression, padding apart."""
        return int(self.places.kept.sum()) * self.layout.bytes_per_token

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
            prompts=self._prompts,
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


def open_dump(url: str, check: bool = True, page_cache: bool | None = None) -> Dump:
    """Opens a dump, finished or not; of an unfinished one it shows what is committed by now.

    Args:
        url: local path or fsspec URL.
        check: hold everything that is read against its hash in the manifests.
        page_cache: False reads states from a local disk past the page cache (O_DIRECT): faster, for less CPU time,
            and nothing else is evicted, but every epoch reads from the disk. True reads through it. None reads
            through it if the dump takes at most half of this machine's, or its container's, memory.

    Raises:
        OutputError: there is no dump.
        CorruptDump, StorageError: it can't be read.
    """
    return Dump(Store(url), check, page_cache)
