"""Rows that the model answers itself: what it is asked, and the prompt table that is made of what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_tokenizer import tiny_chat, tiny_tokenizer, turns

from actors.capture.answers import judge
from actors.messages import SampleFailure
from actors.questions import Ask
from actors.synthetic import synthetic_reply
from storage.errors import AlreadyExists, CorruptDump, IdentityMismatch, PromptError
from storage.files import Store
from storage.prompts import (
    ASKED,
    AnswerParts,
    GenerateSpec,
    LossMask,
    PromptSpec,
    PromptTable,
    Reply,
    answered,
    prepare,
    read_prepared,
    take_answers,
)


def asked(
    tmp_path: Path,
    tokenizer_path: str,
    rows: list[Any],
    *,
    max_tokens: int = 100,
    mask: str = "assistant",
    **generate: Any,
) -> tuple[Store, PromptSpec, PromptTable]:
    """What is asked of a prompt file's rows."""
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = PromptSpec(
        url=str(tmp_path / "p.jsonl"),
        tokenizer_path=tokenizer_path,
        max_tokens=max_tokens,
        loss_mask=LossMask(mask),  # type: ignore[arg-type]
        generate=GenerateSpec(**{"max_new_tokens": 8, **generate}),
    )
    store = Store(str(tmp_path / "dump"))
    prepare(store, spec)
    return store, spec, PromptTable(store, ASKED)


def reply(row: int, *ids: int, finish: str = "stop") -> Reply:
    return Reply(row, np.array(ids, np.int32), finish)


def supervised(table: PromptTable, row: int) -> str:
    """The supervised text of a row, a bar where the mask has a gap."""
    chat, prepared = tiny_chat("chatml"), table.load(row)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], prepared.loss_mask, [0]])))
    return "|".join(chat.decode(prepared.token_ids[a:b]) for a, b in edges.reshape(-1, 2))


def test_a_question_ends_where_the_answer_begins_and_other_rows_pass(
    tmp_path: Path, tokenizer_path: str
) -> None:
    rows = [
        {"id": "q", "messages": turns("2 + 2?")},
        {"id": "done", "messages": turns("2 + 2?", "4")},
        {"id": "tool", "messages": [*turns("What is it?", "I look."), {"role": "tool", "content": "four"}]},
        {"id": "ids", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    _, _, table = asked(tmp_path, tokenizer_path, rows)
    text = tiny_chat("chatml").decode(table.load(0).token_ids)
    assert text.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert table.questions()[0].tolist() == [8, 0, 8, 0]
    assert table.load(1).loss_mask.any()
    assert supervised(table, 2) == "I look.<|im_end|>"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("assistant", "one<|im_end|>|tea"), ("last_turn", "tea"), ("all", None)],
)
def test_an_answer_is_supervised_and_the_policy_decides_about_its_prompt(
    tmp_path: Path, tokenizer_path: str, mask: str, expected: str | None
) -> None:
    store, spec, before = asked(
        tmp_path, tokenizer_path, [{"id": "q", "messages": turns("a", "one", "b")}], mask=mask
    )
    said = tiny_chat("chatml").encode("tea").token_ids
    AnswerParts(store).put([reply(0, *said)])
    take_answers(store, spec, {})
    table = PromptTable(store)
    row, answer = table.load(0), table.answer(0)
    assert answer is not None
    assert row.token_ids.tolist() == [*before.load(0).token_ids.tolist(), *said.tolist()]
    assert answer.answer_start == before.load(0).token_ids.size
    assert (answer.answer, answer.finish_reason) == ("tea", "stop")
    if expected is None:
        assert row.loss_mask.all()
    else:
        assert supervised(table, 0) == expected


def test_split_turns_keep_the_turns_that_are_there_and_ask_for_the_last(
    tmp_path: Path, tokenizer_path: str
) -> None:
    rows = [{"id": "q", "messages": turns("a", "one", "b")}, {"id": "first", "messages": turns("a")}]
    _, _, table = asked(tmp_path, tokenizer_path, rows, mask="split_turns")
    assert [table.load(r).sample_id for r in range(3)] == ["q/turn-1", "q/turn-2", "first/turn-1"]
    assert table.questions()[0].tolist() == [0, 8, 8]
    assert supervised(table, 0) == "one<|im_end|>"
    assert not table.load(1).loss_mask.any()


