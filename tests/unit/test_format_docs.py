"""The code on the format's page runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_dumps import LAYOUT, head_of, make_dump, states_of

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def run_block(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    make_dump(tmp_path / "dump-demo", [9, 20, 30], skipped=[0])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number], names)
    return names


def test_the_lines_with_zarr_read_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_block(0, tmp_path, monkeypatch)
    assert names["sample"]["row"] == 1
    expected = torch.from_numpy(states_of(LAYOUT, 1, 20)[2].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(names["final"], expected)
    assert names["token_ids"].tolist() == head_of(1, 20).token_ids.tolist()


def test_the_lines_with_tensorstore_read_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_block(1, tmp_path, monkeypatch)
    assert np.array_equal(names["bits"].transpose(1, 0, 2), states_of(LAYOUT, 1, 20))
