"""``hsdump verify``: the account, every byte, and on request the states against a reference."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from actors.models import local_model
from cluster.progress import ByteProgress
from cluster.report import size
from cluster.spread import spread
from storage.account import check_account
from storage.errors import CorruptDump, StorageError
from storage.files import Store
from storage.reader import open_dump
from storage.reference import (
    ReferenceItem,
    SampleResult,
    StateResult,
    pick_samples,
    run_reference,
)
from storage.verify import Problem, ShardFindings, VerifyItem, run_item, work_items

VERIFY_KEY = "verify.json"
_PROBLEMS_KEPT = 50


def verify(
    url: str,
    *,
    reference: int,
    model: str | None,
    trust_remote_code: bool,
    address: str | None,
    sample_fraction: float,
    seed: int,
) -> None:
    """Checks a dump and prints what was found.

    Args:
        url: the dump.
        reference: samples to recompute with Hugging Face, the longest among them; 0 for none.
        model: folder of the model; None takes the one that the dump names.
        trust_remote_code: run Python code that comes with the model.
        address: Ray cluster to spread the work over.
        sample_fraction: share of the samples whose states are read.
        seed: of their choice.

    Raises:
        CorruptDump: something is wrong; every bad sample was printed.
    """
    console = Console(highlight=False, soft_wrap=True)
    store = Store(url)
    found = check_account(store)
    account = found.account
    console.print(
        f"account   {found.expected_rows if found.expected_rows is not None else account.rows} rows = "
        f"{account.committed} committed + {account.skipped} skipped + {account.failed} failed"
    )
    problems = list(found.problems)
    shards = _read(console, work_items(store, sample_fraction, seed), address)
    problems += [problem for shard in shards for problem in shard.problems]
    layout = open_dump(url).layout
    samples, tokens, kept, read = (
        sum(getattr(s, name) for s in shards) for name in ("samples", "tokens", "kept", "bytes")
    )
    some = "" if layout.keep.everything else f", states of {kept:,} (keep: {layout.keep})"
    part = (
        "" if sample_fraction == 1 else f" of {account.committed} (fraction {sample_fraction:g}, seed {seed})"
    )
    console.print(
        f"bytes     {len(shards)} shards, {samples} samples{part}, {tokens:,} tokens{some} x "
        f"{layout.bytes_per_token:,} bytes = {size(kept * layout.bytes_per_token)}; "
        f"{size(read)} read and compared with their xxh3"
    )
    results: list[SampleResult] = []
    if reference and account.committed:
        results = _reference(console, url, reference, model, trust_remote_code)
        problems += _reference_problems(results)
    _keep(store, shards, sample_fraction, results, problems)
    _say_problems(console, problems)
    if problems:
        bad = {p.sample_id for p in problems if p.sample_id is not None}
        raise CorruptDump(
            f"{url}: {len(problems)} problems, {len(bad)} samples affected; they are listed above"
        )
    console.print(
        "good      no problems" + (f" in the samples that were read, {samples}{part}" if part else "")
    )


def _read(console: Console, items: Sequence[VerifyItem], address: str | None) -> list[ShardFindings]:
    done_bytes = {item.shard: item.bytes for item in items}
    findings = []
    with ByteProgress(console, "reading", sum(done_bytes.values())) as progress:
        for shard in spread(run_item, items, address):
            findings.append(shard)
            progress.add(done_bytes[shard.shard])
    return sorted(findings, key=lambda shard: shard.shard)


def _keep(
    store: Store,
    shards: Sequence[ShardFindings],
    fraction: float,
    results: Sequence[SampleResult],
    problems: Sequence[Problem],
) -> None:
    """``verify.json``: what was found last, for the report; a dump that can't be written to does without."""
    record = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "good": not problems,
        "samples": sum(s.samples for s in shards),
        "bytes": sum(s.bytes for s in shards),
        "fraction": fraction,
        "reference": [_worst(results, k) for k in range(len(results[0].states))] if results else [],
        "problems": [problem.what for problem in problems[:_PROBLEMS_KEPT]],
    }
    with contextlib.suppress(StorageError):
        store.replace(VERIFY_KEY, json.dumps(record, indent=1).encode())


def _reference(
    console: Console, url: str, count: int, model: str | None, trust_remote_code: bool
) -> list[SampleResult]:
    transformers.utils.logging.disable_progress_bar()
    dump = open_dump(url)
    path = local_model(model) if model else local_model(*dump.header.model_source)
    item = ReferenceItem(
        url,
        tuple(pick_samples(dump, count)),
        path,
        device="auto" if torch.cuda.is_available() else "cpu",
        trust_remote_code=trust_remote_code,
    )
    console.print(
        f"reference {len(item.sample_ids)} samples recomputed with Hugging Face in float32 from {path}"
    )
    results = list(run_reference(item))
    console.print(_table(results))
    return results


def _reference_problems(results: Sequence[SampleResult]) -> list[Problem]:
    return [
        Problem(f"state {s.state}: {_why(s)}", row=r.row, sample_id=r.sample_id)
        for r in results
        for s in r.states
        if not s.passed
    ]


def _why(state: StateResult) -> str:
    medians = ", ".join(f"{name} {value:.4f}" for name, value in state.medians.items())
    return (
        f"the median error per token is {state.summary.median:.4f} (right is below {state.limit:.4f}), the nearest "
        f"state of the reference is {state.nearest} (medians: {medians})"
    )


def _table(results: Sequence[SampleResult]) -> Table:
    """Per state over all samples: the worst of each figure, and how many samples agree."""
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("state", "median", "p99", "max", "over 0.1", "nearest", "by", "samples"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for k in range(len(results[0].states)):
        worst = _worst(results, k)
        table.add_row(
            worst["state"],
            f"{worst['median']:.4f}",
            f"{worst['p99']:.4f}",
            f"{worst['max']:.4f}",
            f"{worst['share_over_0_1']:.1%}",
            worst["nearest"],
            f"{worst['ratio']:.0f}x",
            f"{worst['good']} of {worst['samples']} good",
        )
    return table


def _worst(results: Sequence[SampleResult], k: int) -> dict[str, Any]:
    """The worst of each figure of one state, over all samples."""
    states = [r.states[k] for r in results]
    worst = max(states, key=lambda s: s.summary.median)
    return {
        "state": str(worst.state),
        "median": float(worst.summary.median),
        "p99": float(max(s.summary.p99 for s in states)),
        "max": float(max(s.summary.max for s in states)),
        "share_over_0_1": float(max(s.summary.share_over_0_1 for s in states)),
        "nearest": worst.nearest,
        "ratio": float(min(s.ratio for s in states)),
        "good": sum(s.passed for s in states),
        "samples": len(states),
    }


def _say_problems(console: Console, problems: Sequence[Problem]) -> None:
    """One line for each affected sample and each problem that is no sample's."""
    by_sample: dict[str, list[Problem]] = {}
    for problem in problems:
        if problem.sample_id is None:
            where = "the dump" if problem.shard is None else f"shard {problem.shard}"
            console.print(f"bad       {where}: {problem.what}", markup=False)
        else:
            by_sample.setdefault(problem.sample_id, []).append(problem)
    for sample_id, found in by_sample.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        console.print(f"bad       sample {sample_id}: {found[0].what}{more}", markup=False)
