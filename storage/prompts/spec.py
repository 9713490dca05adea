"""What to prepare, what came of it, and the records between the two. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

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
class GenerateSpec:
    """How the model answers rows itself, before anything is captured.

    Attributes:
        max_new_tokens: longest answer, in tokens.
        temperature: 0 is greedy.
        top_p: smallest set of tokens with this probability that is sampled from.
        top_k: most likely tokens that are sampled from; -1 is all.
        seed: that every answer's own seed follows from.
        n: answers to each row.
        stop: texts of one token, or token ids, that end an answer beside the model's own end of turn.
        truncated: what becomes of an answer that came to no end.
        plain: whether rows without turns (``text``, ``input_ids``) are completed or kept as they are.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    n: int = 1
    stop: tuple[str | int, ...] = ()
    truncated: Literal["keep", "drop"] = "keep"
    plain: Literal["keep", "complete"] = "keep"

    def seed_of(self, sample_id: str) -> int:
        """The seed of one answer: the lowest 31 bits of the xxh3-64 of ``<seed>:<sample id>``."""
        return int(xxhash.xxh3_64_intdigest(f"{self.seed}:{sample_id}".encode())) & 0x7FFF_FFFF


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
        generate: how the model answers rows that end in a user's turn; None takes all rows as they are.
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
    generate: GenerateSpec | None = None

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
        asks: the model is to go on from here.
    """

    turn: int | None
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    rejection: Rejection | None = None
    asks: bool = False


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
class Question:
    """What a prepared row asks of the model; its fields are columns of ``prompts/asked``.

    Attributes:
        max_new_tokens: longest answer.
        seed: of the answer.
    """

    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the model said; its fields are columns of ``prompts``.

    Attributes:
        answer_start: first token of the answer in the row.
        finish_reason: ``stop``: it came to its end; ``length``: it was cut.
        seed: that was given with the request.
        answer: its text, without special tokens.
    """

    answer_start: int
    finish_reason: str
    seed: int
    answer: str


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
        more: what it asks, or what the model said.
    """

    row: int
    source_row: int
    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    skip_reason: str | None = None
    more: Question | Answer | None = None


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
