"""What to prepare, what came of it, and the records between the two. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.urls import shown_url

MaskPolicy = Literal["assistant", "last_turn", "split_turns", "all", "markers"]
FileFormat = Literal["auto", "jsonl", "parquet"]


@dataclass(frozen=True)
class LossMask:
    """Which tokens are supervised.

    Attributes:
        policy: ``assistant``: every assistant turn; ``last_turn``: the last one; ``split_turns``: one sample
            a turn, each with its last turn supervised; ``all``: every token; ``markers``: what stands between
            two strings of the rendered text.
        start: markers only: text that a supervised stretch follows; not supervised itself.
        end: markers only: text that ends it; supervised.
    """

    policy: MaskPolicy = "assistant"
    start: str = ""
    end: str = ""

    def __post_init__(self) -> None:
        if (self.policy == "markers") != bool(self.start and self.end):
            raise ValueError(
                f"loss_mask {self.policy!r} with start {self.start!r} and end {self.end!r}: both strings "
                "belong to the policy `markers`, and only to it"
            )


@dataclass(frozen=True)
class PromptSpec:
    """The prompt file and how it becomes token ids.

    Attributes:
        url: JSONL (also compressed) or Parquet; any fsspec URL.
        tokenizer_path: local folder or hub id that transformers loads the tokenizer from.
        max_tokens: longest prepared row, in tokens.
        format: ``auto`` goes by the file's name.
        over_long: a longer row is skipped, or stops the preparation. It is never cut.
        loss_mask: which tokens are supervised.
        chat_template: Jinja text that replaces the tokenizer's own template.
        trust_remote_code: run Python code that comes with the tokenizer.
        revision: hub revision of the tokenizer.
        limit: take only the first so many rows of the file.
        vocab_size: rows of the model's embedding; ids of ``input_ids`` rows must be below it. None: the
            tokenizer's own size.
    """

    url: str
    tokenizer_path: str
    max_tokens: int
    format: FileFormat = "auto"
    over_long: Literal["skip", "fail"] = "skip"
    loss_mask: LossMask = LossMask()
    chat_template: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    limit: int | None = None
    vocab_size: int | None = None

    @property
    def shown_url(self) -> str:
        """The URL as it may be logged and stored: without credentials."""
        return shown_url(self.url)


@dataclass(frozen=True)
class Rejection:
    """Why a row gives no sample.

    Attributes:
        kind: short class of the reason, by which rows are counted.
        reason: one line for a person.
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Tokenised:
    """One sample that a row gave, or why it gave none.

    Attributes:
        turn: number of the assistant turn, from 1, under ``split_turns``; else None.
        token_ids: int32 [T].
        loss_mask: uint8 [T], 1 where supervised.
        rejection: set when there is no sample; the arrays are then empty.
    """

    turn: int | None
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    rejection: Rejection | None = None


@dataclass(frozen=True)
class RowResult:
    """What one row of the file gave, before ids were compared.

    Attributes:
        source_row: row of the file, from 0.
        own_id: the row's ``id`` or ``conversation_id``; None when it has none.
        digest: xxh3-128 of its canonical content, hexadecimal.
        samples: at least one.
    """

    source_row: int
    own_id: str | None
    digest: str
    samples: tuple[Tokenised, ...]


@dataclass(frozen=True)
class PreparedRow:
    """One row of the prepared table.

    Attributes:
        row: index in the table.
        source_row: row of the prompt file, from 0.
        sample_id: unique among the rows that aren't skipped.
        token_ids: int32 [T]; empty when skipped.
        loss_mask: uint8 [T].
        skip_reason: why it is skipped, else None.
    """

    row: int
    source_row: int
    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    skip_reason: str | None = None


@dataclass(frozen=True)
class ReasonCount:
    """How many rows were skipped for reasons of one kind, with one of them as an example."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class PartInfo:
    """One Parquet object of the prepared table."""

    key: str
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class PreparedSummary:
    """What a preparation left; stored as ``prompts/_prepared.json``.

    Attributes:
        identity: what the prepared rows depend on; two preparations with equal identities are the same.
        source_url: the prompt file, for people.
        source_rows: rows read from it.
        rows: prepared rows = to_collect + skipped.
        tokens: tokens of the rows to collect.
        supervised_tokens: those with loss mask 1.
        longest_tokens: length of the longest row to collect.
        reasons: skipped rows by kind of reason, commonest first.
        warnings: what a person should know, such as renamed ids.
        parts: the Parquet objects in row order.
    """

    identity: Mapping[str, Any]
    source_url: str
    source_rows: int
    rows: int
    to_collect: int
    skipped: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    reasons: tuple[ReasonCount, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: tuple[PartInfo, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PreparedSummary:
        """Inverse of `to_json`."""
        return cls(
            **{
                **data,
                "reasons": tuple(ReasonCount(**r) for r in data["reasons"]),
                "warnings": tuple(data["warnings"]),
                "parts": tuple(PartInfo(**p) for p in data["parts"]),
            }
        )
