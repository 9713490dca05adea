"""The command and its driver on a local cluster, with made-up states: what a person sees when actors die."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from collect_support import Collecting, hsdump
from tiny_tokenizer import tiny_tokenizer

from actors.synthetic import synthetic_states
from storage import open_dump

pytestmark = pytest.mark.slow

ROWS = 200
TOKENS = 60
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "vocab_size": 4096,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that takes about six seconds, so that it isn't over before the test acts."""
    model = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"id": f"s{i}", "input_ids": [i % 4000] * TOKENS, "loss_mask": [1] * TOKENS} for i in range(ROWS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "model": {"path": str(model)},
        "capture": {"boundaries": [2, 4], "final_normed": True},
        "prompts": {"url": str(tmp_path / "prompts.jsonl"), "loss_mask": "all"},
        "output": str(tmp_path / "dump"),
        "engine": {"kind": "synthetic", "gpus": 0, "args": {"tokens_per_s": 2000.0}},
        "limits": {"object_store_bytes": 200 << 20, "batch_samples": 4},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty for one that has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def pid_of(collecting: Collecting, actor: str) -> int:
    """The process of an actor of the command's own cluster, by the title that Ray gives it."""
    found = [
        p.pid
        for p in psutil.Process(collecting.process.pid).children(recursive=True)
        if any(part.startswith(f"ray::{actor}") for part in command_of(p))
    ]
    assert len(found) == 1, f"{len(found)} processes of {actor}"
    return found[0]


def assert_complete(folder: Path) -> None:
    dump = open_dump(str(folder / "dump"))
    assert len(dump) == ROWS
    for i in (0, 99, ROWS - 1):
        sample = dump[f"s{i}"]
        expected = synthetic_states(sample.sample_id, TOKENS, dump.layout)
        bits = sample.stack().transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, expected)


def test_a_killed_coordinator_is_replaced_while_the_engine_goes_on(run: Path, tmp_path: Path) -> None:
    collecting = Collecting(run)
    try:
        collecting.until("engine-0: its states are made up")
        engine = pid_of(collecting, "SyntheticEngine")
        os.kill(pid_of(collecting, "Coordinator"), signal.SIGKILL)
        collecting.until("the coordinator died; a new one starts from the manifests")
        assert pid_of(collecting, "SyntheticEngine") == engine
        assert collecting.wait() == 0, collecting.text
    finally:
        collecting.end()
    assert f"{ROWS} rows = {ROWS} committed + 0 skipped + 0 failed" in collecting.text
    assert "Traceback" not in collecting.text
    assert_complete(tmp_path)
    assert len(json.loads((tmp_path / "dump/run.json").read_text())["timeline"]) > 1
    logs = Path(re.findall(r"logs: (\S+)", collecting.text)[-1])
    assert {f.name for f in logs.iterdir()} >= {"coordinator-0.log", "coordinator-1.log", "writer-0.log"}


def test_a_killed_driver_is_resumed_by_the_same_command(run: Path, tmp_path: Path) -> None:
    collecting = Collecting(run)
    try:
        collecting.until("engine-0: its states are made up")
        collecting.process.kill()
        collecting.process.wait()
    finally:
        collecting.end()
    done = hsdump("collect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(tmp_path)
