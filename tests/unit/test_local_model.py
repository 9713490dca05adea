"""What is fetched from the hub for a run, and for a rehearsal that needs no weights."""

from __future__ import annotations

import fnmatch

import huggingface_hub
import pytest

from actors.models import local_model


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_fetched_only_where_they_are_needed(weights: bool, monkeypatch: pytest.MonkeyPatch):
    files = ["config.json", "tokenizer.json", "modeling.py", "model-00001-of-2.safetensors", "old.bin"]
    fetched: list[str] = []

    def snapshot(path: str, revision: str | None, ignore_patterns: list[str] | None) -> str:
        fetched.extend(f for f in files if not any(fnmatch.fnmatch(f, p) for p in ignore_patterns or []))
        return "/cache"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_model("owner/name", "main", weights=weights) == "/cache"
    assert fetched == (files if weights else files[:3])
