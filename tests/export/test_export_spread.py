"""An export over a Ray cluster's workers writes the same files as one in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from export_dumps import make_export_dump

from cluster.cli import run_cli


@pytest.mark.slow
def test_a_cluster_writes_the_same_files(tmp_path: Path) -> None:
    url = make_export_dump(tmp_path / "dump")
    here, there = tmp_path / "here", tmp_path / "there"
    assert run_cli(["export", url, "--to", "deepspec", str(here), "--split", "0.4"]) == 0
    context = ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    try:
        address = context.address_info["gcs_address"]
        arguments = ["export", url, "--to", "deepspec", str(there), "--split", "0.4", "--address", address]
        command = [sys.executable, "-m", "cluster", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        ray.shutdown()
    assert done.returncode == 0, done.stderr
    assert "2 files, 0 were there already" in done.stdout
    files = [path.relative_to(here) for path in here.rglob("*") if path.is_file()]
    assert len(files) == 10
    for path in files:
        assert (there / path).read_bytes() == (here / path).read_bytes(), path
