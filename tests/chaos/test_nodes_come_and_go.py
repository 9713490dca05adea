"""A node that joins in mid-run, and one that is to be taken away by a deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from chaos_oracle import check_dump
from chaos_site import Site

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PREEMPTION = 2
"""DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto."""


def drain(site: Site, node: Any, seconds: float) -> None:
    """What a cloud's notice of pre-emption does."""
    client = ray._raylet.GcsClient(address=site.cluster.address)
    deadline_ms = int((time.time() + seconds) * 1000)
    accepted, why = client.drain_node(node.node_id, PREEMPTION, "spot instance", deadline_ms)
    assert accepted, why


def test_node_added(tmp_path: Path) -> None:
    with Site(tmp_path, nodes=1) as site:
        site.collect()
        site.until(lambda status: status.counts.written + status.counts.committed >= 12)
        added = site.add_node()
        site.until(lambda status: any(e.node_id == added.node_id and e.done_samples for e in status.engines))
        assert site.finish() == 0, site.text
        check_dump(site.output)


def test_node_draining(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        site.collect()
        site.until(lambda status: status.counts.written + status.counts.committed >= 24)
        engine = site.on(site.nodes[1], "engine")
        drain(site, site.nodes[1], 300)
        site.until_line(f"{engine} gets no more work: its node .* is draining")
        assert site.finish() == 0, site.text
        assert "is gone" not in site.text, "leaving in order cost something"
        check_dump(site.output)
