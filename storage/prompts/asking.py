"""What a row asks of the model: its tokens up to where the answer begins, and which of these are supervised.

An answer's own tokens are always supervised, all of them. The policy decides about what stands before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from storage.errors import RowRejected
from storage.prompts.chat import ChatTokenizer, Encoding
from storage.prompts.masks import Mask, marker_spans, require_opening, span_mask, supervise, turn_mask
from storage.prompts.rows import Conversation, Text, TokenRow
from storage.prompts.spec import GenerateSpec, LossMask, Tokenised

_ASKING_ROLES = frozenset({"user", "tool"})
"""Whoever spoke last in a conversation that the model is to go on with."""


def ask(
    chat: ChatTokenizer, content: Conversation | Text | TokenRow, policy: LossMask, generate: GenerateSpec
) -> list[Tokenised]:
    """The samples of one row, of which those are marked that the model has to answer.

    A conversation that ends otherwise than with a user or a tool is taken as it is, and so is a row without
    turns unless these are to be completed. Under ``split_turns`` the turns before the question are samples
    of their own.

    Raises:
        RowRejected: the row as a whole gives no sample.
    """
    if isinstance(content, Conversation):
        if content.messages[-1]["role"] not in _ASKING_ROLES:
            return supervise(chat, content, policy)
        earlier = [i for i, message in enumerate(content.messages) if message["role"] == "assistant"]
        question = _question(chat, content, earlier, policy)
        if policy.policy != "split_turns":
            return [question]
        turns = supervise(chat, content, policy) if earlier else []
        return [*turns, replace(question, turn=len(turns) + 1)]
    if generate.plain == "keep":
        return supervise(chat, content, policy)
    return [_completed(chat, content, policy)]


def _question(
    chat: ChatTokenizer, conversation: Conversation, earlier: list[int], policy: LossMask
) -> Tokenised:
    encoding = chat.encode(chat.render(conversation.messages, conversation, generation_prompt=True))
    mask = _prompt_mask(chat, encoding, policy)
    if policy.policy == "assistant" and earlier:
        mask = _earlier_turns(chat, conversation, encoding, earlier)
    return Tokenised(None, encoding.token_ids, mask, asks=True)


def _earlier_turns(
    chat: ChatTokenizer, conversation: Conversation, encoding: Encoding, turns: list[int]
) -> Mask:
    messages = conversation.messages
    if not chat.has_generation_tags:
        require_opening(turns)
        return turn_mask(chat, conversation, messages, encoding, turns, "assistant")
    text, spans = chat.render_with_spans(messages, conversation)
    if not encoding.text.startswith(text):
        raise RowRejected(
            "mask",
            f"{chat.name} writes the conversation otherwise when an answer is asked for, so its earlier turns can't be "
            "told apart; use loss_mask: last_turn",
        )
    return span_mask(chat, encoding, spans)


def _completed(chat: ChatTokenizer, content: Text | TokenRow, policy: LossMask) -> Tokenised:
    if isinstance(content, TokenRow):
        everything = policy.policy == "all"
        mask = np.full(content.token_ids.size, everything, dtype=np.uint8)
        given = content.loss_mask
        return Tokenised(None, content.token_ids, mask if given is None else given, asks=True)
    encoding = chat.encode_plain(content.text)
    return Tokenised(None, encoding.token_ids, _prompt_mask(chat, encoding, policy), asks=True)


def _prompt_mask(chat: ChatTokenizer, encoding: Encoding, policy: LossMask) -> Mask:
    """Of policies that need no turns; zeros for the others."""
    if policy.policy == "markers":
        return span_mask(chat, encoding, marker_spans(encoding.text, policy.start, policy.end))
    return np.full(encoding.token_ids.size, policy.policy == "all", dtype=np.uint8)
