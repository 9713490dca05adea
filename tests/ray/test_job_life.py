"""A run as a job of a real Ray cluster: submitted with the documented line, followed, stopped and resumed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from collect_support import ROOT
from job_server import JobServer, job_server
from raylets import assert_complete, made_up_run

from storage.files import Store
from storage.manifest import read_manifests

pytestmark = pytest.mark.slow

ROWS = 100
HELD = {"args": {"hold_at_sample": 60}}
"""The engine waits there until the test has acted; the second run's has fewer to do."""


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    # Short, because the paths of Ray's sockets have to be.
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder, job_server(Path(folder)) as made:
        yield made


def documented_line(run: Path, *options: str) -> str:
    """The line of docs/scale-out.md and README.md with this run in it."""
    lines = {
        re.search(r"^    ray (job submit .* -- python -m cluster collect .*)$", text, re.MULTILINE).group(1)
        for text in ((ROOT / "README.md").read_text(), (ROOT / "docs/scale-out.md").read_text())
    }
    (line,) = lines
    assert line.count("RUN.yaml") == 1
    return line.replace("job submit", " ".join(("job submit", *options))).replace("RUN.yaml", str(run))


def test_the_documented_line_runs_and_its_progress_is_in_the_log(server: JobServer, tmp_path: Path):
    run = made_up_run(tmp_path, 40, {"args": {"tokens_per_s": 200.0}})
    done = server.ray(documented_line(run, "--submission-id", "whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    log = server.ray("job logs whole").stdout
    assert re.search(r"starting 1 engine on", log)
    assert re.search(r"40 rows = 40 committed \+ 0 skipped \+ 0 failed", log)
    assert server.run_code("whole") == 0
    assert_complete(tmp_path, 40)


def test_a_stopped_job_seals_what_it_has_and_the_same_line_goes_on(server: JobServer, tmp_path: Path):
    run = made_up_run(tmp_path, ROWS, HELD)
    assert server.ray(documented_line(run, "--no-wait", "--submission-id", "first")).returncode == 0
    server.log_until("first", "engine-0: its states are made up")

    seen = server.status()
    assert sum(seen["rows"].values()) == ROWS
    assert list(seen["engines"]) == ["engine-0"]
    assert seen["in_flight_limit_bytes"] == 20 << 20
    again = server.ray(documented_line(run, "--no-wait", "--submission-id", "first"))
    assert again.returncode != 0
    assert "already exists" in again.stdout + again.stderr
    other = server.ray(documented_line(run, "--submission-id", "other"))
    assert other.returncode == 1
    assert re.search(r"error: output .*/dump is in use by run \w+ on", server.ray("job logs other").stdout)
    assert server.run_code("other") == 2
    assert server.run_code("first") == 3

    assert server.ray("job stop first --no-wait").returncode == 0
    server.log_until("first", "stopping: no more work is handed out")
    server.let_engines_go_on()
    stopped = server.until_it_ended("first")
    log = server.ray("job logs first").stdout
    assert (found := re.search(rf"asked to stop: (\d+) of {ROWS} rows are committed", log)), log
    committed = [s.row for m in read_manifests(Store(str(tmp_path / "dump"))) for s in m.samples]
    assert 60 <= len(committed) == int(found.group(1)) < 80
    assert json.loads((tmp_path / "dump/run.json").read_text())["counts"]["written"] == 0
    assert stopped.status == "STOPPED"
    assert server.run_code("first") == 1

    done = server.ray(documented_line(run, "--submission-id", "second"))
    assert done.returncode == 0, done.stdout
    assert "resuming" in done.stdout
    assert_complete(tmp_path, ROWS)


def test_a_job_that_leaves_rows_out_has_failed(server: JobServer, tmp_path: Path):
    run = made_up_run(tmp_path, 20, {"args": {"bad_rows": [3]}})
    failed = server.ray(documented_line(run, "--submission-id", "failing"))
    assert failed.returncode == 1
    assert "1 of 20 rows failed" in failed.stdout
    assert server.details("failing").status == "FAILED"
    assert server.run_code("failing") == 1


def test_without_the_token_nobody_gets_in(server: JobServer, tmp_path: Path):
    (tmp_path / "other").write_text("0" * 64)
    refused = server.ray("job list", RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"))
    assert refused.returncode != 0
    assert "whole" not in refused.stdout
