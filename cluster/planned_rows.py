"""The rows that a plan is made for: those of the output's own dump, or freshly prepared ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.collect import refuse_foreign
from cluster.forecast import AnswersForecast, forecast_answers
from cluster.preview import Stretch, load_tokenizer, stretches
from cluster.run import Run
from storage.committed import read_places
from storage.dump import ROOT_KEY, check_identity, read_header
from storage.errors import PromptError
from storage.files import Store
from storage.prompts import ASKED, PromptTable, answered, prepare, prompts_identity, read_prepared
from storage.prompts.parts import FOLDER

_PREVIEW_TOKENS = 400
"""The preview is the first row of at most so many tokens, so that it fits a screen."""


@dataclass(frozen=True)
class PlannedRows:
    """Prepared rows, wherever they are.

    Attributes:
        table: all of them, with those that are skipped.
        rows: int64 [to_collect], their numbers.
        tokens: int32 [to_collect]; of a row that the model answers, with the longest answer.
        kept: int32 [to_collect], tokens whose states are stored.
        committed: bool [to_collect].
        answers: what the model is to say first; None where it is asked nothing, or has said it.
    """

    table: PromptTable
    rows: NDArray[np.int64]
    tokens: NDArray[np.int32]
    kept: NDArray[np.int32]
    committed: NDArray[np.bool_]
    answers: AnswersForecast | None

    @property
    def stateless(self) -> int:
        """Prepared rows that aren't collected because nothing of them would be stored."""
        return int((self.table.status == 0).sum()) - self.rows.size

    def chosen(self, most_tokens: int) -> list[int]:
        """Rows in the order of the file, of so many tokens together, one at least."""
        ends = np.cumsum(self.tokens)
        return [int(r) for r in self.rows[: max(1, int((ends <= most_tokens).sum()))]]

    def preview(self, run: Run) -> tuple[str, tuple[Stretch, ...]] | None:
        """Id and pieces of one row; None without a tokenizer."""
        tokenizer = load_tokenizer(run.files.folder, run.config.model.trust_remote_code)
        if tokenizer is None:
            return None
        short = np.flatnonzero(self.tokens <= _PREVIEW_TOKENS)
        at = int(short[0]) if short.size else int(self.tokens.argmin())
        row = self.table.load(int(self.rows[at]))
        return row.sample_id, stretches(tokenizer, row.token_ids.tolist(), row.loss_mask.tolist())


def committed_before(run: Run, store: Store) -> set[int] | None:
    """Rows that the output's dump holds; None when it has none of this run.

    Raises:
        OutputError: something else is there, or another run's dump.
    """
    refuse_foreign(store)
    there = read_prepared(store) or read_prepared(store, ASKED)
    if there is None or not store.exists(ROOT_KEY):
        return None
    identity = run.identity(prompts_identity(run.prompts))
    check_identity(store, read_header(store), identity, run.config.writers.codec)
    return set(read_places(store)["row"].to_pylist())


def planned_rows(run: Run, store: Store, committed: Collection[int] | None) -> PlannedRows:
    """The rows that would be collected.

    Args:
        run: the run.
        store: the output whose dump is gone on with, or a scratch folder.
        committed: the rows that are in that dump; None prepares the rows anew.

    Raises:
        PromptError: no row can be collected.
    """
    if committed is None:
        prepare(store, run.prompts)
    asks = run.prompts.generate is not None and read_prepared(store) is None
    table = PromptTable(store, ASKED if asks else FOLDER)
    kept = table.kept(run.keep)
    rows = np.flatnonzero((table.status == 0) & (kept > 0))
    if not rows.size:
        raise PromptError(
            f"no row has a token whose states are to be stored (capture.keep: {run.keep}); set it to all"
        )
    done = np.fromiter(committed or (), np.int64)
    tokens, answers = table.tokens[rows], None
    if asks:
        longest = table.questions()[0]
        tokens, answers = tokens + longest[rows], forecast_answers(longest, answered(store)[0])
    return PlannedRows(table, rows, tokens, kept[rows], np.isin(rows, done), answers)
