"""Checks that shards hold what their manifests say: every committed byte against its hash, every number sane.

Work falls into one picklable item a shard; `storage.account` looks across shards. Findings are data: who
prints them decides how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.dump import read_header
from storage.encoded import Entries, read_index
from storage.errors import CorruptDump, OutputError
from storage.files import Store
from storage.layout import (
    SCALE_TYPE,
    TOKEN_COLUMNS,
    Layout,
    ShardIndex,
    hidden_key,
    scales_key,
    token_key,
)
from storage.manifest import (
    Manifest,
    ManifestObject,
    ManifestSample,
    hidden_digest,
    read_manifest,
)
from storage.verify_columns import wrong_columns
from storage.verify_items import VerifyItem, work_items
from storage.verify_states import SeenState, StateReader
from storage.whole_prompts import WholePrompts

__all__ = ["Problem", "ShardFindings", "VerifyItem", "run_item", "work_items"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: what, where and with which value.
        shard: shard it is in, None for problems of the whole dump.
        row: prepared row of the sample that is affected, None for problems of a whole object.
        sample_id: its id.
    """

    what: str
    shard: int | None = None
    row: int | None = None
    sample_id: str | None = None


@dataclass(frozen=True)
class ShardFindings:
    """What the check of one shard found; no problems means all its bytes are good.

    Attributes:
        shard: its number.
        samples: samples whose states were read.
        tokens: their tokens.
        kept: of these, those whose states are stored.
        bytes: bytes of states that were read and hashed, padding included.
        problems: what is wrong; each affected sample has a problem of its own.
    """

    shard: int
    samples: int
    tokens: int
    kept: int
    bytes: int
    problems: tuple[Problem, ...]


@dataclass
class _Check:
    """The check of one shard while it goes on."""

    store: Store
    layout: Layout
    manifest: Manifest
    chosen: Sequence[ManifestSample]
    entries: Entries | None = None
    scales: npt.NDArray[np.float32] | None = None
    problems: list[Problem] = field(default_factory=list)
    read_bytes: int = 0

    def say(self, what: str, sample: ManifestSample | None = None) -> None:
        row, sample_id = (sample.row, sample.sample_id) if sample else (None, None)
        self.problems.append(Problem(what, self.manifest.shard, row, sample_id))

    def say_all(self, what: str) -> None:
        for sample in self.manifest.samples:
            self.say(what, sample)


def run_item(item: VerifyItem) -> ShardFindings:
    """Checks one shard, reading it once in small pieces, from the disk itself rather than from the page cache.

    Raises:
        OutputError: the dump can't be seen from here.
        StorageError: the storage fails; what is wrong with the dump itself is in the findings.
    """
    store = Store(item.dump_url, page_cache=False)
    layout = read_header(store).layout
    try:
        manifest = read_manifest(store, item.shard)
    except (CorruptDump, FileNotFoundError) as exc:
        return ShardFindings(item.shard, 0, 0, 0, 0, (Problem(str(exc), item.shard),))
    samples = [s for s in manifest.samples if item.rows is None or s.row in item.rows]
    check = _Check(store, layout, manifest, samples)
    if manifest.layout != layout:
        check.say_all(f"the manifest's layout {manifest.layout} isn't the dump's {layout}")
    else:
        _check_states(check)
        _check_columns(check)
    tokens, kept = sum(s.tokens for s in samples), sum(s.kept for s in samples)
    return ShardFindings(item.shard, len(samples), tokens, kept, check.read_bytes, tuple(check.problems))


def _object(check: _Check, key: str, geometry_bytes: int) -> ManifestObject | None:
    """The manifest's entry of an object whose presence and size were checked; None when it can't be read."""
    entry = next((o for o in check.manifest.objects if o.key == key), None)
    if entry is None:
        check.say_all(f"the manifest doesn't list {key}")
        return None
    if entry.bytes < geometry_bytes:
        check.say(f"{key}: the manifest says {entry.bytes} bytes, its samples take {geometry_bytes}")
    size = check.store.size(key)
    if size is None:
        check.say_all(f"{key} is missing")
        return None
    if size != entry.bytes:
        check.say(f"{key} has {size} bytes, its manifest says {entry.bytes}")
    return entry


def _check_states(check: _Check) -> None:
    layout, samples = check.layout, check.manifest.samples
    key = hidden_key(check.manifest.shard)
    body = 0
    if layout.codec == "none":
        body = max((s.offset + layout.sample_bytes(s.kept) for s in samples), default=0)
    entry = _object(check, key, body + layout.index_bytes)
    if entry is None:
        return
    try:
        index = _expected_index(check)
    except CorruptDump as exc:
        check.say_all(str(exc))
        return
    footer = index.to_bytes()
    if hidden_digest(samples, footer) != entry.xxh3:
        check.say_all(
            "the manifest's hash of the states doesn't follow from its samples: the manifest is damaged"
        )
    _check_index(check, key, index)
    if layout.quantised and not _read_scales(check):
        return
    reader = StateReader(check.store, layout, check.manifest.shard, check.entries)
    for sample, k, seen in reader.look(check.chosen):
        _check_state(check, sample, k, seen)


