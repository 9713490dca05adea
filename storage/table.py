"""``samples.parquet``: one row for each prepared row, where it is or why it isn't there.

It is built at the end from the manifests. Its footer holds the account, so that a complete dump is recognised
by one small read.

    row          int64    prepared row
    sample_id    string
    status       string   committed | skipped | failed
    reason       string   why it was skipped or failed; null otherwise
    tokens       int32    T; this and the following are null unless committed
    kept         int32    R, tokens whose states are stored
    shard        int32
    first_slot   int32    first inner chunk along the token axis, inside the shard
    offset       int64    where the sample's bytes start in ``hidden/c/<shard>/0/0``
    array_start  int64    first index along axis 0 of the zarr arrays
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.committed import counting_order, read_places
from storage.errors import CorruptDump, IncompleteRun
from storage.files import Store
from storage.layout import Layout

TABLE_KEY = "samples.parquet"
_GROUP_ROWS = 1 << 14
ACCOUNT_FIELD = b"hsdump_account"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("kept", pa.int32()),
        pa.field("shard", pa.int32()),
        pa.field("first_slot", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("array_start", pa.int64()),
    ]
)
OUTCOMES = pa.schema([SCHEMA.field(name) for name in ("row", "sample_id", "status", "reason")])
"""Columns that a row without a place has."""
Status = Literal["committed", "skipped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of a prepared row that is in no shard.

    Attributes:
        row: prepared row.
        sample_id: its id.
        status: ``skipped`` or ``failed``.
        reason: why, in one line.
    """

    row: int
    sample_id: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Account:
    """Counts of a finished run; ``rows`` is the sum of the next three.

    Attributes:
        tokens: tokens of the committed samples.
        kept: of these, the tokens whose states are stored.
    """

    rows: int
    committed: int
    skipped: int
    failed: int
    tokens: int
    kept: int


