"""Lines that a person reads on the terminal or in the job's log."""

from __future__ import annotations

import time

from storage.layout import Layout
from storage.prompts import PreparedSummary
from storage.table import Account


def say(line: str) -> None:
    """Prints one line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def size(size_bytes: float) -> str:
    """Bytes for people: 923.9 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def say_prepared(prepared: PreparedSummary) -> None:
    """What preparation made of the prompt file."""
    share = prepared.supervised_tokens / prepared.tokens if prepared.tokens else 0.0
    say(
        f"{prepared.source_rows} rows in, {prepared.to_collect} to collect ({prepared.tokens:,} tokens, longest "
        f"{prepared.longest_tokens:,}, {share:.0%} supervised), {prepared.skipped} skipped"
    )
    for reason in prepared.reasons:
        say(f"  skipped {reason.count}: {reason.kind}, for example {reason.example}")
    for warning in prepared.warnings:
        say(f"  note: {warning}")


def say_account(account: Account, layout: Layout) -> None:
    """The account that must add up, and the invariant of its bytes."""
    stored = account.tokens * layout.bytes_per_token
    say(
        f"{account.rows} rows = {account.committed} committed + {account.skipped} skipped + {account.failed} failed; "
        f"{account.tokens:,} tokens x {layout.bytes_per_token:,} bytes = {size(stored)} of states"
    )
