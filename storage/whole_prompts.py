"""Token ids and masks of all tokens of a sample, from ``prompts/``.

Where only some tokens' states are stored, the token columns beside the states have those tokens alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.files import Store
from storage.prompts.table import PromptTable


class WholePrompts:
    """The prepared rows of a dump, opened when the first is asked for. Picklable, safe under threads.

    Args:
        store: the dump.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._table: PromptTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def of(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Token ids and loss mask of a prepared row, [T] each; read-only.

        Raises:
            OutputError, CorruptDump, StorageError: ``prompts/`` isn't there or can't be read.
        """
        if self._table is None:
            self._table = PromptTable(self._store)
        prompt = self._table.load(row)
        return prompt.token_ids, prompt.loss_mask
