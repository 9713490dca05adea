"""``hsdump collect``: from a run file to a committed dump. Again on the same output, it resumes."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from actors.run_messages import RunSummary
from cluster.admission import Admission, Needs
from cluster.answering import AnswerPass
from cluster.driver import Driver
from cluster.fleet import Fleet
from cluster.lines import set_up_lines
from cluster.output import open_output
from cluster.placement import gpus_per_engine, place_engines, read_nodes
from cluster.repair import repair_before_run
from cluster.report import say, say_account, say_next_steps, say_prepared, say_questions
from cluster.run import Run, resolve
from cluster.run_file import load_run
from cluster.session import NAMESPACE, Session, connect
from cluster.specs import coordinator_spec, engine_spec, writer_spec
from cluster.tenure import Tenure, hold
from cluster.watch import Watch
from storage.dump import ROOT_KEY, DumpHeader, check_identity, open_or_create, read_header
from storage.errors import IncompleteRun, OutputError
from storage.files import Store
from storage.lease import LEASE_FOLDER
from storage.prompts import ASKED, PreparedSummary, PromptTable, prepare, prompts_identity, read_prepared
from storage.prompts.answers import ANSWERS_FOLDER
from storage.table import read_account

RUN_KEY = "run.json"


@dataclass(frozen=True)
class Outcome:
    """What a run that completed leaves in memory.

    Attributes:
        timeline: looks at it at even distances.
    """

    summary: RunSummary
    timeline: Sequence[Mapping[str, Any]]
    session: Session


def collect(
    run_file: str, overrides: Sequence[str], *, address: str | None, start: Path, json_logs: bool = False
) -> None:
    """Runs the job to its end.

    Args:
        run_file: RUN.yaml, a path or an fsspec URL.
        overrides: ``key.sub=value``.
        address: Ray cluster; None starts a local one, unless RAY_ADDRESS names one.
        start: folder that relative paths start from.
        json_logs: every line is a JSON object.

    Raises:
        UserError: something to mend, found as early as it can be.
        IncompleteRun: the run ended and samples are failed or missing.
    """
    set_up_lines(as_json=json_logs)
    config = load_run(run_file, overrides)
    run = resolve(config, start)
    store = open_output(config.output, start)
    refuse_foreign(store)
    found = _recognise(store, run)
    if found is not None and _is_complete(store, *found):
        return
    with hold(store, run.run_id) as tenure:
        outcome = collect_into(store, run, address, tenure, json_logs, found)
    if outcome is not None:
        say_next_steps(store.url, outcome.session)


def collect_into(
    store: Store,
    run: Run,
    address: str | None,
    tenure: Tenure,
    json_logs: bool = False,
    found: tuple[DumpHeader, PreparedSummary] | None = None,
) -> Outcome | None:
    """Runs a resolved job on an output that is this process's own.

    Args:
        store: the output.
        run: the resolved run.
        address: Ray cluster; None starts a local one, unless RAY_ADDRESS names one.
        tenure: says that the output is this process's own.
        json_logs: every line is a JSON object.
        found: the dump that is there, if it was recognised already: that digests the prompt file.

    Returns:
        How it ended; None if there was nothing to do.

    Raises:
        UserError: something to mend.
        IncompleteRun: the run ended and samples are failed or missing.
        LeaseLost: another run took the output over.
    """
    header, prepared = found or _recognise(store, run) or _make(store, run)
    if _is_complete(store, header, prepared):
        return None
    if read_account(store) is not None or store.list("manifest") or store.list(ANSWERS_FOLDER):
        say(f"resuming {store.url}")
    repair_before_run(store)
    config, started = run.config, time.time()
    namespace = NAMESPACE + run.run_id
    with connect(address, config.limits.object_store_bytes, namespace) as session, Watch(json_logs) as watch:
        watch.export(run.run_id)
        nodes = [n for n in read_nodes() if not n.draining]
        gpus = gpus_per_engine(config.engine.gpus, nodes)
        if not config.engine.wait_for_nodes_s:
            place_engines(nodes, gpus, config.engine.count)
        head = ray.get_runtime_context().get_node_id()
        needs = Needs(
            gpus=gpus,
            model=run.files.source if config.engine.kind == "sglang" else None,
            revision=run.files.revision,
            only_on=head if config.writers.place == "head" else None,
            fetch_within_s=config.engine.start_timeout_s,
        )
        admission = Admission(store, run.run_id, needs)
        admission.admit(nodes)
        log_dir = str(session.log_dir)
        fleet = Fleet(
            engine_spec(run, header.layout, gpus, store.url, log_dir), writer_spec(run, store.url, log_dir)
        )
        coordinator = coordinator_spec(run, header.layout, nodes, store.url, log_dir)
        answering = None
        if config.generate is not None and read_prepared(store) is None:
            answering = AnswerPass(store, run.prompts, config.generate, coordinator)
        driver = Driver(store, config, fleet, gpus, coordinator, admission, tenure, watch, answering)
        summary = driver.run(nodes)
    watch.summary(summary)
    answered = answering.record if answering is not None else {}
    _record(store, run, session.log_dir, started, summary, watch.timeline, answered)
    account = summary.account
    if account is None:
        what = "committed" if answering is None or answered else "answered"
        raise IncompleteRun(
            f"{summary.stopped}: {summary.counts.committed} of {summary.counts.total} rows are {what}; the same "
            "command goes on from there"
        )
    say_account(account, header.layout)
    if account.failed:
        raise IncompleteRun(
            f"{account.failed} of {account.rows} rows failed; `hsdump inspect {store.url}` lists the reasons, and "
            "the same command tries them again"
        )
    return Outcome(summary, watch.timeline, session)


def _is_complete(store: Store, header: DumpHeader, prepared: PreparedSummary) -> bool:
    """Whether nothing is left to do, which is then said."""
    done = read_account(store)
    if done is None or done.rows != prepared.rows or done.failed:
        return False
    say(f"{store.url} is complete: nothing to do")
    say_account(done, header.layout)
    return True


def _recognise(store: Store, run: Run) -> tuple[DumpHeader, PreparedSummary] | None:
    """The dump that is there, if it is this run's; None where there is none yet.

    Raises:
        IdentityMismatch: it is another run's.
    """
    prepared = read_prepared(store) or read_prepared(store, ASKED)
    if prepared is None or not store.exists(ROOT_KEY):
        return None
    header = read_header(store)
    check_identity(store, header, run.identity(prompts_identity(run.prompts)), run.config.writers.codec)
    return header, prepared


def _make(store: Store, run: Run) -> tuple[DumpHeader, PreparedSummary]:
    """Prepares the prompts and makes the dump."""
    say(f"preparing {run.prompts.shown_url} into {store.url}")
    prepared = prepare(store, run.prompts)
    say_prepared(prepared)
    if run.prompts.generate is not None:
        say_questions(PromptTable(store, ASKED))
    layout = run.layout(prepared.longest_tokens)
    return open_or_create(store, run.identity(prepared.identity), layout, _versions()), prepared


def refuse_foreign(store: Store) -> None:
    """A folder with other things in it isn't filled with a dump."""
    root = store.local_root
    if root is None or not root.exists():
        return
    names = {p.name for p in root.iterdir()}
    ours = {"zarr.json", "prompts", LEASE_FOLDER, ".tmp"}
    if names and not names & ours:
        shown = ", ".join(sorted(names)[:3])
        raise OutputError(
            f"output {root}: holds something else ({shown}, ...); give a new or an empty folder"
        )


def _record(
    store: Store,
    run: Run,
    log_dir: Path,
    started: float,
    summary: RunSummary,
    timeline: Sequence[Mapping[str, Any]],
    answered: Mapping[str, Any],
) -> None:
    """``run.json``: the last invocation, for people and for the report; no run reads it back."""
    config = run.config.model_dump(mode="json")
    config["prompts"]["url"] = run.prompts.shown_url
    record = {
        "run_id": run.run_id,
        "config": config,
        "started_unix_s": round(started, 1),
        "seconds": round(time.time() - started, 1),
        "counts": asdict(summary.counts),
        "stopped": summary.stopped,
        "stored_bytes": summary.stored_bytes,
        "work_seconds": round(summary.work_s, 2),
        "events": dict(summary.events),
        "host": platform.node(),
        "logs": str(log_dir),
        "timeline": list(timeline),
        "answering": dict(answered),
    }
    store.replace(RUN_KEY, json.dumps(record, indent=1).encode())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hsdump", "sglang", "ray", "torch", "transformers", "zarr", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
