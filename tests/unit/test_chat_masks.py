"""Loss masks on the documented templates of several model families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import BOS, WithoutOffsets, template_text, tiny_chat, tiny_tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from storage.errors import RowRejected
from storage.prompts.chat import ChatTokenizer
from storage.prompts.masks import marker_spans, supervise
from storage.prompts.rows import Conversation, Text, TokenRow
from storage.prompts.spec import LossMask, Tokenised

FAMILIES = ["chatml", "chatml_tagged", "qwen3", "kimi_k2", "deepseek_v31", "llama31"]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
END = {
    "chatml": "<|im_end|>",
    "chatml_tagged": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "kimi_k2": "<|im_end|>",
    "deepseek_v31": "<｜end▁of▁sentence｜>",
    "llama31": "<|eot_id|>",
}
OPENING = {"qwen3": EMPTY_THOUGHT, "kimi_k2": "</think>"}
"""What a family's model generates before the content of an answer without reasoning."""


def chat_of(*contents: str) -> Conversation:
    roles = ["user", "assistant"]
    return Conversation(tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)))


def supervised(chat: ChatTokenizer, sample: Tokenised) -> list[str]:
    """The text of each supervised stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]]).astype(np.int8)))
    return [chat.decode(sample.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]


TWO_TURNS = chat_of("What is 2 + 2?", "It is 4.", "And 3 + 3?", "It is 6. 因为散射😀")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_turn_supervises_the_answer_and_its_end(family: str) -> None:
    chat = tiny_chat(family)
    (sample,) = supervise(chat, chat_of("What is 2 + 2?", "It is 4."), LossMask())
    assert supervised(chat, sample) == [OPENING.get(family, "") + "It is 4." + END[family]]
    assert sample.token_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.uint8


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3"])
def test_every_assistant_turn_is_supervised_where_the_template_repeats_itself(family: str) -> None:
    chat = tiny_chat(family)
    (sample,) = supervise(chat, TWO_TURNS, LossMask("assistant"))
    opening = OPENING.get(family, "")
    assert supervised(chat, sample) == [
        opening + "It is 4." + END[family],
        opening + "It is 6. 因为散射😀" + END[family],
    ]


def test_qwen3_is_refused_under_assistant_with_template_cause_and_way_out() -> None:
    with pytest.raises(RowRejected) as caught:
        supervise(tiny_chat("qwen3"), TWO_TURNS, LossMask("assistant"))
    assert caught.value.kind == "mask"
    for part in ("the chat template of qwen3", "<think>", "split_turns", "message 1"):
        assert part in str(caught.value)


def test_kimi_is_refused_when_it_strips_the_reasoning_of_a_tool_call() -> None:
    call = {"id": "functions.add:0", "function": {"name": "add", "arguments": "{}"}}
    messages: tuple[dict[str, Any], ...] = (
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "reasoning_content": "I need a tool.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    )
    chat = tiny_chat("kimi_k2")
    with pytest.raises(RowRejected, match=r"I need a tool.*split_turns"):
        supervise(chat, Conversation(messages), LossMask("assistant"))
    first, last = supervise(chat, Conversation(messages), LossMask("split_turns"))
    assert supervised(chat, first)[0].startswith("I need a tool.</think><|tool_call_begin|>functions.add:0")
    assert supervised(chat, last) == ["</think>It is 4.<|im_end|>"]
    # The answer was written with that reasoning in view, so its sample has it.
    assert "<think>I need a tool.</think>" in chat.decode(last.token_ids)
    (same,) = supervise(chat, Conversation(messages), LossMask("last_turn"))
    assert same.token_ids.tolist() == last.token_ids.tolist()
    assert same.loss_mask.tolist() == last.loss_mask.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_last_turn_supervises_only_the_last_answer(family: str) -> None:
    chat = tiny_chat(family)
    (sample,) = supervise(chat, TWO_TURNS, LossMask("last_turn"))
    assert supervised(chat, sample) == [OPENING.get(family, "") + "It is 6. 因为散射😀" + END[family]]
    assert "It is 4." in chat.decode(sample.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_split_turns_gives_what_the_model_saw_at_each_turn(family: str) -> None:
    chat, tokenizer = tiny_chat(family), tiny_tokenizer(family)
    samples = supervise(chat, TWO_TURNS, LossMask("split_turns"))
    assert [s.turn for s in samples] == [1, 2]
    for sample, length, answer in zip(samples, (1, 3), ("It is 4.", "It is 6. 因为散射😀"), strict=True):
        assert supervised(chat, sample) == [OPENING.get(family, "") + answer + END[family]]
        prompt = tokenizer.apply_chat_template(
            list(TWO_TURNS.messages[:length]), add_generation_prompt=True, return_dict=False
        )
        before = sample.token_ids[: int(np.argmax(sample.loss_mask))]
        assert before.tolist() == prompt


def test_qwen3_keeps_reasoning_of_the_turn_that_is_supervised_only() -> None:
    chat = tiny_chat("qwen3")
    first = "<think>\nTwo and two.\n</think>\n\nIt is 4."
    samples = supervise(chat, chat_of("2 + 2?", first, "3 + 3?", "It is 6."), LossMask("split_turns"))
    assert supervised(chat, samples[0]) == [first + "<|im_end|>"]
    assert "Two and two" not in chat.decode(samples[1].token_ids)


def test_deepseek_drops_reasoning_and_starts_the_answer_after_its_closing_tag() -> None:
    chat = tiny_chat("deepseek_v31")
    (sample,) = supervise(chat, chat_of("2 + 2?", "<think>Easy.</think>It is 4."), LossMask())
    assert "Easy" not in chat.decode(sample.token_ids)
    assert supervised(chat, sample) == ["It is 4.<｜end▁of▁sentence｜>"]
    before = chat.decode(sample.token_ids[: int(np.argmax(sample.loss_mask))])
    assert before.endswith("<｜Assistant｜></think>")


def test_llama_trims_contents_and_writes_its_bos_once() -> None:
    chat = tiny_chat("llama31")
    (sample,) = supervise(chat, chat_of(" 2 + 2? ", "\n\nIt is 4.\n"), LossMask())
    assert supervised(chat, sample) == ["It is 4.<|eot_id|>"]
    text = chat.decode(sample.token_ids)
    assert text.count(BOS) == 1
    assert "Today Date: 26 Jul 2024" in text


def test_plain_text_gets_the_bos_that_it_lacks_and_no_second_one() -> None:
    chat = tiny_chat(None)
    for text in ("Paris.", f"{BOS}Paris."):
        (sample,) = supervise(chat, Text(text), LossMask("all"))
        assert chat.decode(sample.token_ids) == f"{BOS}Paris."
        assert sample.loss_mask.all()


def test_generation_tags_agree_with_transformers_and_with_growing_prefixes() -> None:
    conversation = chat_of("2 + 2?", "It is 4.", "3 + 3?", "It is 6.")
    tagged = tiny_tokenizer("chatml_tagged")
    (sample,) = supervise(tiny_chat("chatml_tagged"), conversation, LossMask())
    theirs = tagged.apply_chat_template(
        list(conversation.messages), return_assistant_tokens_mask=True, return_dict=True
    )
    assert sample.token_ids.tolist() == theirs["input_ids"]
    assert sample.loss_mask.tolist() == theirs["assistant_masks"]
    untagged = (
        template_text("chatml_tagged").replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    )
    chat = ChatTokenizer(tiny_tokenizer(), untagged, "untagged")
    assert not chat.has_generation_tags
    (prefixes,) = supervise(chat, conversation, LossMask())
    assert prefixes.loss_mask.tolist() == sample.loss_mask.tolist()


def test_a_token_that_reaches_into_an_answer_rejects_the_row() -> None:
    chat = tiny_chat("chatml")
    with pytest.raises(RowRejected, match="the tokens before message 1 are others") as caught:
        supervise(chat, chat_of("Hello?", "\n\nParis."), LossMask())
    assert caught.value.kind == "mask"


def test_tokens_that_are_split_otherwise_before_an_answer_reject_the_row() -> None:
    # GPT-2 keeps two line breaks together at the end of a text, and parts them when a word follows: the edge
    # lies between two tokens either way, but they aren't the ones that the model would have seen.
    tokenizer = tiny_tokenizer("llama31")
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    for each in (tokenizer, WithoutOffsets(tokenizer)):
        with pytest.raises(RowRejected, match="the tokens before message 1 are others"):
            supervise(ChatTokenizer(each, None, "llama31"), chat_of("2 + 2?", "It is 4."), LossMask())


@pytest.mark.parametrize(
    ("conversation", "kind"),
    [
        (Conversation(({"role": "user", "content": "Hello?"},)), "unsupervised"),
        (Conversation(({"role": "assistant", "content": "Hello."},)), "mask"),
    ],
)
def test_a_conversation_without_a_turn_to_find_is_rejected(conversation: Conversation, kind: str) -> None:
    with pytest.raises(RowRejected) as caught:
        supervise(tiny_chat("chatml"), conversation, LossMask())
    assert caught.value.kind == kind


def test_a_question_after_the_last_answer_stays_in_the_sample_unsupervised() -> None:
    chat = tiny_chat("chatml")
    (sample,) = supervise(chat, chat_of("2 + 2?", "It is 4.", "Sure?"), LossMask("last_turn"))
    assert supervised(chat, sample) == ["It is 4.<|im_end|>"]
    assert "Sure?" in chat.decode(sample.token_ids)


@pytest.mark.parametrize("policy", ["assistant", "last_turn", "split_turns"])
def test_rows_without_turns_are_rejected_where_turns_are_needed(policy: Any) -> None:
    for content in (Text("Paris."), TokenRow(np.array([1, 2], np.int32), None)):
        with pytest.raises(RowRejected, match="loss_mask: all") as caught:
            supervise(tiny_chat("chatml"), content, LossMask(policy))
        assert caught.value.kind == "no_turns"


def test_a_rows_own_mask_wins() -> None:
    row = TokenRow(np.array([5, 6, 7], np.int32), np.array([0, 1, 0], np.uint8))
    for policy in (LossMask("assistant"), LossMask("all")):
        (sample,) = supervise(tiny_chat("chatml"), row, policy)
        assert sample.loss_mask.tolist() == [0, 1, 0]


def test_markers_supervise_from_after_the_start_through_the_end() -> None:
    chat = tiny_chat("qwen3")  # the family whose turns growing prefixes can't find
    policy = LossMask("markers", start="<|im_start|>assistant\n", end="<|im_end|>")
    (sample,) = supervise(chat, TWO_TURNS, policy)
    assert supervised(chat, sample) == [
        "It is 4.<|im_end|>",
        EMPTY_THOUGHT + "It is 6. 因为散射😀<|im_end|>",
    ]
    with pytest.raises(RowRejected, match="occurs nowhere"):
        supervise(chat, TWO_TURNS, LossMask("markers", start="[/INST]", end="</s>"))


def test_an_unclosed_marker_reaches_to_the_end() -> None:
    assert marker_spans("a[b]c[d", "[", "]") == [(2, 4), (6, 7)]


def test_markers_without_their_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        LossMask("markers", start="x")
    with pytest.raises(ValueError, match="markers"):
        LossMask("assistant", start="x", end="y")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["last_turn", "split_turns", "markers"])
def test_a_tokenizer_without_offsets_gives_the_same_masks(family: str, policy: Any) -> None:
    mask = LossMask(policy, "<|im_middle|>", "<|im_end|>") if policy == "markers" else LossMask(policy)
    if policy == "markers" and family != "kimi_k2":
        mask = LossMask(policy, "2?", END[family])
    slow = ChatTokenizer(WithoutOffsets(tiny_tokenizer(family)), None, family)
    for ours, theirs in zip(
        supervise(slow, TWO_TURNS, mask), supervise(tiny_chat(family), TWO_TURNS, mask), strict=True
    ):
        assert ours.rejection is None
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_a_template_that_refuses_a_row_is_named() -> None:
    chat = ChatTokenizer(
        tiny_tokenizer(), "{{ raise_exception('roles must alternate') }}", "prompts.chat_template"
    )
    with pytest.raises(
        RowRejected, match=r"prompts\.chat_template refuses it.*roles must alternate"
    ) as caught:
        supervise(chat, TWO_TURNS, LossMask("all"))
    assert caught.value.kind == "template"


def test_a_tokenizer_without_a_template_rejects_conversations_but_takes_text() -> None:
    chat = tiny_chat(None)
    with pytest.raises(RowRejected, match=r"give one as prompts\.chat_template"):
        supervise(chat, TWO_TURNS, LossMask())
    assert supervise(chat, Text("Paris."), LossMask("all"))


_CONTENT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20).filter(
    lambda t: bool(t.strip())
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_CONTENT, min_size=2, max_size=6), st.sampled_from(["chatml", "chatml_tagged", "kimi_k2"]))
def test_supervised_text_is_exactly_the_answers_and_their_ends(contents: list[str], family: str) -> None:
    chat = _CHATS[family]
    # White space at an answer's start may merge with the line break before it, in ChatML.
    merges = family.startswith("chatml") and any(answer[0].isspace() for answer in contents[1::2])
    try:
        (sample,) = supervise(chat, chat_of(*contents), LossMask())
    except RowRejected:
        assert merges
        return
    assert sample.loss_mask.size == sample.token_ids.size
    expected = [OPENING.get(family, "") + answer + END[family] for answer in contents[1::2]]
    assert merges or supervised(chat, sample) == expected


_CHATS = {family: tiny_chat(family) for family in ("chatml", "chatml_tagged", "kimi_k2")}
