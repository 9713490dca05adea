"""Lines that a person reads on the terminal or in the job's log."""

from __future__ import annotations

from cluster.lines import LOGGER
from cluster.session import Session
from storage.layout import Layout
from storage.prompts import PreparedSummary, PromptTable
from storage.table import Account


def say(line: str) -> None:
    """Prints one line with the time, at once; see `cluster.lines`."""
    LOGGER.info("%s", line)


def say_questions(asked: PromptTable) -> None:
    """What the model is to answer."""
    longest, _ = asked.questions()
    rows = int((longest > 0).sum())
    say(f"{rows:,} of them are answered by the model first, with at most {int(longest.sum()):,} tokens")


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
    stored = account.kept * layout.bytes_per_token
    part = "" if layout.keep.everything else f", states of {account.kept:,} (keep: {layout.keep})"
    say(
        f"{account.rows} rows = {account.committed} committed + {account.skipped} skipped + {account.failed} failed; "
        f"{account.tokens:,} tokens{part} x {layout.bytes_per_token:,} bytes = {size(stored)} of states"
    )


def say_next_steps(url: str, session: Session) -> None:
    """Where everything is, and what to type next."""
    say(f"dump: {url}   logs: {session.log_dir}")
    say("next:")
    for command, why in (
        (f"hsdump verify {url} --reference 8", "every byte, and 8 samples against Hugging Face"),
        (f"hsdump inspect {url}", "what is in it"),
    ):
        say(f"  {command}   # {why}")


def duration(seconds: float) -> str:
    """Seconds for people: 5 h 07 min."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s" if m else f"{s} s"
