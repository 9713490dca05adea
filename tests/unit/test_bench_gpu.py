"""The parts of the GPU benchmark that judge: the overlap of a trace, the ratios of rounds, the thinned-out samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from gpu_models import lognormal_lengths, thin_out
from gpu_report import rows_of
from gpu_trace import STATES_BYTES, overlap


def kernel(start: float, duration: float, stream: int = 7) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": start,
        "dur": duration,
        "args": {"stream": stream},
    }


def copy(start: float, duration: float, size: int = STATES_BYTES, stream: int = 9) -> dict[str, Any]:
    args = {"stream": stream, "bytes": size}
    name = "Memcpy DtoH (Device -> Pinned)"
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": start, "dur": duration, "args": args}


def test_copies_count_as_overlapped_only_while_a_kernel_of_another_stream_runs() -> None:
    events = [kernel(0, 100), kernel(150, 50), copy(80, 40), copy(160, 10), kernel(300, 10, stream=9)]
    found = overlap(events)
    assert found["copies"] == 2
    assert found["overlapped"] == pytest.approx((20 + 10) / 50)
    assert found["bytes"] == 2 * STATES_BYTES
    assert found["gpu_busy"] == pytest.approx(150 / 200)


def test_copies_of_the_scheduler_itself_are_not_counted() -> None:
    assert overlap([kernel(0, 100), copy(10, 5, size=4096, stream=7)])["copies"] == 0


def test_ratio_is_the_median_over_rounds_of_the_ratio_to_plain_in_the_same_round() -> None:
    rounds = [
        {"round": i, "arm": arm, "tokens": 1000, "seconds": seconds}
        for arm, times in {"plain": [10.0, 20.0, 40.0], "discard": [10.0, 25.0, 40.0]}.items()
        for i, seconds in enumerate(times)
    ]
    rows = {row["case"]: row for row in rows_of(rounds, "plain", {"model": "m", "gpus": 1})}
    assert rows["discard"]["ratios"] == [1.0, 0.8, 1.0]
    assert rows["discard"]["ratio_to_plain"] == 1.0
    assert rows["discard"]["tokens_per_s"] == 40


def test_thinned_out_samples_keep_the_lengths_distribution_and_come_longest_first() -> None:
    lengths = np.array(lognormal_lengths(500_000))
    picked = lengths[thin_out(lengths, 50_000)]
    assert np.mean(lengths) == pytest.approx(1730, rel=0.1)
    assert np.mean(picked) == pytest.approx(np.mean(lengths), rel=0.1)
    assert picked.sum() == pytest.approx(50_000, rel=0.2)
    assert list(picked) == sorted(picked, reverse=True)
