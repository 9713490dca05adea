"""``hsdump verify``: the account, every byte, and on request the states against a reference."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cluster.report import size
from cluster.spread import spread
from storage.account import check_account
from storage.errors import CorruptDump
from storage.files import Store
from storage.reader import open_dump
from storage.reference import ReferenceItem, SampleComparison, run_reference
from storage.verify import Problem, run_item, work_items

_SHOWN = 20


def verify(
    url: str, *, reference: int, model: str | None, trust_remote_code: bool, address: str | None
) -> None:
    """Checks a dump and prints what was found.

    Args:
        url: the dump.
        reference: samples to recompute with Hugging Face, the longest among them; 0 for none.
        model: folder of the model; None takes the one that the dump names.
        trust_remote_code: run Python code that comes with the model.
        address: Ray cluster to spread the work over.

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
    samples = tokens = read = 0
    items = work_items(store)
    for shard in spread(run_item, items, address):
        samples += shard.samples
        tokens += shard.tokens
        read += shard.bytes
        problems += shard.problems
    layout = open_dump(url).layout
    console.print(
        f"bytes     {len(items)} shards, {samples} samples, {tokens:,} tokens x {layout.bytes_per_token:,} bytes = "
        f"{size(found.states_bytes)}; {size(read)} read and compared with their xxh3"
    )
    if tokens != account.tokens:
        problems.append(Problem(f"the shards hold {tokens} tokens, the account says {account.tokens}"))
    if reference and account.committed:
        problems += _reference(console, url, reference, model, trust_remote_code)
    _say_problems(console, problems)
    if problems:
        bad = {p.sample_id for p in problems if p.sample_id is not None}
        raise CorruptDump(f"{url}: {len(problems)} problems, {len(bad)} samples affected; they are listed above")
    console.print("good      no problems")


def _reference(
    console: Console, url: str, count: int, model: str | None, trust_remote_code: bool
) -> list[Problem]:
    dump = open_dump(url)
    item = ReferenceItem(url, choose(dump.samples, count), model or dump.header.model_path, trust_remote_code)
    console.print(
        f"reference {len(item.sample_ids)} samples recomputed with Hugging Face in float32 from {item.model_path}"
    )
    comparisons = run_reference(item)
    console.print(_table(comparisons))
    return [
        Problem(f"state {s.state}: {s.why}", sample_id=c.sample_id)
        for c in comparisons
        for s in c.states
        if not s.good
    ]
