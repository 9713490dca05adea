"""``hsdump plan``: what a run will do and take, and every reason why it can't work, before anything is spent.

It resolves, prepares and places with the functions that `collect` uses, and writes nothing to the output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.capture import flags
from actors.capture.boundary import BoundaryRow, boundary_table
from cluster.admission import Admission, Needs
from cluster.config import RunConfig
from cluster.forecast import (
    AnswersForecast,
    EnginesForecast,
    MemoryForecast,
    RowsForecast,
    SizeForecast,
    TimeForecast,
    forecast_engines,
    forecast_memory,
    forecast_rows,
    forecast_size,
    forecast_time,
    memory_problems,
    size_problems,
)
from cluster.machine import gpu_bytes, this_machine
from cluster.output import open_output
from cluster.placement import Node, gpus_per_engine, place_engines, read_nodes
from cluster.planned_rows import PlannedRows, committed_before, planned_rows
from cluster.preview import Stretch
from cluster.probing import not_probed, probe_on
from cluster.run import Run, resolve
from cluster.run_file import load_run
from cluster.savings import Saving, forecast_savings
from cluster.serving import serving_ids
from cluster.session import connect
from cluster.specs import coordinator_spec, engine_spec
from storage.errors import HsdumpError, OutputError
from storage.export.draft_config import ServingIds
from storage.files import Store
from storage.keep import Keep
from storage.layout import Layout

PROBE_TOKENS = 16_384
"""Of the run's rows, to measure an engine's speed with."""


@dataclass
class Plan:
    """What was found out; a part is None where a problem stands in its way.

    Attributes:
        problems: why the run can't work, one line each with the remedy; empty when it can.
        model: name, architecture and shape.
        serving: layer ids for a drafter that is trained on the boundaries.
        savings: what other choices of capture.keep would take.
        flags: SGLang's arguments that aren't the user's own, with their values.
        preview: id and pieces of one sample.
        resumes: the output holds this run's dump already.
        probe: what the start of an engine showed, for people.
    """

    problems: list[str] = field(default_factory=list)
    model: dict[str, Any] | None = None
    output: str | None = None
    resumes: bool = False
    rows: RowsForecast | None = None
    answers: AnswersForecast | None = None
    boundaries: tuple[BoundaryRow, ...] = ()
    serving: ServingIds | None = None
    size: SizeForecast | None = None
    savings: tuple[Saving, ...] = ()
    engines: EnginesForecast | None = None
    memory: MemoryForecast | None = None
    time: TimeForecast | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    preview: tuple[str, tuple[Stretch, ...]] | None = None
    probe: tuple[str, ...] = ()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """What goes wrong inside is a problem of the run, and the plan goes on with what doesn't need it."""
        try:
            yield
        except HsdumpError as error:
            self.problems.append(" ".join(str(error).split()))


def make_plan(
    run_file: str,
    overrides: Sequence[str],
    *,
    address: str | None,
    start: Path,
    tokens_per_s: float | None = None,
    start_engine: bool = False,
) -> Plan:
    """Finds everything out.

    Args:
        run_file: RUN.yaml, a path or an fsspec URL.
        overrides: ``key.sub=value``.
        address: Ray cluster to plan for; None plans for this machine, unless RAY_ADDRESS names one.
        start: folder that relative paths start from.
        tokens_per_s: speed of one engine, where it is known.
        start_engine: start one where the run would, prove its capture and measure its speed.

    Raises:
        ConfigError: the run file itself can't be read.
    """
    config = load_run(run_file, overrides)
    plan = Plan()
    run, store = None, None
    with plan.part():
        run = resolve(config, start)
    with plan.part():
        store = _output(open_output(config.output, start))
        plan.output = store.url
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []
        with plan.part():
            nodes = _nodes(stack, config, address)
        places = _place(plan, config, nodes)
        if nodes and store is not None and (address or os.environ.get("RAY_ADDRESS")):
            with plan.part():
                _check_seen(config, store, nodes)
        if run is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hsdump-plan-"))
            prepared = _plan_run(plan, run, store, Store(folder), nodes, places)
            if start_engine and places and prepared is not None and run.config.engine.kind == "sglang":
                with plan.part():
                    tokens_per_s = _probe(plan, run, prepared, places[0], tokens_per_s)
            if plan.size is not None and tokens_per_s and places:
                plan.time = forecast_time(plan.size, len(places), tokens_per_s)
    if start_engine and not plan.probe:
        plan.probe = (not_probed(config.engine.kind),)
    return plan


def _probe(
    plan: Plan, run: Run, prepared: PlannedRows, node_id: str, tokens_per_s: float | None
) -> float | None:
    """Starts an engine on the run's own rows and ends it; the speed, unless it was given."""
    gpus = plan.engines.gpus_per_engine if plan.engines is not None else 0
    chosen = prepared.chosen(PROBE_TOKENS)
    rows = [prepared.table.load(row).token_ids for row in chosen]
    layout = run.layout(prepared.table.summary.longest_tokens)
    spec = replace(engine_spec(run, layout, gpus, "", ""), name="probe")
    found = probe_on(node_id, spec, rows)
    plan.probe = found.lines
    if found.error is not None:
        raise found.error
    too_long = int((prepared.table.tokens[prepared.rows] > found.max_sample_tokens).sum())
    if too_long:
        plan.problems.append(
            f"{too_long} rows are longer than the {found.max_sample_tokens:,} tokens that an engine takes: lower "
            "prompts.max_tokens to that, or give the KV pool more room (engine.args.mem_fraction_static)"
        )
    return tokens_per_s or found.tokens_per_s


