"""Starts an engine, proves its capture on one prompt, and ends it: go or no-go before a run spends anything."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.capture.engine import SchedulerFunction
from actors.capture.hook import run_scheduler_with_hook
from actors.capture.proof import report_lines
from actors.capture.session import CaptureSession
from actors.messages import Batch, EngineSpec, SampleRef, plan_segments
from storage.errors import HsdumpError


@dataclass(frozen=True)
class Probe:
    """What a start of an engine showed.

    Attributes:
        go: captured states are right; a run with this engine can start.
        lines: the proof in five lines, or the reason why not, for a person.
        report: the proof as it would be stored in capture_report.json; empty without one.
        max_sample_tokens: longest sample that this engine takes; 0 without one.
        seconds: from the start to the end of the proof.
        tokens_per_s: with capture, over the given rows; None where none were given or one of them failed.
        error: what stood in the way; None when nothing did.
    """

    go: bool
    lines: tuple[str, ...]
    report: Mapping[str, Any]
    max_sample_tokens: int
    seconds: float
    tokens_per_s: float | None = None
    error: HsdumpError | None = None


def probe(
    spec: EngineSpec,
    rows: Sequence[npt.NDArray[np.int32]] = (),
    scheduler_function: SchedulerFunction = run_scheduler_with_hook,
) -> Probe:
    """Starts the engine of ``spec`` in this process's machine and ends it again.

    Args:
        spec: of the engine; it needs no prompts.
        rows: token ids [T] to measure the speed with.
        scheduler_function: what every scheduler process runs.

    It needs what the engine needs: its GPUs and the model's directory on this machine. Nothing is written
    but logs, below ``spec.log_dir``.
    """
    begun = time.monotonic()
    session = CaptureSession(spec, scheduler_function)
    try:
        info = session.start().result()
        took_s = time.monotonic() - begun
        tokens_per_s = _speed(session, spec, [r for r in rows if len(r) <= info.max_sample_tokens])
    except HsdumpError as error:
        said = (f"no-go: {type(error).__name__}: {error}",)
        return Probe(False, said, {}, 0, time.monotonic() - begun, error=error)
    finally:
        session.shutdown()
    lines = (
        *report_lines(info.capture_report),
        f"go: ready after {took_s:.0f} s; samples of up to {info.max_sample_tokens} tokens",
    )
    return Probe(True, lines, info.capture_report, info.max_sample_tokens, took_s, tokens_per_s)


def _speed(session: CaptureSession, spec: EngineSpec, rows: Sequence[npt.NDArray[np.int32]]) -> float | None:
    """Tokens a second through prefill, ring and joining, all rows at once; their states are let go of."""
    if not rows:
        return None
    samples = tuple(SampleRef(i, 1, len(ids), len(ids)) for i, ids in enumerate(rows))
    batch = Batch("probe", samples, plan_segments([len(ids) for ids in rows], spec.capture.stored))
    begun_s = time.monotonic()
    record = session.submit(batch, rows).record().result(timeout=spec.load_timeout_s)
    if any(outcome.failure is not None for outcome in record.outcomes):
        return None
    return batch.tokens / (time.monotonic() - begun_s)
