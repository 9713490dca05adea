"""The real run of `bench_balance`: engines that take their time, on raylets of this host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scale_run import Collection, make_dump, raylets

from storage.layout import Layout

LAYOUT = Layout(states=("final_normed",), hidden_size=4, shard_rows=32_768)


def finished_on_ray(tokens: NDArray[np.int32], speeds: Sequence[float], folder: Path) -> list[float]:
    """Seconds from the first dispatch to each engine's last answer."""
    store = make_dump(folder / "dump", tokens, LAYOUT)
    with raylets(len(speeds)) as nodes:
        collection = Collection(store, LAYOUT, nodes, speeds)
        summary = collection.run()
    if summary.account is None or summary.account.committed != tokens.size:
        raise SystemExit(f"the run didn't end well: {summary}")
    return [summary.last_answer_s[f"engine-{i}"] for i in range(len(speeds))]