def _read_scales(check: _Check) -> bool:
    """Reads the scales of a shard, [S, K]; whether they are there."""
    layout, key = check.layout, scales_key(check.manifest.shard)
    shape = (layout.shard_rows, layout.num_states)
    data = _whole_object(check, key, layout.shard_rows * layout.num_states * layout.scale_bytes)
    if data is not None:
        check.scales = np.frombuffer(data, SCALE_TYPE).reshape(shape)
    return data is not None


def _whole_object(check: _Check, key: str, size: int) -> bytes | None:
    """A small object of a known size, held against its hash; None when it can't be read."""
    entry = _object(check, key, size)
    if entry is None:
        return None
    data = check.store.read(key)
    found = xxhash.xxh3_64_hexdigest(data)
    if found != entry.xxh3:
        check.say(f"{key}: xxh3 is {found}, its manifest says {entry.xxh3}")
    return data[:size] + bytes(max(size - len(data), 0))


def _expected_index(check: _Check) -> ShardIndex:
    """The index that follows from the manifest, or, of compressed chunks, the part of it that it speaks of.

    Raises:
        CorruptDump: chunks are compressed and the index is damaged.
    """
    layout, index = check.layout, ShardIndex(check.layout)
    if layout.codec != "none":
        check.entries = read_index(check.store, layout, check.manifest.shard)
    for sample in check.manifest.samples:
        slots = layout.slots(sample.kept)
        if check.entries is None:
            index.add(sample.first_slot, slots, sample.offset)
        else:
            index.add_chunks(sample.first_slot, check.entries[sample.first_slot :][:slots])
    return index


def _check_index(check: _Check, key: str, expected: ShardIndex) -> None:
    """Compares the index that zarr readers use with the one that follows from the manifest."""
    size = check.store.size(key) or 0
    length = check.layout.index_bytes
    footer = check.store.read_range(key, size - length, length) if size >= length else b""
    if footer == expected.to_bytes():
        return
    wrong = list(check.manifest.samples)
    if footer:
        entries = np.frombuffer(footer[:-4], "<u8").reshape(expected.entries().shape)
        differs = np.any(entries != expected.entries(), axis=(1, 2))
        slots = check.layout.slots
        # Zarr readers refuse an index whose checksum fails, so a wrong entry or checksum hits every sample;
        # those whose own entries differ are read from the wrong place even without the check.
        wrong = [s for s in wrong if differs[s.first_slot : s.first_slot + slots(s.kept)].any()] or wrong
    for sample in check.manifest.samples:
        own = "its entries differ" if sample in wrong else "its entries are good, the checksum isn't"
        check.say(f"the index of {key} is damaged ({own}): zarr readers can't read the sample", sample)


def _check_state(check: _Check, sample: ManifestSample, k: int, seen: SeenState) -> None:
    state = check.layout.states[k]
    check.read_bytes += seen.bytes
    if seen.error is not None:
        check.say(f"state {state}: {seen.error}", sample)
        return
    if check.scales is not None:
        start = sample.first_slot * check.layout.chunk_rows
        scales = np.ascontiguousarray(check.scales[start : start + sample.kept, k])
        seen.digest.update(scales.tobytes())
        if not (np.isfinite(scales) & (scales > 0)).all():
            check.say(f"state {state}: a scale isn't a positive number", sample)
    found = seen.digest.hexdigest()
    if found != sample.xxh3[k]:
        check.say(f"state {state}: xxh3 is {found}, the manifest says {sample.xxh3[k]}", sample)
    if seen.bad_rows:
        count, first = len(seen.bad_rows), seen.bad_rows[0]
        check.say(f"state {state}: not finite at {count} tokens, first at token {first}", sample)
    if seen.largest == 0:
        check.say(f"state {state}: all zero", sample)


def _check_columns(check: _Check) -> None:
    layout = check.layout
    columns: dict[str, npt.NDArray[Any]] = {}
    for column, dtype in layout.token_columns.items():
        key = token_key(column, check.manifest.shard)
        data = _whole_object(check, key, layout.shard_rows * np.dtype(dtype).itemsize)
        if data is None:
            return
        columns[column] = np.frombuffer(data, dtype)
    prompts = WholePrompts(check.store)
    for sample in check.manifest.samples:
        start = sample.first_slot * layout.chunk_rows
        stored = whole = {name: values[start : start + sample.kept] for name, values in columns.items()}
        try:
            if not layout.keep.everything:
                whole = dict(zip(TOKEN_COLUMNS, prompts.of(sample.row), strict=True))
            wrong = wrong_columns(layout, sample, stored, whole)
        except (CorruptDump, OutputError, IndexError) as exc:
            wrong = str(exc)
        if wrong:
            check.say(wrong, sample)
