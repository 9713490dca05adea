"""``hsdump rehearse`` on nodes of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from collect_support import hsdump
from raylets import made_up_run

pytestmark = pytest.mark.slow


def test_a_rehearsal_measures_a_whole_collection_and_leaves_nothing(tmp_path: Path):
    run = made_up_run(tmp_path, 8, {})
    tree = yaml.safe_load(run.read_text())
    tree["engine"] = {"gpus": 8}
    run.write_text(yaml.safe_dump(tree))
    before = {p.name for p in tmp_path.iterdir()}
    done = hsdump("rehearse", run, "--nodes", 2, "--rows", 60, "--tokens-per-s", 20000, "--clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting 2 engines" in done.stdout
    assert re.search(r"60 rows = 60 committed", done.stdout)
    speed = re.search(
        r"measured: 60 samples, ([\d,]+) tokens and .* tokens/s, [\d.]+ GB/s written", done.stdout
    )
    assert speed, done.stdout
    assert 50_000 < int(speed.group(1).replace(",", "")) < 200_000
    assert {p.name for p in tmp_path.iterdir()} == before
