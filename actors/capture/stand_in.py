"""What stands in where the identity check can't prove a boundary: a small random model of the same structure.

It runs in an engine of its own beside the real one, through SGLang's own class and this project's hook, with the real
engine's arguments, and every boundary is compared with Hugging Face. That shows that capture takes the right place of
this class; it shows nothing of the real weights, of their quantisation, or of what only a deep or wide model does.

The work is `actors.capture.stand_in_run`, in a process of its own, which is ended when it takes too long.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.capture.engine import SchedulerFunction
from actors.capture.proof import UNPROVABLE, Check, Report, check, finish_report
from actors.messages import EngineSpec
from storage.layout import State
from storage.reference import NEAREST_BY, StateResult

logger = logging.getLogger(__name__)

LONGEST_S = 300.0
"""From its start to its answer; a first start on a GPU host compiles kernels for a minute or two."""

SecondProof = Callable[[EngineSpec, SchedulerFunction, Report], Report]


@dataclass(frozen=True)
class Task:
    """What the process is told.

    Attributes:
        spec: of the real engine.
        function: what its scheduler processes run.
        states: that its identity check couldn't prove.
        process: what one of its scheduler processes said of its hook.
    """

    spec: EngineSpec
    function: SchedulerFunction
    states: tuple[State, ...]
    process: Mapping[str, Any]


def no_more(spec: EngineSpec, function: SchedulerFunction, report: Report) -> Report:
    """Leaves the report as it is: a stand-in has no stand-in."""
    return report


def prove_by_stand_in(spec: EngineSpec, function: SchedulerFunction, report: Report) -> Report:
    """Adds what a stand-in showed to a report whose identity check left states unproved; blocks meanwhile.

    Raises:
        ProofFailed: states of the stand-in are wrong.
    """
    states = unproved(report["checks"], spec.capture.layout.states)
    if not states:
        return report
    logger.info("%s: the identity check can't prove %s; starting a stand-in", spec.name, states)
    begun = time.monotonic()
    found = _run(Task(spec, function, states, report["processes"][0]))
    checks = found.get("checks") or [check(_name(s), None, str(found["why"])) for s in states]
    about = {**found.get("about", {}), "took_s": round(time.monotonic() - begun, 1)}
    return finish_report({**report, "stand_in": about}, report["processes"], [*report["checks"], *checks])


def unproved(checks: Sequence[Check], states: Sequence[State]) -> tuple[State, ...]:
    """States whose identity isn't provable, in the order of ``states``."""
    names = {c["check"] for c in checks if c["status"] == UNPROVABLE}
    return tuple(s for s in states if f"identity of {s}" in names)


def judge(state: State, where: str, found: StateResult, control: StateResult) -> Check:
    """What a comparison with Hugging Face says of a state.

    Args:
        state: of the real model.
        where: which state of the stand-in stands for it, in words.
        found: how that one compares.
        control: the same of final_normed, which the engine computes whatever capture does.
    """
    detail = f"{where}: median {found.summary.median:.4f}, neighbours {found.ratio:.3g} times as far"
    if found.passed:
        return check(_name(state), True, detail)
    if not control.passed:
        why = f"SGLang's own output of the stand-in is {control.summary.median:.3g} from Hugging Face's"
        return check(_name(state), None, why)
    if found.summary.median < control.summary.median * NEAREST_BY and found.ratio > 1 / NEAREST_BY:
        return check(_name(state), None, f"{detail}: too much alike to tell them apart")
    return check(_name(state), False, f"{detail}; the nearest is {found.nearest}")


def _name(state: State) -> str:
    return f"stand-in of {state}"


def _run(task: Task) -> dict[str, Any]:
    """The process's answer: ``checks`` and ``about``, or ``why`` there are none."""
    with tempfile.TemporaryDirectory(prefix="hsdump-stand-in-") as folder:
        Path(folder, "task").write_bytes(pickle.dumps(task))
        log = Path(task.spec.log_dir or folder) / f"{task.spec.name}-stand-in.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "actors.capture.stand_in_run", folder, str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with log.open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            return {"why": f"its stand-in gave no answer for {LONGEST_S:.0f} s; see {log}"}
        finally:
            process.kill()
            process.wait()
        try:
            answer: dict[str, Any] = json.loads(Path(folder, "answer").read_bytes())
        except (OSError, ValueError):
            return {"why": f"its stand-in ended with exit code {process.returncode}; see {log}"}
        return answer
