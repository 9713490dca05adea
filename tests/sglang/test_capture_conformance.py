"""Every family's captured states against Hugging Face in float32, token by token; `make models` keeps the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conformance_results
import pytest
import tiny_models
from conformance import Case, run

pytestmark = pytest.mark.slow

N = tiny_models.LAYERS
FAMILIES = (
    "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3", "deepseek_v2",
    "deepseek_v3", "kimi_k25", "apertus",
)  # fmt: skip
CASES = {family: Case(family) for family in FAMILIES} | {
    "llama-chunk-64": Case("llama", chunk=64, boundaries=(2, 4, 7)),
    "llama-float16": Case("llama", dtype="float16", chunk=2048, boundaries=(2, 4, 7)),
    "llama-float32": Case("llama", dtype="float32", chunk=2048, boundaries=(2, 4, 7)),
}
CLASSES = {
    "apertus": "ApertusForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
}
READ_AT_LAYERS = {"mixtral": "no setter", "gemma3": "the proof found the collector's states wrong"}
"""Families whose own collector is missing or wrong in this release, with the reason that the proof found."""


@pytest.fixture(scope="module", params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def row(
    name: str, models_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    found = {"case": name, **run(CASES[name], models_dir, tmp_path_factory.mktemp("logs"))}
    if request.config.getoption("--models-results"):
        conformance_results.keep(Path(request.config.getoption("--models-results")), found)
    return found


def test_states_equal_hugging_face_token_by_token(row: dict[str, Any], name: str) -> None:
    assert row.get("refused") is None
    assert row["wrong"] == []
    boundaries = CASES[name].boundaries or (0, 1, 2, N // 2, N - 1)
    assert [s["state"] for s in row["states"]] == [*boundaries, "final", "final_normed"]


def test_the_class_is_the_one_that_the_real_model_uses(row: dict[str, Any], name: str) -> None:
    assert row["model"] == CLASSES[CASES[name].family]


def test_the_proof_passes_with_nothing_left_unproved(row: dict[str, Any]) -> None:
    assert row["not_provable"] == []
    states = [s["state"] for s in row["states"] if s["state"] != "final_normed"]
    assert {f"identity of {s}" for s in states} <= set(row["proof"])


def test_boundaries_come_from_the_models_own_collector_where_it_is_right(
    row: dict[str, Any], name: str
) -> None:
    asked = [s["state"] for s in row["states"] if isinstance(s["state"], int)]
    family = CASES[name].family
    if family in READ_AT_LAYERS:
        assert (row["consulted"], row["read_at_layers"]) == ([], asked)
        assert READ_AT_LAYERS[family] in row["why_at_layers"]
    else:
        assert row["consulted"] == [b for b in asked if b]
        assert row["read_at_layers"] == [b for b in asked if not b]
