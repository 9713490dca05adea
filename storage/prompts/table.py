"""Reads the prepared table: two small columns for planning, single rows for collecting."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import CorruptDump, OutputError
from storage.files import Store
from storage.keep import Keep
from storage.prompts.parts import ASKED, FOLDER, SCHEMA, prepared_key, read_prepared
from storage.prompts.spec import Answer, PartInfo, PreparedRow, PreparedSummary

TO_COLLECT = 0
SKIPPED = 1

_CACHED_GROUPS = 8
_BATCH_ROWS = 1 << 16
_ROW_COLUMNS = ("row", "source_row", "skip_reason", "sample_id", "token_ids", "loss_mask")


class _Group:
    """One row group, laid out for single rows: a small row costs a few microseconds."""

    def __init__(self, table: pa.Table) -> None:
        columns = [table[name].combine_chunks() for name in _ROW_COLUMNS]
        self.row, self._source_row = (column.to_numpy() for column in columns[:2])
        self._skip_reason, self._sample_id = columns[2:4]
        self._ends = columns[4].offsets.to_numpy()
        self._token_ids, self._loss_mask = (column.values.to_numpy() for column in columns[4:])

    def load(self, at: int) -> PreparedRow:
        """The row at a place in the group; its arrays are read-only views."""
        tokens = slice(self._ends[at], self._ends[at + 1])
        return PreparedRow(
            row=int(self.row[at]),
            source_row=int(self._source_row[at]),
            sample_id=self._sample_id[at].as_py(),
            token_ids=self._token_ids[tokens],
            loss_mask=self._loss_mask[tokens],
            skip_reason=self._skip_reason[at].as_py(),
        )


class PromptTable:
    """The prepared rows of a dump. Safe to use from several threads.

    Args:
        store: the dump, or any folder that holds its ``prompts/``.
        folder: `FOLDER`, or `ASKED` for the rows as the model is asked.

    Attributes:
        summary: what the preparation recorded.
        tokens: int32 [n], length of each row; 0 where skipped.
        status: uint8 [n], `TO_COLLECT` or `SKIPPED`.

    Raises:
        OutputError: there is no complete preparation.
        CorruptDump: a part is missing or isn't what the preparation recorded.
    """

    def __init__(self, store: Store, folder: str = FOLDER) -> None:
        summary = read_prepared(store, folder)
        if summary is None:
            raise OutputError(
                f"{store.url} holds no complete preparation: {prepared_key(folder)} is missing; run `hsdump collect` "
                "on it again"
            )
        self.summary: PreparedSummary = summary
        self._asked = folder == ASKED
        self._store = store
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self._metadata: list[Any] = []
        self._group_ends: list[npt.NDArray[np.int64]] = []
        self._part_ends = np.cumsum([part.rows for part in summary.parts], dtype=np.int64).tolist()
        columns = [self._open_part(part) for part in summary.parts]
        self.tokens: npt.NDArray[np.int32] = np.concatenate([tokens for tokens, _ in columns])
        self.status: npt.NDArray[np.uint8] = np.concatenate([status for _, status in columns])

    def __len__(self) -> int:
        """Prepared rows, skipped ones included."""
        return int(self.tokens.size)

    def load(self, row: int) -> PreparedRow:
        """One row with its token ids.

        Raises:
            IndexError: there is no such row.
            CorruptDump: its part can't be read.
        """
        part, group, at = self._place(row)
        rows = self._group(part, group)
        if rows.row[at] != row:
            raise CorruptDump(f"{self._where(part)}: row {rows.row[at]} stands where row {row} belongs")
        return rows.load(at)

    def answer(self, row: int) -> Answer | None:
        """What the model said in answer to a row; None for one that it didn't answer. Raises as `load`."""
        part, group, at = self._place(row)
        names = [field.name for field in fields(Answer)]
        if not set(names) <= set(self._metadata[part].schema.to_arrow_schema().names):
            return None
        with self._store.open_read(self.summary.parts[part].key) as file:
            try:
                table = pq.ParquetFile(file, metadata=self._metadata[part]).read_row_group(
                    group, columns=names
                )
            except (pa.ArrowException, OSError) as exc:
                raise self._unreadable(part, exc) from exc
        found = {name: table[name][at].as_py() for name in names}
        return None if found["finish_reason"] is None else Answer(**found)

    def questions(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Of ``prompts/asked``: most new tokens of each row, 0 where it isn't to be answered; and its seed."""
        columns = [pc.fill_null(self.column(name), 0).to_numpy() for name in ("max_new_tokens", "seed")]
        return columns[0], columns[1]

    def skipped(self) -> pa.Table:
        """``row``, ``sample_id`` and ``skip_reason`` of every skipped row, in order."""
        names = ["row", "sample_id", "skip_reason"]
        found = [pa.schema([SCHEMA.field(name) for name in names]).empty_table()]
        for part in range(len(self.summary.parts)) if self.status.any() else ():
            with self._store.open_read(self.summary.parts[part].key) as file:
                reader = pq.ParquetFile(file, metadata=self._metadata[part])
                try:
                    for batch in reader.iter_batches(_BATCH_ROWS, columns=names):
                        found.append(pa.table(batch.filter(batch["skip_reason"].is_valid())))
                except (pa.ArrowException, OSError) as exc:
                    raise self._unreadable(part, exc) from exc
        return pa.concat_tables(found)

    def sample_ids(self, rows: npt.NDArray[np.int64]) -> pa.ChunkedArray:
        """The ids of some rows, by one look at that column where there are any."""
        if not rows.size:
            return pa.chunked_array([], pa.string())
        return self.column("sample_id").take(pa.array(rows))

    def column(self, name: str) -> Any:
        """One column of all rows as a pyarrow.ChunkedArray, without reading the others."""
        tables = [self._read_columns(part, [name]) for part in range(len(self.summary.parts))]
        return pa.concat_tables(tables)[name]

    def kept(self, keep: Keep) -> npt.NDArray[np.int32]:
        """Tokens of each row whose states are stored under a policy, int32 [n]; 0 where skipped.

        Of ``prompts/asked`` they are the most that it may come to: every token of an answer is supervised.

        Raises:
            CorruptDump: a part can't be read.
        """
        supervised = self.tokens
        if keep.policy == "supervised":
            supervised = self.column("supervised").to_numpy().astype(np.int32, copy=False)
        if self._asked:
            longest = self.questions()[0]
            return keep.counts(self.tokens + longest, supervised + longest)
        return keep.counts(self.tokens, supervised)

    def _place(self, row: int) -> tuple[int, int, int]:
        """Part, row group in it, and place in that."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} prepared rows")
        part = bisect.bisect_right(self._part_ends, row)
        in_part = row - (self._part_ends[part - 1] if part else 0)
        ends = self._group_ends[part]
        group = int(np.searchsorted(ends, in_part, side="right"))
        return part, group, in_part - (int(ends[group - 1]) if group else 0)

    def _open_part(self, part: PartInfo) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        size_bytes = self._store.size(part.key)
        if size_bytes != part.size_bytes:
            raise CorruptDump(
                f"{self._store.url}/{part.key} has {size_bytes or 0} bytes, {part.size_bytes} were written; "
                "restore it from a copy, or collect into another folder"
            )
        index = len(self._metadata)
        with self._store.open_read(part.key) as file:
            try:
                metadata = pq.read_metadata(file)
            except pa.ArrowException as exc:
                raise self._unreadable(index, exc) from exc
        self._metadata.append(metadata)
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._group_ends.append(np.cumsum(rows, dtype=np.int64))
        table = self._read_columns(index, ["tokens", "skip_reason"])
        status = np.where(table["skip_reason"].is_valid().to_numpy(), SKIPPED, TO_COLLECT).astype(np.uint8)
        return table["tokens"].to_numpy().astype(np.int32, copy=False), status

    def _read_columns(self, part: int, columns: list[str]) -> Any:
        with self._store.open_read(self.summary.parts[part].key) as file:
            try:
                return pq.ParquetFile(file, metadata=self._metadata[part]).read(columns=columns)
            except (pa.ArrowException, OSError) as exc:
                raise self._unreadable(part, exc) from exc

    def _group(self, part: int, group: int) -> _Group:
        with self._lock:
            cached = self._groups.get((part, group))
            if cached is not None:
                self._groups.move_to_end((part, group))
                return cached
            with self._store.open_read(self.summary.parts[part].key) as file:
                try:
                    reader = pq.ParquetFile(file, metadata=self._metadata[part], pre_buffer=True)
                    rows = _Group(reader.read_row_group(group, columns=list(_ROW_COLUMNS)))
                except (pa.ArrowException, OSError) as exc:
                    raise self._unreadable(part, exc) from exc
            self._groups[part, group] = rows
            if len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
            return rows

    def _where(self, part: int) -> str:
        return f"{self._store.url}/{self.summary.parts[part].key}"

    def _unreadable(self, part: int, exc: Exception) -> CorruptDump:
        return CorruptDump(
            f"{self._where(part)} can't be read as Parquet ({exc}); restore it from a copy, or collect into "
            "another folder"
        )
