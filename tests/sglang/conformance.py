"""One conformance case: a model in one engine with given flags, its states held against Hugging Face.

Pytest, the GPU script and the table in docs/models.md all run the same cases through here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from capture_support import (
    Reference,
    engine_spec,
    error_per_token,
    random_ids,
    running,
    states_of,
    submit,
)

from actors.capture.session import CaptureSession
from storage.errors import HsdumpError

LENGTHS = (5, 33, 300, 700, 128, 1, 64)
"""Shorter than a chunk of the dump, of one token, and over several forwards of 256 tokens."""
MEDIAN, NEAREST_BY = 0.02, 3.0
P99_DENSE, P99_MOE = 0.1, 0.35
"""A router that tips the other way moves single tokens of a mixture of experts far."""


HARNESS = ("mem_fraction_static", "max_total_tokens", "sampling_backend", "grammar_backend", "nccl_port")
"""Arguments that only make room for several engines beside each other."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is started.

    Attributes:
        family: of `tiny_models`.
        args: SGLang's arguments besides the harness's own.
        chunk: chunked_prefill_size.
        dtype: of the engine.
        gpus: 0 is the CPU.
        replicas: data-parallel.
        boundaries: below N; None takes {0, 1, 2, N//2, N-1}.
        quantised: weights or activations are, so that states are those of another model than the reference's.
    """

    family: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chunk: int = 256
    dtype: str = "bfloat16"
    gpus: int = 0
    replicas: int = 1
    boundaries: tuple[int, ...] | None = None
    quantised: bool = False

    @property
    def moe(self) -> bool:
        """Whether single tokens may be routed otherwise than in the reference."""
        return self.family in tiny_models.MOE

    @property
    def flags(self) -> str:
        """The arguments for a person."""
        told = {k: v for k, v in self.args.items() if k not in HARNESS}
        given = {"chunked_prefill_size": self.chunk, "dtype": self.dtype, **told}
        if self.gpus:
            given = {"tp": self.gpus // self.replicas, "dp": self.replicas, **given}
        return " ".join(f"{k}={v}" for k, v in given.items())


@dataclasses.dataclass(frozen=True)
class StateError:
    """How far one state of one case is from Hugging Face, over all tokens."""

    state: int | str
    median: float
    p99: float
    max: float
    nearest_other: float

    def wrong(self, p99: float | None) -> str | None:
        """What is wrong with it, if anything; without ``p99`` only whether it is the nearest state."""
        if p99 is not None and not self.median < MEDIAN:
            return f"state {self.state}: median {self.median:.4f}"
        if p99 is not None and not self.p99 < p99:
            return f"state {self.state}: p99 {self.p99:.4f}"
        if not self.nearest_other > NEAREST_BY * self.median:
            return f"state {self.state}: another is only {self.nearest_other / self.median:.1f} times as far"
        return None


def spec_of(case: Case, models: Path, logs: Path) -> Any:
    """The engine of a case; makes its model if it isn't there."""
    model = tiny_models.make(case.family, models)
    n = tiny_models.LAYERS
    boundaries = (0, 1, 2, n // 2, n - 1) if case.boundaries is None else case.boundaries
    spec = engine_spec(model, boundaries, logs, chunk=case.chunk, dtype=case.dtype, **case.args)
    return dataclasses.replace(spec, gpus=case.gpus, replicas=case.replicas)


def measure(
    session: CaptureSession, reference: Reference, lengths: Sequence[int] = LENGTHS, seed: int = 1
) -> list[StateError]:
    """Captures random prompts in one batch and compares every state of every token."""
    layout = session._spec.capture.layout
    ids = random_ids(lengths, seed)
    record, captured = states_of(session, submit(session, ids))
    failures = [o.failure for o in record.outcomes if o.failure]
    assert not failures, failures
    return compare(layout.states, captured, [reference.states(x) for x in ids])


def compare(
    states: Sequence[Any],
    captured: Sequence[np.ndarray[Any, Any]],
    references: Sequence[Mapping[Any, torch.Tensor]],
) -> list[StateError]:
    """Errors per token of every state against every state of the reference."""
    found = []
    for k, state in enumerate(states):
        errors = {
            other: torch.cat(
                [error_per_token(c[k], r[other]) for c, r in zip(captured, references, strict=True)]
            )
            for other in references[0]
        }
        own = errors.pop(state)
        others = min(float(e.median()) for e in errors.values())
        found.append(
            StateError(state, float(own.median()), float(own.quantile(0.99)), float(own.max()), others)
        )
    return found


def run(case: Case, models: Path, logs: Path) -> dict[str, Any]:
    """Starts the engine of a case, measures, and gives one row of the table; refusals are rows too."""
    begun = time.monotonic()
    row: dict[str, Any] = {"family": case.family, "flags": case.flags, "gpus": case.gpus}
    try:
        spec = spec_of(case, models, logs)
        with running(spec) as session:
            info = session.start().result(0)
            report = info.capture_report
            row |= {"started_s": round(time.monotonic() - begun, 1), "sglang": info.engine_version}
            row |= {k: report["processes"][0][k] for k in ("model", "consulted", "read_at_layers", "places")}
            row |= {"why_at_layers": report["processes"][0]["why_at_layers"]}
            row["not_provable"] = report["not_provable"]
            row["proof"] = {c["check"]: c["detail"] for c in report["checks"]}
            errors = measure(session, Reference(tiny_models.reference_of(case.family, models)))
    except (HsdumpError, AssertionError) as error:
        return row | {"refused": f"{type(error).__name__}: {error}", "right": False}
    p99 = None if case.quantised else P99_MOE if case.moe else P99_DENSE
    wrong = [w for e in errors if (w := e.wrong(p99))]
    if any(e.state == "final_normed" and e.wrong(p99) for e in errors):
        wrong.append(
            "the engine's own output is as far from Hugging Face's, so it is the engine that differs"
        )
    return row | {
        "states": [dataclasses.asdict(e) for e in errors],
        "right": not wrong,
        "wrong": wrong,
        "took_s": round(time.monotonic() - begun, 1),
    }
