"""What a row of the prompt file says, and the prompt file itself."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import PromptError, RowRejected
from storage.prompts import source
from storage.prompts.rows import (
    CONTENT_FIELDS,
    Conversation,
    Text,
    TokenRow,
    content_digest,
    decode_row,
    own_id,
    read_content,
)
from storage.prompts.source import file_kind, read_rows, source_digest

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def read(row: dict[str, Any]) -> Conversation | Text | TokenRow:
    return read_content(decode_row(json.dumps(row).encode()))


def test_openai_and_sharegpt_rows_say_the_same() -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    assert read({"messages": MESSAGES}) == read({"conversations": sharegpt}) == Conversation(tuple(MESSAGES))
    system = {"role": "system", "content": "Be brief."}
    assert read({"conversations": sharegpt, "system": "Be brief."}) == Conversation((system, *MESSAGES))
    assert read({"conversations": MESSAGES}) == Conversation(tuple(MESSAGES))


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("human", "user"), ("gpt", "assistant"), *((r, r) for r in ("user", "assistant", "system", "tool"))],
)
def test_sharegpt_speakers_become_roles(speaker: str, role: str) -> None:
    content = read({"conversations": [{"from": speaker, "value": "x"}]})
    assert isinstance(content, Conversation)
    assert content.messages == ({"role": role, "content": "x"},)


def test_token_rows_keep_their_ids_and_mask() -> None:
    content = read({"input_ids": [3, 1, 2], "loss_mask": [0, 1, 1]})
    assert isinstance(content, TokenRow)
    assert content.loss_mask is not None
    assert (content.token_ids.tolist(), content.token_ids.dtype) == ([3, 1, 2], "int32")
    assert (content.loss_mask.tolist(), content.loss_mask.dtype) == ([0, 1, 1], "uint8")
    without = read({"input_ids": [3, 1, 2]})
    assert isinstance(without, TokenRow)
    assert without.loss_mask is None


def test_a_row_with_several_forms_is_read_as_the_most_exact_one() -> None:
    assert isinstance(read({"text": "Hi", "messages": MESSAGES}), Conversation)
    assert isinstance(read({"text": "Hi", "messages": None}), Text)
    assert isinstance(read({"messages": MESSAGES, "input_ids": [1]}), TokenRow)


def test_tool_calls_may_stand_without_content_and_tools_may_be_json_text() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    content = read({"messages": [MESSAGES[0], call], "tools": json.dumps(tools)})
    assert isinstance(content, Conversation)
    assert content.messages[1]["tool_calls"] == call["tool_calls"]
    assert content.tools == tuple(tools)


@pytest.mark.parametrize(
    ("row", "kind", "part"),
    [
        ({"prompt": "x"}, "no_field", "prompt"),
        ({}, "no_field", "nothing"),
        ({"messages": []}, "empty", "messages is empty"),
        ({"messages": "Hi"}, "content", "str"),
        ({"messages": ["Hi"]}, "content", "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "content", "int"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "content", "list"),
        ({"messages": [{"role": "user"}]}, "content", "nothing"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty", "messages[0]"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": ""}]}, "empty", "messages[2]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role", "robot"),
        ({"messages": [{"content": "x"}]}, "role", "None"),
        ({"conversations": [{"from": "bard", "value": "x"}]}, "role", "bard"),
        ({"messages": MESSAGES, "tools": "{"}, "content", "tools"),
        ({"text": ""}, "empty", "text"),
        ({"text": ["x"]}, "content", "list"),
        ({"text": "\ud800"}, "content", "surrogate"),
        ({"input_ids": []}, "empty", "input_ids"),
        ({"input_ids": [1, "2"]}, "content", "integers"),
        ({"input_ids": [[1]]}, "content", "integers"),
        ({"input_ids": [1, -1]}, "vocab", "-1"),
        ({"input_ids": [2**31]}, "vocab", str(2**31)),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "content", "1 values for 2"),
        ({"input_ids": [1], "loss_mask": [2]}, "content", "2, outside 0..1"),
    ],
)
def test_bad_rows_are_rejected_with_kind_and_place(row: dict[str, Any], kind: str, part: str) -> None:
    with pytest.raises(RowRejected) as caught:
        read(row)
    assert caught.value.kind == kind
    assert part in str(caught.value)


@pytest.mark.parametrize("line", [b"{", b"[1]", b'"x"', b"\xff{}", b"[" * 100_000])
def test_lines_that_are_no_json_object_are_broken(line: bytes) -> None:
    with pytest.raises(RowRejected) as caught:
        decode_row(line)
    assert caught.value.kind == "broken"


def test_the_rows_own_id_comes_first() -> None:
    assert own_id({"id": 0, "conversation_id": "b"}) == "0"
    assert own_id({"id": "", "conversation_id": "b"}) == "b"
    assert own_id({"text": "x"}) is None
    assert own_id({"id": "\ud800"}) == "\\ud800"


def test_the_digest_is_of_content_only() -> None:
    digest = content_digest({"messages": MESSAGES, "id": "a", "source": "web"})
    assert digest == content_digest(json.loads('{"messages":' + json.dumps(MESSAGES) + ', "id": "b"}'))
    other_order = [{"content": m["content"], "role": m["role"]} for m in MESSAGES]
    assert digest == content_digest({"messages": other_order})
    with_null = [{**m, "tool_calls": None} for m in MESSAGES]
    assert digest == content_digest({"messages": with_null})
    assert digest != content_digest({"messages": MESSAGES[:1]})
    assert digest != content_digest({"messages": MESSAGES, "tools": [{"name": "f"}]})
    assert len(digest) == 32


_MESSAGE_KEYS = st.sampled_from(["role", "content", "from", "value"])
_JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_MESSAGE_KEYS, inner),
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(CONTENT_FIELDS), _JSON))
def test_no_row_raises_anything_but_a_rejection(row: dict[str, Any]) -> None:
    content_digest(row)
    with contextlib.suppress(RowRejected):
        assert isinstance(read(row), Conversation | Text | TokenRow)


def test_compressed_lines_read_as_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_READ_BYTES", 7)
    data = b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}\r\n{"text": "c"}'
    paths = [tmp_path / name for name in ("x.jsonl", "x.jsonl.gz", "x.ndjson.zst")]
    for path, packed in zip(paths, (data, gzip.compress(data), zstandard.compress(data)), strict=True):
        path.write_bytes(packed)
        rows = list(read_rows(str(path), "auto"))
        assert [number for number, _ in rows] == [0, 3, 4]
        assert [decode_row(raw)["text"] for _, raw in rows] == ["a", "b", "c"]
    assert len({source_digest(str(path)) for path in paths}) == 3


def test_parquet_rows_read_as_jsonl_ones(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "messages": MESSAGES[: 1 + i % 2], "extra": i} for i in range(600)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    read_back = [(n, decode_row(raw)) for n, raw in read_rows(str(path), "auto", limit=500)]
    assert read_back == [(i, {"id": f"r{i}", "messages": rows[i]["messages"]}) for i in range(500)]
    assert content_digest(read_back[1][1]) == content_digest(decode_row(json.dumps(rows[1]).encode()))


def test_parquet_without_a_known_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(PromptError, match=r"prompt.*none of\s+messages"):
        list(read_rows(str(tmp_path / "x.parquet"), "auto"))


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://b/x.JSONL", "jsonl"),
        ("x.json.gz", "jsonl"),
        ("a.b.parquet", "parquet"),
        ("memory://x.pq", "parquet"),
    ],
)
def test_the_name_tells_the_kind_of_file(url: str, kind: str) -> None:
    assert file_kind(url, "auto") == kind


def test_files_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"prompts\.format"):
        file_kind("x.csv", "auto")
    assert file_kind("x.csv", "jsonl") == "jsonl"
    with pytest.raises(PromptError, match=r"there is no prompt file.*prompts\.url"):
        list(read_rows(str(tmp_path / "none.jsonl"), "auto"))
    with pytest.raises(PromptError, match="is a folder"):
        list(read_rows(str(tmp_path), "jsonl"))
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    for name in ("x.jsonl.gz", "x.parquet"):
        with pytest.raises(PromptError, match=f"{name} can't be read"):
            list(read_rows(str(tmp_path / name), "auto"))
    with pytest.raises(PromptError, match="can't be read"):
        list(read_rows("nosuchprotocol://x.jsonl", "auto"))