def committed_table(layout: Layout, places: pa.Table) -> pa.Table:
    """Committed rows alone, in the table's schema: what an unfinished dump holds.

    Args:
        layout: the dump's geometry.
        places: of the samples, with the columns of `storage.committed.PLACES`.
    """
    shard = places["shard"].to_numpy().astype(np.int64)
    starts = shard * layout.shard_rows + places["first_slot"].to_numpy().astype(np.int64) * layout.chunk_rows
    columns = {name: places[name] for name in places.column_names}
    columns |= {
        "status": pa.repeat("committed", len(places)),
        "reason": pa.nulls(len(places), pa.string()),
        "array_start": pa.array(starts),
    }
    return pa.table([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def outcome_table(outcomes: Iterable[Outcome]) -> pa.Table:
    """A few outcomes as a table of `OUTCOMES`."""
    return pa.Table.from_pylist([asdict(outcome) for outcome in outcomes], schema=OUTCOMES)


def write_table(store: Store, layout: Layout, places: pa.Table, outcomes: pa.Table) -> Account:
    """Puts `TABLE_KEY` in place, zstd-compressed, made and written a few rows at a time.

    A row that is committed counts as that whatever its outcome says.

    Args:
        store: the dump.
        layout: its geometry.
        places: `storage.committed.PLACES` of every copy of the committed samples.
        outcomes: `OUTCOMES` of the rows that aren't committed.

    Returns:
        The counts.

    Raises:
        CorruptDump: an outcome says committed and no manifest has that row.
        IncompleteRun: a row between the first and the last has neither.
        StorageError: writing failed.
    """
    counted = counting_order(places)
    held = places["row"].to_numpy()[counted]
    outcomes = outcomes.filter(pa.array(~_among(outcomes["row"].to_numpy(), held)))
    _refuse_unheld(outcomes)
    rows = np.concatenate([held, outcomes["row"].to_numpy()])
    order = np.argsort(rows, kind="stable")
    _require_each_once(rows[order])
    tokens, kept = (int(places[name].to_numpy()[counted].sum(dtype=np.int64)) for name in ("tokens", "kept"))
    failed = pc.sum(pc.equal(outcomes["status"], "failed")).as_py() or 0
    account = Account(len(rows), len(held), len(outcomes) - failed, failed, tokens, kept)
    schema = SCHEMA.with_metadata({ACCOUNT_FIELD: json.dumps(asdict(account))})
    sink = io.BytesIO()  # unlike Arrow's, it gives its bytes without a copy
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for start in range(0, max(len(rows), 1), _GROUP_ROWS):
            which = order[start : start + _GROUP_ROWS]
            here = committed_table(layout, places.take(counted[which[which < len(held)]]))
            nowhere = _without_places(outcomes.take(which[which >= len(held)] - len(held)))
            writer.write_table(pa.concat_tables([here, nowhere]).sort_by("row"))
    store.replace(TABLE_KEY, sink.getvalue())
    return account


def _among(rows: npt.NDArray[np.int64], held: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of the rows are among ``held``, which ascends: without a hash table of a million."""
    at = np.searchsorted(held, rows)
    found: npt.NDArray[np.bool_] = at < held.size
    found[found] = held[at[found]] == rows[found]
    return found


def _refuse_unheld(outcomes: pa.Table) -> None:
    claimed = outcomes.filter(pc.equal(outcomes["status"], "committed"))
    for record in claimed.slice(0, 1).to_pylist():
        raise CorruptDump(
            f"row {record['row']} ({record['sample_id']!r}) was reported as committed and no manifest has "
            "it; run the same command again to collect it anew"
        )


def _require_each_once(rows: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(rows != np.arange(rows.size))
    if wrong.size:
        raise IncompleteRun(
            f"row {wrong[0]} is neither committed nor skipped nor failed, or more than one of them; run the same "
            "command again"
        )


def _without_places(outcomes: pa.Table) -> pa.Table:
    nowhere = {f.name: pa.nulls(len(outcomes), f.type) for f in SCHEMA if f.name not in OUTCOMES.names}
    columns = {name: outcomes[name] for name in OUTCOMES.names} | nowhere
    return pa.table([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def count(table: pa.Table) -> Account:
    """The account of a table."""
    counts = {s: pc.sum(pc.equal(table["status"], s)).as_py() or 0 for s in get_args(Status)}
    sums = {name: pc.sum(table[name]).as_py() or 0 for name in ("tokens", "kept")}
    return Account(rows=len(table), **counts, **sums)


def read_table(store: Store) -> pa.Table | None:
    """The table, None while the dump isn't finished.

    Raises:
        CorruptDump: it can't be read.
    """
    try:
        with store.open_read(TABLE_KEY) as file:
            table = pq.read_table(file)
    except FileNotFoundError:
        return None
    except pa.ArrowException as exc:
        raise _corrupt(store, exc) from exc
    # A table without the column is of a dump that has the states of every token.
    return table if "kept" in table.column_names else table.append_column("kept", table["tokens"])


def current_table(store: Store) -> pa.Table | None:
    """The table, None when there is none or when it is older than a manifest: a run went on after it was built.

    Raises:
        CorruptDump: it, or a manifest that it doesn't know, can't be read.
        StorageError: the dump can't be read.
    """
    table = read_table(store)
    if table is None:
        return None
    held = table.filter(pc.equal(table["status"], "committed"))
    rows, shards = held["row"].to_numpy(), held["shard"].to_numpy()
    # A shard that the table doesn't know may be empty, or hold copies that don't count.
    newer = read_places(store, known=frozenset(np.unique(shards).tolist()))
    at = np.searchsorted(rows, newer["row"].to_numpy())
    at[at == rows.size] = 0
    unknown = rows[at] != newer["row"].to_numpy() if rows.size else np.ones(len(newer), np.bool_)
    if unknown.any() or (len(newer) and (shards[at] >= newer["shard"].to_numpy()).any()):
        return None
    return table


def read_account(store: Store) -> Account | None:
    """The account of a finished dump by one small read, None while it isn't finished.

    Raises:
        CorruptDump: it can't be read.
    """
    try:
        with store.open_read(TABLE_KEY) as file:
            metadata = pq.read_schema(file).metadata
        account = json.loads(metadata[ACCOUNT_FIELD])
        return Account(**{"kept": account["tokens"], **account})
    except FileNotFoundError:
        return None
    except (pa.ArrowException, KeyError, TypeError, ValueError) as exc:
        raise _corrupt(store, exc) from exc


def _corrupt(store: Store, exc: Exception) -> CorruptDump:
    return CorruptDump(
        f"{store.where(TABLE_KEY)} can't be read ({exc}). Remove it and run the same command again: it is "
        "built from the manifests"
    )
