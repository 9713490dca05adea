"""Prompts in: the prompt file, tokenised once into the dump, and the table that a run reads."""

from storage.prompts.answers import AnswerParts, Reply, answered, take_answers
from storage.prompts.parts import ASKED, read_prepared
from storage.prompts.prepare import prepare, prompts_identity
from storage.prompts.spec import Answer, GenerateSpec, LossMask, PreparedRow, PreparedSummary, PromptSpec
from storage.prompts.table import PromptTable

__all__ = [
    "ASKED",
    "Answer",
    "AnswerParts",
    "GenerateSpec",
    "LossMask",
    "PreparedRow",
    "PreparedSummary",
    "PromptSpec",
    "PromptTable",
    "Reply",
    "answered",
    "prepare",
    "prompts_identity",
    "read_prepared",
    "take_answers",
]
