"""``hsdump rehearse``: a whole collection with made-up states, to measure a cluster and its storage.

Everything but the model is the run's own: its prompts, states, limits, writers and the output's file system.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.run_messages import RunSummary
from cluster.collect import collect_into, refuse_foreign
from cluster.config import RunConfig
from cluster.output import open_output
from cluster.raylets import local_raylets
from cluster.report import say, size
from cluster.run import resolve
from cluster.run_file import load_run
from cluster.tenure import hold
from storage.removal import remove_dump

MEAN_TOKENS = 1730.0
"""Of generated rows: 17.3 million tokens in 10,000 conversations."""
_SIGMA = 0.8
_SEED = 7


def rehearse(
    run_file: str,
    overrides: Sequence[str],
    *,
    address: str | None,
    nodes: int,
    rows: int | None,
    tokens_per_s: float,
    clean: bool,
    start: Path,
) -> None:
    """Rehearses a run.

    Args:
        run_file: RUN.yaml, a path or an fsspec URL.
        overrides: ``key.sub=value``.
        address: Ray cluster; None starts a local one of ``nodes`` nodes, unless RAY_ADDRESS names one.
        nodes: engines, one a node.
        rows: generated rows instead of the run's prompts; None takes those.
        tokens_per_s: speed of each engine; 0 is as fast as it can.
        clean: removes what was written.
        start: folder that relative paths start from.

    Raises:
        UserError: something to mend.
        IncompleteRun: not everything was collected.
    """
    config = load_run(run_file, overrides)
    address = address or os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        prompts = None
        if rows is not None:
            prompts = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "prompts.parquet"
            write_prompts(prompts, rows, config.prompts.max_tokens)
        rehearsed = rehearsal(config, nodes, tokens_per_s, prompts, local=address is None)
        run = resolve(rehearsed, start)
        store = open_output(rehearsed.output, start)
        refuse_foreign(store)
        where = stack.enter_context(local_raylets(nodes)) if address is None else address
        tenure = stack.enter_context(hold(store, run.run_id))
        outcome = collect_into(store, run, where, tenure)
        if outcome is not None:
            for line in measured(outcome.summary, outcome.timeline):
                say(line)
    if clean:
        remove_dump(store)
        say(f"removed {store.url}")
    else:
        say(f"what was written is in {store.url}; `--clean` removes it after a rehearsal")


def rehearsal(
    config: RunConfig, nodes: int, tokens_per_s: float, prompts: Path | None, local: bool
) -> RunConfig:
    """The run with a synthetic engine, and its output beside the run's own. Pure but for the output's name.

    Args:
        config: the run.
        nodes: engines.
        tokens_per_s: of each engine.
        prompts: a generated prompt file; None keeps the run's.
        local: on nodes of this machine, which have CPUs only.
    """
    engine = config.engine.model_copy(
        update={"kind": "synthetic", "count": nodes, "args": {"tokens_per_s": tokens_per_s}}
        | ({"gpus": 0, "data_parallel": 1} if local else {})
    )
    update: dict[str, Any] = {
        "engine": engine,
        "output": f"{config.output.rstrip('/')}-rehearsal-{uuid.uuid4().hex[:6]}",
    }
    if prompts is not None:
        given = {"url": str(prompts), "format": "parquet", "loss_mask": "all", "limit": None}
        update["prompts"] = config.prompts.model_copy(update=given)
    return config.model_copy(update=update)


def lengths(rows: int, max_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Made-up lengths in tokens, always the same: log-normal like those of conversations, the mean `MEAN_TOKENS`."""
    drawn = np.random.default_rng(_SEED).lognormal(math.log(MEAN_TOKENS) - _SIGMA**2 / 2, _SIGMA, rows)
    return np.clip(drawn.astype(np.int64), 1, max_tokens)


def write_prompts(path: Path, rows: int, max_tokens: int) -> None:
    """Generated rows of token ids."""
    schema = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema) as file:
        for first, some in _chunks(lengths(rows, max_tokens)):
            ids = [np.arange(n, dtype=np.int32) % 1000 for n in some]
            names = [f"generated-{first + i}" for i in range(len(some))]
            file.write_table(pa.table({"id": names, "input_ids": ids}, schema=schema))


def _chunks(values: np.ndarray[Any, Any], of: int = 1000) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    for first in range(0, len(values), of):
        yield first, values[first : first + of]


def measured(summary: RunSummary, timeline: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a rehearsal says: speeds, and what they were bound by. Pure.

    Args:
        summary: of the run.
        timeline: looks at it at even distances, as `cluster.watch.Watch` keeps them.
    """
    account, seconds = summary.account, max(summary.work_s, 1e-9)
    if account is None:
        return ["nothing was measured: it was stopped"]
    lines = [
        f"measured: {account.committed:,} samples, {account.tokens:,} tokens and {size(summary.stored_bytes)} in "
        f"{seconds:,.1f} s: {account.committed / seconds:,.0f} samples/s, {account.tokens / seconds:,.0f} tokens/s, "
        f"{summary.stored_bytes / seconds / 1e9:.2f} GB/s written"
    ]
    bounds = Counter(point["bottleneck"] for point in timeline if point["bottleneck"] != "nothing")
    if not bounds:
        return [*lines, "where the time went can't be said of so short a run: take more --rows"]
    shares = ", ".join(f"{what} {n / bounds.total():.0%}" for what, n in bounds.most_common())
    lines.append(f"bound by: {shares} (of {bounds.total()} looks)")
    last = timeline[-1]
    lines.append(
        f"seconds in sum: engines {last['busy_s']:,.1f} at work and {last['waiting_s']:,.1f} waiting with rows to do, "
        f"forwards {last['ring_wait_s']:,.1f} waiting for the ring, writers {last['write_s']:,.1f} writing and "
        f"{last['seal_s']:,.1f} committing"
    )
    return lines
