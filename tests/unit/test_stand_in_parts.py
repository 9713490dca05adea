"""The small model that stands in for one whose identity can't be proved: its form, and what is concluded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from actors.capture.proof import FAILED, PASSED, UNPROVABLE, check, report_lines
from actors.capture.shrink import shrunken, shrunken_boundaries
from actors.capture.stand_in import judge, unproved
from actors.capture.stand_in_model import MOST_PARAMETERS, NotProvable, make_model
from actors.capture.stand_in_run import _same_way
from storage.reference import ErrorSummary, StateResult

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LARGE = {
    "llama": hf.LlamaConfig(
        hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80, vocab_size=128_256,
        eos_token_id=[128_001, 128_008],
    ),
    "smollm2": hf.LlamaConfig(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30, vocab_size=49_152
    ),
    "deepseek_v3": hf.DeepseekV3Config(rope_scaling=YARN),
    "qwen3_moe": hf.Qwen3MoeConfig(
        hidden_size=4096, num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_hidden_layers=94,
        num_experts=128,
    ),
    "gemma3": hf.Gemma3TextConfig(),
    "gpt_oss": hf.GptOssConfig(),
    "qwen2": hf.Qwen2Config(),
}  # fmt: skip


def plain(config: hf.PretrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("family", list(LARGE))
def test_hugging_face_makes_the_small_model_of_the_same_structure(family: str, ranks: int) -> None:
    large = plain(LARGE[family])
    small = shrunken({**large, "quantization_config": {"quant_method": "fp8"}}, ranks)
    assert small["num_hidden_layers"] == 8
    assert "quantization_config" not in small
    config = hf.AutoConfig.for_model(**small)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < MOST_PARAMETERS
    heads, groups = small["num_attention_heads"], small["num_key_value_heads"]
    assert heads % groups == 0
    assert (heads > groups) == (large["num_attention_heads"] > large["num_key_value_heads"])
    if large["num_attention_heads"] % ranks == 0:
        assert heads % ranks == 0
    for name in ("head_dim", "layer_types", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        whole = large.get(name)
        assert small.get(name) == (whole[:8] if isinstance(whole, list) else whole), name
    ids = [small[k] for k in ("bos_token_id", "eos_token_id") if small[k] is not None]
    assert all(0 <= i < 1024 for value in ids for i in (value if isinstance(value, list) else [value]))


def test_a_multimodal_model_is_stood_for_by_its_text_model() -> None:
    text = plain(LARGE["llama"])
    assert shrunken({"text_config": text, "vision_config": {}}, 1) == shrunken(text, 1)


def test_boundaries_near_an_end_keep_their_distance_to_it() -> None:
    assert shrunken_boundaries([0, 2, 3, 30, 58, 60], 61, 8) == {0: 0, 2: 2, 3: 3, 30: 4, 58: 5, 60: 7}
    assert shrunken_boundaries([2, 15, 27], 30, 8) == {2: 2, 15: 4, 27: 5}
    assert shrunken_boundaries([0, 4, 5], 6, 6) == {0: 0, 4: 4, 5: 5}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "nobody_knows_this"}, r"transformers makes no small nobody_knows_this model: "),
        (
            {"model_type": "nobody_knows_this", "auto_map": {"AutoConfig": "own.Own"}},
            r"its own code isn't run \(set model.trust_remote_code if you trust it\)",
        ),
        ({"num_attention_heads": "many"}, "no form that can be made small"),
        ({"num_experts": 10_000, "head_dim": 100_000}, "million parameters, over 400"),
    ],
)
def test_where_there_can_be_no_small_model_it_says_why_and_what_to_do(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**plain(LARGE["llama"]), **config}))
    with pytest.raises(NotProvable, match=said):
        make_model(tmp_path, tmp_path / "small", "bfloat16", trust_remote_code=False, ranks=1)


def result(median: float, ratio: float, passed: bool) -> StateResult:
    nearest = "2" if ratio > 1 else "3"
    return StateResult(2, ErrorSummary(median, median, median, 0.0), {}, nearest, ratio, 0.02, passed)


GOOD, ENGINE_WRONG = result(0.006, 90.0, True), result(0.3, 2.0, False)


@pytest.mark.parametrize(
    ("found", "control", "status"),
    [
        (GOOD, GOOD, PASSED),
        (GOOD, ENGINE_WRONG, PASSED),
        (result(0.5, 0.01, False), GOOD, FAILED),
        (result(0.9, 1.0, False), GOOD, FAILED),
        (result(0.5, 0.01, False), ENGINE_WRONG, UNPROVABLE),
        (result(0.005, 2.0, False), GOOD, UNPROVABLE),
    ],
)
def test_only_a_state_that_is_wrong_in_a_right_engine_is_a_failure(
    found: StateResult, control: StateResult, status: str
) -> None:
    assert judge(15, "4 of 8 random layers", found, control)["status"] == status


def test_nothing_is_concluded_from_another_class_or_another_place() -> None:
    real = {"hooked": "llama.LlamaModel.forward", "setter": "set_dflash([1, 14])", "places": ["norm"]}
    _same_way(real, {**real, "setter": "set_dflash([1, 3])"})
    for other in ({"hooked": "x"}, {"setter": "set_eagle3([1, 3])"}, {"places": ["prepare"]}):
        with pytest.raises(NotProvable, match="its stand-in has another"):
            _same_way(real, {**real, **other})


def test_the_log_says_what_stood_in() -> None:
    checks = [
        check("identity of 2", True, "median 0.003", 0),
        check("identity of 15", None, "a fused input", 0),
        check("stand-in of 15", True, "4 of 8 random layers: median 0.0061"),
    ]
    assert unproved(checks, (2, 15, "final")) == (15,)
    head = {
        "engine": "e",
        "model": "M",
        "sglang": "1",
        "states": [2, 15],
        "processes": [],
        "not_provable": [],
    }
    line = report_lines({**head, "checks": checks})[2]
    assert line == (
        "identity: 2 median 0.003; 15 not provable here: a fused input; in place of that, a small random model of "
        "this class against Hugging Face: 15 4 of 8 random layers: median 0.0061"
    )
