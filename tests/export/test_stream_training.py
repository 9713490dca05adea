"""A stream feeds speculators the batches that its export does: the code on the training page, run as it stands."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from export_dumps import make_export_dump

from cluster.cli import run_cli

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_streams_batches_equal_the_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: Path
) -> None:
    data = importlib.import_module("speculators.train.data")
    make_export_dump(tmp_path / "dump-demo")
    assert run_cli(["export", str(tmp_path / "dump-demo"), "--to", "speculators", str(tmp_path / "out")]) == 0
    dataset = data.ArrowDataset(max_len=40, datapath=tmp_path / "out/train", on_missing="raise")
    monkeypatch.chdir(tmp_path)
    (block,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "CollateFn" in b
    ]
    names: dict[str, Any] = {}
    exec(block.replace("2048", "40"), names)
    seen = []
    for pack in names["stream"]:
        streamed = names["collate"](list(names["samples"](pack)))
        exported = names["collate"]([dataset[row] for row in pack["rows"]])
        assert streamed.keys() == exported.keys()
        for name, value in exported.items():
            assert torch.equal(torch.as_tensor(streamed[name]), torch.as_tensor(value)), name
        seen += pack["rows"]
    assert sorted(seen) == list(range(7))
