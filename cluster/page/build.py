"""Puts the page together: facts and figures into the template, plotly's own script inline."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
from markupsafe import Markup

from actors.capture.proof import report_lines
from cluster.page import plots
from cluster.page.facts import Facts, read_facts
from cluster.page.statistics import TOP_CHANNELS
from cluster.report import duration, say, size
from storage.errors import OutputError
from storage.files import Store

PAGE_KEY = "report.html"


def report(url: str, output: str | None) -> None:
    """Writes the page.

    Args:
        url: the dump.
        output: file to write; None is ``report.html`` in the dump.

    Raises:
        OutputError: there is no dump, or the file can't be written.
    """
    store = Store(url)
    page = render(read_facts(url)).encode()
    if output is None:
        store.replace(PAGE_KEY, page)
        say(f"written: {store.where(PAGE_KEY)} ({size(len(page))}, needs no network)")
        return
    try:
        Path(output).write_bytes(page)
    except OSError as error:
        raise OutputError(f"--output {output}: can't be written: {error}; name another file") from error
    say(f"written: {output} ({size(len(page))}, needs no network)")


def render(facts: Facts) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "duration": duration, "thousands": "{:,}".format}
    return environment.get_template("page.html.jinja").render(
        f=facts,
        title=_title(facts),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        tokens=sum(facts.dump.places.tokens.tolist()),
        kept=sum(facts.dump.places.kept.tolist()),
        verdict=_verdict(facts),
        seconds=facts.run.get("work_seconds"),
        started=_day(facts.run.get("started_unix_s")),
        proofs=[_proof(p) for p in facts.proof.values() if p],
        plots=_plots(facts),
        top_channels=TOP_CHANNELS,
        samples=_samples(facts),
        plotly=Markup(plotly.offline.get_plotlyjs()),
    )


def _title(facts: Facts) -> str:
    """The model: a hub id, or the name of a local folder."""
    source = str(facts.dump.identity.model.get("source") or facts.dump.url)
    return source.rstrip("/").rpartition("/")[2] if source.startswith("/") else source


def _verdict(facts: Facts) -> tuple[str, str]:
    """A word for the top of the page, and its class."""
    account = facts.account.account
    if facts.account.problems and any("isn't finished" not in p.what for p in facts.account.problems):
        return "damaged", "bad"
    if facts.account.problems:
        return "not finished", "warn"
    if account.failed:
        return f"{account.failed:,} row{'s' * (account.failed != 1)} failed", "bad"
    return "complete", "good"


def _day(unix_s: float | None) -> str | None:
    return None if unix_s is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _proof(proof: Mapping[str, Any]) -> dict[str, Any]:
    return {"lines": report_lines(proof), "checks": proof["checks"], "passed": proof["passed"]}


def _plots(facts: Facts) -> dict[str, Markup]:
    """Name -> figure; those whose numbers aren't there are left out."""
    figures = {}
    timeline = facts.run.get("timeline", [])
    if len(timeline) > 1:
        figures["throughput"] = plots.throughput(timeline)
        figures["time"] = plots.where_time_went(timeline)
    if len(facts.dump):
        figures["lengths"] = plots.lengths(facts.dump.places.tokens)
    if facts.statistics is not None:
        figures["norms"] = plots.norms(facts.statistics)
        if any(s.outliers for s in facts.statistics.states):
            figures["outliers"] = plots.outliers(facts.statistics)
    return {name: Markup(plots.figure_html(figure, f"plot-{name}")) for name, figure in figures.items()}


def _samples(facts: Facts) -> Markup:
    """The browser's samples as JSON inside a script: ``<`` is escaped, since they are other people's text."""
    data = json.dumps([asdict(sample) for sample in facts.browsed])
    return Markup(data.replace("<", "\\u003c"))
