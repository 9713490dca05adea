"""The command with `capture.keep`, with made-up states: from masks to a dump that holds some tokens' states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from collect_support import hsdump
from run_files import made_up_run_file

from actors.synthetic import synthetic_states
from storage import open_dump

pytestmark = pytest.mark.slow

TOKENS = 60


def run_file(folder: Path, masks: np.ndarray) -> Path:
    """A run of one row for each mask, with states at three places."""
    rows = [
        {"id": f"s{i}", "input_ids": [i] * TOKENS, "loss_mask": mask} for i, mask in enumerate(masks.tolist())
    ]
    limits = {"object_store_bytes": 200 << 20, "batch_samples": 4}
    return made_up_run_file(folder, rows, capture={"keep": "supervised"}, limits=limits)


def test_states_of_the_supervised_tokens_alone_are_collected_and_a_row_without_any_is_skipped(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2, (12, TOKENS))
    masks[3] = 0
    run = run_file(tmp_path, masks)
    done = hsdump("collect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = int(masks.sum())
    assert f"{11 * TOKENS:,} tokens, states of {kept} (keep: supervised) x 384 bytes" in done.stdout
    assert "12 rows = 11 committed + 1 skipped + 0 failed" in done.stdout
    dump = open_dump(str(tmp_path / "dump"))
    for i in sorted({*range(12)} - {3}):
        sample = dump[f"s{i}"]
        expected = synthetic_states(sample.sample_id, TOKENS, dump.layout)[:, masks[i].astype(bool)]
        bits = sample.stack().transpose(0, 1).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, expected)
    (skipped,) = (r for r in dump.samples.to_pylist() if r["status"] == "skipped")
    assert (skipped["sample_id"], skipped["reason"]) == (
        "s3",
        "no token's states are to be stored (capture.keep: supervised)",
    )
    good = hsdump("verify", tmp_path / "dump")
    assert good.returncode == 0, good.stdout + good.stderr
    again = hsdump("collect", run, "--set", "capture.keep=all")
    assert again.returncode == 2
    assert 'capture.keep: "all" here, "supervised" in the dump' in again.stderr
