"""One batch in the engine, as the actor sees it: a future for each segment and one for the record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from actors.capture.forwards import AGAIN, CAPTURED, CHECKED
from actors.capture.intake import Array, Intake
from actors.capture.join import BatchJoin
from actors.capture.proof import TOKEN_GAP
from actors.capture.second_look import SecondLook
from actors.capture.statistics import Alarms, StateStatistics
from actors.messages import Batch, BatchRecord, EngineSpec, FailureKind


class CaptureJob:
    """A batch on its way; made by `CaptureSession.submit`.

    Args:
        batch: what was handed over.
        spec: of the engine.
        token_ids: [T] for each sample.
        serial: distinguishes this submission from an aborted one of the same attempts, whose request ids
            SGLang may still hold.
        looked: samples that are looked at twice.
        watch: what every sample's states are counted in, and where what is unusual goes.
        positions: the tokens whose states are stored, [R] for each sample; None for all.

    Attributes:
        rids: request id of each sample.
        looks: sample -> its second look.
    """

    def __init__(
        self,
        batch: Batch,
        spec: EngineSpec,
        token_ids: Sequence[Array],
        serial: int,
        looked: Sequence[int] = (),
        watch: tuple[StateStatistics, Alarms] | None = None,
        positions: Sequence[Array] | None = None,
    ) -> None:
        capture = spec.capture
        self.batch = batch
        self.token_ids = token_ids
        self.looks = {i: SecondLook(capture.layout, len(token_ids[i])) for i in looked}
        self.rids = [
            f"{CAPTURED}{spec.run_id}:{s.row}:{s.attempt}:{serial}{CHECKED if i in self.looks else ''}"
            for i, s in enumerate(batch.samples)
        ]
        errors = None if watch is None else watch[0].measured
        self.join = BatchJoin(batch, capture.stored, token_ids, positions, errors)
        self._watch = watch
        self._next_tokens: dict[int, dict[str, Any]] = {}
        self._sample_of = {rid: i for i, rid in enumerate(self.rids)}
        self._segments: list[Future[Array]] = [Future() for _ in batch.segments]
        self._record: Future[BatchRecord] = Future()
        self._started = time.monotonic()

    @property
    def num_segments(self) -> int:
        """Segments of the batch."""
        return len(self._segments)

    @property
    def looked_last(self) -> list[int]:
        """Its samples, those that are looked at twice at the end."""
        samples = range(len(self.rids))
        return [i for i in samples if i not in self.looks] + list(self.looks)

    def looks_ahead(self, forward_tokens: int) -> bool:
        """Whether the second captures may go ahead of the batch, and still be in other forwards than the first.

        Behind it they would wait for all that waits in the engine, and the batch for them: the engine's other batches
        were done by then, and the GPU idled until new ones came. SGLang takes requests in their order, so those
        between the two have to fill a forward.

        Args:
            forward_tokens: most tokens of one forward.
        """
        between = sum(len(ids) for i, ids in enumerate(self.token_ids) if i not in self.looks)
        return between >= forward_tokens

    def segment(self, index: int) -> Future[Array]:
        """Done when every row of a segment is there or given up.

        Returns:
            Flat array of the layout's storage dtype; empty when all of the segment's samples failed. Nobody
            else holds it once `forget` was called.
        """
        return self._segments[index]

    def forget(self, index: int) -> None:
        """Lets go of a segment that was read, so that a long sample isn't held whole until its end."""
        self._segments[index] = Future()

    def record(self) -> Future[BatchRecord]:
        """Done when every segment is."""
        return self._record

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        """Takes rows of one of the batch's requests from the ring."""
        sample = self._sample_of[rid]
        if self._watch is not None:
            statistics, alarms = self._watch
            alarms.raise_for(self.batch.samples[sample].row, start, statistics.look(states))
        if sample in self.looks:
            self.looks[sample].first(start, states)
        self._deliver(self.join.put(sample, start, states, ids))

    def lost(self, rid: str, reason: str) -> None:
        """Hears that a request's states couldn't be taken."""
        self.fail(self._sample_of[rid], "other", reason)

    def found(self, kind: str, finding: dict[str, Any]) -> None:
        """Hears what the scheduler process found for a sample that is looked at."""
        sample = self._sample_of[str(finding["rid"])]
        if kind == "next_token" and finding.get("end") == len(self.token_ids[sample]):
            self._next_tokens[sample] = finding

    def judge_looks(self) -> None:
        """Gives up samples whose second capture or next token says that their states are wrong."""
        for sample, look in self.looks.items():
            if self.join.failed(sample):
                continue
            gap = float(self._next_tokens.get(sample, {}).get("gap", 0.0))
            wrong = look.difference()
            if gap > TOKEN_GAP:
                wrong = (
                    f"the engine's next token is {gap:.3f} of the largest logit below the maximum of lm_head "
                    "over final_normed"
                )
            if wrong:
                self.fail(sample, "bad_states", wrong)

    def fail(self, sample: int, kind: FailureKind, reason: str) -> None:
        """Gives a sample up."""
        self._deliver(self.join.fail(sample, kind, reason))

    def judge(self, sample: int, answer: dict[str, Any]) -> None:
        """Holds the engine's answer for a sample against what was sent."""
        meta = answer.get("meta_info", {})
        finish = meta.get("finish_reason") or {}
        sent = len(self.token_ids[sample])
        if isinstance(finish, dict) and finish.get("type") == "abort":
            self.fail(sample, "engine", f"the engine gave the request up: {finish.get('message')}")
        elif meta.get("prompt_tokens") != sent:
            text = f"the engine read {meta.get('prompt_tokens')} tokens, {sent} were sent"
            self.fail(sample, "row_mismatch", text)
        elif meta.get("cached_tokens"):
            text = (
                f"{meta['cached_tokens']} tokens came from a prefix cache, whose states were never computed"
            )
            self.fail(sample, "row_mismatch", text)

    def route(self, intake: Intake) -> None:
        """Has the requests' chunks brought here."""
        for rid in self.rids:
            intake.route(rid, self)

    def finish(self, engine: str, intake: Intake, answered: float) -> None:
        """Completes the batch: rows that haven't come by now never will."""
        self.forget_routes(intake)
        for i in range(len(self.rids)):
            missing = self.join.missing_rows(i)
            if missing:
                self.fail(i, "row_mismatch", f"{missing} of {len(self.token_ids[i])} rows never came")
        record = BatchRecord(
            batch_id=self.batch.batch_id,
            engine=engine,
            outcomes=self.join.outcomes(),
            prefill_s=answered - self._started,
            drain_s=time.monotonic() - answered,
        )
        with contextlib.suppress(InvalidStateError):
            self._record.set_result(record)

    def break_off(self, error: BaseException | None) -> None:
        """Ends the job before its time: with an error, or cancelled."""
        futures: list[Future[Any]] = [*self._segments, self._record]
        for future in futures:
            if error is None:
                future.cancel()
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(error)

    def forget_routes(self, intake: Intake) -> None:
        """Has nothing brought here any more."""
        for rid in self.rids:
            intake.forget(rid)
            intake.forget(f"{rid}{AGAIN}")

    def _deliver(self, segments: Sequence[int]) -> None:
        for s in segments:
            with contextlib.suppress(InvalidStateError):
                self._segments[s].set_result(self.join.take(s))
