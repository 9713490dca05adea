"""Carries an export out: begins it, writes one part, and ends it with the index files. Every file appears whole."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from storage.errors import AlreadyExists, ConfigError, CorruptDump, OutputError, StorageFull
from storage.export.draft_config import ServingIds, draft_config, vocab_size_of
from storage.export.form import TRAIN, ExportSample, File, Selection
from storage.export.formats import FORMATS
from storage.export.plan import RECORD_KEY, ExportItem, ExportPlan
from storage.export.vocabulary import Counts, add_counts, count_supervised, coverage, vocabulary_map
from storage.files import Store
from storage.reader import Dump, open_dump

COMPLETE = "complete"


@dataclass(frozen=True)
class PartDone:
    """What became of one part.

    Attributes:
        split: the part's.
        number: the part's.
        written: files that were written.
        found: files that were there already.
        counts: supervised tokens by id, int64.
    """

    split: str
    number: int
    written: int
    found: int
    counts: Counts


@dataclass(frozen=True)
class Summary:
    """What the end of an export says.

    Attributes:
        written: files of samples that were written.
        found: files of samples that were there already.
        supervised: supervised tokens of the training split.
        coverage: share of them that the draft vocabulary holds; None without one.
    """

    written: int
    found: int
    supervised: int
    coverage: float | None


class DumpSource:
    """Reads samples of a dump as formats want them."""

    def __init__(self, dump: Dump, selection: Selection) -> None:
        self._dump, self._selection = dump, selection

    def sample(self, number: int) -> ExportSample:
        """See `storage.export.form.Source`."""
        sample = self._dump[number]
        stacked = sample.stack(self._selection.states)
        input_ids, loss_mask = self.columns(number)
        return ExportSample(sample.sample_id, input_ids, loss_mask, stacked[:, :-1], stacked[:, -1])

    def columns(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `storage.export.form.Source`."""
        input_ids, loss_mask, _ = self._dump[number].columns()
        return input_ids, loss_mask.to(torch.int64)


def start(plan: ExportPlan) -> None:
    """Writes the record of an export, or finds the one that this one goes on with.

    Raises:
        OutputError: another export or other files are there, or the destination is in the dump.
        StorageFull: the disk hasn't the room.
        StorageError: the destination can't be written to.
    """
    dest = plan.dest
    if dest.url == plan.dump.url or dest.url.startswith(plan.dump.url + "/"):
        raise OutputError(f"{dest.url}: is inside the dump; export to a folder of its own")
    record = plan.record()
    found = _read_record(dest)
    if found is not None:
        differences = [
            f"{name}: {record[name]!r} here, {found.get(name)!r} there"
            for name in record
            if found.get(name) != record[name]
        ]
        if differences:
            raise OutputError(
                f"{dest.url} holds another export; name another folder, or remove that one. It differs in\n  "
                + "\n  ".join(differences)
            )
        return
    if dest.list(""):
        raise OutputError(f"{dest.url} isn't empty and holds no export; name a folder of its own")
    free_bytes = dest.free_bytes()
    if free_bytes is not None and free_bytes < plan.bytes:
        raise StorageFull(
            f"{dest.url}: the export takes about {plan.bytes:,} bytes and {free_bytes:,} are free; make room, take "
            "fewer samples (--max-samples), or stream the dump into training without an export (docs/training.md)"
        )
    dest.replace(RECORD_KEY, _json({**record, COMPLETE: False}))


def run_item(item: ExportItem) -> PartDone:
    """Writes the files of one part that aren't there yet. Picklable work for any process.

    Raises:
        OutputError: this machine sees another destination.
        BadStates: a value that the format can't hold.
        CorruptDump, StorageError: reading or writing failed.
    """
    dest = Store(item.dest_url)
    found_record = _read_record(dest)
    if found_record is None or found_record.get("samples") != item.nonce:
        raise OutputError(
            f"{item.dest_url}: this machine doesn't see the export that was begun there; export to a shared file "
            "system or a bucket, or leave --address out"
        )
    source = DumpSource(open_dump(item.dump_url), item.selection)
    written = found = 0
    for file in FORMATS[item.form].files(item.part, source):
        if dest.exists(file.key):
            found += 1
        else:
            _write(dest, file)
            written += 1
    counts: Counts = np.zeros(0, np.int64)
    for number in item.part.numbers:
        counts = add_counts(counts, count_supervised(*source.columns(number)))
    return PartDone(item.part.split, item.part.number, written, found, counts)


