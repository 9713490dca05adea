"""A run file resolved: what belongs to a run's identity, and what doesn't."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_tokenizer import tiny_tokenizer

from cluster.config import RunConfig
from cluster.run import resolve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "vocab_size": 4096,
}


def identity(folder: Path, model: str, **capture: object):
    tree = {
        "model": {"path": model},
        "capture": capture,
        "prompts": {"url": "p.jsonl"},
        "output": "dump",
    }
    return resolve(RunConfig.model_validate(tree), folder).identity({})


def make_model(folder: Path) -> Path:
    model = folder / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model


def test_how_a_path_is_written_is_no_part_of_the_identity(tmp_path: Path):
    model = make_model(tmp_path)
    relative, absolute = identity(tmp_path, "model"), identity(tmp_path, str(model))
    assert relative.differences(absolute) == []
    assert relative.model["path"] == str(model.resolve())


def test_other_weights_are_another_identity(tmp_path: Path):
    model = make_model(tmp_path)
    before = identity(tmp_path, "model")
    (model / "model.safetensors").write_bytes(b"1234")
    assert any("model.files" in line for line in before.differences(identity(tmp_path, "model")))


def test_boundary_n_is_the_final_state(tmp_path: Path):
    make_model(tmp_path)
    by_number = identity(tmp_path, "model", boundaries=(2, 8))
    by_name = identity(tmp_path, "model", boundaries=(2,), final=True)
    assert by_number.differences(by_name) == []
