"""What engines read of the prompts: rows to capture, and questions with how they are to be answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.messages import Batch
from storage.files import Store
from storage.keep import Keep
from storage.prompts import ASKED, PreparedRow, PromptTable

_SAMPLING = ("temperature", "top_p", "top_k", "stop_token_ids")


@dataclass(frozen=True)
class Ask:
    """One question.

    Attributes:
        token_ids: int32 [T], the prompt.
        max_new_tokens: longest answer.
        seed: of its sampling.
    """

    token_ids: NDArray[np.int32]
    max_new_tokens: int
    seed: int


class Questions:
    """Rows that wait for an answer.

    Args:
        store: the dump, or a folder with a copy of its prompts.

    Attributes:
        sampling: SGLang's sampling parameters, the same for every row.

    Raises:
        OutputError: there are none.
        StorageError: they can't be read.
    """

    def __init__(self, store: Store) -> None:
        self._table = PromptTable(store, ASKED)
        self._longest, self._seeds = self._table.questions()
        generate = self._table.summary.identity["generate"]
        self.sampling: Mapping[str, Any] = {name: generate[name] for name in _SAMPLING}

    def of(self, batch: Batch) -> list[Ask]:
        """A question for each sample of a batch."""
        rows = [sample.row for sample in batch.samples]
        return [
            Ask(self._table.load(row).token_ids, int(self._longest[row]), int(self._seeds[row]))
            for row in rows
        ]


class Prompts:
    """Both tables, each opened when it is first asked for: the model may have to write a part of one before.

    Args:
        url: folder that holds prompts/: the dump, or a copy of its prompts on this node.
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)

    @cached_property
    def table(self) -> PromptTable:
        """Rows to capture."""
        return PromptTable(self._store)

    @cached_property
    def questions(self) -> Questions:
        """Rows to answer."""
        return Questions(self._store)

    def of(self, batch: Batch, keep: Keep) -> tuple[list[PreparedRow], list[NDArray[np.int32]]]:
        """The row of each sample of a batch, and the positions of those tokens whose states are stored, [R]."""
        rows = [self.table.load(sample.row) for sample in batch.samples]
        return rows, [keep.positions(row.loss_mask) for row in rows]
