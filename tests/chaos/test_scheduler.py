"""The process in which the model runs is killed under a real engine: its actor goes with it, another one is started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from chaos_site import left_in_shared_memory
from collect_support import Collecting, hsdump, run_file, schedulers_of, shared_memory

from storage import open_dump

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def test_scheduler(tmp_path: Path, smollm2: Path) -> None:
    before = shared_memory()
    run = run_file(tmp_path, smollm2, tmp_path / "dump", limit=20)
    # Not bfloat16, in which a CPU without instructions for it takes minutes: what comes after a death is the same.
    collecting = Collecting(run, "--set", "model.dtype=float32")
    try:
        collecting.until(r"engine-0: proof: \d+ checks passed")
        (scheduler,) = schedulers_of(collecting.process.pid)
        os.kill(scheduler, signal.SIGKILL)
        collecting.until("engine-0 is gone")
        collecting.until(r"engine-1: proof: \d+ checks passed")
        assert collecting.wait() == 0, collecting.text
    finally:
        collecting.end()
    assert "Traceback" not in collecting.text
    assert left_in_shared_memory(before) == set()
    verified = hsdump("verify", tmp_path / "dump", "--reference", "3")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    rows = open_dump(str(tmp_path / "dump")).samples["row"].to_pylist()
    assert rows == list(range(len(rows)))
