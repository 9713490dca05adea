"""``samples.parquet``: one row for each prepared row, where it is or why it isn't there.

It is built at the end from the manifests. Its footer holds the account, so that a complete dump is recognised
by one small read.

    row          int64    prepared row
    sample_id    string
    status       string   committed | skipped | failed
    reason       string   why it was skipped or failed; null otherwise
    tokens       int32    T; this and the following are null unless committed
    shard        int32
    first_slot   int32    first inner chunk along the token axis, inside the shard
    offset       int64    where the sample's bytes start in ``hidden/c/<shard>/0/0``
    array_start  int64    first index along axis 0 of the zarr arrays
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import CorruptDump, IncompleteRun
from storage.files import Store
from storage.layout import Layout
from storage.manifest import Committed, read_manifests

TABLE_KEY = "samples.parquet"
ACCOUNT_FIELD = b"hsdump_account"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("shard", pa.int32()),
        pa.field("first_slot", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("array_start", pa.int64()),
    ]
)
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
    """

    rows: int
    committed: int
    skipped: int
    failed: int
    tokens: int


def committed_table(layout: Layout, committed: Mapping[int, Committed]) -> pa.Table:
    """The committed rows alone, in the table's schema: what an unfinished dump holds."""
    return pa.Table.from_pylist([_committed_record(layout, c) for c in committed.values()], schema=SCHEMA)


def build_table(layout: Layout, committed: Mapping[int, Committed], outcomes: Iterable[Outcome]) -> pa.Table:
    """The table of `TABLE_KEY`; a row that is committed counts as that whatever its outcome says.

    Raises:
        CorruptDump: an outcome says committed and no manifest has that row.
        IncompleteRun: a row between the first and the last has neither.
    """
    records = {row: _committed_record(layout, found) for row, found in committed.items()}
    for outcome in outcomes:
        if outcome.row in records:
            continue
        if outcome.status == "committed":
            raise CorruptDump(
                f"row {outcome.row} ({outcome.sample_id!r}) was reported as committed and no manifest has "
                "it; run the same command again to collect it anew"
            )
        records[outcome.row] = asdict(outcome)
    for expected, row in enumerate(sorted(records)):
        if row != expected:
            raise IncompleteRun(
                f"row {expected} is neither committed nor skipped nor failed; run the same command again"
            )
    ordered = [records[row] for row in sorted(records)]
    table = pa.Table.from_pylist(ordered, schema=SCHEMA)
    return table.replace_schema_metadata({ACCOUNT_FIELD: json.dumps(asdict(count(table)))})


def _committed_record(layout: Layout, found: Committed) -> dict[str, Any]:
    sample = found.sample
    return {
        "row": sample.row,
        "sample_id": sample.sample_id,
        "status": "committed",
        "tokens": sample.tokens,
        "shard": found.shard,
        "first_slot": sample.first_slot,
        "offset": sample.offset,
        "array_start": layout.array_start(found.shard, sample.first_slot),
    }


def count(table: pa.Table) -> Account:
    """The account of a table."""
    status = table["status"].to_pylist()
    tokens = sum(t or 0 for t in table["tokens"].to_pylist())
    counts = {s: status.count(s) for s in ("committed", "skipped", "failed")}
    return Account(rows=len(status), **counts, tokens=tokens)


def write_table(store: Store, table: pa.Table) -> None:
    """Puts the table in place, zstd-compressed."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    store.replace(TABLE_KEY, sink.getvalue().to_pybytes())


def read_table(store: Store) -> pa.Table | None:
    """The table, None while the dump isn't finished.

    Raises:
        CorruptDump: it can't be read.
    """
    try:
        with store.open_read(TABLE_KEY) as file:
            return pq.read_table(file)
    except FileNotFoundError:
        return None
    except pa.ArrowException as exc:
        raise _corrupt(store, exc) from exc


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
    known = dict(zip(held["row"].to_pylist(), held["shard"].to_pylist(), strict=True))
    # A shard that the table doesn't know may be empty, or hold copies that don't count.
    for manifest in read_manifests(store, known=set(known.values())):
        if any(known.get(sample.row, manifest.shard) >= manifest.shard for sample in manifest.samples):
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
        return Account(**json.loads(metadata[ACCOUNT_FIELD]))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, KeyError, TypeError, ValueError) as exc:
        raise _corrupt(store, exc) from exc


def _corrupt(store: Store, exc: Exception) -> CorruptDump:
    return CorruptDump(
        f"{store.where(TABLE_KEY)} can't be read ({exc}). Remove it and run the same command again: it is "
        "built from the manifests"
    )