def test_turns_that_a_template_rewrites_are_refused_rather_than_guessed(tmp_path: Path) -> None:
    tiny_tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    rows = [{"id": f"q{i}", "messages": turns("a", "one", "b")} for i in range(2)]
    with pytest.raises(PromptError, match="loss_mask: split_turns"):
        asked(tmp_path, str(tmp_path / "qwen3"), rows)
    (tmp_path / "last").mkdir()
    _, _, table = asked(tmp_path / "last", str(tmp_path / "qwen3"), rows, mask="last_turn")
    assert table.questions()[0].tolist() == [8, 8]


def test_several_answers_have_ids_and_seeds_of_their_own_that_collide_with_nothing(
    tmp_path: Path, tokenizer_path: str
) -> None:
    rows = [
        {"id": "tea/answer-1", "messages": turns("other", "words")},
        {"id": "tea", "messages": turns("Tea?")},
        {"id": "tea/answer-2", "messages": turns("more", "words")},
    ]
    _, _, table = asked(tmp_path, tokenizer_path, rows, n=2, temperature=1.0)
    ids = [table.load(r).sample_id for r in range(4)]
    assert ids == ["tea/answer-1", "tea/answer-1#1", "tea/answer-2", "tea/answer-2#2"]
    seeds = table.questions()[1].tolist()
    assert seeds[1] != seeds[2]
    assert seeds[1:3] == [GenerateSpec(8).seed_of(i) for i in ids[1:3]]
    # Not of the row's place in the file.
    (tmp_path / "again").mkdir()
    _, _, again = asked(tmp_path / "again", tokenizer_path, rows[1:2], n=2, temperature=1.0)
    assert again.questions()[1].tolist()[1] == seeds[2]
    assert GenerateSpec(8, seed=1).seed_of("x") != GenerateSpec(8).seed_of("x")


