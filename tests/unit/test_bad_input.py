"""What a person sees after a mistake: one line that names the thing and the remedy, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tiny_tokenizer import tiny_tokenizer

from cluster.cli import run_cli

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 64,
    "vocab_size": 4096,
}
ROW = {"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file that is right in everything: tests break one thing each."""
    model = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROW) + "\n")
    tree = {"model": {"path": "model"}, "prompts": {"url": "prompts.jsonl"}, "output": "dump"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Runs a command that must fail, and gives the one line that it says about it."""
    assert run_cli(["collect", "run.yaml", *arguments]) == code
    said = capsys.readouterr().err.strip()
    assert said.startswith("hsdump: error: ")
    assert "Traceback" not in said
    return said


def test_no_run_file(folder, capsys):
    (folder / "run.yaml").unlink()
    assert "run file run.yaml: no such file" in complaint(capsys)


def test_run_file_that_is_no_yaml(folder, capsys):
    (folder / "run.yaml").write_text("model: [")
    assert "run.yaml: not valid YAML" in complaint(capsys)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prompts.max_token=5", "unknown key prompts.max_token; did you mean max_tokens?"),
        ("engine.gpus=-1", "gpus is -1; it is auto or 0..1024"),
        ("prompts.max_tokens=none", "prompts.max_tokens"),
        ("capture.boundaries=[2,2]", "name one boundary twice"),
        ("capture={boundaries: [], final_normed: false}", "nothing to capture"),
        ("engine.args={enable_dp_attention: true}", "enable_dp_attention"),
        ("engine.args={speculative_algorithm: EAGLE}", "speculative_algorithm"),
        ("engine.args={disable_radix_cache: false}", "disable_radix_cache"),
        ("engine.args={use_ray: true}", "use_ray"),
        ("engine.args={tp_size: 2}", "tp_size"),
        ("novalue", "write it as key.sub=value"),
        ("capture.boundaries=[99]", "boundary 99: the model has 30 layers, boundaries are 0..30"),
        ("capture.boundaries=middle", "capture.boundaries"),
        ("capture.keep=last:0", "capture.keep: 'last:0' isn't all, supervised or last:N with N from 1"),
        ("model.path=/no/such/model", "model.path /no/such/model: no such folder"),
        ("prompts.url=/no/such/file.jsonl", "/no/such/file.jsonl"),
        ("prompts.chat_template=/no/such.jinja", "prompts.chat_template /no/such.jinja"),
        ("output=memory://dump", "memory is gone with the process"),
        ("output=run.yaml", "is a file; give a folder"),
    ],
)
def test_a_wrong_value_is_named(folder, capsys, override, said):
    assert said in complaint(capsys, "--set", override)


def test_model_without_a_config(folder, capsys):
    (folder / "model/config.json").unlink()
    assert "has no config.json" in complaint(capsys)


def test_empty_prompt_file(folder, capsys):
    (folder / "prompts.jsonl").write_text("")
    assert "prompts.jsonl" in complaint(capsys)


def test_prompt_file_whose_every_row_is_broken(folder, capsys):
    (folder / "prompts.jsonl").write_text("{\n[1]\n")
    said = complaint(capsys)
    assert "prompts.jsonl" in said
    assert "2" in said


def test_over_long_rows_stop_a_run_that_asks_for_it(folder, capsys):
    said = complaint(capsys, "--set", "prompts.max_tokens=3", "--set", "prompts.over_long=fail")
    assert "over max_tokens 3" in said


def test_output_folder_with_something_else_in_it(folder, capsys):
    (folder / "dump").mkdir()
    (folder / "dump/holiday.jpg").write_bytes(b"")
    said = complaint(capsys)
    assert "holds something else (holiday.jpg" in said
    assert sorted(p.name for p in (folder / "dump").iterdir()) == ["holiday.jpg"]


def test_relative_output_inside_a_job(folder, capsys, monkeypatch):
    inside = folder / "runtime_resources/working_dir_files/_ray_pkg_0"
    inside.mkdir(parents=True)
    (inside / "run.yaml").write_text((folder / "run.yaml").read_text())
    monkeypatch.chdir(inside)
    assert "deleted with the job" in complaint(capsys, "--set", f"model.path={folder}/model")


def test_debug_shows_where(folder, capsys):
    assert run_cli(["collect", "run.yaml", "--set", "capture.boundaries=[99]", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_no_dump_there(folder, capsys, command):
    assert run_cli([command, "nothing-here"]) == 2
    assert "there is no dump here" in capsys.readouterr().err


def test_unknown_command(capsys):
    assert run_cli(["colect"]) == 2
    assert "collect" in capsys.readouterr().err
