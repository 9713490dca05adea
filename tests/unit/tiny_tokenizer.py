"""A small byte-level BPE tokenizer with the template families' special tokens, made without a network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from storage.prompts.chat import ChatTokenizer

TEMPLATES = Path(__file__).parent / "templates"

BOS = "<|begin_of_text|>"
_SPECIAL = [
    BOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
]  # fmt: skip
_ADDED = ["<think>", "</think>"]
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words as Llama 3 and Qwen cut them: line breaks stay together, whatever follows."""
_TRAINING_TEXT = [
    "The answer is four.\n\nWhat is the capital of France?\n\n\nParis is the capital of France.\n",
    "user assistant system You answer briefly. Why is the sky blue?\n\n\n\nBecause of scattering.  \n",
    "Warum ist der Himmel blau? Wegen der Streuung.\n\n\n",
    "天空为什么是蓝色的？因为散射。\n\n",
] * 20


@cache
def _json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    # As with Qwen3, thinking tags are single tokens but not special ones.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )
    return str(tokenizer.to_str())


def tiny_tokenizer(template: str | None = None) -> Any:
    """A fresh tokenizer that puts a BOS before plain text, as Llama's does; ``template`` names a file."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_json()), bos_token=BOS, additional_special_tokens=_SPECIAL[1:]
    )
    if template is not None:
        tokenizer.chat_template = template_text(template)
    return tokenizer


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def tiny_chat(template: str | None) -> ChatTokenizer:
    return ChatTokenizer(tiny_tokenizer(template), None, f"the chat template of {template}")


class WithoutOffsets:
    """A tokenizer as Kimi's is: Python code that tells no offsets."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return self._tokenizer(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation whose user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
