"""A sample's text with its loss mask, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens with the same mask, decoded together so that characters of many tokens survive."""

    text: str
    supervised: bool


def load_tokenizer(model_path: str, trust_remote_code: bool = False) -> Any | None:
    """The tokenizer in a model's folder; None where it isn't on this machine or can't be loaded.

    Its text is for people to look at: nothing depends on it, and no code of a model is run for it unasked.
    """
    if not Path(model_path).is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # no tokenizer files, or ones that are code
        return None


def stretches(tokenizer: Any, ids: Sequence[int], mask: Sequence[int | bool]) -> tuple[Stretch, ...]:
    """Cuts a sample where its mask changes.

    Args:
        tokenizer: that it was made with.
        ids: [T].
        mask: [T], true where supervised.
    """
    found = []
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or bool(mask[stop]) != bool(mask[start]):
            found.append(Stretch(tokenizer.decode(ids[start:stop]), bool(mask[start])))
            start = stop
    return tuple(found)


def coloured(pieces: Sequence[Stretch], limit: int | None = None) -> Text:
    """For a terminal: supervised text green, the rest dim; cut after ``limit`` characters."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, style="bold green" if piece.supervised else "dim")
    if limit is not None and len(text) > limit:
        rest = len(text) - limit
        text.truncate(limit)
        text.append(f" ... ({rest:,} characters more)", style="italic")
    return text
