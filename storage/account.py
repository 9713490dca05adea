"""Checks across shards: rows = committed + skipped + failed, and the table agrees with the manifests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage.dump import ROOT_KEY, read_header
from storage.errors import CorruptDump
from storage.files import Store
from storage.layout import Layout
from storage.manifest import Committed, Manifest, committed_samples, committed_shards, read_manifest
from storage.prompts.parts import read_prepared
from storage.table import Account, committed_table, count, read_table
from storage.verify import Problem


@dataclass(frozen=True)
class AccountFindings:
    """Whether every row is where the dump says.

    Attributes:
        account: the counts; of an unfinished dump, those of its manifests.
        expected_rows: prepared rows, None where the dump doesn't say.
        states_bytes: committed tokens x bytes a token.
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
    manifests, problems = _manifests(store)
    if expected_rows is None:
        try:
            prepared = read_prepared(store)
            expected_rows = prepared.rows if prepared else None
        except CorruptDump as exc:
            problems.append(Problem(str(exc)))
    committed = committed_samples(manifests)
    table = read_table(store)
    if table is None:
        table = committed_table(layout, committed)
        problems.append(
            Problem(
                f"the dump isn't finished: {len(committed)} of {_known(expected_rows)} rows are committed "
                "and there is no samples.parquet; run the same command again"
            )
        )
    else:
        problems += _check_table(layout, table, manifests)
        problems += _check_rows(table, expected_rows)
    problems += _check_invariant(store, layout)
    account = count(table)
    return AccountFindings(account, expected_rows, account.tokens * layout.bytes_per_token, tuple(problems))


def _manifests(store: Store) -> tuple[list[Manifest], list[Problem]]:
    manifests, problems = [], []
    for shard in committed_shards(store):
        try:
            manifests.append(read_manifest(store, shard))
        except CorruptDump as exc:
            problems.append(Problem(str(exc), shard))
    return manifests, problems


def _check_table(layout: Layout, table: pa.Table, manifests: Iterable[Manifest]) -> list[Problem]:
    """Every committed row must be in the manifest of the shard that the table names, at the same place."""
    held = {(m.shard, s.row): Committed(m.shard, s) for m in manifests for s in m.samples}
    problems = []
    places = committed_table(layout, dict(enumerate(held.values()))).to_pylist()
    by_place: Mapping[tuple[int, int], Any] = {(p["shard"], p["row"]): p for p in places}
    rows = set()
    for record in table.to_pylist():
        if record["status"] != "committed":
            continue
        rows.add(record["row"])
        place = by_place.get((record["shard"], record["row"]))
        if place == record:
            continue
        what = "no manifest has it" if place is None else f"the manifest says {place}"
        problems.append(
            Problem(
                f"samples.parquet has the sample in shard {record['shard']}, but {what}",
                record["shard"],
                record["row"],
                record["sample_id"],
            )
        )
    for (shard, row), found in held.items():
        if row not in rows:
            what = "committed by a manifest, but not committed in samples.parquet; run the same command again"
            problems.append(Problem(what, shard, row, found.sample.sample_id))
    return problems


def _check_rows(table: pa.Table, expected_rows: int | None) -> list[Problem]:
    problems = []
    account = count(table)
    rows = table["row"].to_pylist()
    if account.rows != account.committed + account.skipped + account.failed:
        problems.append(Problem(f"samples.parquet has {account.rows} rows, but its counts are {account}"))
    if rows != list(range(len(rows))):
        problems.append(Problem("samples.parquet doesn't have each row from 0 once, in order"))
    if expected_rows is not None and account.rows != expected_rows:
        problems.append(
            Problem(f"{expected_rows} rows were prepared, samples.parquet accounts for {account.rows}")
        )
    ids = Counter(r["sample_id"] for r in table.to_pylist() if r["status"] == "committed")
    problems += [
        Problem(f"{n} committed samples have this id", sample_id=sample_id)
        for sample_id, n in ids.items()
        if n > 1
    ]
    return problems


def _check_invariant(store: Store, layout: Layout) -> list[Problem]:
    stated = json.loads(store.read(ROOT_KEY))["attributes"].get("bytes_per_token")
    if stated == layout.bytes_per_token:
        return []
    return [
        Problem(
            f"the root says {stated} bytes a token, its layout makes {layout.num_states} states x "
            f"{layout.hidden_size} x {layout.itemsize} = {layout.bytes_per_token}"
        )
    ]


def _known(rows: int | None) -> str:
    return "an unknown number of" if rows is None else str(rows)
