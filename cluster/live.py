"""The live view of a run on a terminal: a pace and the engines that load, drawn. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.run_messages import Status
from cluster.pace import MemberPace, Pace, spoken_rate
from cluster.report import duration, size

MOST_ENGINES = 16
"""Engines that are shown one by one; of more, those with the least to do."""


def view(pace: Pace, hosts: Mapping[str, str], loading: Mapping[str, float]) -> RenderableType:
    """Everything that a person wants to see at once.

    Args:
        pace: of the run.
        hosts: node id -> name.
        loading: engine -> seconds since its start, of those that load.
    """
    parts = [_bar(pace), _rows(pace), _engines(pace, hosts, loading), _nodes(pace, hosts)]
    trouble = problems(pace.status)
    if trouble:
        parts.append(Text(trouble, style="yellow", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def problems(status: Status) -> str:
    """Retries by class, the pause, and the last thing that went wrong; empty when all is well."""
    parts = []
    if status.paused:
        parts.append(f"paused: {status.paused}")
    if status.events:
        parts.append(
            "retries: " + ", ".join(f"{count} {kind}" for kind, count in sorted(status.events.items()))
        )
    if status.last_problem and status.last_problem != status.paused:
        parts.append(f"last problem: {status.last_problem}")
    return "; ".join(parts)


def _bar(pace: Pace) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(2):
        table.add_column(no_wrap=True)
    share = pace.done_tokens / max(1, pace.total_tokens)
    spoken, answering = spoken_rate(pace), pace.status.task == "answer"
    rate = "" if spoken is None else f"{spoken:,.0f} tokens/s"
    left = "" if pace.left_s is None else f"{duration(pace.left_s)} to go"
    text = Text.assemble(
        (f"{share:4.0%}", "bold"),
        f"  answering: {pace.status.answer_tokens:,} tokens said"
        if answering
        else f"  {pace.done_tokens:,} of {pace.total_tokens:,} tokens",
        (f"  {rate}", "cyan"),
        (f"  {left}", "bold"),
    )
    table.add_row(ProgressBar(total=max(1, pace.total_tokens), completed=pace.done_tokens, width=30), text)
    return table


def _rows(pace: Pace) -> Text:
    c = pace.status.counts
    text = Text(
        f"rows {c.committed:,} committed, {c.written:,} written, {c.in_flight:,} in flight, {c.pending:,} pending, "
        f"{c.skipped:,} skipped, "
    )
    text.append(f"{c.failed:,} failed", style="bold red" if c.failed else "")
    if pace.bottleneck != "nothing":
        text.append(
            f"   bound by: {pace.bottleneck}", style="green" if pace.bottleneck == "engine" else "yellow"
        )
    return text


def _engines(pace: Pace, hosts: Mapping[str, str], loading: Mapping[str, float]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("engine", "left"), ("node", "left"), ("state", "left"), ("batches", "right"),
                          ("tokens to do", "right"), ("rows done", "right"), ("busy", "right")):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    shown = sorted(pace.engines, key=lambda e: e.busy if e.busy is not None else 0.0)[:MOST_ENGINES]
    for engine in sorted(shown, key=lambda e: _number(e.status.name)):
        s = engine.status
        state = Text("works", style="green") if s.batches else Text("waits", style="yellow")
        busy = "" if engine.busy is None else f"{engine.busy:.0%}"
        node = hosts.get(s.node_id, s.node_id[:8])
        table.add_row(s.name, node, state, str(s.batches), f"{s.tokens:,}", f"{s.done_samples:,}", busy)
    for name, seconds in loading.items():
        table.add_row(name, "", Text(f"loads for {duration(seconds)}", style="dim"))
    if len(pace.engines) > MOST_ENGINES:
        table.add_row(f"and {len(pace.engines) - MOST_ENGINES} more")
    return table


def _nodes(pace: Pace, hosts: Mapping[str, str]) -> Table:
    limit = max(1, pace.status.in_flight_limit_bytes)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "permits", "", "writers"):
        table.add_column(name, no_wrap=True)
    by_node: dict[str, list[MemberPace]] = {node: [] for node in pace.status.in_flight_bytes}
    for writer in pace.writers:
        by_node.setdefault(writer.status.node_id, []).append(writer)
    for node, writers in list(by_node.items())[:MOST_ENGINES]:
        used = pace.status.in_flight_bytes.get(node, 0)
        table.add_row(
            hosts.get(node, node[:8]),
            ProgressBar(total=limit, completed=used, width=16),
            f"{size(used)} of {size(limit)}",
            _writers(writers),
        )
    return table


def _writers(writers: Sequence[MemberPace]) -> str:
    return ", ".join(
        f"{w.status.name} {size(w.bytes_per_s)}/s{'' if w.busy is None else f', {w.busy:.0%} busy'}"
        for w in writers
    )


def _number(name: str) -> tuple[int, str]:
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isdecimal() else 0, name)
