"""Layer ids for servers: the boundaries come back through SGLang's own setters."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import run_cli
from cluster.serving import captured_boundaries, serving_ids
from storage.export.draft_config import draft_config


@pytest.mark.parametrize(
    ("architecture", "boundaries", "num_layers", "ids"),
    [
        ("LlamaForCausalLM", (2, 15, 27), 30, (1, 14, 26)),
        ("MistralForCausalLM", (2, 16, 29), 32, (1, 15, 28)),  # inherits it
        ("Qwen3MoeForCausalLM", (2, 24, 45), 48, (1, 23, 44)),  # hands it on to the inner model
        ("DeepseekV3ForCausalLM", (2, 30, 58), 61, (1, 29, 57)),
        ("DeepseekV3ForCausalLM", (3, 31, 59), 61, (3, 31, 59)),  # shifts only when the first id is 1
        ("KimiK25ForConditionalGeneration", (2, 30, 58), 61, (1, 29, 57)),  # wraps DeepseekV3ForCausalLM
        ("KimiK25ForConditionalGeneration", (3, 31, 59), 61, (3, 31, 59)),
        ("GptOssForCausalLM", (2, 18, 33), 36, (1, 17, 32)),
        ("GptOssForCausalLM", (2, 18, 36), 36, (1, 17, 35)),
    ],
)
def test_ids_and_back(
    architecture: str, boundaries: tuple[int, ...], num_layers: int, ids: tuple[int, ...]
) -> None:
    found = serving_ids(architecture, boundaries, num_layers)
    assert found.sglang == ids
    assert found.vllm == boundaries
    assert captured_boundaries(architecture, ids, num_layers) == boundaries


def test_the_reference_runs_ids_mean_others_where_one_counts_outputs() -> None:
    assert captured_boundaries("KimiK25ForConditionalGeneration", (2, 30, 58), 61) == (2, 30, 58)
    assert captured_boundaries("LlamaForCausalLM", (2, 30, 58), 61) == (3, 31, 59)
    assert captured_boundaries("GptOssForCausalLM", (2, 18, 36), 36) == (2, 18, 36)


def test_boundaries_out_of_reach_have_no_ids() -> None:
    found = serving_ids("DeepseekV3ForCausalLM", (1, 30, 58), 61)
    assert found.sglang is None
    assert "[1, 30, 58]" in found.why_not
    unknown = serving_ids("NoSuchModel", (2, 15, 27), 30)
    assert unknown.sglang is None
    assert "NoSuchModel" in unknown.why_not
    assert unknown.vllm == (2, 15, 27)


@pytest.mark.slow
def test_the_setter_taken_from_the_source_does_what_the_imported_one_does() -> None:
    from sglang.srt.models.llama import LlamaForCausalLM

    model: Any = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(is_last_rank=True), model=types.SimpleNamespace()
    )
    LlamaForCausalLM.set_eagle3_layers_to_capture(model, [1, 14, 26])
    assert tuple(model.model.layers_to_capture) == captured_boundaries("LlamaForCausalLM", (1, 14, 26), 30)


def test_an_export_prints_them_and_its_draft_config_holds_them(
    dump_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["export", dump_url, "--to", "specforge", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "SGLang     eagle_config.eagle_aux_hidden_state_layer_ids [1, 14, 26]" in said
    assert "vLLM       eagle_aux_hidden_state_layer_ids [2, 15, 27]" in said
    config = json.loads((tmp_path / "draft_config.json").read_text())
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 14, 26],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["num_aux_hidden_states"] == 3


def test_the_draft_config_takes_the_targets_shape() -> None:
    target = {
        "text_config": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 100,
            "num_hidden_layers": 61,
        }
    }
    serving = serving_ids("KimiK25ForConditionalGeneration", (3, 31, 59), 61)
    config = draft_config(target, 64, "bfloat16", serving, None)
    assert config["num_attention_heads"] == 4
    assert config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == 100
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