def test_prompt_and_answer_stay_within_max_tokens(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [{"id": "q", "input_ids": [5] * 10}, {"id": "full", "input_ids": [5] * 12}]
    store, _, table = asked(tmp_path, tokenizer_path, rows, plain="complete", max_tokens=12)
    assert table.questions()[0].tolist() == [2, 0]
    (reason,) = table.skipped().to_pylist()
    assert reason["skip_reason"] == "12 tokens leave no room for an answer within max_tokens 12"
    prepared = read_prepared(store, ASKED)
    assert prepared is not None
    assert prepared.longest_tokens == 12


def test_rows_without_turns_pass_unless_they_are_to_be_completed(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [{"id": "ids", "input_ids": [5, 6]}, {"id": "text", "text": "Four."}]
    _, _, kept = asked(tmp_path, tokenizer_path, rows, mask="all")
    assert kept.questions()[0].tolist() == [0, 0]
    (tmp_path / "completed").mkdir()
    _, _, table = asked(tmp_path / "completed", tokenizer_path, rows, plain="complete")
    assert table.questions()[0].tolist() == [8, 8]
    assert not table.load(0).loss_mask.any()


def test_answers_that_were_cut_are_dropped_with_their_reason_and_stay_readable(
    tmp_path: Path, tokenizer_path: str
) -> None:
    rows = [{"id": "a", "messages": turns("a")}, {"id": "b", "messages": turns("b")}]
    store, spec, _ = asked(tmp_path, tokenizer_path, rows, truncated="drop")
    AnswerParts(store).put([reply(1, 5, 6, finish="length"), reply(0, 7)])
    summary = take_answers(store, spec, {})
    assert (summary.rows, summary.to_collect, summary.skipped) == (2, 1, 1)
    table = PromptTable(store)
    row, answer = table.load(1), table.answer(1)
    assert answer is not None
    assert (row.skip_reason, row.token_ids.size) == ("its answer came to no end within 2 tokens", 0)
    assert answer.finish_reason == "length"
    assert [r.kind for r in summary.reasons] == ["truncated"]


def test_the_first_answer_to_a_row_counts_and_a_part_is_never_overwritten(
    tmp_path: Path, tokenizer_path: str
) -> None:
    store, spec, _ = asked(tmp_path, tokenizer_path, [{"id": "a", "messages": turns("a")}])
    early, late = AnswerParts(store), AnswerParts(store)  # the late one was given up and doesn't know it
    early.put([reply(0, 7)])
    late.put([reply(0, 8, 9)])
    assert [a.tolist() for a in answered(store)] == [[0], [1]]
    assert len(store.list("prompts/answers")) == 2
    take_answers(store, spec, {})
    assert PromptTable(store).load(0).token_ids[-1] == 7
    assert take_answers(store, spec, {}).rows == 1  # again: what is there is left alone


def test_a_row_without_an_answer_is_an_error_unless_its_reason_is_known(
    tmp_path: Path, tokenizer_path: str
) -> None:
    rows = [{"id": "a", "messages": turns("a")}, {"id": "b", "messages": turns("b")}]
    store, spec, _ = asked(tmp_path, tokenizer_path, rows)
    AnswerParts(store).put([reply(0, 7)])
    with pytest.raises(CorruptDump, match="no answer to row 1"):
        take_answers(store, spec, {})
    summary = take_answers(store, spec, {1: "poison"})
    assert [(r.kind, r.count) for r in summary.reasons] == [("unanswered", 1)]
    assert PromptTable(store).load(1).skip_reason == "poison"


def test_a_table_without_any_row_left_is_refused(tmp_path: Path, tokenizer_path: str) -> None:
    store, spec, _ = asked(tmp_path, tokenizer_path, [{"id": "a", "messages": turns("a")}], truncated="drop")
    AnswerParts(store).put([reply(0, 7, finish="length")])
    with pytest.raises(PromptError, match="1 x truncated"):
        take_answers(store, spec, {})
    assert read_prepared(store) is None


def test_answers_are_part_of_what_makes_two_runs_the_same(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [{"id": "a", "messages": turns("a")}]
    asked(tmp_path, tokenizer_path, rows)
    with pytest.raises(IdentityMismatch, match="max_new_tokens"):
        asked(tmp_path, tokenizer_path, rows, max_new_tokens=9)


def test_answers_end_with_the_templates_end_of_turn_and_with_what_is_asked_for() -> None:
    chat = tiny_chat("chatml")
    end, bos = (int(chat.encode(text).token_ids[0]) for text in ("<|im_end|>", "<|begin_of_text|>"))
    assert chat.stop_ids(()) == (end,)
    assert chat.stop_ids(("<|begin_of_text|>", 40)) == tuple(sorted({end, bos, 40}))
    with pytest.raises(PromptError, match=r"'The answer is four.' is \d+ tokens"):
        chat.stop_ids(("The answer is four.",))
    with pytest.raises(PromptError, match="100000 is no token id"):
        chat.stop_ids((100_000,))


def test_the_tables_columns_are_those_that_the_format_names(tmp_path: Path, tokenizer_path: str) -> None:
    store, spec, _ = asked(tmp_path, tokenizer_path, [{"id": "a", "messages": turns("a")}])
    AnswerParts(store).put([reply(0, 7)])
    take_answers(store, spec, {})
    names = pq.read_schema(tmp_path / "dump/prompts/part-00000.parquet").names
    assert names[-4:] == ["answer_start", "finish_reason", "seed", "answer"]
    assert PromptTable(store).answer(0) is not None


def test_a_part_that_is_there_already_costs_a_number_and_no_answer(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    parts = AnswerParts(store)
    store.put_if_absent("prompts/answers/00000000.parquet", b"another process's")
    parts.put([reply(0, 7)])
    assert store.exists("prompts/answers/00000001.parquet")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("prompts/answers/00000001.parquet", b"")
    with pytest.raises(CorruptDump, match="00000000"):
        answered(store)


def answer(finish: dict[str, Any], ids: tuple[int, ...] = (5, 2), prompt_tokens: int = 3) -> dict[str, Any]:
    return {"output_ids": list(ids), "meta_info": {"finish_reason": finish, "prompt_tokens": prompt_tokens}}


def test_what_an_engine_says_is_taken_only_if_it_is_an_answer_to_what_was_sent() -> None:
    good = judge(4, 3, answer({"type": "stop", "matched": 2}))
    assert isinstance(good, Reply)
    assert (good.row, good.token_ids.tolist(), good.finish_reason) == (4, [5, 2], "stop")
    wrong = [
        answer({"type": "abort", "message": "no memory"}),
        answer({"type": "stop"}, prompt_tokens=2),
        answer({"type": "length"}, ids=()),
    ]
    kinds = [said.kind for said in (judge(4, 3, a) for a in wrong) if isinstance(said, SampleFailure)]
    assert kinds == ["engine", "row_mismatch", "other"]


def test_a_made_up_answer_is_the_same_every_time_and_depends_on_its_seed() -> None:
    ask = Ask(np.array([5, 6, 7], np.int32), 40, 11)
    first, again = synthetic_reply(0, ask), synthetic_reply(0, ask)
    assert first.token_ids.tolist() == again.token_ids.tolist()
    lengths = {synthetic_reply(0, Ask(ask.token_ids, 40, seed)).token_ids.size for seed in range(50)}
    assert len(lengths) > 10
    cut = [s for s in range(400) if synthetic_reply(0, Ask(ask.token_ids, 40, s)).finish_reason == "length"]
    assert all(synthetic_reply(0, Ask(ask.token_ids, 40, s)).token_ids.size == 40 for s in cut)
