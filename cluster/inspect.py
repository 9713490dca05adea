"""``hsdump inspect``: what a dump holds, or one sample with its text and mask."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.preview import coloured, load_tokenizer, stretches
from cluster.report import size
from cluster.statistics import float8_errors
from storage.errors import ConfigError
from storage.files import Store
from storage.layout import Layout
from storage.prompts import Answer, PreparedSummary, PromptTable, read_prepared
from storage.reader import Dump, open_dump
from storage.sample import Sample

_REASONS_SHOWN = 8


def inspect(url: str, sample_id: str | None) -> None:
    """Prints a dump's contents, or one sample of it.

    Args:
        url: the dump.
        sample_id: a sample; None prints the dump.

    Raises:
        ConfigError: no committed sample has that id.
    """
    console = Console(highlight=False, soft_wrap=True)
    dump = open_dump(url)
    if sample_id is None:
        _print_dump(console, dump, read_prepared(Store(url)))
        return
    try:
        sample = dump[sample_id]
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    _print_sample(console, dump, sample)
    answer = PromptTable(Store(url)).answer(sample.row)
    if answer is not None:
        console.print(f"\n{escape(said(answer))}")


def said(answer: Answer) -> str:
    """What is known of an answer of the model's own, in one line."""
    how = "came to its end" if answer.finish_reason == "stop" else f"was cut ({answer.finish_reason})"
    return f"the model's own answer begins at token {answer.answer_start} and {how}; seed {answer.seed}"


def _print_dump(console: Console, dump: Dump, prepared: PreparedSummary | None) -> None:
    identity, layout = dump.identity, dump.layout
    lengths = dump.places.tokens
    tokens, kept = int(lengths.sum()), int(dump.places.kept.sum())
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", escape(f"{identity.model.get('source')} ({identity.model.get('architecture')})"))
    table.add_row("layers", f"{identity.capture['num_layers']} of hidden size {layout.hidden_size}")
    table.add_row("states", f"{', '.join(map(str, layout.states))} in {_stored_as(layout)}")
    table.add_row("samples", f"{len(dump)} committed, {tokens:,} tokens")
    if lengths.size:
        least, p50, p99, most = np.percentile(
            lengths, (0, 50, 99, 100), method="nearest"
        ).tolist()  # as plan's
        table.add_row("lengths", f"{least:,} to {most:,} tokens, median {p50:,}, p99 {p99:,}")
    table.add_row("size", f"{layout.bytes_per_token:,} bytes a token, {size(kept * layout.bytes_per_token)}")
    if not layout.keep.everything:
        table.add_row("kept", f"states of {kept:,} tokens ({kept / max(tokens, 1):.0%}; keep: {layout.keep})")
    if prepared is not None:
        mask = prepared.identity["loss_mask"]["policy"]
        share = prepared.supervised_tokens / max(prepared.tokens, 1)
        table.add_row("prompts", escape(f"{prepared.source_url}: {prepared.source_rows} rows, loss mask {mask}, "
                                        f"{share:.0%} supervised"))  # fmt: skip
    for line in float8_errors(Store(dump.url)):
        table.add_row("float8", line)
    versions = ", ".join(f"{name} {version}" for name, version in dump.header.versions.items())
    table.add_row("made with", versions)
    console.print(table)
    _print_missing(console, dump)
    if len(dump):
        first = dump[0].sample_id
        console.print(f"\none sample: hsdump inspect {escape(dump.url)} {escape(repr(first))}")


def _stored_as(layout: Layout) -> str:
    return (
        f"{layout.element_type} with scales, computed in {layout.dtype}" if layout.quantised else layout.dtype
    )


def _print_missing(console: Console, dump: Dump) -> None:
    records = [r for r in dump.samples.to_pylist() if r["status"] != "committed"]
    if not records:
        return
    counts = Counter(r["status"] for r in records)
    console.print("\n" + ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) + ":")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("row", "status", "sample", "reason"):
        table.add_column(name)
    for record in sorted(records, key=lambda r: (r["status"], r["row"]))[:_REASONS_SHOWN]:
        table.add_row(
            str(record["row"]), record["status"], escape(record["sample_id"]), escape(record["reason"])
        )
    console.print(table)
    if len(records) > _REASONS_SHOWN:
        console.print(f"... {len(records) - _REASONS_SHOWN} more in {dump.url}/samples.parquet")


def _print_sample(console: Console, dump: Dump, sample: Sample) -> None:
    ids, mask, positions = sample.columns()
    stored = "" if sample.kept == sample.tokens else f"states of {sample.kept:,}, "
    console.print(
        f"{escape(sample.sample_id)}: row {sample.row}, {sample.tokens:,} tokens, {int(mask.sum()):,} supervised, "
        f"{stored}shard {sample.shard}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("state", "mean", "std", "norm of a token: median", "largest"):
        table.add_column(name, justify="right")
    for state in dump.layout.states:
        values = sample.states(state).float()
        norms = values.norm(dim=-1)
        table.add_row(
            str(state),
            f"{values.mean():.4f}",
            f"{values.std():.3f}",
            f"{norms.median():.2f}",
            f"{norms.max():.2f} (token {int(positions[norms.argmax()])})",
        )
    console.print(table)
    tokenizer = load_tokenizer(dump.header.model_path)
    if tokenizer is None:
        console.print(
            f"\nthe tokenizer isn't at {dump.header.model_path}; token ids: {ids[:32].tolist()} ..."
        )
        return
    console.print("\ntext, [bold green]supervised tokens in green[/]:")
    console.print(coloured(stretches(tokenizer, ids.tolist(), mask.tolist())))
