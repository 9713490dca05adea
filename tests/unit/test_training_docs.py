"""The code on the training page runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from made_dumps import make_dump

from storage.layout import Layout

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LAYOUT = Layout(states=(2, 15, 27, "final"), hidden_size=16, chunk_rows=4, shard_rows=64)


@pytest.mark.parametrize("number", [0, 1])
def test_the_code_on_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dump(tmp_path / "dump-demo", [9, 20, 30], layout=LAYOUT)
    monkeypatch.chdir(tmp_path)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    names: dict[str, Any] = {}
    exec(block.replace("a sample's id", "sample 0/../é"), names)
    if number == 1:
        assert names["pack"]["hidden_states"].shape == (59, 4, 16)
        assert names["pack"]["cu_seqlens"][-1] == 59
