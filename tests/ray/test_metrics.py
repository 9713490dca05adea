"""Prometheus scrapes a local cluster while a run goes on: every panel of the dashboard has something to show."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from collection import SmallDriver, make_dump
from prometheus import scraping
from rich.console import Console

from cluster.metrics import COUNTERS, GAUGES
from cluster.watch import Watch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "cluster/grafana/hsdump.json"
WITHIN_S = 150.0
LENGTHS = [40] * 4000
"""More than the test waits for: it stops the run once it has seen everything."""
SLOW = {"tokens_per_s": 800.0, "bad_rows": (5,)}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


def panel_queries() -> dict[str, str]:
    """Panel and letter -> query, as Grafana would ask it."""
    queries = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$run", ".*").replace("$__rate_interval", "15s")
            queries[f"{panel['title']} {target['refId']}"] = expression
    return queries


def test_every_panel_of_the_dashboard_has_data(tmp_path: Path) -> None:
    driver = SmallDriver(make_dump(tmp_path, LENGTHS), faults=[SLOW, SLOW | {"die_at_sample": 60}])
    driver.replacement_faults = SLOW
    driver.begin()
    missing = panel_queries()
    targets = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()]
    deadline_s = time.monotonic() + WITHIN_S
    with (
        scraping(targets, tmp_path) as prometheus,
        Watch(console=Console(file=io.StringIO(), force_terminal=False)) as watch,
    ):
        watch.export("run")
        while missing and time.monotonic() < deadline_s:
            status = driver.status()
            watch.update(status, {e.node_id: "this node" for e in status.engines}, {})
            done, _ = ray.wait([driver.run, driver.loss], timeout=0.5)
            if driver.loss in done:
                driver._replace(True)
                watch.restarted("engine")
            assert driver.run not in done, "the run ended before every panel was seen"
            missing = {name: query for name, query in missing.items() if not prometheus.query(query)}
    ray.get(driver.coordinator.stop.remote("the test has seen enough"))
    driver.end()
    assert missing == {}


def test_the_dashboard_and_the_page_name_the_metrics_that_there_are() -> None:
    ours = {f"ray_{name}" for name in GAUGES} | {f"ray_{name}_total" for name in COUNTERS}
    asked = set(re.findall(r"\bray_hsdump\w+", DASHBOARD.read_text()))
    assert asked - ours == set()
    page = (ROOT / "docs/metrics.md").read_text()
    assert {name for name in ours if f"`{name}`" not in page} == set()
