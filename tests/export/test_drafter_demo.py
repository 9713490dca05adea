"""The drafter's demo on a made-up model: two steps of each arm, and what judges them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export_dumps import VOCAB, make_export_dump, without
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.cli import run_cli

EXAMPLES = Path(__file__).parents[2] / "examples/drafter"


@pytest.mark.slow
def test_every_arm_trains_and_a_run_that_is_done_is_not_repeated(tmp_path: Path, trainers: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=30,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    # A norm whose weights are all one, as a fresh model has, gives the same a second time.
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    layout = without(states=(2, 3, 15, 16, 27, 28, 29, "final"))
    url = make_export_dump(tmp_path / "dump", layout, [20 + i for i in range(14)])
    for name, boundaries in (("right", "2,15,27"), ("wrong", "3,16,28")):
        options = [
            "--boundaries",
            boundaries,
            "--split",
            "0.4",
            "--draft-vocab-size",
            "20",
            "--vocab-size",
            str(VOCAB),
        ]
        assert run_cli(["export", url, "--to", "speculators", str(tmp_path / name), *options]) == 0
    command = [
        sys.executable,
        str(EXAMPLES / "train.py"),
        *(str(tmp_path / n) for n in ("model", "right", "wrong")),
    ]
    command += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "r.json")]
    command += ["--steps", "2", "--seeds", "0", "--draft-vocab-size", "20"]
    environment = {**os.environ, "PYTHONPATH": str(trainers)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "r.json").read_text())
    assert [r["states"] for r in results] == ["captured", "shuffled", "final_wrong", "off_by_one", "float8"]
    assert all(len(r["losses"]) == 2 and 0 <= r["heldout_accuracy"] <= 1 for r in results)
    assert len({r["first_loss"] for r in results}) == 5
    assert json.loads((tmp_path / "runs/drafter/config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [
        2, 15, 27,
    ]  # fmt: skip
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").glob("*.json")}
    (tmp_path / "runs/shuffled-0-2.json").unlink()
    subprocess.run(command, capture_output=True, env=environment, check=True)
    assert {p for p in times if p.stat().st_mtime_ns != times[p]} == {tmp_path / "runs/shuffled-0-2.json"}


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("drafter_report", EXAMPLES / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_runs(
    captured: float, shuffled: float, final_wrong: float, final_loss: float = 1.0
) -> list[dict[str, Any]]:
    accuracies = {"captured": captured, "shuffled": shuffled, "final_wrong": final_wrong, "off_by_one": 0.9}
    return [
        {"states": arm, "seed": seed, "first_loss": 2.0, "final_loss": final_loss, "heldout_accuracy": value}
        for arm, value in accuracies.items()
        for seed in range(3)
    ]


def test_arms_that_are_too_near_are_a_failure(report: Any) -> None:
    assert report.complaints(made_runs(0.33, 0.30, 0.29)) == []
    assert "shuffled" in report.complaints(made_runs(0.32, 0.30, 0.20))[0]
    assert "final_wrong" in report.complaints(made_runs(0.32, 0.20, 0.30))[0]
    assert len(report.complaints(made_runs(0.5, 0.3, 0.3, final_loss=2.5))) == 12
