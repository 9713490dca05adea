"""``hsdump export``: a dump as a trainer's files, over a Ray cluster where one is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.progress import ByteProgress
from cluster.report import size
from cluster.run_file import local_path
from cluster.serving import serving_ids
from cluster.spread import spread
from storage.dump import DumpHeader
from storage.errors import ConfigError
from storage.export.draft_config import ServingIds, plain_ids
from storage.export.formats import FORMATS
from storage.export.plan import ExportOptions, ExportPlan, plan_export
from storage.export.work import PartDone, Summary, finish, run_item, start
from storage.files import Store
from storage.reader import open_dump


def export(
    url: str,
    form_name: str,
    dest_url: str,
    options: ExportOptions,
    *,
    dry_run: bool,
    address: str | None,
    cwd: Path,
) -> None:
    """Exports a dump and says what is where.

    Args:
        url: the dump.
        form_name: a key of `FORMATS`.
        dest_url: where to; a relative path starts at ``cwd``.
        options: what the user chose.
        dry_run: say what would be written, and write nothing.
        address: Ray cluster to spread the work over.
        cwd: where the user typed the command.

    Raises:
        UserError: something to mend before anything is written.
        StorageError: reading or writing failed.
    """
    if form_name not in FORMATS:
        raise ConfigError(f"--to {form_name}: it is one of {', '.join(FORMATS)}")
    console = Console(highlight=False, soft_wrap=True)
    header = open_dump(url).header
    target = target_config(header)
    plan = plan_export(url, FORMATS[form_name], local_path(dest_url, cwd), options, target)
    serving = dump_serving_ids(header, plan.selection.boundaries)
    _say_plan(console, plan)
    if not dry_run:
        start(plan)
        summary = finish(plan, _write(console, plan, address), serving)
        _say_done(console, plan, summary)
    console.print(
        f"trainer   {plan.form.usage(Store(plan.dest.url).where('train'), plan.selection)}", markup=False
    )
    if plan.selection.boundaries:
        first, *others = serving.lines()
        console.print(
            f"serving   {first}, so the drafter's config.json needs (draft_config.json has it):", markup=False
        )
        for line in others:
            console.print(f"          {line}", markup=False)


def dump_serving_ids(header: DumpHeader, boundaries: tuple[int, ...]) -> ServingIds:
    """The layer ids for servers, from what a dump says of its model."""
    architecture = header.identity.model.get("architecture")
    if not architecture or header.num_layers is None:
        return plain_ids(boundaries, "the dump doesn't say its model's architecture")
    return serving_ids(str(architecture), boundaries, header.num_layers)


def target_config(header: DumpHeader) -> Mapping[str, Any]:
    """The model's config.json, empty where its folder isn't on this machine."""
    path = Path(str(header.identity.model.get("path", ""))) / "config.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _write(console: Console, plan: ExportPlan, address: str | None) -> list[PartDone]:
    sizes = {(part.split, part.number): plan.part_bytes(part) for part in plan.parts}
    done = []
    with ByteProgress(console, "writing", plan.bytes) as progress:
        for result in spread(run_item, plan.items(), address):
            done.append(result)
            progress.add(sizes[result.split, result.number])
    return done


def _say_plan(console: Console, plan: ExportPlan) -> None:
    selection = plan.selection
    splits = ", ".join(
        f"{sum(len(part.numbers) for part in plan.split_parts(split))} {split}" for split in plan.splits
    )
    console.print(
        f"export    {plan.form.trainer}: {plan.samples} samples ({splits}), {plan.tokens:,} tokens x "
        f"{plan.state_bytes:,} bytes"
    )
    ids = plan.form.layer_ids(selection.boundaries)
    numbered = f" (in {plan.form.trainer}'s numbering {ids})" if selection.boundaries else ""
    console.print(
        f"states    boundaries {list(selection.boundaries) or 'none'}{numbered}, {selection.final}",
        markup=False,
    )
    free_bytes = plan.dest.free_bytes()
    free = "" if free_bytes is None else f", {size(free_bytes)} free"
    console.print(
        f"disk      about {size(plan.bytes)} in {plan.files:,} files{free}: {plan.dest.url}", markup=False
    )
    if plan.form.file_a_sample:
        local = plan.dest.local_root is not None
        cost = "an fsync and an inode" if local else "a request"
        console.print(
            f"          one file a sample: each costs {cost} to write, and one to open to train on it"
        )


def _say_done(console: Console, plan: ExportPlan, summary: Summary) -> None:
    console.print(f"written   {summary.written} files, {summary.found} were there already")
    share = (
        ""
        if summary.coverage is None
        else (
            f"; {plan.options.draft_vocab_size:,} tokens are {summary.coverage:.1%} of what the drafter is to propose"
        )
    )
    console.print(
        f"tokens    {summary.supervised:,} supervised in train, counted in token_counts.parquet{share}"
    )
