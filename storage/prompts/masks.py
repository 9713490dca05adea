"""Which tokens of a row are supervised.

Assistant tokens come from the template's own ``{% generation %}`` tags where it has them. Otherwise the
conversation is rendered up to each assistant turn, with the generation prompt, and through it; both must be
prefixes of the whole rendering, in text and in tokens, and what lies between them is the turn. A template
that writes a turn otherwise once more turns follow fails that check, and its row is rejected: a guess would
supervise the wrong tokens without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from storage.errors import RowRejected
from storage.prompts.chat import ChatTokenizer, Encoding, Span
from storage.prompts.rows import Conversation, Message, Text, TokenRow
from storage.prompts.spec import LossMask, MaskPolicy, Rejection, Tokenised

Mask = npt.NDArray[np.uint8]

_REMEDY: dict[MaskPolicy, str] = {
    "assistant": "use loss_mask: split_turns (one sample a turn) or last_turn",
    "last_turn": "use loss_mask: split_turns (one sample a turn)",
    "split_turns": "use loss_mask: markers, or a prompts.chat_template with {% generation %} tags",
}


def supervise(
    chat: ChatTokenizer, content: Conversation | Text | TokenRow, policy: LossMask
) -> list[Tokenised]:
    """The samples of one row: one, or one a turn under ``split_turns``, each perhaps with its own rejection.

    Raises:
        RowRejected: the row as a whole gives no sample.
    """
    if isinstance(content, TokenRow):
        return [_token_row(content, policy)]
    if isinstance(content, Text):
        return [_plain_text(chat, content, policy)]
    if policy.policy == "all":
        encoding = chat.encode(chat.render(content.messages, content, generation_prompt=False))
        return [Tokenised(None, encoding.token_ids, np.ones_like(encoding.token_ids, dtype=np.uint8))]
    if policy.policy == "markers":
        encoding = chat.encode(chat.render(content.messages, content, generation_prompt=False))
        return [Tokenised(None, encoding.token_ids, _marker_mask(chat, encoding, policy))]
    turns = [i for i, message in enumerate(content.messages) if message["role"] == "assistant"]
    if not turns:
        raise RowRejected("unsupervised", "the conversation has no assistant turn")
    if policy.policy == "split_turns":
        return [_one_turn(chat, content, turn, number) for number, turn in enumerate(turns, start=1)]
    wanted = turns[-1:] if policy.policy == "last_turn" else turns
    return [_turns(chat, content, content.messages, wanted, policy.policy)]


def rejected(rejection: Rejection, turn: int | None = None) -> Tokenised:
    """A sample that isn't one."""
    return Tokenised(turn, np.empty(0, np.int32), np.empty(0, np.uint8), rejection)


def _token_row(row: TokenRow, policy: LossMask) -> Tokenised:
    if row.loss_mask is not None:
        return Tokenised(None, row.token_ids, row.loss_mask)
    if policy.policy != "all":
        raise RowRejected(
            "no_turns",
            f"input_ids without a loss_mask don't show their turns, which loss_mask: {policy.policy} needs; "
            "add a loss_mask to the row, or use loss_mask: all",
        )
    return Tokenised(None, row.token_ids, np.ones_like(row.token_ids, dtype=np.uint8))


def _plain_text(chat: ChatTokenizer, row: Text, policy: LossMask) -> Tokenised:
    if policy.policy not in ("all", "markers"):
        raise RowRejected(
            "no_turns",
            f"plain text has no turns, which loss_mask: {policy.policy} needs; use loss_mask: all or markers",
        )
    encoding = chat.encode_plain(row.text)
    if policy.policy == "markers":
        return Tokenised(None, encoding.token_ids, _marker_mask(chat, encoding, policy))
    return Tokenised(None, encoding.token_ids, np.ones_like(encoding.token_ids, dtype=np.uint8))


def _one_turn(chat: ChatTokenizer, conversation: Conversation, turn: int, number: int) -> Tokenised:
    try:
        sample = _turns(chat, conversation, conversation.messages[: turn + 1], [turn], "split_turns")
    except RowRejected as exc:
        return rejected(Rejection(exc.kind, exc.reason), number)
    return Tokenised(number, sample.token_ids, sample.loss_mask)


def _turns(
    chat: ChatTokenizer,
    conversation: Conversation,
    messages: Sequence[Message],
    turns: Sequence[int],
    policy: MaskPolicy,
) -> Tokenised:
    if chat.has_generation_tags:
        return _by_generation_tags(chat, conversation, messages, turns, policy)
    require_opening(turns)
    text = chat.render(messages, conversation, generation_prompt=False)
    final = len(messages) - 1
    if list(turns) == [final]:
        text = _as_generated(chat, conversation, messages, text)
    encoding = chat.encode(text)
    return Tokenised(
        None, encoding.token_ids, turn_mask(chat, conversation, messages, encoding, turns, policy)
    )


def require_opening(turns: Sequence[int]) -> None:
    """Refuses a conversation whose first message is among the assistant turns ``turns``.

    Raises:
        RowRejected: it is.
    """
    if turns[0] == 0:
        raise RowRejected("mask", "it starts with an assistant turn, so nothing shows where that begins")


