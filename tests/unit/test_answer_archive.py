"""What the coordinator keeps of answers: committed part by part, nothing lost by a failure, nothing asked twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from made_dumps import LAYOUT

from actors.answering import AnswerArchive
from actors.balance import Limits
from actors.ledger import Ledger
from actors.rows import Counts
from actors.run_messages import CoordinatorSpec
from storage.errors import StorageFull
from storage.files import Store
from storage.prompts import ASKED, AnswerParts, PreparedSummary, Reply
from storage.prompts.parts import QUESTIONS, PartWriter, write_prepared
from storage.prompts.spec import PreparedRow, Question

LIMITS = Limits(1000, 1 << 20, 4, 8, 1 << 20)


def reply(row: int, tokens: int = 3) -> Reply:
    return Reply(row, np.arange(tokens, dtype=np.int32), "stop")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four rows: three questions, and one that passes."""
    store, ids = Store(str(tmp_path)), np.arange(10, dtype=np.int32)
    parts = PartWriter(store, ASKED, QUESTIONS)
    for row in range(4):
        question = Question(20, row) if row != 2 else None
        parts.add(PreparedRow(row, row, f"s{row}", ids, np.zeros(10, np.uint8), None, question), None)
    summary = PreparedSummary({}, "", 4, 4, 4, 0, 40, 0, 30, parts=parts.close())
    write_prepared(store, summary, ASKED)
    return store


def load(store: Store) -> tuple[AnswerArchive, Ledger]:
    archive = AnswerArchive(CoordinatorSpec(store.url, "run", LAYOUT, LIMITS, full_timeout_s=0.1))
    ledger, _ = asyncio.run(archive.load())
    return archive, ledger


def test_rows_that_have_an_answer_are_not_asked_again_and_others_count_with_the_longest(store: Store) -> None:
    AnswerParts(store).put([reply(1, 7)])
    archive, ledger = load(store)
    assert ledger.counts() == Counts(2, 0, 0, 1, 1, 0)
    assert [int(t) for t in ledger.rows.tokens] == [30, 30, 0, 30]
    assert archive.answer_tokens == 7


def test_answers_are_due_when_the_first_of_them_is_old(store: Store) -> None:
    archive, _ = load(store)
    assert not archive.due(100.0)
    archive.add((reply(0),), 100.0)
    archive.add((reply(1),), 104.0)
    assert not archive.due(104.9)
    assert archive.due(105.0)
    assert sorted(asyncio.run(archive.commit())) == [0, 1]
    assert not archive.due(200.0)


def test_a_full_disk_costs_no_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, _ = load(store)
    archive.add((reply(0),), 0.0)

    def full(key: str, data: bytes) -> None:
        raise StorageFull("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(archive._store, "put_if_absent", full)
        with pytest.raises(StorageFull):
            asyncio.run(archive.commit())
    archive.add((reply(3),), 1.0)
    assert asyncio.run(archive.commit()) == [0, 3]
    _, again = load(store)
    assert again.counts().committed == 2
