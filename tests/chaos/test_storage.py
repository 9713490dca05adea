"""The output fails for a while, or is full, and the object store has hardly any room: nobody dies of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import pytest
import ray
from chaos_oracle import check_dump
from chaos_site import ROOT, Site, left_in_shared_memory, stopped, write_run
from ray._private.internal_api import memory_summary
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

sys.path.insert(0, str(ROOT / "tests/s3"))
from faulty_proxy import SLOW_DOWN, Fault, FaultyProxy
from servers import moto

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

OUTAGE_S = float(os.environ.get("OUTAGE_S", "20"))
"""How long the object store fails; `make chaos FAULT=storage OUTAGE_S=360` is the full length."""
MIB = 1 << 20
_ANSWERS = ((400, b"<Error><Code>RequestTimeout</Code></Error>"), (503, SLOW_DOWN))
"""The client hands the first on at once; the second it tries again by itself, for a while."""
_TURN_S = 2.0


@contextlib.contextmanager
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyProxy]]:
    """A bucket behind a proxy that can be told to fail; the environment leads everything there."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with moto(folder / "moto.log") as server, FaultyProxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        botocore.session.get_session().create_client("s3", region_name="us-east-1").create_bucket(
            Bucket="dumps"
        )
        yield "s3://dumps/run", proxy


@pytest.mark.timeout(600 + 2 * OUTAGE_S)
def test_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permits = {"inflight_bytes": 3 * MIB}
    # 70 MiB in all, of which permits and the writers' shards, the claimed ones too, hold 22.
    capture = {"boundaries": list(range(8))}
    with (
        bucket(tmp_path, monkeypatch) as (output, proxy),
        Site(tmp_path, output=output, capture=capture, limits=permits) as site,
    ):
        site.collect()
        site.until(lambda status: status.counts.written + status.counts.committed >= 24)
        engines = site.engine_pids()
        faults = [Fault(lambda method, path: True, sys.maxsize, status=s, body=b) for s, b in _ANSWERS]
        proxy.faults = faults
        began_s = time.monotonic()
        site.release()
        site.until(lambda status: "writer-" in (status.paused or "") and status.counts.pending > 0)
        while (now_s := time.monotonic()) - began_s < OUTAGE_S:
            turn = int((now_s - began_s) / _TURN_S) % 2  # each kind of answer for a while
            proxy.faults = [faults[turn]]
            assert site.engine_pids() == engines
        held_back = site.until(lambda status: True)
        assert held_back.counts.pending > 0, "permits didn't hold back the dispatch"
        proxy.faults = []
        assert site.finish() == 0, site.text
        assert not re.search(r"(engine|writer)-\d+ is gone", site.text)
        check_dump(output)


FULL = """
mount -t tmpfs -o size={size} none {folder} || exit 77
head -c {filler} /dev/zero > {folder}/filler
"$PYTHON" -m cluster collect {run_file} &
echo "pid $!"
wait $!
code=$?
cp -r {folder}/dump {copy}
exit $code
"""


def test_full_disk(tmp_path: Path) -> None:
    """A tmpfs in a mount namespace of its own, where the command starts its own cluster of one node."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    before = set(os.listdir("/dev/shm"))
    disk, copy, log = tmp_path / "disk", tmp_path / "copy", tmp_path / "log"
    disk.mkdir()
    limits = {"object_store_bytes": 120 * MIB, "batch_samples": 4}
    run_file = write_run(tmp_path, str(disk / "dump"), engine={"args": {}}, limits=limits)
    script = FULL.format(size=36 * MIB, filler=26 * MIB, folder=disk, run_file=run_file, copy=copy)
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=without_cluster(), start_new_session=True
        )
    try:
        pid = wait_for_line(process, log, r"^pid (\d+)").group(1)
        wait_for_line(process, log, "no space left")
        os.truncate(f"/proc/{pid}/root{disk}/filler", 0)
        code = process.wait(300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text()
    if code == 77 or "unshare:" in text:
        pytest.skip("this user may not mount a tmpfs in a namespace of its own")
    assert code == 0, text
    assert not re.search(r"(engine|writer)-\d+ is gone", text)
    check_dump(str(copy))
    assert left_in_shared_memory(before) == set()


def without_cluster() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, "PYTHON": sys.executable}


def wait_for_line(process: subprocess.Popen[bytes], log: Path, pattern: str) -> re.Match[str]:
    deadline_s = time.monotonic() + 300
    while True:
        ended = process.poll() is not None
        if found := re.search(pattern, log.read_text(), re.MULTILINE):
            return found
        if ended or time.monotonic() > deadline_s:
            raise AssertionError(f"no line matches {pattern!r}:\n{log.read_text()}")
        time.sleep(0.1)


def test_object_store_almost_full(tmp_path: Path) -> None:
    """Somebody else's data and all permits together leave a fifth of it, which is where Ray begins to spill."""
    capture = {"boundaries": list(range(8))}  # 70 MiB in all
    with Site(tmp_path, store_bytes=100 * MIB, capture=capture, limits={"batch_samples": 64}) as site:
        ballast = [fill_store(node, 36 * MIB) for node in site.nodes]
        site.collect()
        site.until(lambda status: len(status.writers) == 2)
        with stopped(*(site.pid(name) for name in site.actors("writer"))):
            site.release()
            site.until(lambda status: max(status.in_flight_bytes.values()) > 30 * MIB)
        assert site.finish() == 0, site.text
        summary = memory_summary(site.cluster.address, stats_only=True)
        assert "Spilled" not in summary, summary
        assert len(ballast) == 2
        check_dump(site.output)


def fill_store(node: Any, size_bytes: int) -> object:
    """Puts other data into a node's object store; it is there as long as what is returned."""

    class Holder:  # in here, so that it is sent by value: the workers can't import this file
        def fill(self) -> None:
            self.held = ray.put(np.zeros(size_bytes, np.uint8))

    strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    holder = ray.remote(Holder).options(num_cpus=0, scheduling_strategy=strategy).remote()
    ray.get(holder.fill.remote())
    return holder