def turn_mask(
    chat: ChatTokenizer,
    conversation: Conversation,
    messages: Sequence[Message],
    encoding: Encoding,
    turns: Sequence[int],
    policy: MaskPolicy,
) -> Mask:
    """1 for the tokens of some assistant turns in a rendering of ``messages``; uint8 [T].

    Args:
        chat: the template.
        conversation: what ``messages`` are a head of.
        messages: as they were rendered, with or without a generation prompt after them.
        encoding: of that rendering.
        turns: indices of the messages.
        policy: for the remedy in an error.

    Raises:
        RowRejected: the rendering doesn't show where a turn begins or ends.
    """
    final = len(messages) - 1
    mask = np.zeros(encoding.token_ids.size, dtype=np.uint8)
    for turn in turns:
        before = chat.render(messages[:turn], conversation, generation_prompt=True)
        start = _token_edge(chat, encoding, before, f"before message {turn}", policy)
        end = encoding.token_ids.size
        if turn < final:
            through = chat.render(messages[: turn + 1], conversation, generation_prompt=False)
            end = _token_edge(chat, encoding, through, f"through message {turn}", policy)
        mask[start : chat.end_of_turn(encoding.token_ids, start, end)] = 1
    return mask


def _as_generated(
    chat: ChatTokenizer, conversation: Conversation, messages: Sequence[Message], text: str
) -> str:
    """``text``, the rendering of ``messages``, with what stands before its last turn as it was for the model.

    Kimi strips the reasoning of tool calls once the answer is there. The model still had it in view when it
    wrote that answer, so the sample is the prompt as it was, and then the answer's text. Where that can't be
    told apart, ``text`` comes back as it is, and the check of its prefix says why.
    """
    before = chat.render(messages[:-1], conversation, generation_prompt=True)
    if text.startswith(before):
        return text
    closed = chat.render(messages[:-1], conversation, generation_prompt=False)
    opening = before.removeprefix(closed)
    found = text.rfind(opening)
    if not before.startswith(closed) or not opening or found < 0:
        return text
    answer = text[found + len(opening) :]
    content = messages[-1]["content"] or ""
    return before + answer if content.strip() in answer else text


def _by_generation_tags(
    chat: ChatTokenizer,
    conversation: Conversation,
    messages: Sequence[Message],
    turns: Sequence[int],
    policy: MaskPolicy,
) -> Tokenised:
    text, spans = chat.render_with_spans(messages, conversation)
    encoding = chat.encode(text)
    if policy != "assistant" and turns[0] > 0:
        head = chat.render(messages[: turns[0]], conversation, generation_prompt=False)
        if not text.startswith(head):
            raise RowRejected("mask", _otherwise(chat, head, text, f"before message {turns[0]}", policy))
        spans = [span for span in spans if span[0] >= len(head)]
    return Tokenised(None, encoding.token_ids, span_mask(chat, encoding, spans))


def _token_edge(chat: ChatTokenizer, encoding: Encoding, prefix: str, where: str, policy: MaskPolicy) -> int:
    if not encoding.text.startswith(prefix):
        raise RowRejected("mask", _otherwise(chat, prefix, encoding.text, where, policy))
    count = chat.tokens_before(encoding, prefix)
    if count is None:
        around = encoding.text[max(0, len(prefix) - 8) : len(prefix) + 8]
        raise RowRejected(
            "mask",
            f"with {chat.name}, the tokens {where} are others when text follows, in {around!r}; mend the "
            "row's white space, or use loss_mask: markers",
        )
    return count


def _otherwise(chat: ChatTokenizer, head: str, text: str, where: str, policy: MaskPolicy) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(head, text, strict=False)) if a != b), min(len(head), len(text))
    )
    return (
        f"{chat.name} writes the conversation {where} otherwise when more follows: "
        f"{head[same : same + 32]!r} becomes {text[same : same + 32]!r}, so one rendering doesn't show which "
        f"tokens are the assistant's; {_REMEDY[policy]}"
    )


def _marker_mask(chat: ChatTokenizer, encoding: Encoding, policy: LossMask) -> Mask:
    spans = marker_spans(encoding.text, policy.start, policy.end)
    if not spans:
        raise RowRejected("unsupervised", f"the start marker {policy.start!r} occurs nowhere in the text")
    return span_mask(chat, encoding, spans)


def marker_spans(text: str, start: str, end: str) -> list[Span]:
    """Spans after each ``start`` through the next ``end``, or through the text's end without one."""
    spans: list[Span] = []
    position = 0
    while (found := text.find(start, position)) >= 0:
        first = found + len(start)
        closing = text.find(end, first)
        position = len(text) if closing < 0 else closing + len(end)
        spans.append((first, position))
    return spans


def span_mask(chat: ChatTokenizer, encoding: Encoding, spans: Sequence[Span]) -> Mask:
    """1 for each token whose first character lies in a span; uint8 [T].

    A token that begins before a span and reaches into it isn't supervised: the model generated it, if at all,
    from an earlier place.

    Raises:
        RowRejected: the tokenizer doesn't tell offsets, and a token reaches over a span's edge.
    """
    mask = np.zeros(encoding.token_ids.size, dtype=np.uint8)
    for start, end in spans:
        if encoding.starts is not None and encoding.ends is not None:
            inside = (encoding.starts >= start) & (encoding.starts < end) & (encoding.ends > encoding.starts)
            mask[inside] = 1
            continue
        first = chat.tokens_before(encoding, encoding.text[:start])
        last = chat.tokens_before(encoding, encoding.text[:end])
        if first is None or last is None:
            raise RowRejected("mask", f"a token reaches over an edge of characters {start} to {end}")
        mask[first:last] = 1
    return mask