def finish(plan: ExportPlan, done: Iterable[PartDone], serving: ServingIds) -> Summary:
    """Writes what spans all samples: index files, vocabulary, the drafter's config, the list of samples, the record.

    Args:
        plan: the export.
        done: of every part.
        serving: layer ids for the drafter's config.

    Raises:
        ConfigError: the vocabulary's sizes don't fit.
        CorruptDump: parts are missing.
        StorageError: writing failed.
    """
    results = list(done)
    if {(d.split, d.number) for d in results} != {(p.split, p.number) for p in plan.parts}:
        raise CorruptDump(f"{plan.dest.url}: parts of the export are missing; run it again")
    counts: Counts = np.zeros(0, np.int64)
    for result in results:
        if result.split == TRAIN:
            counts = add_counts(counts, result.counts)
    d2t, t2d = _maps(plan, counts)
    files = [
        file
        for split in plan.splits
        for file in plan.form.index_files(split, plan.split_parts(split), plan.about)
    ]
    files += plan.form.vocabulary_files(counts, d2t, t2d)
    for file in files:
        plan.dest.replace(file.key, b"".join(bytes(piece) for piece in file.pieces()))
    plan.dest.replace("token_counts.parquet", _token_counts(counts))
    plan.dest.replace("samples.parquet", _sample_list(plan))
    config = draft_config(
        plan.target_config,
        plan.dump.layout.hidden_size,
        plan.dump.layout.dtype,
        serving,
        plan.options.draft_vocab_size,
    )
    plan.dest.replace("draft_config.json", _json(config))
    plan.dest.remove_sinks()  # of workers that were killed; no other is alive
    plan.dest.replace(RECORD_KEY, _json({**plan.record(), COMPLETE: True}))
    return Summary(
        sum(d.written for d in results),
        sum(d.found for d in results),
        int(counts.sum()),
        None if t2d is None else coverage(counts, t2d),
    )


def _maps(plan: ExportPlan, counts: Counts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    size = plan.options.draft_vocab_size
    if size is None:
        return None, None
    vocab_size = plan.options.vocab_size or vocab_size_of(plan.target_config)
    if vocab_size is None:
        raise ConfigError(
            "--draft-vocab-size needs the target's vocabulary, and its config.json isn't where the dump says; give "
            "--vocab-size"
        )
    return vocabulary_map(counts, size, vocab_size)


def _write(dest: Store, file: File) -> None:
    """Puts a file piece by piece; somebody who was faster wrote the same."""
    sink = dest.object_sink(file.key)
    offset = 0
    try:
        for piece in file.pieces():
            data = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
            sink.write_at(offset, data)
            offset += data.size
        sink.commit(offset)
    except AlreadyExists:
        pass
    except BaseException:
        sink.abort()
        raise


def _read_record(dest: Store) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(dest.read(RECORD_KEY))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(
            f"{dest.where(RECORD_KEY)} isn't an export's record ({error}); name another folder"
        ) from error
    return record


def _token_counts(counts: Counts) -> bytes:
    ids = counts.nonzero()[0]
    return _parquet(pa.table({"token_id": ids, "count": counts[ids]}))


def _sample_list(plan: ExportPlan) -> bytes:
    """Which sample is where: ``place`` counts within the split, as file names and index rows do."""
    places = [(part.split, part.first + i, n) for part in plan.parts for i, n in enumerate(part.numbers)]
    numbers: Sequence[int] = [n for _, _, n in places]
    return _parquet(
        pa.table(
            {
                "split": [split for split, _, _ in places],
                "place": [place for _, place, _ in places],
                "row": plan.dump.places.row[numbers],
                "sample_id": [plan.dump[n].sample_id for n in numbers],
                "tokens": plan.dump.places.tokens[numbers],
            }
        )
    )


def _parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=2).encode()
