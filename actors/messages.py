"""What crosses between processes, and nothing else: frozen dataclasses and flat numpy arrays.

A *batch* is some samples for one engine. Its states travel as *segments*: flat 1-D arrays of the layout's
storage dtype, at most `SEGMENT_BYTES` each, that hold *pieces* one after another. A piece is [K, rows, H] in C
order for rows ``start .. start + rows`` of those of one sample that are stored, and their scales where there are any
(`actors.pieces`). How a batch falls into segments follows from its stored rows alone (`plan_segments`), so sender and
receiver need no header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from storage.layout import Layout
from storage.prompts import Reply

SEGMENT_BYTES = 256 << 20
"""Largest segment. Ray allocates a call's return value whole, and one call should stay under a tenth of the
object store."""


@dataclass(frozen=True)
class SampleRef:
    """One attempt at one prepared row.

    Attributes:
        row: index of the prepared row.
        attempt: attempt number, from 1; a result with another number is stale and refused.
        tokens: T, what the model reads.
        kept: R, rows of states that must come back.
    """

    row: int
    attempt: int
    tokens: int
    kept: int


@dataclass(frozen=True)
class Piece:
    """Rows of one sample inside a segment.

    Attributes:
        sample: position of the sample in its batch.
        start: stored rows of the sample before it; a multiple of the layout's chunk_rows.
        rows: stored rows in it.
    """

    sample: int
    start: int
    rows: int


Segment = tuple[Piece, ...]


@dataclass(frozen=True)
class Batch:
    """Samples that one engine prefills together.

    Attributes:
        batch_id: unique in the run's life, across coordinators.
        samples: the attempts.
        segments: how their states fall into segments.
    """

    batch_id: str
    samples: tuple[SampleRef, ...]
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(s.tokens for s in self.samples)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain integers: to pickle an object a sample costs more than all else that is done for a small one.
        samples = tuple(n for s in self.samples for n in (s.row, s.attempt, s.tokens, s.kept))
        segments = tuple(
            tuple(n for p in segment for n in (p.sample, p.start, p.rows)) for segment in self.segments
        )
        return _batch, (self.batch_id, samples, segments)


def _batch(batch_id: str, samples: tuple[int, ...], segments: tuple[tuple[int, ...], ...]) -> Batch:
    return Batch(
        batch_id,
        tuple(SampleRef(*four) for four in zip(*[iter(samples)] * 4, strict=True)),
        tuple(
            tuple(Piece(*three) for three in zip(*[iter(segment)] * 3, strict=True)) for segment in segments
        ),
    )


FailureKind = Literal["bad_states", "row_mismatch", "too_long", "engine", "other"]


@dataclass(frozen=True)
class SampleFailure:
    """Why an attempt gave no states.

    Attributes:
        kind: the class of the failure; ``too_long`` means skip, never retry.
        reason: one line for a person.
    """

    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class SampleOutcome:
    """What became of one attempt inside an engine; no failure means all its pieces are good."""

    row: int
    attempt: int
    failure: SampleFailure | None = None


@dataclass(frozen=True)
class BatchRecord:
    """What an engine says of a batch once every segment of it is ready.

    Attributes:
        outcomes: one for each sample, in the batch's order.
        prefill_s: from handing the batch to the engine until the engine answered.
        drain_s: from then until the last segment was ready.
    """

    batch_id: str
    engine: str
    outcomes: tuple[SampleOutcome, ...]
    prefill_s: float
    drain_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        rows = tuple(o.row for o in self.outcomes)
        attempts = tuple(o.attempt for o in self.outcomes)
        failures = {i: o.failure for i, o in enumerate(self.outcomes) if o.failure is not None}
        return _record, (self.batch_id, self.engine, rows, attempts, failures, self.prefill_s, self.drain_s)


def _record(
    batch_id: str,
    engine: str,
    rows: tuple[int, ...],
    attempts: tuple[int, ...],
    failures: dict[int, SampleFailure],
    prefill_s: float,
    drain_s: float,
) -> BatchRecord:
    each = enumerate(zip(rows, attempts, strict=True))
    outcomes = tuple(SampleOutcome(row, attempt, failures.get(i)) for i, (row, attempt) in each)
    return BatchRecord(batch_id, engine, outcomes, prefill_s, drain_s)


@dataclass(frozen=True)
class BatchAnswers:
    """What an engine said to the rows of a batch.

    Attributes:
        outcomes: one for each sample, in the batch's order.
        replies: of the samples that didn't fail.
    """

    batch_id: str
    outcomes: tuple[SampleOutcome, ...]
    replies: tuple[Reply, ...]


@dataclass(frozen=True)
class SealedShard:
    """A committed shard: its manifest is in place.

    Attributes:
        rows: prepared rows that are committed by it.
        stored_bytes: bytes of its objects.
    """

    shard: int
    writer: str
    rows: tuple[int, ...]
    stored_bytes: int


@dataclass(frozen=True)
class WriteAck:
    """A writer's answer: which samples it now holds, and which shards it sealed since its last answer.

    Attributes:
        written: rows of this batch whose bytes have left the object store; not safe yet.
        sealed: shards committed meanwhile, whichever batches they hold.
        failed: rows of this batch that couldn't be taken, with the reason.
        lost: rows of this batch, and rows of earlier answers' ``written``, that went down with a shard when the
            storage failed; by nobody's fault.
    """

    written: tuple[int, ...] = ()
    sealed: tuple[SealedShard, ...] = ()
    failed: tuple[SampleOutcome, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture, resolved against the model.

    Attributes:
        boundaries: boundaries below N, ascending.
        final: boundary N, before the final norm.
        final_normed: after the final norm.
        num_layers: N, decoder layers.
        layout: geometry of the states as the model computes them: boundaries, then final, then final_normed.
        encoding: how they are stored; one of `storage.layout.ENCODINGS`.
    """

    boundaries: tuple[int, ...]
    final: bool
    final_normed: bool
    num_layers: int
    layout: Layout
    encoding: str = "none"

    @property
    def stored(self) -> Layout:
        """Geometry of the states as they are stored."""
        return replace(self.layout, encoding=self.encoding)


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine.

    Attributes:
        name: `engine-0`; also the actor's name.
        kind: `sglang`, or `synthetic`.
        prompts_url: folder that holds prompts/: the dump, or a copy of its prompts on this node.
        run_id: part of every request id.
        model_path: folder on the engine's node, or the hub id that the node gets it from.
        revision: the hub's commit.
        dtype: bfloat16, float16, float32.
        gpus: GPUs of this engine; 0 runs on the CPU.
        replicas: data-parallel replicas inside the engine.
        server_args: further SGLang arguments, checked against the refusals.
        capture: what to capture.
        ring_bytes: size of each replica's ring.
        log_dir: where the engine's processes keep their full logs.
        load_timeout_s: longest time from construction to the end of the start-up proof.
        stall_timeout_s: longest time without any progress while requests are in flight.
        storage_timeout_s: longest time that failing storage is waited for, where prompts are read.
    """

    name: str
    kind: Literal["sglang", "synthetic"]
    prompts_url: str
    run_id: str
    model_path: str
    dtype: str
    gpus: int
    replicas: int
    trust_remote_code: bool
    capture: CaptureSpec
    ring_bytes: int
    log_dir: str
    load_timeout_s: float
    stall_timeout_s: float
    server_args: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    storage_timeout_s: float = 900.0


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says of itself.

    Attributes:
        node_id: Ray's id of its node.
        process_ids: of the engine's scheduler processes.
        max_sample_tokens: longest sample that its KV pool takes.
        capture_report: the start-up proof, as stored in capture_report.json.
    """

    name: str
    node_id: str
    hostname: str
    actor_pid: int
    process_ids: tuple[int, ...]
    max_sample_tokens: int
    engine_version: str
    capture_report: Mapping[str, Any]


