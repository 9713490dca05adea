"""Token frequencies and the vocabulary map of a drafter. Pure, no I/O.

A drafter with a small vocabulary predicts the tokens that are supervised most often. d2t and t2d are EAGLE-3's:
target id = draft id + d2t[draft id]; t2d says of each target id whether the drafter knows it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from storage.errors import ConfigError

Counts = npt.NDArray[np.int64]


def count_supervised(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> Counts:
    """How often each id is supervised, int64 [largest id + 1].

    Args:
        input_ids: int64 [T].
        loss_mask: int64 [T].
    """
    return np.bincount(input_ids[loss_mask.bool()].numpy()).astype(np.int64)


def add_counts(first: Counts, second: Counts) -> Counts:
    """The sum of two counts, as long as the longer one."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def vocabulary_map(
    counts: Counts, draft_vocab_size: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``draft_vocab_size`` most frequent ids; equally frequent ones, and ids that never occur, by their number.

    Args:
        counts: supervised tokens of each id, int64 [at most vocab_size].
        draft_vocab_size: V', of the drafter.
        vocab_size: V, of the target.

    Returns:
        d2t int64 [V'] (target id minus draft id, draft ids ascending as target ids do) and t2d bool [V].

    Raises:
        ConfigError: the drafter's vocabulary isn't between 1 and the target's, or a token is beyond the target's.
    """
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ConfigError(f"--draft-vocab-size {draft_vocab_size}: the target has {vocab_size} tokens")
    if len(counts) > vocab_size:
        raise ConfigError(
            f"token {len(counts) - 1} is in the dump and the target has {vocab_size} tokens; check --vocab-size"
        )
    frequent = np.argsort(-np.pad(counts, (0, vocab_size - len(counts))), kind="stable")[:draft_vocab_size]
    chosen = torch.from_numpy(np.sort(frequent))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(draft_vocab_size), t2d


def coverage(counts: Counts, t2d: torch.Tensor) -> float:
    """Share of the supervised tokens that the drafter can propose at all."""
    total = int(counts.sum())
    return float(counts[t2d.numpy()[: len(counts)]].sum() / total) if total else 0.0
