"""Checks across shards: rows = committed + skipped + failed, and the table agrees with the manifests."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.committed import concat, counting, manifest_places
from storage.dump import ROOT_KEY, read_header
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import Layout
from storage.manifest import committed_shards, read_manifest
from storage.prompts.parts import read_prepared
from storage.table import Account, committed_table, count, read_table
from storage.verify import Problem

_COMPARED = ("sample_id", "tokens", "kept", "first_slot", "offset", "array_start")
_THERE = "_there"


@dataclass(frozen=True)
class AccountFindings:
    """Whether every row is where the dump says.

    Attributes:
        account: the counts; of an unfinished dump, those of its manifests.
        expected_rows: prepared rows, None where the dump doesn't say.
        states_bytes: stored tokens of the committed samples x bytes a token.
        problems: what is wrong.
    """

    account: Account
    expected_rows: int | None
    states_bytes: int
    problems: tuple[Problem, ...]


def check_account(store: Store, expected_rows: int | None = None) -> AccountFindings:
    """Compares prepared rows, ``samples.parquet`` and the manifests.

    Args:
        store: the dump.
        expected_rows: prepared rows; None takes ``rows`` of ``prompts/_prepared.json``.

    Raises:
        OutputError: there is no dump.
        StorageError: the storage fails, or samples.parquet can't be read; all else is in the findings.
    """
    layout = read_header(store).layout
    held, problems = _read_places(store)
    if expected_rows is None:
        try:
            prepared = read_prepared(store)
            expected_rows = prepared.rows if prepared else None
        except CorruptDump as exc:
            problems.append(Problem(str(exc)))
    table = read_table(store)
    if table is None:
        table = committed_table(layout, counting(held))
        problems.append(
            Problem(
                f"the dump isn't finished: {len(table)} of {_known(expected_rows)} rows are committed "
                "and there is no samples.parquet; run the same command again"
            )
        )
    else:
        problems += _check_table(layout, table, held)
        problems += _check_rows(table, expected_rows)
    problems += _check_invariant(store, layout)
    account = count(table)
    return AccountFindings(account, expected_rows, account.kept * layout.bytes_per_token, tuple(problems))


def _read_places(store: Store) -> tuple[pa.Table, list[Problem]]:
    """`PLACES` of every readable manifest, and what is wrong with the others."""
    places, problems = [], []
    for shard in committed_shards(store):
        try:
            places.append(manifest_places(read_manifest(store, shard)))
        except CorruptDump as exc:
            problems.append(Problem(str(exc), shard))
    return concat(places), problems


def _check_table(layout: Layout, table: pa.Table, held: pa.Table) -> list[Problem]:
    """Every committed row must be in the manifest of the shard that the table names, at the same place."""
    listed = table.filter(pc.equal(table["status"], "committed"))
    there = committed_table(layout, held)
    both = listed.join(there, keys=["shard", "row"], join_type="left outer", right_suffix=_THERE)
    same = functools.reduce(
        pc.and_, (pc.fill_null(pc.equal(both[n], both[n + _THERE]), False) for n in _COMPARED)
    )
    differing = both.filter(pc.invert(same)).sort_by("row")
    problems = [_misplaced(record) for record in differing.to_pylist()]
    unlisted = held.filter(pc.invert(pc.is_in(held["row"], listed["row"].combine_chunks())))
    what = "committed by a manifest, but not committed in samples.parquet; run the same command again"
    problems += [Problem(what, p["shard"], p["row"], p["sample_id"]) for p in unlisted.to_pylist()]
    return problems


def _misplaced(record: Mapping[str, Any]) -> Problem:
    """A row of the table beside the manifest's place for it, whose columns end in `_THERE`."""
    if record["sample_id" + _THERE] is None:
        what = "no manifest has it"
    else:
        what = f"the manifest says { {n: record[n + _THERE] for n in _COMPARED} }"
    return Problem(
        f"samples.parquet has the sample in shard {record['shard']}, but {what}",
        record["shard"],
        record["row"],
        record["sample_id"],
    )


def _check_rows(table: pa.Table, expected_rows: int | None) -> list[Problem]:
    problems = []
    account = count(table)
    if account.rows != account.committed + account.skipped + account.failed:
        problems.append(Problem(f"samples.parquet has {account.rows} rows, but its counts are {account}"))
    if not np.array_equal(table["row"].to_numpy(), np.arange(len(table))):
        problems.append(Problem("samples.parquet doesn't have each row from 0 once, in order"))
    if expected_rows is not None and account.rows != expected_rows:
        problems.append(
            Problem(f"{expected_rows} rows were prepared, samples.parquet accounts for {account.rows}")
        )
    committed = table.filter(pc.equal(table["status"], "committed"))
    ids = committed.group_by("sample_id").aggregate([("row", "count")])
    problems += [
        Problem(f"{record['row_count']} committed samples have this id", sample_id=record["sample_id"])
        for record in ids.filter(pc.greater(ids["row_count"], 1)).to_pylist()
    ]
    return problems


def _check_invariant(store: Store, layout: Layout) -> list[Problem]:
    stated = json.loads(store.read(ROOT_KEY))["attributes"].get("bytes_per_token")
    if stated == layout.bytes_per_token:
        return []
    return [
        Problem(
            f"the root says {stated} bytes a token, its layout makes {layout.num_states} states x "
            f"({layout.hidden_size} x {layout.itemsize} + {layout.scale_bytes}) = {layout.bytes_per_token}"
        )
    ]


def _known(rows: int | None) -> str:
    return "an unknown number of" if rows is None else str(rows)
