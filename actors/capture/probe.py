"""Starts an engine, proves its capture on one prompt, and ends it: go or no-go before a run spends anything."""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.capture.engine import SchedulerFunction
from actors.capture.hook import run_scheduler_with_hook
from actors.capture.proof import report_lines
from actors.capture.session import CaptureSession
from actors.logs import log_to_file
from actors.messages import Batch, EngineSpec, SampleRef, plan_segments
from storage.errors import HsdumpError

BATCH_TOKENS = (2_048, 4_096, 8_192, 16_384)
"""Batches that the speed is measured with. The first one also warms up, so a fast engine is judged by a later one."""
LONG_ENOUGH_S = 5.0
"""A batch that takes so long is the last: a slow engine has shown its speed by then."""


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
    """Starts the engine of ``spec`` on this machine and ends it again.

    Args:
        spec: of the engine; it needs no prompts.
        rows: token ids [T] to measure the speed with, over and over.
        scheduler_function: what every scheduler process runs.

    It needs what the engine needs: its GPUs, and the model on this machine or from the hub. Its logs are in a folder
    for temporary files, which is kept only where something stood in the way.
    """
    begun = time.monotonic()
    folder = tempfile.mkdtemp(prefix="hsdump-probe-")
    try:
        with _logging_to(folder, spec.name):
            found = _probe(replace(spec, log_dir=folder), rows, scheduler_function, begun)
    except HsdumpError as error:
        said = (
            f"no-go: {type(error).__name__}: {error}",
            f"no-go after {time.monotonic() - begun:.0f} s; the logs are in {folder} on {socket.gethostname()}",
        )
        return Probe(False, said, {}, 0, time.monotonic() - begun, error=error)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _probe(
    spec: EngineSpec,
    rows: Sequence[npt.NDArray[np.int32]],
    scheduler_function: SchedulerFunction,
    begun: float,
) -> Probe:
    session = CaptureSession(spec, scheduler_function)
    try:
        info = session.start().result()
        took_s = time.monotonic() - begun
        tokens_per_s = _speed(session, spec, [r for r in rows if len(r) <= info.max_sample_tokens])
    finally:
        session.shutdown()
    lines = (
        *report_lines(info.capture_report),
        f"go: ready after {took_s:.0f} s; samples of up to {info.max_sample_tokens} tokens",
    )
    return Probe(True, lines, info.capture_report, info.max_sample_tokens, took_s, tokens_per_s)


@contextmanager
def _logging_to(folder: str, name: str) -> Iterator[None]:
    """Keeps this process's log in a file: the probe's result is what a person wants to see."""
    handlers = logging.root.handlers[:]
    log_to_file(folder, name)
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers


def _speed(session: CaptureSession, spec: EngineSpec, rows: Sequence[npt.NDArray[np.int32]]) -> float | None:
    """Tokens a second through prefill, ring and joining; their states are let go of."""
    if not rows:
        return None
    tokens_per_s = None
    endless = itertools.cycle(rows)
    for most in BATCH_TOKENS:
        given = [next(endless)]
        while sum(map(len, given)) < most:
            given.append(next(endless))
        took_s = _capture(session, spec, given)
        if took_s is None:
            return None
        tokens_per_s = sum(map(len, given)) / took_s
        if took_s > LONG_ENOUGH_S:
            break
    return tokens_per_s


def _capture(
    session: CaptureSession, spec: EngineSpec, rows: Sequence[npt.NDArray[np.int32]]
) -> float | None:
    """Seconds that a batch takes; None where a sample of it failed."""
    samples = tuple(SampleRef(i, 1, len(ids), len(ids)) for i, ids in enumerate(rows))
    batch = Batch("probe", samples, plan_segments([len(ids) for ids in rows], spec.capture.stored))
    begun = time.monotonic()
    record = session.submit(batch, rows).record().result(timeout=spec.load_timeout_s)
    failed = any(outcome.failure is not None for outcome in record.outcomes)
    return None if failed else time.monotonic() - begun
