"""From a prompt file to the prepared table, and what is refused on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_tokenizer import template_text, tiny_tokenizer, turns

from storage.errors import IdentityMismatch, ModelError, PromptError, StorageError
from storage.files import Store
from storage.prompts import LossMask, PromptSpec, PromptTable, prepare, read_prepared
from storage.prompts.parts import prepared_key


def write(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


ROWS: list[Any] = [
    {"id": "a", "messages": turns("2 + 2?", "4")},
    '{"id": "broken"',
    {"id": "a", "messages": turns("2 + 2?", "4")},
    {"id": "a", "messages": turns("3 + 3?", "6")},
    {"messages": turns("Explain.", "long " * 200)},
    {"id": 7, "conversations": [{"from": "human", "value": "天空？"}, {"from": "gpt", "value": "蓝色。"}]},
    {"id": "ids", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    {"id": "outside", "input_ids": [5, 10**6], "loss_mask": [0, 1]},
    {"id": "blind", "input_ids": [5, 6], "loss_mask": [0, 0]},
    {"id": "plain", "text": "No turns here."},
]


def spec_of(url: str, tokenizer_path: str, **changes: Any) -> PromptSpec:
    return PromptSpec(**{"url": url, "tokenizer_path": tokenizer_path, "max_tokens": 100, **changes})


def test_every_row_is_accounted_for_with_its_reason(tmp_path: Path, tokenizer_path: str) -> None:
    store, seen = Store(str(tmp_path / "dump")), []
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path)
    summary = prepare(store, spec, progress=lambda rows, tokens: seen.append((rows, tokens)))
    table = PromptTable(store)
    assert (summary.source_rows, summary.rows, summary.to_collect, summary.skipped) == (10, 10, 4, 6)
    assert table.status.tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]
    assert [table.load(row).sample_id for row in (0, 3, 5, 6)] == ["a", "a#3", "7", "ids"]
    reasons = {r["row"]: r["skip_reason"] for r in table.skipped().to_pylist()}
    assert sorted(reasons) == [1, 2, 4, 7, 8, 9]
    for row, part in {
        1: "isn't JSON", 2: "duplicate of row 0", 4: "over max_tokens 100", 7: "1000000",
        8: "no token is supervised", 9: "loss_mask: all or markers",
    }.items():  # fmt: skip
        assert part in reasons[row]
    assert {r.kind: r.count for r in summary.reasons} == dict.fromkeys(
        ["broken", "duplicate", "over_long", "vocab", "unsupervised", "no_turns"], 1
    )
    assert "1 rows" in summary.warnings[0]
    assert "a#3" in summary.warnings[0]
    assert seen == [(10, summary.tokens)]


def test_prepared_rows_are_what_the_tokenizer_says(tmp_path: Path, tokenizer_path: str) -> None:
    store, tokenizer = Store("memory://prepared-rows"), tiny_tokenizer("chatml")
    summary = prepare(store, spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path))
    table = PromptTable(store)
    row = table.load(0)
    expected = tokenizer.apply_chat_template(turns("2 + 2?", "4"), return_dict=False)
    assert row.token_ids.tolist() == expected
    assert tokenizer.decode(row.token_ids[row.loss_mask == 1]) == "4<|im_end|>"
    assert (row.token_ids.dtype, row.loss_mask.dtype, row.source_row) == (np.int32, np.uint8, 0)
    assert table.load(6).loss_mask.tolist() == [0, 1, 1]
    assert table.load(1).token_ids.size == 0
    collected = [table.load(int(i)) for i in np.flatnonzero(table.status == 0)]
    assert table.tokens[table.status == 0].tolist() == [r.token_ids.size for r in collected]
    assert summary.tokens == int(table.tokens.sum())
    assert summary.supervised_tokens == sum(int(r.loss_mask.sum()) for r in collected)
    assert summary.longest_tokens == table.tokens.max()
    assert summary.source_rows == len(ROWS)
    assert read_prepared(store) == summary


def test_split_turns_accounts_for_each_turn(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [
        {"id": "x", "messages": turns("2 + 2?", "4", "More?", "word " * 50)},
        {"id": "x", "messages": turns("2 + 2?", "4", "More?", "word " * 50)},
        {"id": "none", "messages": turns("Anybody?")},
    ]
    store = Store(str(tmp_path / "dump"))
    spec = spec_of(write(tmp_path / "p.jsonl", rows), tokenizer_path, loss_mask=LossMask("split_turns"))
    summary = prepare(store, spec)
    table = PromptTable(store)
    loaded = [table.load(i) for i in range(len(table))]
    assert [(r.sample_id, r.source_row, r.skip_reason is None) for r in loaded] == [
        ("x/turn-1", 0, True), ("x/turn-2", 0, False), ("x", 1, False), ("none", 2, False),
    ]  # fmt: skip
    assert (summary.source_rows, summary.rows) == (3, 4)
    assert "duplicate of row 0" in str(loaded[2].skip_reason)
    assert table.column("turn").to_pylist() == [1, 2, None, None]


def test_over_long_fail_names_row_length_and_limit(tmp_path: Path, tokenizer_path: str) -> None:
    store = Store(str(tmp_path / "dump"))
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path, over_long="fail")
    with pytest.raises(PromptError, match=r"row 4 .*\d{3,} tokens are over max_tokens 100.*over_long: skip"):
        prepare(store, spec)
    assert read_prepared(store) is None


def test_a_file_without_one_good_row_names_the_commonest_reasons(tmp_path: Path, tokenizer_path: str) -> None:
    url = write(tmp_path / "p.jsonl", ["{", "[", "}", {"prompt": "x"}, {"text": ""}])
    with pytest.raises(PromptError, match=r"all 5 rows were rejected: 3 x broken .*; 1 x no_field"):
        prepare(Store(str(tmp_path / "dump")), spec_of(url, tokenizer_path))


def test_empty_and_missing_files_say_so(tmp_path: Path, tokenizer_path: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name, part in (("empty.jsonl", "is empty"), ("missing.jsonl", "there is no prompt file")):
        with pytest.raises(PromptError, match=part):
            prepare(Store(str(tmp_path / "dump")), spec_of(str(tmp_path / name), tokenizer_path))


def test_a_template_that_fails_most_rows_stops_early(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [{"id": i, "messages": turns("2 + 2?", "4", "3 + 3?", "6")} for i in range(600)]
    spec = spec_of(write(tmp_path / "p.jsonl", rows), tokenizer_path, chat_template=template_text("qwen3"))
    seen: list[int] = []
    with pytest.raises(
        PromptError, match=r"first 256 rows; row 0: prompts\.chat_template writes.*split_turns"
    ):
        prepare(Store(str(tmp_path / "a")), spec, workers=1, progress=lambda n, _: seen.append(n))
    assert max(seen) < 256
    short = spec_of(
        write(tmp_path / "q.jsonl", rows[:3]), tokenizer_path, chat_template=template_text("qwen3")
    )
    with pytest.raises(PromptError, match="fails 3 of the 3 rows"):
        prepare(Store(str(tmp_path / "b")), short)
    single = [*rows[:1], *({"id": i, "messages": turns("2 + 2?", "4")} for i in range(1000, 1002))]
    mostly = spec_of(
        write(tmp_path / "r.jsonl", single), tokenizer_path, chat_template=template_text("qwen3")
    )
    assert prepare(Store(str(tmp_path / "c")), mostly).to_collect == 2


def test_a_template_that_is_no_jinja_is_refused_at_once(tmp_path: Path, tokenizer_path: str) -> None:
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path, chat_template="{% if %}")
    with pytest.raises(PromptError, match="isn't valid Jinja: line 1"):
        prepare(Store(str(tmp_path / "dump")), spec)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), str(tmp_path / "model"))
    with pytest.raises(ModelError, match=r"model can't be loaded.*model\.path"):
        prepare(Store(str(tmp_path / "dump")), spec)


def test_limit_takes_the_first_rows(tmp_path: Path, tokenizer_path: str) -> None:
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path, limit=4)
    assert prepare(Store(str(tmp_path / "dump")), spec).source_rows == 4


def test_a_complete_preparation_is_kept_and_another_one_refused(tmp_path: Path, tokenizer_path: str) -> None:
    store = Store(str(tmp_path / "dump"))
    spec = spec_of(write(tmp_path / "p.jsonl", ROWS), tokenizer_path)
    first = prepare(store, spec)
    part = tmp_path / "dump" / first.parts[0].key
    written_ns = part.stat().st_mtime_ns
    assert prepare(store, spec) == first
    assert part.stat().st_mtime_ns == written_ns
    with pytest.raises(IdentityMismatch, match="max_tokens: 99 here, 100 in the dump"):
        prepare(store, spec_of(spec.url, tokenizer_path, max_tokens=99))
    write(tmp_path / "p.jsonl", ROWS[:5])
    with pytest.raises(IdentityMismatch, match="file_xxh3_128"):
        prepare(store, spec)


class DiesAtTheEnd(Store):
    def put_if_absent(self, key: str, data: bytes) -> None:
        if key == prepared_key():
            raise StorageError("the machine went down")
        super().put_if_absent(key, data)


def test_an_incomplete_preparation_is_overwritten(tmp_path: Path, tokenizer_path: str) -> None:
    url = write(tmp_path / "p.jsonl", ROWS)
    with pytest.raises(StorageError, match="went down"):
        prepare(DiesAtTheEnd(str(tmp_path / "dump")), spec_of(url, tokenizer_path))
    store = Store(str(tmp_path / "dump"))
    assert [key for key, _ in store.list("prompts")] == ["prompts/part-00000.parquet"]
    store.replace("prompts/part-00007.parquet", b"of a larger file")
    summary = prepare(store, spec_of(url, tokenizer_path, max_tokens=1000))
    assert summary.to_collect == 5
    assert len(PromptTable(store)) == 10
    assert not store.exists("prompts/part-00007.parquet")


@pytest.mark.slow
def test_the_table_does_not_depend_on_the_number_of_processes(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [*ROWS, *({"id": f"n{i}", "messages": turns(f"{i} + 1?", str(i + 1))} for i in range(700))]
    spec = spec_of(write(tmp_path / "p.jsonl", rows), tokenizer_path)
    stores = [Store(str(tmp_path / "one")), Store(str(tmp_path / "two"))]
    summaries = [prepare(store, spec, workers=n) for store, n in zip(stores, (1, 2), strict=True)]
    assert summaries[0] == summaries[1]
    key = summaries[0].parts[0].key
    assert stores[0].read(key) == stores[1].read(key)
    assert summaries[0].to_collect == 704


_PREPARE = """
import sys
from storage.files import Store
from storage.prompts import PromptSpec, prepare

if __name__ == "__main__":
    spec = PromptSpec(sys.argv[1], sys.argv[2], max_tokens=100)
    prepare(Store(sys.argv[3]), spec, workers=2, progress=lambda rows, tokens: print(rows, flush=True))
"""


@pytest.mark.slow
def test_killing_a_preparation_leaves_no_process_behind(tmp_path: Path, tokenizer_path: str) -> None:
    rows = [{"id": i, "messages": turns(f"{i} + 1?", str(i + 1))} for i in range(50_000)]
    url = write(tmp_path / "p.jsonl", rows)
    (tmp_path / "script.py").write_text(_PREPARE)
    command = [sys.executable, "script.py", url, tokenizer_path, str(tmp_path / "dump")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # workers are at it
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert read_prepared(Store(str(tmp_path / "dump"))) is None
