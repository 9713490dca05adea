"""Runs the proof's requests on a started engine and gathers what the scheduler processes found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.capture.adapter import untried
from actors.capture.cpu import slow_type
from actors.capture.engine import EngineProcess
from actors.capture.forwards import AT_LAYERS, OFF, PROOF
from actors.capture.intake import Array, Intake
from actors.capture.join import BatchJoin
from actors.capture.model_info import ModelInfo
from actors.capture.proof import (
    NEW_TOKENS,
    Check,
    Report,
    check,
    collector_is_wrong,
    finish_report,
    judge_hooks,
    judge_identity,
    judge_ranks,
    judge_token,
    probe_batch,
    probe_tokens,
)
from actors.capture.wire import Message
from actors.messages import EngineSpec

logger = logging.getLogger(__name__)

PLAIN = "hsdump-plain:"
HEAR_S = 30.0
"""Longest wait for the word of ranks that own no rows, which no fence follows."""


class _ProbeSink:
    """Joins the probe's chunks as a sample's are joined."""

    def __init__(self, spec: EngineSpec, tokens: Array) -> None:
        self.join = BatchJoin(probe_batch(spec.capture, "probe", len(tokens)), spec.capture.layout, [tokens])
        self.rows = 0
        self.reason = ""
        self.findings: dict[str, Message] = {}

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        self.rows += len(ids)
        self.join.put(0, start, states, ids)

    def lost(self, rid: str, reason: str) -> None:
        self.reason = reason
        self.join.fail(0, "other", reason)

    def found(self, kind: str, finding: Message) -> None:
        self.findings[kind] = finding


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

    tokens = probe_tokens(model.vocab_size, length)
    checks = await _prove_all(engine, intake, spec, tokens)
    if collector_is_wrong(checks, intake.hooked):
        logger.warning(
            "%s: SGLang's collector gives wrong states for this model; reading its layers' inputs", spec.name
        )
        await _change_place(engine, intake, spec, tokens)
        checks = await _prove_all(engine, intake, spec, tokens)
    warnings = [untried(str(sglang.__version__)), None if spec.gpus else slow_type(spec.dtype)]
    head = {
        "engine": spec.name,
        "sglang": str(sglang.__version__),
        "warning": "; ".join(filter(None, warnings)) or None,
        "model": str(intake.hooked[0]["model"]) if intake.hooked else model.architecture,
        "model_path": spec.model_path,
        "states": list(spec.capture.layout.states),
        "probe_tokens": length,
    }
    return finish_report(head, intake.hooked, checks)


async def _prove_all(engine: EngineProcess, intake: Intake, spec: EngineSpec, tokens: Array) -> list[Check]:
    processes = max(spec.gpus, spec.replicas)
    checks = judge_hooks(intake.hooked, spec.capture, processes, spec.replicas)
    for replica in range(spec.replicas):
        checks += await _prove_replica(engine, intake, spec, tokens, replica)
    return checks


async def _change_place(engine: EngineProcess, intake: Intake, spec: EngineSpec, tokens: Array) -> None:
    """Has every rank of every replica read boundaries at the layers' inputs from now on."""
    for replica in range(spec.replicas):
        rid = f"{AT_LAYERS}{spec.run_id}:{spec.name}:{replica}"
        await engine.prefill(tokens.tolist(), rid, **_where(engine, spec, replica))
    await asyncio.wrap_future(intake.fence())
    # Ranks that own no rows have no ring, and so no fence: their word comes when it comes.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAR_S):
            while any(h["consulted"] for h in intake.hooked):
                await asyncio.sleep(0.02)


async def _hear_all_ranks(sink: _ProbeSink, ranks: int) -> None:
    """Waits for what the ranks say that own no rows; who says nothing is judged for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAR_S):
            while not all(f"rank {rank}" in sink.findings for rank in range(1, ranks)):
                await asyncio.sleep(0.02)


def _where(engine: EngineProcess, spec: EngineSpec, replica: int) -> dict[str, Any]:
    return {engine.replica_argument: replica} if spec.replicas > 1 else {}


async def _prove_replica(
    engine: EngineProcess, intake: Intake, spec: EngineSpec, tokens: Array, replica: int
) -> list[Check]:
    ranks = max(1, spec.gpus // spec.replicas)
    rids = [f"{prefix}{spec.run_id}:{spec.name}:{replica}" for prefix in (PROOF, OFF, PLAIN)]
    sinks = [_ProbeSink(spec, tokens) for _ in rids]
    answers: list[dict[str, Any]] = []
    for rid, sink in zip(rids, sinks, strict=True):
        intake.route(rid, sink)
        answers.append(
            await engine.prefill(tokens.tolist(), rid, NEW_TOKENS, **_where(engine, spec, replica))
        )
        await asyncio.wrap_future(intake.fence())
        if sink is sinks[0]:
            await _hear_all_ranks(sink, ranks)
        intake.forget(rid)
    captured = sinks[0]
    found = captured.findings
    checks = [*_judge_rows(captured, sinks[1:], spec, replica)]
    if "identity" not in found:
        checks.append(check("identity", False, "the scheduler process reported nothing", replica))
    checks += [judge_identity(state, replica) for state in found.get("identity", {}).get("states", [])]
    checks += judge_ranks(found, ranks, replica)
    checks += judge_token(found.get("next_token"), replica)
    outputs = [np.asarray(a["output_ids"]).tolist() for a in answers]
    same = outputs[0] == outputs[1] == outputs[2]
    text = f"{NEW_TOKENS} greedy tokens with the hook on, switched off, and not captured"
    checks.append(
        check("outputs are the same with and without", same, text if same else f"{outputs}", replica)
    )
    return checks


def _judge_rows(
    captured: _ProbeSink, others: Sequence[_ProbeSink], spec: EngineSpec, replica: int
) -> list[Check]:
    """The probe's rows came, as they should; nobody else's did."""
    outcome = captured.join.outcomes()[0].failure
    missing = captured.join.missing_rows(0)
    wrong = outcome.reason if outcome else f"{missing} rows are missing" if missing else ""
    detail = f"{captured.rows} rows, {len(spec.capture.layout.states)} states each"
    foreign = sum(sink.rows for sink in others)
    return [
        check(
            "as many states and rows as asked, finite, none all zeros",
            not wrong,
            f"{detail}; {wrong}" if wrong else detail,
            replica,
        ),
        check("requests of others are not captured", foreign == 0, f"{foreign} rows of them came", replica),
    ]
