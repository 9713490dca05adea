"""What a row of the prompt file says, whatever its form. Pure.

Forms, in the order in which they are looked for (a row with several takes the first):

* ``input_ids``: token ids, with an optional ``loss_mask`` of the same length;
* ``messages``: OpenAI's list of ``{"role", "content"}``;
* ``conversations``: ShareGPT's list of ``{"from", "value"}``, with an optional ``system`` string;
* ``text``: one string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import RowRejected

ID_FIELDS = ("id", "conversation_id")
FORM_FIELDS = ("input_ids", "messages", "conversations", "text")
CONTENT_FIELDS = (*FORM_FIELDS, "loss_mask", "tools", "system")
"""Fields that decide what is tokenised; a row's digest covers these and no others."""

Message = dict[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, with the tools they may call."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Text:
    """Plain text without turns."""

    text: str


@dataclass(frozen=True)
class TokenRow:
    """Token ids int32 [T]; loss_mask uint8 [T], or None where the row has none."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8] | None


def decode_row(raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The row as a mapping without null fields.

    Parquet fills every struct of a column up with nulls, so there they go at all depths.

    Raises:
        RowRejected: the line isn't one JSON object.
    """
    if isinstance(raw, dict):
        return dict(_without_nulls(raw))
    try:
        row = json.loads(raw)
    except UnicodeDecodeError as exc:
        raise RowRejected("broken", f"the line isn't UTF-8: {exc.reason} at byte {exc.start}") from None
    except (ValueError, RecursionError) as exc:
        raise RowRejected("broken", f"the line isn't JSON: {exc}") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise RowRejected("broken", f"the line holds a JSON {kind}; each line is one JSON object")
    return {key: value for key, value in row.items() if value is not None}


def own_id(row: Mapping[str, Any]) -> str | None:
    """The row's ``id``, else its ``conversation_id``, as text; None when both are missing or empty."""
    for field in ID_FIELDS:
        value = row.get(field)
        if value is not None and str(value):
            return str(value).encode("utf-8", "backslashreplace").decode()
    return None


def content_digest(row: Mapping[str, Any] | bytes) -> str:
    """xxh3-128, hexadecimal, of what the row says; of its bytes where it can't be decoded.

    Canonical: only `CONTENT_FIELDS`, keys sorted, no nulls, no white space, so that the order of keys and the
    kind of file don't matter.
    """
    if isinstance(row, bytes):
        return xxhash.xxh3_128_hexdigest(row.strip())
    content = _without_nulls({field: row[field] for field in CONTENT_FIELDS if field in row})
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def read_content(row: Mapping[str, Any]) -> Conversation | Text | TokenRow:
    """The row's content in one of three forms.

    Raises:
        RowRejected: no known field, an empty one, or one of the wrong shape.
    """
    form = next((field for field in FORM_FIELDS if field in row), None)
    if form is None:
        held = ", ".join(sorted(row)) or "nothing"
        raise RowRejected("no_field", f"the row holds {held}; none of {', '.join(FORM_FIELDS)}")
    if form == "text":
        return Text(_checked_text(row["text"], "text"))
    if form == "input_ids":
        return _token_row(row["input_ids"], row.get("loss_mask"))
    return Conversation(_messages(row, form), _tools(row.get("tools")))


def _messages(row: Mapping[str, Any], form: str) -> tuple[Message, ...]:
    turns = row[form]
    if not isinstance(turns, list):
        raise RowRejected("content", f"{form} is a {type(turns).__name__}, not a list of messages")
    if not turns:
        raise RowRejected("empty", f"{form} is empty")
    messages = [_message(turn, f"{form}[{i}]") for i, turn in enumerate(turns)]
    system = row.get("system") if form == "conversations" else None
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _checked_text(system, "system")})
    return tuple(messages)


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise RowRejected("content", f"{where} is a {type(turn).__name__}, not a message")
    if "from" in turn:
        role, names, content = turn["from"], _SPEAKERS, turn.get("value")
    else:
        role, names, content = turn.get("role"), {r: r for r in _ROLES}, turn.get("content")
    if not isinstance(role, str) or role not in names:
        raise RowRejected("role", f"{where} is by {role!r}; known are {', '.join(sorted(names))}")
    if content is None and turn.get("tool_calls"):
        checked = None
    else:
        # A tool may have nothing to say, and many files give every conversation an empty system message.
        checked = _checked_text(content, where, may_be_empty=names[role] in ("system", "tool"))
    rest = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content") and v is not None}
    return {"role": names[role], "content": checked, **rest}


def _checked_text(value: Any, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        held = "nothing" if value is None else f"a {type(value).__name__}"
        raise RowRejected("content", f"{where} holds {held} where text is expected")
    if not value.strip() and not may_be_empty:
        raise RowRejected("empty", f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise RowRejected(
            "content", f"{where} holds half a surrogate pair at character {exc.start}"
        ) from None
    return value


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str):  # Parquet files often keep tool schemas as JSON text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowRejected("content", "tools is text that isn't JSON") from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowRejected("content", "tools isn't a list of JSON schemas")
    return tuple(value)


def _token_row(ids: Any, mask: Any) -> TokenRow:
    token_ids = _integers(ids, "input_ids", np.iinfo(np.int32).max)
    if not token_ids.size:
        raise RowRejected("empty", "input_ids is empty")
    if mask is None:
        return TokenRow(token_ids.astype(np.int32), None)
    loss_mask = _integers(mask, "loss_mask", 1)
    if loss_mask.size != token_ids.size:
        raise RowRejected("content", f"loss_mask has {loss_mask.size} values for {token_ids.size} input_ids")
    return TokenRow(token_ids.astype(np.int32), loss_mask.astype(np.uint8))


def _integers(value: Any, field: str, highest: int) -> npt.NDArray[np.int64]:
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise RowRejected("content", f"{field} isn't a flat list of integers")
    worst = next((v for v in value if not 0 <= v <= highest), None)
    if worst is not None:
        kind = "vocab" if field == "input_ids" else "content"
        raise RowRejected(kind, f"{field} holds {worst}, outside 0..{highest}")
    return np.asarray(value, dtype=np.int64)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value
