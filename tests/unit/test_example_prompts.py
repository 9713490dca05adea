"""The example conversations hold what a first run should show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from storage.files import Store
from storage.prompts import PromptSpec, PromptTable, prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "conversations.jsonl"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PromptTable:
    folder = tmp_path_factory.mktemp("example")
    tiny_tokenizer("chatml").save_pretrained(folder / "tokenizer")
    store = Store(str(folder / "dump"))
    prepare(store, PromptSpec(str(EXAMPLE), str(folder / "tokenizer"), max_tokens=4500))
    return PromptTable(store)


def test_the_account_of_the_example_is_not_trivial(table: PromptTable) -> None:
    kinds = {reason.kind: reason.count for reason in table.summary.reasons}
    assert kinds == {"broken": 1, "duplicate": 1, "over_long": 1}
    assert len(table.summary.warnings) == 1
    assert table.summary.to_collect >= 64
    assert table.skipped()["sample_id"].to_pylist()[1:] == ["prime-factors", "photosynthesis"]


def test_the_example_has_several_languages_and_turns(table: PromptTable) -> None:
    tokenizer = tiny_tokenizer("chatml")
    rows = [table.load(int(i)) for i in np.flatnonzero(table.status == 0)]
    texts = [tokenizer.decode(row.token_ids) for row in rows]
    assert sum(text.count("<|im_start|>assistant") > 1 for text in texts) > 30
    assert sum(any("\u4e00" <= c <= "\u9fff" for c in text) for text in texts) >= 8
    assert sum(" und " in text for text in texts) >= 8
    assert len({row.sample_id for row in rows}) == len(rows)
