"""What an export will write: samples by split and part, sizes, and the record by which it is taken up again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.errors import ConfigError, OutputError
from storage.export.form import EVAL, TRAIN, About, ExportFormat, Part, Selection
from storage.export.selection import select
from storage.files import Store
from storage.reader import Dump, open_dump

RECORD_KEY = "export.json"
RECORD_VERSION = 1
_TOKEN_BYTES = 16
"""Token id and mask of a token, int64 each; formats with narrower ones need less."""
_FILE_BYTES = 4096
"""Headers and the last block of a file."""


@dataclass(frozen=True)
class ExportOptions:
    """What the user chose.

    Attributes:
        boundaries: which of the dump's; None for the trainer's usual ones.
        eval_fraction: share of the samples that goes to the split `EVAL`, chosen by a hash of their ids, so that
            a sample stays in its split whatever else is in the dump.
        max_samples: the first so many samples; None for all.
        draft_vocab_size: make d2t and t2d for this many tokens.
        vocab_size: of the target; None takes it from the model's config.json.

    Raises:
        ConfigError: a value is out of its range.
    """

    boundaries: tuple[int, ...] | None = None
    eval_fraction: float = 0.0
    max_samples: int | None = None
    draft_vocab_size: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"--split {self.eval_fraction}: give a share from 0 up to below 1")
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"--max-samples {self.max_samples}: give 1 or more")


@dataclass(frozen=True)
class ExportItem:
    """One part to write; picklable.

    Attributes:
        dump_url: the dump.
        dest_url: where to.
        form: name of the format.
        selection: the states.
        part: the samples.
        nonce: what `RECORD_KEY` at the destination says, so that a node that sees another place notices.
    """

    dump_url: str
    dest_url: str
    form: str
    selection: Selection
    part: Part
    nonce: str


@dataclass(frozen=True)
class ExportPlan:
    """All of an export.

    Attributes:
        dump: the dump.
        dest: where to.
        form: the format.
        options: what the user chose.
        selection: the states.
        parts: of all splits.
        target_config: the target's config.json; empty where it isn't at hand.
    """

    dump: Dump
    dest: Store
    form: ExportFormat
    options: ExportOptions
    selection: Selection
    parts: tuple[Part, ...]
    target_config: Mapping[str, Any] = field(default_factory=dict)

    def split_parts(self, split: str) -> list[Part]:
        """The parts of one split, in order."""
        return [part for part in self.parts if part.split == split]

    @property
    def splits(self) -> list[str]:
        """Splits that have samples."""
        return [split for split in (TRAIN, EVAL) if self.split_parts(split)]

    @property
    def samples(self) -> int:
        """Samples in all splits."""
        return sum(len(part.numbers) for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens in all splits."""
        return sum(sum(part.tokens) for part in self.parts)

    @property
    def files(self) -> int:
        """Files of samples."""
        return self.samples if self.form.file_a_sample else len(self.parts)

    def part_bytes(self, part: Part) -> int:
        """About what a part takes on the disk."""
        files = len(part.numbers) if self.form.file_a_sample else 1
        return sum(part.tokens) * (self.state_bytes + _TOKEN_BYTES) + files * _FILE_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of a token's states."""
        return len(self.selection.states) * self.dump.layout.computed.row_bytes

    @property
    def bytes(self) -> int:
        """About what the export takes on the disk."""
        return sum(self.part_bytes(part) for part in self.parts)

    @property
    def about(self) -> About:
        """For index files."""
        model = self.dump.identity.model
        name = str(model.get("source") or model.get("path") or "")
        return About(name, self.dump.layout, self.selection)

    def items(self) -> list[ExportItem]:
        """One for each part."""
        nonce = self.record()["samples"]
        return [
            ExportItem(self.dump.url, self.dest.url, self.form.name, self.selection, part, nonce)
            for part in self.parts
        ]

    def record(self) -> dict[str, Any]:
        """What makes two exports the same one: which samples and states, in which files."""
        numbers = np.array(
            [(n, *_place(self.dump, n)) for part in self.parts for n in part.numbers], np.int64
        )
        splits = {split: sum(len(part.numbers) for part in self.split_parts(split)) for split in self.splits}
        digest = hashlib.sha256(numbers.tobytes() + repr([len(p.numbers) for p in self.parts]).encode())
        return {
            "version": RECORD_VERSION,
            "format": self.form.name,
            "dump": self.dump.url,
            "boundaries": list(self.selection.boundaries),
            "final": self.selection.final,
            "trainer_layer_ids": self.form.layer_ids(self.selection.boundaries),
            "splits": splits,
            "draft_vocab_size": self.options.draft_vocab_size,
            "samples": digest.hexdigest(),
        }


def plan_export(
    dump_url: str,
    form: ExportFormat,
    dest_url: str,
    options: ExportOptions,
    target_config: Mapping[str, Any] | None = None,
) -> ExportPlan:
    """Decides everything before anything is written.

    Raises:
        ConfigError: an option that the trainer or the dump can't follow.
        OutputError: the dump lacks what the trainer needs, or has no samples; the message names the run's option.
        CorruptDump, StorageError: the dump can't be read.
    """
    dump = open_dump(dump_url)
    selection = select(dump.header, form, options.boundaries)
    count = len(dump) if options.max_samples is None else min(len(dump), options.max_samples)
    if not count:
        raise OutputError(f"{dump.url} has no committed sample to export")
    names: dict[str, list[int]] = {TRAIN: [], EVAL: []}
    for number in range(count):
        names[split_of(dump[number].sample_id, options.eval_fraction)].append(number)
    if not names[TRAIN]:
        raise ConfigError(
            f"--split {options.eval_fraction}: all of the {count} samples fall into the held-out part; give a "
            "smaller share"
        )
    token_bytes = len(selection.states) * dump.layout.computed.row_bytes
    parts = [
        part
        for split in (TRAIN, EVAL)
        for part in cut(split, names[split], dump.places.tokens.tolist(), token_bytes, form.part_bytes)
    ]
    return ExportPlan(dump, Store(dest_url), form, options, selection, tuple(parts), target_config or {})


def split_of(sample_id: str, eval_fraction: float) -> str:
    """The split of a sample: it depends on nothing but its id."""
    digest = hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return EVAL if int.from_bytes(digest, "big") < eval_fraction * 2**64 else TRAIN


def cut(
    split: str, numbers: Sequence[int], tokens: Sequence[int], token_bytes: int, part_bytes: int
) -> list[Part]:
    """Cuts a split into parts of about ``part_bytes``, each of at least one sample.

    Args:
        split: its name.
        numbers: its samples.
        tokens: T of every sample of the dump.
        token_bytes: bytes of a token's states.
        part_bytes: bytes at which a part ends.
    """
    groups: list[list[int]] = []
    filled = part_bytes
    for number in numbers:
        if filled >= part_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += tokens[number] * token_bytes
    parts, first = [], 0
    for k, group in enumerate(groups):
        parts.append(Part(split, k, len(groups), first, tuple(group), tuple(tokens[n] for n in group)))
        first += len(group)
    return parts


def _place(dump: Dump, number: int) -> tuple[int, int, int, int]:
    places = dump.places
    return (
        int(places.row[number]),
        int(places.tokens[number]),
        int(places.shard[number]),
        int(places.offset[number]),
    )
