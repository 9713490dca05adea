"""Token counts and the draft vocabulary, against speculators' own and by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from export_dumps import LENGTHS, VOCAB, head_of

from cluster.cli import run_cli
from storage.errors import ConfigError
from storage.export.vocabulary import coverage, vocabulary_map


def test_the_most_frequent_tokens_and_then_the_lowest() -> None:
    d2t, t2d = vocabulary_map(np.array([0, 5, 0, 9, 5, 1]), 4, 8)
    assert (d2t + torch.arange(4)).tolist() == [1, 3, 4, 5]
    assert t2d.nonzero().flatten().tolist() == [1, 3, 4, 5]
    d2t, t2d = vocabulary_map(np.array([0, 0, 3]), 3, 8)
    assert (d2t + torch.arange(3)).tolist() == [0, 1, 2]
    assert coverage(np.array([2, 1, 1]), torch.tensor([True, False, True])) == 0.75
    with pytest.raises(ConfigError, match="--draft-vocab-size"):
        vocabulary_map(np.array([1]), 9, 8)
    with pytest.raises(ConfigError, match="--vocab-size"):
        vocabulary_map(np.ones(9, np.int64), 2, 8)


def test_the_maps_are_those_that_speculators_would_make(
    dump_url: str, tmp_path: Path, trainers: Path
) -> None:
    theirs = importlib.import_module("speculators.train.vocab_mapping")
    assert (
        run_cli(
            ["export", dump_url, "--to", "speculators", str(tmp_path), "--draft-vocab-size", "12",
             "--vocab-size", str(VOCAB)]
        )
        == 0
    )  # fmt: skip
    frequency = torch.load(tmp_path / "train/token_freq.pt", weights_only=True)
    supervised = [t for r, n in enumerate(LENGTHS) for t, m in zip(*_columns(r, n), strict=True) if m]
    assert frequency == {t: supervised.count(t) for t in set(supervised)}
    d2t, t2d = theirs.build_vocab_mappings_from_distribution(frequency, 12, VOCAB)
    assert np.load(tmp_path / "train/d2t-12.npy").tolist() == d2t.tolist()
    assert np.load(tmp_path / "train/t2d-12.npy").tolist() == t2d.tolist()
    assert json.loads((tmp_path / "draft_config.json").read_text())["draft_vocab_size"] == 12


def test_specforge_counts_the_same_and_finds_the_map(dump_url: str, tmp_path: Path, trainers: Path) -> None:
    theirs = importlib.import_module("specforge.training.vocab_mapping")
    options = ["--draft-vocab-size", "12", "--vocab-size", str(VOCAB), "--split", "0.4"]
    assert run_cli(["export", dump_url, "--to", "specforge", str(tmp_path), *options]) == 0
    counts = theirs.count_effective_feature_tokens(str(tmp_path / "train"), target_vocab_size=VOCAB)
    maps = torch.load(tmp_path / "vocab_mapping/vocab_mapping.pt", weights_only=True)
    chosen = set((maps["d2t"] + torch.arange(12)).tolist())
    assert {t for t, _ in counts.most_common(6)} <= chosen
    assert min(counts[t] for t in chosen) >= max((n for t, n in counts.items() if t not in chosen), default=0)


def _columns(row: int, tokens: int) -> tuple[list[int], list[int]]:
    head = head_of(row, tokens)
    return head.token_ids.tolist(), head.loss_mask.tolist()
