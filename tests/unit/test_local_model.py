"""What is fetched from the hub: everything where the model runs, and all but the weights where it is planned."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import ModelInfo

from actors.models import ModelFiles, find_model, local_model


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


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with a model that came without its weights."""
    folder = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def snapshot(path: str, revision: str | None, ignore_patterns: list[str] | None) -> str:
        assert ignore_patterns, "the weights are fetched"
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return folder


def test_a_plan_knows_the_weights_without_fetching_them(cached: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def info(self: HfApi, repo_id: str, **options: object) -> ModelInfo:
        asked.append((repo_id, options["revision"]))
        sizes = {"config.json": 2, "a.safetensors": 7, "b.safetensors": 5, "onnx/model.bin": 9}
        return ModelInfo(id=repo_id, siblings=[{"rfilename": n, "size": s} for n, s in sizes.items()])

    monkeypatch.setattr(HfApi, "model_info", info)
    found = find_model("owner/name", "main")
    assert found == ModelFiles(str(cached), "owner/name", COMMIT, {"a.safetensors": 7, "b.safetensors": 5})
    assert asked == [("owner/name", COMMIT)]


def test_without_the_hub_the_weights_are_those_in_its_cache(cached: Path, monkeypatch: pytest.MonkeyPatch):
    def info(self: HfApi, repo_id: str, **options: object) -> ModelInfo:
        raise OfflineModeIsEnabled("no network")

    monkeypatch.setattr(HfApi, "model_info", info)
    (cached / "a.safetensors").write_bytes(b"1234567")
    assert find_model("owner/name").weights == {"a.safetensors": 7}


def test_a_folder_is_its_own_source(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert find_model(str(tmp_path)) == ModelFiles(
        str(tmp_path), str(tmp_path), None, {"model.safetensors": 3}
    )
