"""Starts an engine, proves its capture on one prompt, and ends it: go or no-go before a run spends anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.capture.engine import SchedulerFunction
from actors.capture.hook import run_scheduler_with_hook
from actors.capture.proof import report_lines
from actors.capture.session import CaptureSession
from actors.messages import EngineSpec
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
        error: what stood in the way; None when nothing did.
    """

    go: bool
    lines: tuple[str, ...]
    report: Mapping[str, Any]
    max_sample_tokens: int
    seconds: float
    error: HsdumpError | None = None


def probe(spec: EngineSpec, scheduler_function: SchedulerFunction = run_scheduler_with_hook) -> Probe:
    """Starts the engine of ``spec`` in this process's machine and ends it again.

    It needs what the engine needs: its GPUs and the model's directory on this machine. Nothing is written
    but logs, below ``spec.log_dir``.
    """
    begun = time.monotonic()
    session = CaptureSession(spec, scheduler_function)
    try:
        info = session.start().result()
    except HsdumpError as error:
        said = (f"no-go: {type(error).__name__}: {error}",)
        return Probe(False, said, {}, 0, time.monotonic() - begun, error)
    finally:
        session.shutdown()
    took_s = time.monotonic() - begun
    lines = (
        *report_lines(info.capture_report),
        f"go: ready after {took_s:.0f} s; samples of up to {info.max_sample_tokens} tokens",
    )
    return Probe(True, lines, info.capture_report, info.max_sample_tokens, took_s)
