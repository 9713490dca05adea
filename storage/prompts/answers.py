"""What the model said, durable part by part while it goes on, and the ordinary prompt table made of it at the end.

``prompts/answers/00000000.parquet`` and so on, each put if absent. A row may stand in two parts, when a process that
was given up comes back: the part with the lowest number counts, since it was there first.

    row            int64
    token_ids      list of int32   the very ids that the engine sampled, with the one that ended the answer
    finish_reason  string          stop | length
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import AlreadyExists, CorruptDump, PromptError
from storage.files import Store
from storage.prompts.account import Tally
from storage.prompts.chat import ChatTokenizer
from storage.prompts.parts import ANSWERS, ASKED, FOLDER, PartWriter, read_prepared, write_prepared
from storage.prompts.spec import Answer, GenerateSpec, PreparedRow, PreparedSummary, PromptSpec, Rejection
from storage.prompts.table import PromptTable
from storage.prompts.tokenising import load_chat

ANSWERS_FOLDER = f"{FOLDER}/answers"
CUT = "length"
"""Finish reason of an answer that came to no end."""

_SCHEMA = pa.schema(
    [("row", pa.int64()), ("token_ids", pa.list_(pa.int32())), ("finish_reason", pa.string())]
)
_NO_TOKENS, _NO_MASK = np.empty(0, np.int32), np.empty(0, np.uint8)


@dataclass(frozen=True)
class Reply:
    """What an engine said to one prepared row.

    Attributes:
        row: of the table.
        token_ids: int32 [A], A > 0.
        finish_reason: ``stop`` or ``length``.
    """

    row: int
    token_ids: npt.NDArray[np.int32]
    finish_reason: str


class AnswerParts:
    """Commits answers, part by part.

    Args:
        store: the dump.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = len(part_keys(store))

    def put(self, replies: Sequence[Reply]) -> int:
        """Commits answers; they are in the dump when this returns.

        Returns:
            Bytes of the part.

        Raises:
            StorageFull: no space is left.
            StorageError: it can't be written; the same call may be made again.
        """
        columns = {name: [getattr(reply, name) for reply in replies] for name in _SCHEMA.names}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns, schema=_SCHEMA), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        while True:
            key, self._next = f"{ANSWERS_FOLDER}/{self._next:08d}.parquet", self._next + 1
            try:
                self._store.put_if_absent(key, data)
            except AlreadyExists:
                continue  # of a process that was given up and isn't gone
            return len(data)


def part_keys(store: Store) -> list[str]:
    """The parts that are there, in the order in which they count."""
    return [key for key, _ in store.list(ANSWERS_FOLDER)]


