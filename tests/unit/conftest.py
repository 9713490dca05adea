"""Fixtures that several unit tests share."""

from __future__ import annotations

import pytest
from tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer whose template is ChatML."""
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer("chatml").save_pretrained(path)
    return str(path)
