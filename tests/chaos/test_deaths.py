"""Processes die, one kind at a time, while the real command runs: the dump is the one without faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos_oracle import check_dump
from chaos_site import Site, kill, processes_of, raylet_pid

from actors.run_messages import Status

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

IN_ONE_SHARD = {"shard_bytes": 1 << 30}
"""Nothing is sealed before the end, so what a writer holds when it dies isn't committed."""


def under_way(status: Status) -> bool:
    """Both engines have come to where they hold, and most of what they did is with the writers."""
    return status.counts.written + status.counts.committed >= 24


def test_engine_actor(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.collect()
        site.until(under_way)
        kill(site.pid("engine-0"))
        site.until_line("engine-0 is gone")
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_writer_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    with Site(tmp_path, writers=IN_ONE_SHARD) as site:
        site.collect()
        held = site.until(under_way)
        assert held.counts.committed == 0
        kill(site.pid("writer-0"))
        site.until_line("writer-0 is gone")
        after = site.until(lambda status: True)
        assert after.counts.written < held.counts.written, "it had nothing to lose"
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_coordinator(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.collect()
        site.until(under_way)
        engines = site.engine_pids()
        kill(site.coordinator_pid())
        site.until_line("the coordinator died; a new one starts from the manifests")
        site.until(lambda status: len(status.engines) == 2)
        assert site.engine_pids() == engines
        assert site.finish() == 0, site.text
        assert "engine-2" not in site.text, "an engine was started again"
        assert "Traceback" not in site.text
        check_dump(site.output)
        logs = Path(re.findall(r"logs: (\S+)", site.text)[-1])
        assert {file.name for file in logs.iterdir()} >= {
            "coordinator-0.log",
            "coordinator-1.log",
            "writer-0.log",
        }


def test_driver(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.collect()
        site.until(lambda status: under_way(status) and status.counts.committed > 0)
        site.kill_driver()
        site.collect()
        site.until_line("resuming")
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_raylet(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.collect()
        site.until(under_way)
        engine = site.on(site.nodes[1], "engine")
        kill(raylet_pid(site.nodes[1]))
        site.until_line(f"{engine} is gone")
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_last_node_with_gpus(tmp_path: Path) -> None:
    with Site(tmp_path, nodes=1, engine={"gpus": 1}) as site:
        lost = site.add_node(gpus=1)
        site.collect()
        site.until(lambda status: status.counts.written + status.counts.committed >= 12)
        for process in processes_of(lost):
            process.kill()
        assert site.finish() == 1, site.text
        assert re.search(
            r"no engine is left and none with 1 GPUs fits.*run the same command again", site.text
        )
        site.add_node(gpus=1)
        site.collect()
        site.release()
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_node_without_grace(tmp_path: Path) -> None:
    with Site(tmp_path, writers=IN_ONE_SHARD) as site:
        site.collect()
        site.until(under_way)
        engine = site.on(site.nodes[1], "engine")
        for process in processes_of(site.nodes[1]):
            process.kill()
        site.until_line(f"{engine} is gone")
        assert site.finish() == 0, site.text
        check_dump(site.output)
