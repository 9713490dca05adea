"""What a dump has to be, whatever happened on the way: the one that a run without faults leaves, sample for sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from chaos_site import LENGTHS

from actors.synthetic import synthetic_states
from storage import open_dump
from storage.account import check_account
from storage.files import Store
from storage.manifest import read_manifests
from storage.table import read_table
from storage.verify import run_item, work_items


def check_dump(url: str, failed: Mapping[str, str] | None = None) -> None:
    """Recomputes every state, and counts.

    Args:
        url: the dump.
        failed: sample id -> a part of the reason, of the samples that must have failed.
    """
    failed = failed or {}
    store = Store(url)
    table = read_table(store)
    assert table is not None
    reasons = {r["sample_id"]: r["reason"] for r in table.to_pylist() if r["status"] != "committed"}
    assert set(reasons) == set(failed)
    assert all(part in reasons[sample_id] for sample_id, part in failed.items()), reasons

    ids = [f"s{i}" for i in range(len(LENGTHS))]
    dump = open_dump(url)
    assert [sample.sample_id for sample in dump] == [i for i in ids if i not in failed]
    for sample in dump:
        row = int(sample.sample_id.removeprefix("s"))
        assert sample.token_ids.tolist() == list(range(row, row + LENGTHS[row]))
        expected = synthetic_states(sample.sample_id, LENGTHS[row], dump.layout)
        bits = sample.stack().contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits.transpose(1, 0, 2), expected), f"{sample.sample_id} differs"

    rows = [sample.row for manifest in read_manifests(store) for sample in manifest.samples]
    assert len(rows) == len(set(rows)) == len(ids) - len(failed), "a sample is in two shards"
    assert check_account(store).problems == ()
    assert [problem for item in work_items(store) for problem in run_item(item).problems] == []
