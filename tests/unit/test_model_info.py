import json
import subprocess
import sys

import pytest

from actors.capture.boundary import capture_spec
from actors.capture.model_info import check_same_model, parse_model_info, read_model_info
from actors.messages import EngineSpec
from storage.errors import ModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}


def test_missing_directory_and_missing_config_are_told_apart(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere isn't a directory"):
        read_model_info(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"has no config\.json; point it at"):
        read_model_info(str(tmp_path))


def test_a_broken_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        read_model_info(str(tmp_path))


def test_shape_of_a_plain_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    info = read_model_info(str(tmp_path))
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.dtype) == (30, 576, 49152, "bfloat16")


def test_shape_of_a_multimodal_model_is_that_of_its_text_model():
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "dtype": "bfloat16"}
    vision = {"num_hidden_layers": 27, "hidden_size": 1152}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
    }
    info = parse_model_info(config, "config.json")
    assert (info.num_layers, info.hidden_size) == (61, 7168)
    assert info.architecture == "KimiK25ForConditionalGeneration"


def test_an_encoder_without_layers_is_refused():
    with pytest.raises(ModelError, match="has no num_hidden_layers"):
        parse_model_info({"architectures": ["X"], "hidden_size": 8, "vocab_size": 8}, "config.json")


def test_planning_loads_neither_torch_nor_sglang():
    program = (
        "import sys, actors.capture.boundary, actors.capture.model_info, actors.capture.flags\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'sglang', 'transformers', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_another_model_than_the_run_was_planned_for_is_refused():
    capture = capture_spec(
        [2], final=False, final_normed=False, num_layers=30, hidden_size=576, dtype="bfloat16", chunk_rows=32,
        shard_rows=64,
    )  # fmt: skip
    spec = EngineSpec("e", "sglang", "", "r", "/m", "bfloat16", 0, 1, False, capture, 0, "/l", 1.0, 1.0)
    check_same_model(parse_model_info(CONFIG, "x"), spec)
    with pytest.raises(
        ModelError, match="has 32 layers of hidden size 576, and the run was made for 30 of 576"
    ):
        check_same_model(parse_model_info(CONFIG | {"num_hidden_layers": 32}, "x"), spec)
