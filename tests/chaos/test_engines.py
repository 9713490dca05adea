"""Engines that live and are of no use: one that hangs, and one sample that kills each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos_oracle import check_dump
from chaos_site import LENGTHS, Site

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

POISON = f"s{LENGTHS.index(max(LENGTHS))}"
"""The longest goes first, before the engines hold."""


def test_poison_sample(tmp_path: Path) -> None:
    with Site(tmp_path, engine={"args": {"die_on_ids": [POISON], "hold_at_sample": 20}}) as site:
        site.collect()
        site.until(lambda status: status.counts.failed == 1 and len(status.engines) == 2)  # both are back
        assert site.finish() == 1, site.text
        died = set(re.findall(r"(engine-\d+) is gone", site.text))
        assert len(died) == 3, "one death in company, two alone"
        check_dump(site.output, failed={POISON: "poison"})


def test_hanging_engine(tmp_path: Path) -> None:
    plan = {"hang_at_sample": 20, "engines": ["engine-0"]}
    # One node, so that the other engine can't have done everything before this one is up.
    with Site(tmp_path, nodes=1, engine={"args": plan, "stall_timeout_s": 3}) as site:
        site.collect()
        assert site.finish() == 0, site.text
        assert re.search(r"engine-0 is gone.*no progress for", site.text)
        check_dump(site.output)
