"""Everything that the page says in words and numbers, read from the dump."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.capture.boundary import boundary_table
from actors.messages import CaptureSpec
from cluster.collect import RUN_KEY
from cluster.inspect import said
from cluster.page.statistics import Statistics, read_statistics
from cluster.preview import Stretch, load_tokenizer, stretches
from cluster.statistics import STATISTICS_KEY, norm_counts
from cluster.verify import VERIFY_KEY
from storage.account import AccountFindings, check_account
from storage.errors import HsdumpError
from storage.files import Store
from storage.prompts import PreparedSummary, PromptTable, read_prepared
from storage.reader import Dump, open_dump
from storage.sample import Sample

BROWSED = 60
"""Samples that can be looked at on the page."""
BROWSED_TOKENS = 4000
"""Tokens of a sample that are shown."""
REASONS = 200
"""Rows that aren't committed and are listed."""


@dataclass(frozen=True)
class Browsed:
    """One sample of the browser; ``pieces`` is empty where the tokenizer isn't on this machine.

    ``said`` is what is known of an answer of the model's own; empty where it is none.
    """

    sample_id: str
    row: int
    tokens: int
    supervised: int
    shard: int
    pieces: tuple[Stretch, ...]
    cut: bool
    said: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of a dump.

    Attributes:
        run: run.json of the last invocation; empty where there is none.
        proof: capture_report.json, by engine.
        verified: what `hsdump verify` found last; None where it never ran.
        account: the account, checked now.
        reasons: rows that aren't committed: status, row, id, reason.
        kinds: how many rows weren't committed, by status.
        statistics: None where nothing is committed.
        statistics_problem: why the samples couldn't be read; None when all is well.
        unusual_tokens: that engines saw with norms far outside their state's usual ones.
    """

    dump: Dump
    prepared: PreparedSummary | None
    run: Mapping[str, Any]
    proof: Mapping[str, Any]
    verified: Mapping[str, Any] | None
    account: AccountFindings
    reasons: tuple[Mapping[str, Any], ...]
    kinds: Mapping[str, int]
    statistics: Statistics | None
    statistics_problem: str | None
    unusual_tokens: int
    browsed: tuple[Browsed, ...]

    @property
    def boundaries(self) -> tuple[tuple[str, str, str], ...]:
        """State, what it is, and Hugging Face's name for it."""
        dump = self.dump
        spec = CaptureSpec(
            tuple(s for s in dump.layout.states if isinstance(s, int)),
            "final" in dump.layout.states,
            "final_normed" in dump.layout.states,
            dump.header.num_layers or 0,
            dump.layout,
        )
        return tuple((str(r.state), r.layer, r.hugging_face) for r in boundary_table(spec))


def read_facts(url: str) -> Facts:
    """Reads a dump, finished or not.

    Args:
        url: the dump.

    Raises:
        OutputError: there is no dump.
        StorageError: it can't be read.
    """
    dump, store = open_dump(url), Store(url)
    rows = [r for r in dump.samples.to_pylist() if r["status"] != "committed"]
    statistics, problem = None, None
    kept = _json(store, STATISTICS_KEY) or {}
    try:
        statistics = read_statistics(dump, norm_counts(kept))
    except HsdumpError as error:
        problem = str(error)
    return Facts(
        dump=dump,
        prepared=read_prepared(store),
        run=_json(store, RUN_KEY) or {},
        proof=_json(store, "capture_report.json") or {},
        verified=_json(store, VERIFY_KEY),
        account=check_account(store),
        reasons=tuple(sorted(rows, key=lambda r: (r["status"], r["row"]))[:REASONS]),
        kinds=Counter(r["status"] for r in rows),
        statistics=statistics,
        statistics_problem=problem,
        unusual_tokens=_unusual(kept),
        browsed=() if problem else tuple(_browsed(dump, _prompts(store))),
    )


def _json(store: Store, key: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(store.read(key))
    except (FileNotFoundError, ValueError):
        return None
    return found


def _unusual(kept: Mapping[str, Any]) -> int:
    """Over all invocations and their engines."""
    return sum(int(engine.get("alarms", 0)) for engines in kept.values() for engine in engines.values())


def _prompts(store: Store) -> PromptTable | None:
    """The prompt table; None where the dump holds none, as a part of one may."""
    return PromptTable(store) if read_prepared(store) is not None else None


def _browsed(dump: Dump, prompts: PromptTable | None) -> list[Browsed]:
    """Samples in the order of the prompt file, spread over it."""
    tokenizer = load_tokenizer(dump.header.model_path)
    numbers = np.unique(np.linspace(0, len(dump) - 1, min(BROWSED, len(dump))).astype(int))
    return [_one(dump[int(n)], tokenizer, prompts) for n in numbers] if len(dump) else []


def _one(sample: Sample, tokenizer: Any, prompts: PromptTable | None) -> Browsed:
    ids, mask, _ = sample.columns()
    shown_ids, shown_mask = ids[:BROWSED_TOKENS].tolist(), mask[:BROWSED_TOKENS].tolist()
    pieces = stretches(tokenizer, shown_ids, shown_mask) if tokenizer is not None else ()
    cut = sample.tokens > BROWSED_TOKENS
    answer = prompts.answer(sample.row) if prompts is not None else None
    about = said(answer) if answer is not None else ""
    return Browsed(
        sample.sample_id, sample.row, sample.tokens, int(mask.sum()), sample.shard, pieces, cut, about
    )
