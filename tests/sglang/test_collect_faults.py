"""The main job through deaths and interruptions, with a real engine: nothing is lost, the same command resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from collect_support import Collecting, hsdump, run_file, schedulers_of

from storage import open_dump

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, smollm2: Path) -> Path:
    return run_file(tmp_path, smollm2, tmp_path / "dump")


def test_a_killed_scheduler_and_an_interrupt_end_in_a_complete_dump(run: Path, tmp_path: Path):
    collecting = Collecting(run)
    try:
        collecting.until(r"engine-0: proof: \d+ checks passed")
        (scheduler,) = schedulers_of(collecting.process.pid)
        os.kill(scheduler, signal.SIGKILL)
        collecting.until("engine-0 died")
        collecting.until(r"engine-1: proof: \d+ checks passed")
        collecting.interrupt()
        assert collecting.wait() == 1, collecting.text
    finally:
        collecting.end()
    assert "the same command goes on from there" in collecting.text
    assert "Traceback" not in collecting.text

    done = hsdump("collect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = hsdump("verify", tmp_path / "dump", "--reference", "3")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    rows = open_dump(str(tmp_path / "dump")).samples["row"].to_pylist()
    assert rows == list(range(len(rows)))