def _output(store: Store) -> Store:
    """Refuses an output that can't be written, without leaving anything there."""
    root = store.local_root
    if root is None:
        store.require_put_if_absent()
        return store
    there = _existing(root)
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"output {root}: {there} can't be written by this user; name another folder")
    return store


def _nodes(stack: contextlib.ExitStack, config: RunConfig, address: str | None) -> list[Node]:
    if address or os.environ.get("RAY_ADDRESS"):
        stack.enter_context(connect(address, None))
        return read_nodes()
    return [this_machine(config.limits.object_store_bytes)]


def _place(plan: Plan, config: RunConfig, nodes: Sequence[Node]) -> list[str]:
    places: list[str] = []
    if nodes:
        gpus = gpus_per_engine(config.engine.gpus, nodes)
        with plan.part():
            places = place_engines(nodes, gpus, config.engine.count)
        plan.engines = forecast_engines(nodes, places, gpus)
    return places


def _check_seen(config: RunConfig, store: Store, nodes: Sequence[Node]) -> None:
    if config.writers.place == "head":
        return
    root = store.local_root
    made = root is not None and not root.exists()
    try:
        Admission(store, "plan", Needs()).admit(nodes)
    finally:
        if made and root is not None and root.exists():
            for folder in (root / ".tmp", root):
                with contextlib.suppress(OSError):  # something else is in it by now
                    folder.rmdir()


def _plan_run(
    plan: Plan,
    run: Run,
    store: Store | None,
    scratch: Store,
    nodes: Sequence[Node],
    places: Sequence[str],
) -> PlannedRows | None:
    plan.model = {
        "path": run.files.source,
        "architecture": run.model.architecture,
        "num_layers": run.model.num_layers,
        "hidden_size": run.model.hidden_size,
        "dtype": run.config.model.dtype,
    }
    gpus = gpus_per_engine(run.config.engine.gpus, nodes) if nodes else 0
    plan.boundaries = boundary_table(engine_spec(run, run.layout(1), gpus, "", "").capture)
    if run.boundaries:
        plan.serving = serving_ids(run.model.architecture, run.boundaries, run.model.num_layers)
    with plan.part():
        plan.flags = _flags(run, gpus)
    committed, prepared = None, None
    if store is not None:
        with plan.part():
            committed = committed_before(run, store)
    plan.resumes = committed is not None
    with plan.part():
        source = store if store is not None and plan.resumes else scratch
        prepared = planned_rows(run, source, committed)
    if prepared is None:
        return None
    said = prepared.answers.all_tokens if prepared.answers is not None else 0
    plan.rows = forecast_rows(prepared.table.summary, prepared.tokens, prepared.stateless, said)
    plan.answers = prepared.answers
    with plan.part():
        plan.preview = prepared.preview(run)
    longest = prepared.table.summary.longest_tokens
    layout = run.layout(longest)
    supervised = prepared.table.kept(Keep("supervised"))[prepared.rows]
    plan.savings = forecast_savings(layout, prepared.tokens, supervised)
    if store is not None:
        plan.size = _size(run, layout, prepared, store, places)
        plan.problems += size_problems(plan.size, store.url)
    if nodes:
        with plan.part():
            engine = engine_spec(run, layout, gpus, "", "")
            coordinator = coordinator_spec(run, layout, nodes, "", "")
            weights = sum(run.files.weights.values())
            largest = int(prepared.kept.max())
            plan.memory = forecast_memory(engine, coordinator, nodes, largest, weights, gpu_bytes())
            plan.problems += memory_problems(plan.memory)
    return prepared


def _size(
    run: Run, layout: Layout, prepared: PlannedRows, store: Store, places: Sequence[str]
) -> SizeForecast:
    writers = run.config.writers
    count = writers.per_node * (len(set(places)) if writers.place == "node" else 1)
    return forecast_size(
        layout,
        prepared.tokens,
        prepared.kept,
        prepared.committed,
        writers.shard_bytes,
        count,
        _free_bytes(store),
    )


def _free_bytes(store: Store) -> int | None:
    return None if store.local_root is None else Store(str(_existing(store.local_root))).free_bytes()


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _flags(run: Run, gpus: int) -> dict[str, Any]:
    """Arguments that SGLang is started with and that aren't the user's own; checks the user's by name."""
    if run.config.engine.kind != "sglang":
        return {}
    spec = engine_spec(run, run.layout(1), gpus, "", "")
    if importlib.util.find_spec("sglang") is None:  # planned on a machine without it
        return dict.fromkeys(flags.FORCED_ON, True)
    given = flags.server_args(spec, flags.installed_fields())
    own = flags.server_args(replace(spec, server_args={}), given)
    return {name: value for name, value in own.items() if given.get(name) == value}
