"""A plan for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.capture.flags import FORCED_ON
from cluster.forecast import EnginesForecast, MemoryForecast, RowsForecast, SizeForecast
from cluster.plan import Plan
from cluster.preview import coloured
from cluster.report import duration, size
from cluster.savings import Saving

_BAR_WIDTH = 30
_PREVIEW_CHARACTERS = 1200
_LOG_WIDTH = 140


def print_plan(plan: Plan, as_json: bool) -> None:
    """Prints a plan to standard output.

    Args:
        plan: what was found out.
        as_json: one JSON object rather than text.
    """
    if as_json:
        print(json.dumps(plan_json(plan), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in _lines(plan):
        table.add_row(name, text)
    console.print(table)
    if plan.rows is not None:
        console.print("\nlengths of the rows to collect, in tokens:")
        console.print(_histogram(plan.rows))
    if plan.savings:
        console.print(
            "\nwhat is stored, by capture.keep and capture.dtype (docs/training.md says what a trainer needs):"
        )
        console.print(_savings(plan.savings))
    if plan.boundaries:
        console.print("\nboundary b is the residual stream after b decoder layers:")
        console.print(_boundaries(plan))
    if plan.serving is not None:
        console.print("\na drafter trained on these boundaries names them in its config.json as:")
        for line in plan.serving.lines()[1:]:
            console.print(f"  {line}", markup=False)
    if plan.flags:
        console.print("\nSGLang is started with these arguments beside your own:")
        console.print(_flags(plan.flags))
    if plan.preview is not None:
        sample_id, pieces = plan.preview
        console.print(f"\nsample {escape(sample_id)}, [bold green]supervised tokens in green[/]:")
        console.print(coloured(pieces, _PREVIEW_CHARACTERS))
    if plan.probe:
        console.print("\nprobe:")
        for line in plan.probe:
            console.print(f"  {line}", markup=False)
    console.print()
    for problem in plan.problems:
        console.print(f"[bold red]problem[/] {escape(problem)}")
    if not plan.problems:
        console.print("[bold green]good[/] the run can work; nothing was written")


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON; a part that a problem stood in the way of is null."""
    data = asdict(plan)
    if plan.preview is not None:
        sample_id, pieces = plan.preview
        data["preview"] = {"sample_id": sample_id, "pieces": [asdict(p) for p in pieces]}
    if plan.engines is not None:
        names = ("hostname", "gpus", "cpus", "engines")
        data["engines"]["cluster"] = [dict(zip(names, node, strict=True)) for node in plan.engines.cluster]
    return {"ok": not plan.problems, **data}


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.model is not None:
        m = plan.model
        yield (
            "model",
            escape(
                f"{m['path']} ({m['architecture']}): {m['num_layers']} layers of {m['hidden_size']}, {m['dtype']}"
            ),
        )
    if plan.rows is not None:
        yield from _row_lines(plan.rows)
    if plan.answers is not None:
        a = plan.answers
        yield (
            "answers",
            f"the model answers {a.rows:,} rows first, {a.answered:,} of them are answered; at most "
            f"{a.most_tokens:,} tokens are left to say, and all lengths here are with the longest answers",
        )
    if plan.size is not None:
        yield from _size_lines(plan, plan.size)
    if plan.engines is not None:
        yield from _engine_lines(plan.engines)
    if plan.memory is not None:
        yield from _memory_lines(plan.memory, plan.engines.gpus_per_engine if plan.engines else 0)
    yield "time", _time(plan)


def _row_lines(rows: RowsForecast) -> Iterator[tuple[str, str]]:
    yield (
        "rows",
        f"{rows.source_rows:,} in the file; {rows.to_collect:,} to collect, {rows.skipped:,} skipped, of these "
        f"{rows.over_long:,} over-long and {rows.duplicates:,} duplicates",
    )
    for reason in rows.reasons:
        yield "", escape(f"{reason.count:,} x {reason.kind}, for example {reason.example}")
    for warning in rows.warnings:
        yield "", escape(f"note: {warning}")
    p = rows.tokens_by_percentile
    yield (
        "tokens",
        f"{rows.tokens:,}; a row has {p[0]:,} to {p[100]:,}, median {p[50]:,}, p90 {p[90]:,}, p99 {p[99]:,}",
    )
    yield "loss mask", f"{rows.supervised_share:.1%} of the tokens are supervised"


