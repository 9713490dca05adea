"""A batch of questions in the engine: requests that decode, none of which is captured.

Their ids have a prefix that the hook doesn't know, so the forwards pass through it like anybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from actors.capture.forwards import ANSWERED
from actors.capture.host import EngineHost
from actors.messages import Batch, BatchAnswers, FailureKind, SampleFailure, SampleOutcome
from actors.questions import Ask
from storage.prompts import Reply


class AnswerJob:
    """A batch of questions on its way; made by `CaptureSession.ask`.

    Args:
        batch: what was handed over.
        asks: a question for each sample.
        sampling: temperature, top_p, top_k and stop_token_ids, for all of them.
        run_id: part of the request ids.
        serial: distinguishes this submission from an aborted one of the same attempts.
    """

    def __init__(
        self, batch: Batch, asks: Sequence[Ask], sampling: Mapping[str, Any], run_id: str, serial: int
    ) -> None:
        self._batch = batch
        self._asks = asks
        self._sampling = sampling
        self._rids = [f"{ANSWERED}{run_id}:{s.row}:{s.attempt}:{serial}" for s in batch.samples]
        self._record: Future[BatchAnswers] = Future()
        self.answers = 0

    def record(self) -> Future[BatchAnswers]:
        """Done when every question is answered or given up."""
        return self._record

    async def run(self, host: EngineHost) -> None:
        """Has the engine answer; runs in its loop."""
        said = await asyncio.gather(*(self._one(host, i) for i in range(len(self._asks))))
        outcomes, replies = [], []
        for sample, one in zip(self._batch.samples, said, strict=True):
            failure = one if isinstance(one, SampleFailure) else None
            outcomes.append(SampleOutcome(sample.row, sample.attempt, failure))
            if isinstance(one, Reply):
                replies.append(one)
        with contextlib.suppress(InvalidStateError):
            self._record.set_result(BatchAnswers(self._batch.batch_id, tuple(outcomes), tuple(replies)))

    def break_off(self, error: BaseException | None) -> None:
        """Ends the job before its time: with an error, or cancelled."""
        if error is None:
            self._record.cancel()
        else:
            with contextlib.suppress(InvalidStateError):
                self._record.set_exception(error)

    async def _one(self, host: EngineHost, index: int) -> Reply | SampleFailure:
        ask = self._asks[index]
        sent = len(ask.token_ids)
        room = host.max_tokens - sent
        if room < 1:
            text = f"{sent} tokens leave no room for an answer in the {host.max_tokens} that an engine takes"
            return SampleFailure("too_long", text)
        sampling = {
            "max_new_tokens": min(ask.max_new_tokens, room),
            "sampling_seed": ask.seed,
            **self._sampling,
        }
        try:
            answer = await host.engine.generate(ask.token_ids.tolist(), self._rids[index], sampling)
        except Exception as error:  # whatever SGLang raises for a request that it doesn't take
            return SampleFailure("engine", f"the engine refused the request: {error}")
        self.answers += 1
        return judge(self._batch.samples[index].row, sent, answer)


def judge(row: int, sent: int, answer: Mapping[str, Any]) -> Reply | SampleFailure:
    """What an answer of SGLang's is worth. Pure.

    Args:
        row: that was asked.
        sent: tokens of the prompt.
        answer: with ``output_ids`` and ``meta_info``.
    """
    meta = answer.get("meta_info", {})
    finish = meta.get("finish_reason") or {}
    ids = np.asarray(answer.get("output_ids", ()), dtype=np.int32)
    kind: FailureKind = "engine"
    if finish.get("type") not in ("stop", "length"):
        return SampleFailure(kind, f"the engine gave the request up: {finish.get('message', finish)}")
    if meta.get("prompt_tokens") != sent:
        return SampleFailure(
            "row_mismatch", f"the engine read {meta.get('prompt_tokens')} tokens, {sent} were sent"
        )
    if not ids.size:
        return SampleFailure("other", "the engine said nothing")
    return Reply(row, ids, str(finish["type"]))
