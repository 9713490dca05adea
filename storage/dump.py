"""A dump's root: made once, grown by the coordinator, finished at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage.committed import read_places
from storage.errors import AlreadyExists, CorruptDump, IdentityMismatch, OutputError
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout, State
from storage.manifest import committed_shards
from storage.table import Account, Outcome, outcome_table, write_table
from storage.zarr_metadata import (
    group_metadata,
    hidden_array_metadata,
    scales_array_metadata,
    token_array_metadata,
)

FORMAT = "hsdump"
FORMAT_VERSION = 2
"""The latest. 2 is a dump with the states of some tokens only, or of 8-bit floats; every other one is of version 1."""
ROOT_KEY = "zarr.json"
HIDDEN_KEY = "hidden/zarr.json"


@dataclass(frozen=True)
class DumpHeader:
    """What the root group's attributes say.

    Attributes:
        identity: what the dump's numbers come from.
        layout: geometry.
        versions: version of each package that took part, as recorded.
    """

    identity: Identity
    layout: Layout
    versions: Mapping[str, str]

    @property
    def num_layers(self) -> int | None:
        """N, the model's decoder layers, None where the identity doesn't say."""
        value = self.identity.capture.get("num_layers")
        return None if value is None else int(value)

    @property
    def model_source(self) -> tuple[str, str | None]:
        """Where the model comes from: a folder or a hub id, and the hub's commit.

        Raises:
            CorruptDump: the identity doesn't name one.
        """
        source = self.identity.model.get("source") or self.model_path
        return str(source), self.identity.model.get("revision")

    @property
    def model_path(self) -> str:
        """The folder that describes the model, on the machine that the command ran on.

        Raises:
            CorruptDump: the identity doesn't name one.
        """
        path = self.identity.model.get("path")
        if not path:
            raise CorruptDump("the dump's identity has no model.path; name the model's directory yourself")
        return str(path)

    def resolve(self, state: State) -> State:
        """The name under which a state is stored: boundary N, before the final norm, is ``"final"``."""
        if state == self.num_layers and state not in self.layout.states:
            return "final"
        return state


def create_dump(store: Store, identity: Identity, layout: Layout, versions: Mapping[str, str]) -> None:
    """Makes an empty dump: the root first, which decides between racing creators, then the arrays.

    Raises:
        AlreadyExists: there is a dump; see `read_header` and `check_identity`.
        OutputError: the storage has no put-if-absent.
        StorageError: writing failed.
    """
    attributes = {
        "format": FORMAT,
        "format_version": 1 if layout.keep.everything and not layout.quantised else 2,
        "identity": identity.to_json(),
        "layout": layout.to_json(),
        "states": list(layout.states),
        "element_type": layout.element_type,
        "bytes_per_token": layout.bytes_per_token,
        "versions": dict(versions),
    }
    store.put_if_absent(ROOT_KEY, _json_bytes(group_metadata(attributes)))
    grow(store, 1)


def open_or_create(
    store: Store, identity: Identity, layout: Layout, versions: Mapping[str, str]
) -> DumpHeader:
    """The header of the dump that is there, or of a new one; the same call starts and resumes a run.

    Returns:
        The header as stored: on a resume its layout and versions are those of the first start.

    Raises:
        IdentityMismatch: the dump there is of another run, or its chunks are compressed in another way.
        OutputError, CorruptDump, StorageError: as `create_dump` and `read_header`.
    """
    with contextlib.suppress(AlreadyExists):
        create_dump(store, identity, layout, versions)
    header = read_header(store)
    check_identity(store, header, identity, layout.codec)
    return header


def check_identity(store: Store, header: DumpHeader, identity: Identity, codec: str) -> None:
    """Refuses to mix two runs, or to go on with another codec than the dump has.

    Raises:
        IdentityMismatch: ``identity`` or ``codec`` isn't the dump's; the message lists what differs.
    """
    differences = identity.differences(header.identity)
    if differences:
        raise IdentityMismatch(
            f"{store.url} holds the dump of another run; name another output, or use that run's settings:\n  "
            + "\n  ".join(differences)
        )
    if codec != header.layout.codec:
        raise IdentityMismatch(
            f"{store.url} holds a dump with the codec {header.layout.codec}, and this run asks for {codec}; a dump has "
            f"one: set writers.codec to {header.layout.codec}, or name another output"
        )


def read_header(store: Store) -> DumpHeader:
    """What the dump's root says.

    Raises:
        OutputError: there is no dump here, or one of a newer version; the message says which it needs.
        CorruptDump: the root isn't readable.
    """
    try:
        attributes = json.loads(store.read(ROOT_KEY))["attributes"]
        if attributes["format"] != FORMAT:
            raise ValueError(f"its format is {attributes['format']!r}")
        version = int(attributes["format_version"])
        if version > FORMAT_VERSION:
            needed = attributes.get("versions", {}).get("hsdump", "a later version")
            raise OutputError(
                f"{store.url} has format version {version}, and this package reads versions up to "
                f"{FORMAT_VERSION}; it was written by hsdump {needed}: install hsdump {needed} or newer"
            )
        if version < 1:
            raise ValueError(f"its format version is {version}")
        return DumpHeader(
            identity=Identity.from_json(attributes["identity"]),
            layout=Layout.from_json(attributes["layout"]),
            versions=dict(attributes["versions"]),
        )
    except FileNotFoundError:
        raise OutputError(f"{store.url}: there is no dump here (no {ROOT_KEY}); check the path") from None
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDump(
            f"{store.where(ROOT_KEY)} isn't the root of a readable dump ({type(exc).__name__}: {exc}); "
            "restore it from a copy, or check the path"
        ) from exc


def grow(store: Store, shards: int) -> None:
    """Makes the arrays' shapes reach at least ``shards`` shards. One process calls it, the coordinator.

    Raises:
        StorageError: writing failed.
    """
    layout = read_header(store).layout
    if _capacity(store, layout) < shards:
        _write_arrays(store, layout, shards)


def finalise(store: Store, outcomes: pa.Table | Iterable[Outcome]) -> Account:
    """Ends a run: ``samples.parquet``, arrays of the exact shape, and no half-written objects left.

    It may be called again after more was committed. No writer may be alive.

    Args:
        store: the dump.
        outcomes: every prepared row that isn't committed, as a table of `storage.table.OUTCOMES` or, where they
            are few, one by one; committed ones come from the manifests.

    Returns:
        The counts.

    Raises:
        IncompleteRun: a row has neither a manifest nor an outcome.
        CorruptDump: a manifest isn't readable.
        StorageError: writing failed.
    """
    layout = read_header(store).layout
    elsewhere = outcomes if isinstance(outcomes, pa.Table) else outcome_table(outcomes)
    places = read_places(store)
    _write_arrays(store, layout, max(committed_shards(store), default=0) + 1)
    store.remove_sinks()
    return write_table(store, layout, places, elsewhere)


def _capacity(store: Store, layout: Layout) -> int:
    try:
        shape = json.loads(store.read(HIDDEN_KEY))["shape"]
        return int(shape[0]) // layout.shard_rows
    except (FileNotFoundError, KeyError, TypeError, ValueError, IndexError):
        return 0  # a creator that died before it wrote the arrays: they follow from the root


def _write_arrays(store: Store, layout: Layout, shards: int) -> None:
    store.replace("tokens/zarr.json", _json_bytes(group_metadata({})))
    for column in layout.token_columns:
        store.replace(f"tokens/{column}/zarr.json", _json_bytes(token_array_metadata(layout, column, shards)))
    if layout.quantised:
        store.replace("scales/zarr.json", _json_bytes(scales_array_metadata(layout, shards)))
    store.replace(HIDDEN_KEY, _json_bytes(hidden_array_metadata(layout, shards)))


def _json_bytes(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=2).encode()
