"""What a run will take, from its prepared rows and the cluster's nodes. Pure: arithmetic on what others read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.capture import flags
from actors.messages import EngineSpec
from actors.run_messages import CoordinatorSpec
from cluster.placement import Node
from storage.layout import Layout
from storage.prompts import PreparedSummary
from storage.prompts.spec import ReasonCount

QUANTILES = (0, 10, 50, 90, 99, 100)
_BARS = 12


@dataclass(frozen=True)
class RowsForecast:
    """What preparation makes of the prompt file.

    Attributes:
        rows: prepared rows = to_collect + skipped.
        over_long: rows over prompts.max_tokens, among the skipped.
        duplicates: rows that repeat an earlier one, among the skipped.
        supervised_share: of the tokens to collect.
        tokens_by_percentile: length of a row to collect, in tokens, by percentile.
        histogram: (longest length in the bar, rows) of bars of equal width.
    """

    source_rows: int
    rows: int
    to_collect: int
    skipped: int
    over_long: int
    duplicates: int
    tokens: int
    supervised_share: float
    tokens_by_percentile: dict[int, int]
    histogram: tuple[tuple[int, int], ...]
    reasons: tuple[ReasonCount, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class AnswersForecast:
    """What the model is to say before the capture.

    Attributes:
        rows: that it is to answer.
        answered: of these, in the dump already.
        most_tokens: that the others may come to.
        all_tokens: that all of them may come to.
    """

    rows: int
    answered: int
    most_tokens: int
    all_tokens: int


def forecast_answers(longest: NDArray[np.int32], answered: NDArray[np.int64]) -> AnswersForecast:
    """Rows and tokens of the pass of the answers.

    Args:
        longest: int32 [rows], most tokens of each row's answer; 0 where none is asked.
        answered: rows that have one.
    """
    left = longest.astype(np.int64)
    left[answered] = 0
    everything = int(longest.sum(dtype=np.int64))
    return AnswersForecast(int((longest > 0).sum()), len(answered), int(left.sum()), everything)


@dataclass(frozen=True)
class SizeForecast:
    """What the dump takes at the output.

    Attributes:
        tokens: of the rows to collect.
        kept: of these, the tokens whose states are stored.
        bytes_per_token: of one of those.
        states_bytes: kept x bytes_per_token: the invariant.
        stored_bytes: with padding to whole chunks, indexes and token columns; before any compression.
        shards: about so many objects of states.
        committed_rows: rows that the output holds already.
        left_tokens: of the rows that it doesn't hold.
        left_bytes: that are still to be written.
        free_bytes: at the output; None where nobody knows, as in a bucket.
    """

    tokens: int
    kept: int
    bytes_per_token: int
    states_bytes: int
    stored_bytes: int
    shards: int
    committed_rows: int
    left_tokens: int
    left_bytes: int
    free_bytes: int | None


@dataclass(frozen=True)
class EnginesForecast:
    """Engines and where they go.

    Attributes:
        cluster: name of each node, what it has, and how many engines it gets.
    """

    engines: int
    gpus_per_engine: int
    gpus: int
    nodes: int
    cluster: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class MemoryForecast:
    """What is held at once.

    Attributes:
        weights_bytes_per_gpu: files of the weights over the tensor parallel ranks.
        forward_states_bytes: of the largest forward, on the first GPU of each replica.
        gpu_bytes: memory of a GPU; None where nobody says.
        ring_bytes: shared memory of one engine's rings.
        in_flight_bytes: most states in flight on a node; the engine joins samples in as much memory.
        largest_sample_bytes: states of the longest row.
        object_store_bytes: of the smallest node.
        host_bytes: memory of the smallest node; None where nobody says.
    """

    weights_bytes_per_gpu: int
    forward_states_bytes: int
    gpu_bytes: int | None
    ring_bytes: int
    in_flight_bytes: int
    largest_sample_bytes: int
    object_store_bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class TimeForecast:
    """How long it takes.

    Attributes:
        tokens_per_s: of one engine.
        seconds: of collecting, without the engines' loading.
        write_bytes_per_s: what the output has to take meanwhile.
    """

    tokens_per_s: float
    seconds: float
    write_bytes_per_s: float


def forecast_rows(
    summary: PreparedSummary, tokens: NDArray[np.int32], stateless: int, answer_tokens: int = 0
) -> RowsForecast:
    """Counts and lengths.

    Args:
        summary: of the preparation.
        tokens: int32 [to_collect], lengths of the rows to collect, with the longest answers.
        stateless: prepared rows of which no token's states are to be stored; they aren't among ``tokens``.
        answer_tokens: that the model may say before; every one of them is supervised.
    """
    none = f"no token of {stateless} rows has its states stored (capture.keep); they are skipped"
    kinds = {r.kind: r.count for r in summary.reasons}
    all_tokens = summary.tokens + answer_tokens
    width = max(1, math.ceil(int(tokens.max()) / _BARS))
    bars = np.bincount((tokens - 1) // width, minlength=_BARS)[:_BARS]
    return RowsForecast(
        source_rows=summary.source_rows,
        rows=summary.rows,
        to_collect=summary.to_collect - stateless,
        skipped=summary.skipped + stateless,
        over_long=kinds.get("over_long", 0),
        duplicates=kinds.get("duplicate", 0),
        tokens=all_tokens,
        supervised_share=(summary.supervised_tokens + answer_tokens) / all_tokens,
        tokens_by_percentile={q: int(np.percentile(tokens, q, method="nearest")) for q in QUANTILES},
        histogram=tuple(((i + 1) * width, int(n)) for i, n in enumerate(bars)),
        reasons=summary.reasons,
        warnings=(*summary.warnings, none) if stateless else summary.warnings,
    )


def forecast_size(
    layout: Layout,
    tokens: NDArray[np.int32],
    kept: NDArray[np.int32],
    committed: NDArray[np.bool_],
    shard_bytes: int,
    writers: int,
    free_bytes: int | None,
) -> SizeForecast:
    """Bytes and shards.

    Args:
        layout: the dump's geometry.
        tokens: int32 [to_collect], lengths of the rows to collect.
        kept: int32 [to_collect], of these the tokens whose states are stored.
        committed: bool [to_collect], rows that the output holds already.
        shard_bytes: a shard is sealed when its states reach this.
        writers: each leaves one shard that isn't full.
        free_bytes: at the output.
    """
    all_tokens, left_tokens, all_kept = (
        int(n.sum(dtype=np.int64)) for n in (tokens, tokens[~committed], kept)
    )
    stored, shards = _stored(layout, kept, shard_bytes, writers)
    left, _ = _stored(layout, kept[~committed], shard_bytes, writers)
    return SizeForecast(
        tokens=all_tokens,
        kept=all_kept,
        bytes_per_token=layout.bytes_per_token,
        states_bytes=all_kept * layout.bytes_per_token,
        stored_bytes=stored,
        shards=shards,
        committed_rows=int(committed.sum()),
        left_tokens=left_tokens,
        left_bytes=left,
        free_bytes=free_bytes,
    )


def _stored(layout: Layout, kept: NDArray[np.int32], shard_bytes: int, writers: int) -> tuple[int, int]:
    slots = int((-(-kept.astype(np.int64) // layout.chunk_rows)).sum())
    states = slots * layout.num_states * layout.chunk_bytes
    if states == 0:
        return 0, 0
    shards = max(-(-states // shard_bytes), -(-slots // layout.shard_slots)) + max(0, writers - 1)
    columns = layout.shard_rows * sum(np.dtype(d).itemsize for d in layout.token_columns.values())
    columns += layout.shard_rows * layout.num_states * layout.scale_bytes
    return states + shards * (layout.index_bytes + columns), shards


def forecast_engines(nodes: Sequence[Node], places: Sequence[str], gpus: int) -> EnginesForecast:
    """Engines on nodes; ``places`` is what `place_engines` said."""
    return EnginesForecast(
        engines=len(places),
        gpus_per_engine=gpus,
        gpus=gpus * len(places),
        nodes=len(set(places)),
        cluster=tuple((n.hostname, n.gpus, n.cpus, places.count(n.node_id)) for n in nodes),
    )


def forecast_memory(
    engine: EngineSpec,
    coordinator: CoordinatorSpec,
    nodes: Sequence[Node],
    largest_kept: int,
    weights_bytes: int,
    gpu_bytes: int | None,
) -> MemoryForecast:
    """The budget of each memory.

    Args:
        engine: what engines are given.
        coordinator: what the coordinator is given.
        nodes: of the cluster.
        largest_kept: most tokens of one row whose states are stored.
        weights_bytes: of the model's weight files.
        gpu_bytes: memory of a GPU, where known.
    """
    ranks = max(1, engine.gpus // engine.replicas)
    known = [n.memory_bytes for n in nodes if n.memory_bytes]
    return MemoryForecast(
        weights_bytes_per_gpu=weights_bytes // ranks,
        forward_states_bytes=flags.chunk_tokens(engine) * engine.capture.layout.bytes_per_token,
        gpu_bytes=gpu_bytes,
        ring_bytes=flags.ring_bytes(engine) * engine.replicas,
        in_flight_bytes=coordinator.limits.in_flight_bytes,
        largest_sample_bytes=largest_kept * engine.capture.stored.bytes_per_token,
        object_store_bytes=min(n.object_store_bytes for n in nodes),
        host_bytes=min(known) if known else None,
    )


def forecast_time(size: SizeForecast, engines: int, tokens_per_s: float) -> TimeForecast:
    """Time at a speed of one engine in tokens per second."""
    rate = tokens_per_s * engines
    return TimeForecast(tokens_per_s, size.left_tokens / rate, rate * size.states_bytes / size.tokens)


def memory_problems(memory: MemoryForecast) -> list[str]:
    """What doesn't fit, one line each with the remedy."""
    problems = []
    m = memory
    if m.largest_sample_bytes > m.in_flight_bytes:
        problems.append(
            f"the longest row's states take {m.largest_sample_bytes:,} bytes, and only {m.in_flight_bytes:,} may be "
            "in flight on a node: give Ray a larger object store, raise limits.inflight_bytes, or lower "
            "prompts.max_tokens"
        )
    if m.gpu_bytes is not None and m.weights_bytes_per_gpu + m.forward_states_bytes > m.gpu_bytes:
        problems.append(
            f"weights of {m.weights_bytes_per_gpu:,} bytes and a forward's states of {m.forward_states_bytes:,} don't "
            f"fit on a GPU of {m.gpu_bytes:,} bytes: raise engine.gpus, or lower engine.args.chunked_prefill_size"
        )
    need = m.ring_bytes + m.in_flight_bytes
    if m.host_bytes is not None and need > m.host_bytes:
        problems.append(
            f"rings and states in flight take {need:,} bytes of memory, and a node has {m.host_bytes:,} beside its "
            "object store: lower limits.inflight_bytes or engine.args.chunked_prefill_size"
        )
    return problems


def size_problems(size: SizeForecast, output: str) -> list[str]:
    """Whether the output has room."""
    if size.free_bytes is None or size.left_bytes <= size.free_bytes:
        return []
    return [
        f"output {output}: {size.left_bytes:,} bytes are to be written and {size.free_bytes:,} are free: name another "
        "output, collect fewer states (capture.boundaries), those of fewer tokens (capture.keep), or fewer rows "
        "(prompts.limit)"
    ]
