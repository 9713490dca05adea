"""Prompts in: the prompt file, tokenised once into the dump, and the table that a run reads."""

from storage.prompts.parts import read_prepared
from storage.prompts.prepare import prepare, prompts_identity
from storage.prompts.spec import LossMask, PreparedRow, PreparedSummary, PromptSpec
from storage.prompts.table import PromptTable

__all__ = [
    "LossMask",
    "PreparedRow",
    "PreparedSummary",
    "PromptSpec",
    "PromptTable",
    "prepare",
    "prompts_identity",
    "read_prepared",
]
