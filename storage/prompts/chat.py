"""A tokenizer with its chat template: text from messages, token ids from text. transformers loads lazily."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import ModelError, PromptError, RowRejected
from storage.prompts.rows import Conversation, Message
from storage.prompts.spec import PromptSpec

Span = tuple[int, int]
"""Characters [start, end) of a rendered text."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoding:
    """A text and its tokens.

    Attributes:
        token_ids: int32 [T].
        starts: int64 [T], first character of each token; None where the tokenizer doesn't tell.
        ends: int64 [T], past its last character. The tokens of one character that was split share its span.
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64] | None
    ends: npt.NDArray[np.int64] | None


class ChatTokenizer:
    """One tokenizer and one template.

    Args:
        tokenizer: a transformers tokenizer; one without offsets (Kimi's is such) works, only more slowly.
        template: Jinja text that replaces the tokenizer's own.
        name: what messages call the template.

    Attributes:
        template: the text in use, None when there is none.
        has_generation_tags: the template marks assistant tokens itself.
    """

    def __init__(self, tokenizer: Any, template: str | None, name: str) -> None:
        self._tokenizer = tokenizer
        # transformers warns of every text that is longer; the length is checked against max_tokens instead.
        tokenizer.model_max_length = 1 << 40
        self._override = template
        self.name = name
        self.template = template if template is not None else _own_template(tokenizer)
        self.has_generation_tags = bool(self.template and _GENERATION_TAG.search(self.template))
        added = tokenizer.added_tokens_decoder
        self._special_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    @classmethod
    def load(cls, spec: PromptSpec) -> ChatTokenizer:
        """Loads ``spec.tokenizer_path``.

        Raises:
            ModelError: there is no tokenizer that transformers can load.
            PromptError: ``spec.chat_template`` isn't valid Jinja.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                spec.tokenizer_path, trust_remote_code=spec.trust_remote_code, revision=spec.revision
            )
        except Exception as exc:  # whatever the model's own code raises
            raise ModelError(
                f"the tokenizer of {spec.tokenizer_path} can't be loaded: {_one_line(exc)}; "
                "model.path names a folder with tokenizer files, or a hub id that this machine can reach"
            ) from exc
        name = f"the chat template of {spec.tokenizer_path}"
        chat = cls(
            tokenizer, spec.chat_template, name if spec.chat_template is None else "prompts.chat_template"
        )
        chat._check_syntax()
        return chat

    @property
    def vocab_size(self) -> int:
        """Token ids that the tokenizer knows, added ones included."""
        return len(self._tokenizer)

    def template_digest(self) -> str | None:
        """xxh3-128 of the template's text, hexadecimal."""
        return None if self.template is None else xxhash.xxh3_128_hexdigest(self.template.encode())

    def vocabulary_digest(self) -> str:
        """xxh3-128, hexadecimal, of every token with its id."""
        hasher = xxhash.xxh3_128()
        for token, token_id in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            hasher.update(f"{token_id}\0{token}\0".encode("utf-8", "backslashreplace"))
        return hasher.hexdigest()

    def render(self, messages: Sequence[Message], conversation: Conversation, generation_prompt: bool) -> str:
        """The text of ``messages``, which are a head of ``conversation``, with its tools.

        Raises:
            RowRejected: the template refuses them, or there is none.
        """
        self._require_template()
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(conversation.tools) or None,
                    chat_template=self._override,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )
        except Exception as exc:  # a template evaluates expressions on other people's data
            raise RowRejected("template", f"{self.name} refuses it: {_one_line(exc)}") from None

    def render_with_spans(
        self, messages: Sequence[Message], conversation: Conversation
    ) -> tuple[str, list[Span]]:
        """The text of ``messages`` and the spans that its generation tags mark. Raises as `render`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._require_template()
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=list(conversation.tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as exc:  # as above
            raise RowRejected("template", f"{self.name} refuses it: {_one_line(exc)}") from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    def encode(self, text: str) -> Encoding:
        """Token ids of a rendered text; nothing is added, since the template has written its own BOS."""
        return self._encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> Encoding:
        """Token ids of plain text, with the BOS that the tokenizer adds unless the text starts with it."""
        bos = self._tokenizer.bos_token
        return self._encode(text, add_special_tokens=not (bos and text.startswith(bos)))

    def tokens_before(self, encoding: Encoding, prefix: str) -> int | None:
        """How many tokens ``prefix`` has, if they are the first of ``encoding``; None if they aren't.

        ``prefix`` is a prefix of the text. It need not be one in tokens: a merge across its end, or another
        split of white space before it, makes tokens that the model wouldn't have seen at that point.
        """
        if len(prefix) == len(encoding.text):
            return int(encoding.token_ids.size)
        count = self._count_by_offsets(encoding, prefix)
        if count is not None:
            return count
        ids = self.encode(prefix).token_ids
        return int(ids.size) if np.array_equal(encoding.token_ids[: ids.size], ids) else None

    def end_of_turn(self, token_ids: npt.NDArray[np.int32], start: int, end: int) -> int:
        """``end`` moved back over white space that the template puts after the turn's last special token.

        ChatML writes a line break after <|im_end|>, which the model never generates.
        """
        for position in range(end - 1, start - 1, -1):
            if int(token_ids[position]) in self._special_ids:
                after = self._tokenizer.decode(token_ids[position + 1 : end].tolist())
                return end if after.strip() else position + 1
        return end

    def decode(self, token_ids: npt.NDArray[np.int32], special: bool = True) -> str:
        """Text of token ids, special tokens included unless told otherwise."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=not special))

    def stop_ids(self, stop: Sequence[str | int]) -> tuple[int, ...]:
        """Token ids that end an answer, ascending: EOS, what the template puts after an answer, and ``stop``.

        Raises:
            PromptError: a text of ``stop`` isn't exactly one token, or a number is no token id.
        """
        found = {self._tokenizer.eos_token_id, self._end_of_answer()} - {None}
        for one in stop:
            if isinstance(one, int) and not 0 <= one < self.vocab_size:
                raise PromptError(
                    f"generate.stop: {one} is no token id; the tokenizer has {self.vocab_size}, from 0"
                )
            ids = [one] if isinstance(one, int) else self.encode(one).token_ids.tolist()
            if len(ids) != 1:
                raise PromptError(
                    f"generate.stop: {one!r} is {len(ids)} tokens ({ids}) here, and engines look at token ids only; "
                    "give a text that is one token, such as the template's end of turn, or a token id"
                )
            found.add(ids[0])
        return tuple(sorted(int(i) for i in found if i is not None))

    def _end_of_answer(self) -> int | None:
        """The special token with which the template ends an answer, None where it has none."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text = self.render(messages, Conversation(tuple(messages)), generation_prompt=False)
        except RowRejected:
            return None
        after = self.encode(text.rpartition("answer")[2]).token_ids
        return int(after[0]) if after.size and int(after[0]) in self._special_ids else None

    def _count_by_offsets(self, encoding: Encoding, prefix: str) -> int | None:
        """As `tokens_before`, but tokenises only what follows the last special token; None: can't tell.

        Tokenizers cut the text at special tokens first, so nothing before one depends on what follows it.
        """
        if encoding.starts is None or encoding.ends is None:
            return None
        count = int(np.searchsorted(encoding.starts, len(prefix), side="left"))
        anchor = next(
            (i for i in range(count - 1, -1, -1) if int(encoding.token_ids[i]) in self._special_ids), None
        )
        if anchor is None or int(encoding.ends[count - 1]) > len(prefix):
            return None
        tail = self.encode(prefix[int(encoding.starts[anchor]) :]).token_ids
        return count if np.array_equal(encoding.token_ids[anchor:count], tail) else None

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        fast = bool(self._tokenizer.is_fast)
        extra = {"return_offsets_mapping": True} if fast else {}
        out = self._tokenizer(text, add_special_tokens=add_special_tokens, **extra)
        ids = np.asarray(out["input_ids"], dtype=np.int32)
        if not fast:
            return Encoding(text, ids, None, None)
        offsets = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoding(text, ids, offsets[:, 0], offsets[:, 1])

    def _require_template(self) -> None:
        if self.template is None:
            raise RowRejected("template", f"{self.name} doesn't exist; give one as prompts.chat_template")

    def _check_syntax(self) -> None:
        from jinja2 import TemplateSyntaxError

        if self._override is None:
            return
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], chat_template=self._override, tokenize=False
            )
        except TemplateSyntaxError as exc:
            raise PromptError(
                f"prompts.chat_template isn't valid Jinja: line {exc.lineno}: {exc.message}"
            ) from exc
        except Exception:  # it may want other messages; rows will tell
            return


def _one_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"


def _own_template(tokenizer: Any) -> str | None:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:  # transformers' way to say that there is none
        return None
