"""Fixtures of the export tests: the trainers' own code, and dumps to export."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from export_dumps import make_export_dump

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).with_name("trainers.txt")


@pytest.fixture(scope="session")
def trainers() -> Iterator[Path]:
    """The trainers' packages, importable. At the end of the path: they never replace one of the project's."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "examples/drafter/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.install(PACKAGES, ROOT / ".cache/trainers")
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def dump_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven samples with boundaries 2, 15 and 27 of 30 layers, final and final_normed."""
    return make_export_dump(tmp_path_factory.mktemp("dump"))