def _size_lines(plan: Plan, found: SizeForecast) -> Iterator[tuple[str, str]]:
    part = "" if found.kept == found.tokens else f", states of {found.kept:,}"
    yield (
        "dump",
        f"{found.tokens:,} tokens{part} x {found.bytes_per_token:,} bytes = "
        f"{size(found.states_bytes)} of states; {size(found.stored_bytes)} with padding and indexes, in about "
        f"{found.shards:,} shards",
    )
    if plan.resumes:
        yield (
            "resume",
            f"{found.committed_rows:,} rows are committed already; {found.left_tokens:,} tokens, "
            f"{size(found.left_bytes)} are left",
        )
    free = "how much is free nobody says" if found.free_bytes is None else f"{size(found.free_bytes)} free"
    fits = found.free_bytes is None or found.left_bytes <= found.free_bytes
    yield "output", escape(f"{plan.output}: {free}{'' if fits else ', which is too little'}")


def _engine_lines(found: EnginesForecast) -> Iterator[tuple[str, str]]:
    each = f"{found.gpus_per_engine} GPUs each" if found.gpus_per_engine else "on CPUs"
    yield "engines", f"{found.engines}, {each}: {found.gpus} GPUs on {found.nodes} nodes"
    for host, gpus, cpus, engines in found.cluster:
        yield "", escape(f"{host}: {gpus} GPUs, {cpus} CPUs, gets {engines} engines")


def _memory_lines(m: MemoryForecast, gpus: int) -> Iterator[tuple[str, str]]:
    gpu = f" of {size(m.gpu_bytes)}" if m.gpu_bytes is not None else ""
    yield (
        "GPU memory" if gpus else "model memory",
        f"{size(m.weights_bytes_per_gpu)} of weights a rank, {size(m.forward_states_bytes)} for the states of a "
        f"forward on the first of each replica{gpu}; the rest is SGLang's",
    )
    host = f" of {size(m.host_bytes)}" if m.host_bytes is not None else ""
    yield (
        "host memory",
        f"{size(m.ring_bytes)} of rings an engine, up to {size(m.in_flight_bytes)} where samples are joined{host}",
    )
    yield (
        "object store",
        f"{size(m.in_flight_bytes)} may be in flight, of {size(m.object_store_bytes)}; the longest row takes "
        f"{size(m.largest_sample_bytes)}{_alone(m)}",
    )


def _alone(m: MemoryForecast) -> str:
    """What it means that two of the longest rows have no room."""
    if m.largest_sample_bytes <= m.in_flight_bytes < 2 * m.largest_sample_bytes:
        return ", and two have no room: its engine waits for it to be written (a larger object store spares that)"
    return ""


def _time(plan: Plan) -> str:
    time = plan.time
    if time is None and plan.probe:
        return "not known: no engine's speed was measured"
    if time is None:
        return "not known: --speed TOKENS/S says what one engine does, --probe starts one and measures"
    return (
        f"{duration(time.seconds)} at {time.tokens_per_s:,.0f} tokens/s an engine, without loading the model; the "
        f"output takes {size(time.write_bytes_per_s)}/s meanwhile"
    )


def _histogram(rows: RowsForecast) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    most = max(count for _, count in rows.histogram)
    for longest, count in rows.histogram:
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        table.add_row(f"  to {longest:,}", bar, f"{count:,}")
    return table


def _savings(savings: Sequence[Saving]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    dtypes = list(dict.fromkeys(s.dtype for s in savings))
    for name in (
        "keep",
        "tokens stored",
        *(f"{d}: {what}" for d in dtypes for what in ("a token read", "in all")),
    ):
        table.add_column(name, justify="left" if name == "keep" else "right")
    for keep in dict.fromkeys(s.keep for s in savings):
        row = [s for s in savings if s.keep == keep]
        cells = [keep, f"{row[0].kept:,}"]
        for s in row:
            cells += [f"{s.bytes_per_token:,.0f} B", size(s.states_bytes) + (" <" if s.chosen else "")]
        table.add_row(*cells)
    table.caption = "< is this run"
    table.caption_justify = "left"
    return table


def _boundaries(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name in ("boundary", "what it is", "Hugging Face", "SGLang id"):
        table.add_column(name)
    for row in plan.boundaries:
        sglang = "-" if row.sglang_id is None else str(row.sglang_id)
        table.add_row(str(row.state), row.layer, escape(row.hugging_face), sglang)
    return table


def _flags(given: dict[str, Any]) -> Table:
    """Forced ones with their reasons first, then what follows from the run file."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for name in sorted(given):
        if name in FORCED_ON:
            table.add_row(f"{name}={given[name]}", FORCED_ON[name])
    others = " ".join(f"{k}={given[k]}" for k in sorted(given) if k not in FORCED_ON and k != "model_path")
    table.add_row("and as the run file says", escape(others))
    return table
