"""The prepared table's Parquet objects: their schema and how they are written.

Row groups are small, so that one row in random order is one small range read, and parts are bounded, so that
a part fits in memory on its way to an object store.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import CorruptDump
from storage.files import Store
from storage.prompts.spec import PartInfo, PreparedRow, PreparedSummary

FOLDER = "prompts"
ASKED = f"{FOLDER}/asked"
"""Where rows wait that the model answers itself: the same table, before the answers."""

_GROUP_TOKENS = 131_072
_GROUP_ROWS = 4_096
_PART_BYTES = 64 << 20

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("source_row", pa.int64()),
        ("turn", pa.int32()),
        ("tokens", pa.int32()),
        ("supervised", pa.int32()),
        ("skip_reason", pa.string()),
        ("sample_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)
"""One row a sample. ``tokens`` and ``supervised``, those with loss mask 1, are 0 and the lists are empty where
``skip_reason`` isn't null; ``turn`` is set
under ``split_turns`` only."""
QUESTIONS = pa.schema([*SCHEMA, ("max_new_tokens", pa.int32()), ("seed", pa.int64())])
"""Of ``prompts/asked``. Both columns are null in a row that isn't to be answered."""
ANSWERS = pa.schema(
    [
        *SCHEMA,
        ("answer_start", pa.int32()),
        ("finish_reason", pa.string()),
        ("seed", pa.int64()),
        ("answer", pa.string()),
    ]
)
"""Of ``prompts`` where the model answered rows. The columns are null in a row that it didn't answer."""


class PartWriter:
    """Writes prepared rows in order, as ``prompts/part-00000.parquet`` and so on.

    Args:
        store: the dump.
        folder: `FOLDER` or `ASKED`.
        schema: of the rows.
    """

    def __init__(self, store: Store, folder: str = FOLDER, schema: pa.Schema = SCHEMA) -> None:
        self._store = store
        self._folder = folder
        self._schema = schema
        self._parts: list[PartInfo] = []
        self._rows: list[tuple[PreparedRow, int | None]] = []
        self._tokens = 0
        self._part_rows = 0
        self._buffer: Any = None
        self._writer: Any = None

    def add(self, row: PreparedRow, turn: int | None) -> None:
        """Appends one row.

        Raises:
            StorageError: a part can't be written.
        """
        full = len(self._rows) >= _GROUP_ROWS or self._tokens + row.token_ids.size > _GROUP_TOKENS
        if self._rows and full:
            self._flush_group()
        self._rows.append((row, turn))
        self._tokens += row.token_ids.size

    def close(self) -> tuple[PartInfo, ...]:
        """Writes what is left; the parts in row order."""
        if self._rows:
            self._flush_group()
        if self._writer is not None:
            self._flush_part()
        return tuple(self._parts)

    def _flush_group(self) -> None:
        if self._writer is None:
            self._buffer = pa.BufferOutputStream()
            # Token ids hardly repeat enough for a dictionary to pay.
            self._writer = pq.ParquetWriter(
                self._buffer, self._schema, compression="zstd", use_dictionary=False
            )
        self._writer.write_table(_group_table(self._rows, self._schema), row_group_size=_GROUP_ROWS)
        self._part_rows += len(self._rows)
        self._rows, self._tokens = [], 0
        if self._buffer.tell() >= _PART_BYTES:
            self._flush_part()

    def _flush_part(self) -> None:
        self._writer.close()
        data = self._buffer.getvalue().to_pybytes()
        key = f"{self._folder}/part-{len(self._parts):05d}.parquet"
        self._store.replace(key, data)
        self._parts.append(PartInfo(key, self._part_rows, len(data)))
        self._buffer, self._writer, self._part_rows = None, None, 0


def prepared_key(folder: str = FOLDER) -> str:
    """The object that is written last, and whose presence makes a folder's table complete."""
    return f"{folder}/_prepared.json"


def write_prepared(store: Store, summary: PreparedSummary, folder: str = FOLDER) -> None:
    """Makes a folder's table complete.

    Args:
        store: the dump.
        summary: of the parts that are there.
        folder: `FOLDER` or `ASKED`.

    Raises:
        AlreadyExists: it is complete.
        StorageError: the dump can't be written.
    """
    store.put_if_absent(prepared_key(folder), json.dumps(summary.to_json(), indent=1).encode())


def read_prepared(store: Store, folder: str = FOLDER) -> PreparedSummary | None:
    """The summary of a complete preparation; None when there is none.

    Args:
        store: the dump.
        folder: `FOLDER` or `ASKED`.

    Raises:
        CorruptDump: its ``_prepared.json`` isn't what `prepare` writes.
    """
    key = prepared_key(folder)
    try:
        data = store.read(key)
    except FileNotFoundError:
        return None
    try:
        return PreparedSummary.from_json(json.loads(data))
    except (ValueError, TypeError, KeyError) as exc:
        raise CorruptDump(
            f"{store.url}/{key} isn't a preparation's summary ({type(exc).__name__}: {exc}); "
            "restore it from a copy, or collect into another folder"
        ) from exc


def _group_table(rows: list[tuple[PreparedRow, int | None]], schema: pa.Schema) -> Any:
    prepared = [row for row, _ in rows]
    lengths = [row.token_ids.size for row in prepared]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    more = {name: [getattr(r.more, name, None) for r in prepared] for name in schema.names[len(SCHEMA) :]}
    return pa.table(
        {
            "row": [row.row for row in prepared],
            "source_row": [row.source_row for row in prepared],
            "turn": [turn for _, turn in rows],
            "tokens": lengths,
            "supervised": [int(np.count_nonzero(row.loss_mask)) for row in prepared],
            "skip_reason": [row.skip_reason for row in prepared],
            "sample_id": [row.sample_id for row in prepared],
            "token_ids": pa.ListArray.from_arrays(
                offsets, np.concatenate([row.token_ids for row in prepared])
            ),
            "loss_mask": pa.ListArray.from_arrays(
                offsets, np.concatenate([row.loss_mask for row in prepared])
            ),
            **more,
        },
        schema=schema,
    )