@dataclass(frozen=True)
class WriterSpec:
    """How one writer works.

    Attributes:
        shard_bytes: a shard is sealed when its states reach this.
        shard_age_s: a shard is sealed when it has been open this long.
        idle_s: a shard is sealed when nothing was put for this long.
        log_dir: where its log is kept on its node; empty keeps none.
        storage_timeout_s: longest time without success that failing storage is waited for.
    """

    name: str
    dump_url: str
    run_id: str
    shard_bytes: int
    shard_age_s: float
    idle_s: float
    log_dir: str = ""
    storage_timeout_s: float = 900.0


@dataclass(frozen=True)
class WriterInfo:
    """What a started writer says of itself."""

    name: str
    node_id: str
    hostname: str
    actor_pid: int


def plan_segments(rows: Sequence[int], layout: Layout, max_bytes: int = SEGMENT_BYTES) -> tuple[Segment, ...]:
    """How samples of so many stored rows fall into segments of at most ``max_bytes``.

    A sample is cut only at multiples of ``layout.chunk_rows``, so that each piece starts on an inner chunk.

    Raises:
        ValueError: ``max_bytes`` doesn't hold one inner chunk of every state.
    """
    step = layout.chunk_rows
    max_rows = max_bytes // (layout.bytes_per_token * step) * step
    if max_rows == 0:
        need = layout.bytes_per_token * step
        raise ValueError(f"a segment of {max_bytes} bytes can't hold {step} rows of {need} bytes")
    segments: list[Segment] = []
    pieces: list[Piece] = []
    room = max_rows
    for i, length in enumerate(rows):
        start = 0
        while start < length:
            taken = min(length - start, room)
            if taken < length - start:
                taken = taken // step * step
            if taken == 0:
                segments.append(tuple(pieces))
                pieces, room = [], max_rows
                continue
            pieces.append(Piece(i, start, taken))
            start += taken
            room -= taken
    if pieces:
        segments.append(tuple(pieces))
    return tuple(segments)
