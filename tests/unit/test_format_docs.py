"""The code on the format's page runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from made_dumps import LAYOUT, head_of, make_dump, states_of

from storage.layout import Layout
from storage.manifest import read_manifest
from storage.zarr_metadata import hidden_array_metadata, token_array_metadata

# Beside its arrays a dump holds objects of its own, which zarr lists with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")

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


def test_the_lines_with_xarray_read_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_block(2, tmp_path, monkeypatch)
    assert names["one_state"].dims == ("token", "hidden")
    assert np.array_equal(names["one_state"].values[:20], states_of(LAYOUT, 1, 20)[0])


def test_the_metadata_on_the_page_is_what_is_written() -> None:
    layout = Layout((2, 16, 29, "final"), 7168)
    hidden, token_ids = (json.loads(b) for b in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert hidden == hidden_array_metadata(layout, 3)
    assert token_ids == token_array_metadata(layout, "token_ids", 3)


def test_every_attribute_and_key_is_on_the_page(tmp_path: Path) -> None:
    store = make_dump(tmp_path, [9])
    page = PAGE.read_text()
    names = set(json.loads(store.read("zarr.json"))["attributes"]) | set(LAYOUT.to_json())
    manifest = read_manifest(store, 0).to_json()
    names |= set(manifest) | set(manifest["samples"][0]) | set(manifest["objects"][0])
    names |= set(pq.read_schema(tmp_path / "samples.parquet").names) | set(
        json.loads(store.read("claims/0.json"))
    )
    assert {name for name in names if f"`{name}`" not in page and f'"{name}"' not in page} == set()
    tops = {path.name for path in tmp_path.iterdir()}
    assert {top for top in tops if top not in page} == set()
