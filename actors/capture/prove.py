"""Runs the proof's requests on a started engine and gathers what the scheduler processes found."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from actors.capture.engine import EngineProcess
from actors.capture.forwards import OFF, PROOF
from actors.capture.intake import Array, Intake
from actors.capture.join import BatchJoin
from actors.capture.model_info import ModelInfo
from actors.capture.proof import (
    NEW_TOKENS,
    Check,
    Report,
    check,
    finish_report,
    judge_hooks,
    judge_identity,
    judge_token,
    probe_batch,
    probe_tokens,
)
from actors.messages import EngineSpec

PLAIN = "hsdump-plain:"


class _ProbeSink:
    """Joins the probe's chunks as a sample's are joined."""

    def __init__(self, spec: EngineSpec, tokens: Array) -> None:
        self.join = BatchJoin(probe_batch(spec.capture, "probe", len(tokens)), spec.capture.layout, [tokens])
        self.rows = 0
        self.reason = ""

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        self.rows += len(ids)
        self.join.put(0, start, states, ids)

    def lost(self, rid: str, reason: str) -> None:
        self.reason = reason
        self.join.fail(0, "other", reason)


async def prove(
    engine: EngineProcess, intake: Intake, spec: EngineSpec, model: ModelInfo, length: int
) -> Report:
    """Proves on every replica that what is captured is right.

    Args:
        engine: just started.
        intake: its scheduler processes are connected to it.
        spec: how the engine was started.
        model: what its config.json says.
        length: tokens of the probe.

    Raises:
        ProofFailed: it isn't.
    """
    import sglang

    processes = max(spec.gpus, spec.replicas)
    checks = judge_hooks(intake.hooked, spec.capture, processes, spec.replicas)
    tokens = probe_tokens(model.vocab_size, length)
    for replica in range(spec.replicas):
        checks += await _prove_replica(engine, intake, spec, tokens, replica)
    head = {
        "engine": spec.name,
        "sglang": str(sglang.__version__),
        "model": str(intake.hooked[0]["model"]) if intake.hooked else model.architecture,
        "model_path": spec.model_path,
        "states": list(spec.capture.layout.states),
        "probe_tokens": length,
    }
    return finish_report(head, sorted(intake.hooked, key=lambda h: (h["dp_rank"], h["tp_rank"])), checks)


async def _prove_replica(
    engine: EngineProcess, intake: Intake, spec: EngineSpec, tokens: Array, replica: int
) -> list[Check]:
    where: dict[str, Any] = {"data_parallel_rank": replica} if spec.replicas > 1 else {}
    rids = [f"{prefix}{spec.run_id}:{spec.name}:{replica}" for prefix in (PROOF, OFF, PLAIN)]
    sinks = [_ProbeSink(spec, tokens) for _ in rids]
    answers: list[dict[str, Any]] = []
    for rid, sink in zip(rids, sinks, strict=True):
        intake.route(rid, sink)
        answers.append(await engine.prefill(tokens.tolist(), rid, NEW_TOKENS, **where))
        await asyncio.wrap_future(intake.fence())
        intake.forget(rid)
    captured = sinks[0]
    outcome = captured.join.outcomes()[0].failure
    missing = captured.join.missing_rows(0)
    good = outcome is None and missing == 0
    detail = f"{captured.rows} rows of {len(tokens)} tokens, {len(spec.capture.layout.states)} states each"
    checks = [
        check(
            "as many states and rows as asked, finite, none all zeros",
            good,
            detail if good else f"{detail}; {outcome.reason if outcome else f'{missing} rows are missing'}",
            replica,
        ),
        check(
            "requests of others are not captured",
            sinks[1].rows == 0 and sinks[2].rows == 0,
            f"{sinks[1].rows + sinks[2].rows} rows of them came",
            replica,
        ),
    ]
    found = [f["identity"] for f in intake.findings if "identity" in f and f["identity"]["rid"] == rids[0]]
    if not found:
        checks.append(check("identity", False, "the scheduler process reported nothing", replica))
    checks += [judge_identity(state, replica) for f in found[:1] for state in f["states"]]
    token = [
        f["next_token"] for f in intake.findings if "next_token" in f and f["next_token"]["rid"] == rids[0]
    ]
    checks += judge_token(token[0] if token else None, replica)
    outputs = [np.asarray(a["output_ids"]).tolist() for a in answers]
    same = outputs[0] == outputs[1] == outputs[2]
    text = f"{NEW_TOKENS} greedy tokens with the hook on, switched off, and not captured"
    checks.append(
        check("outputs are the same with and without", same, text if same else f"{outputs}", replica)
    )
    return checks