def answered(store: Store) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows that have an answer, ascending, and the tokens of each.

    Raises:
        CorruptDump: a part can't be read.
        StorageError: the storage fails.
    """
    rows, tokens = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for table in _parts(store):
        rows.append(table["row"].to_numpy())
        tokens.append(pc.list_value_length(table["token_ids"]).to_numpy().astype(np.int64))
    unique, first = np.unique(np.concatenate(rows), return_index=True)
    return unique, np.concatenate(tokens)[first]


def read_replies(store: Store, first: int, last: int) -> dict[int, Reply]:
    """Answers to rows ``first .. last - 1``. Raises as `answered`."""
    found: dict[int, Reply] = {}
    for table in _parts(store):
        rows = table["row"].to_numpy()
        for at in np.flatnonzero((rows >= first) & (rows < last)).tolist():
            ids = np.asarray(table["token_ids"][at].values, dtype=np.int32)
            reply = Reply(int(rows[at]), ids, table["finish_reason"][at].as_py())
            found.setdefault(reply.row, reply)
    return found


def _parts(store: Store) -> Iterator[Any]:
    for key in part_keys(store):
        with store.open_read(key) as file:
            try:
                yield pq.read_table(file, schema=_SCHEMA)
            except (pa.ArrowException, OSError) as exc:
                raise CorruptDump(
                    f"{store.where(key)} can't be read as Parquet ({exc}); restore it from a copy, or remove it and "
                    "run the same command again: its rows are answered once more"
                ) from exc


def take_answers(store: Store, spec: PromptSpec, unanswered: Mapping[int, str]) -> PreparedSummary:
    """Makes the prompt table of what was asked and what was said. Done before, it is left as it is.

    It takes as much memory as the answers to one part of ``prompts/asked``, whose parts are bounded.

    Args:
        store: the dump.
        spec: as it was prepared.
        unanswered: row -> reason, of rows that are skipped because no engine could answer them.

    Returns:
        The counts of ``prompts/``.

    Raises:
        PromptError: no row is left to collect.
        CorruptDump: a row has neither an answer nor a reason, or a part can't be read.
        StorageError: the dump can't be read or written.
    """
    existing = read_prepared(store)
    if existing is not None:
        return existing
    assert spec.generate is not None
    asked = PromptTable(store, ASKED)
    joined = _Joined(asked, spec.generate, load_chat(spec), unanswered)
    turns, tally = asked.column("turn").to_pylist(), Tally(spec.shown_url)
    parts = PartWriter(store, FOLDER, ANSWERS)
    first = 0
    for part in asked.summary.parts:
        replies = read_replies(store, first, first + part.rows)
        for number in range(first, first + part.rows):
            row, rejection = joined.row(number, replies.get(number))
            parts.add(row, turns[number])
            if rejection is not None:
                tally.skip(rejection.kind, rejection.reason, row.source_row)
            elif row.skip_reason is None:
                tally.collect(row.token_ids.size, int(np.count_nonzero(row.loss_mask)))
        first += part.rows
    if tally.to_collect == 0:
        raise PromptError(f"{store.url}: no row is left to collect: {_common(asked.summary, tally)}")
    summary = replace(
        asked.summary,
        to_collect=tally.to_collect,
        skipped=asked.summary.rows - tally.to_collect,
        tokens=tally.tokens,
        supervised_tokens=tally.supervised_tokens,
        longest_tokens=tally.longest_tokens,
        reasons=asked.summary.reasons + tally.reasons(),
        parts=parts.close(),
    )
    write_prepared(store, summary)
    return summary


class _Joined:
    """Rows of the table that was asked, with what was said."""

    def __init__(
        self, asked: PromptTable, generate: GenerateSpec, chat: ChatTokenizer, unanswered: Mapping[int, str]
    ) -> None:
        self._asked = asked
        self._generate = generate
        self._chat = chat
        self._unanswered = unanswered
        self._longest, self._seeds = asked.questions()

    def row(self, number: int, reply: Reply | None) -> tuple[PreparedRow, Rejection | None]:
        """The row, and why it is skipped though it was asked."""
        row = self._asked.load(number)
        if not self._longest[number]:
            return row, None
        if reply is None:
            if number not in self._unanswered:
                raise CorruptDump(
                    f"prompts/answers holds no answer to row {number}; run the same command again"
                )
            rejection = Rejection("unanswered", self._unanswered[number])
            return _skipped(row, rejection), rejection
        text = self._chat.decode(reply.token_ids, special=False)
        answer = Answer(row.token_ids.size, reply.finish_reason, int(self._seeds[number]), text)
        row = replace(row, more=answer)
        if reply.finish_reason == CUT and self._generate.truncated == "drop":
            text = f"its answer came to no end within {reply.token_ids.size} tokens"
            rejection = Rejection("truncated", text)
            return _skipped(row, rejection), rejection
        ids = np.concatenate([row.token_ids, reply.token_ids])
        mask = np.concatenate([row.loss_mask, np.ones(reply.token_ids.size, np.uint8)])
        return replace(row, token_ids=ids, loss_mask=mask), None


def _skipped(row: PreparedRow, rejection: Rejection) -> PreparedRow:
    return replace(row, token_ids=_NO_TOKENS, loss_mask=_NO_MASK, skip_reason=rejection.reason)


def _common(asked: PreparedSummary, tally: Tally) -> str:
    reasons = sorted(asked.reasons + tally.reasons(), key=lambda r: -r.count)
    return "; ".join(f"{r.count} x {r.kind} ({r.example})" for r in reasons[:3])
