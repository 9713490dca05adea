"""Fixtures for all tests: models that are made once and kept in .models/ of the checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-results", help="file that keeps what the conformance suite measured")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    folder = ROOT / ".models"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    target = models_dir / "SmolLM2-135M-Instruct"
    if not (target / "config.json").exists():
        spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "examples/fetch_smollm2.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.convert(target)
    return target
