"""A capture engine as its actor drives it: start, submit, watch, shut down.

Every public method may be called from any thread and returns at once, `shutdown` aside.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from actors.capture import flags
from actors.capture.answers import AnswerJob
from actors.capture.engine import SchedulerFunction
from actors.capture.forwards import AGAIN
from actors.capture.hook import run_scheduler_with_hook
from actors.capture.host import EngineHost, SessionInfo
from actors.capture.intake import Array
from actors.capture.job import CaptureJob
from actors.capture.second_look import LOOK_EVERY
from actors.capture.stand_in import SecondProof, prove_by_stand_in
from actors.capture.statistics import Alarms, StateStatistics
from actors.messages import Batch, EngineSpec
from actors.questions import Ask
from storage.errors import EngineDead, HsdumpError


class CaptureSession:
    """One engine.

    Args:
        spec: how to start it.
        scheduler_function: what every scheduler process runs.
        look_every: one of so many samples is captured twice and its next token judged.
        second_proof: what is done about states that the identity check can't prove.
    """

    def __init__(
        self,
        spec: EngineSpec,
        scheduler_function: SchedulerFunction = run_scheduler_with_hook,
        look_every: int = LOOK_EVERY,
        second_proof: SecondProof = prove_by_stand_in,
    ) -> None:
        self._spec = spec
        self._host = EngineHost(spec, scheduler_function, self._break_off, second_proof)
        self._look_every = look_every
        self.statistics = StateStatistics(spec.capture.layout)
        self.alarms = Alarms(spec.capture.layout)
        self._tasks: dict[CaptureJob | AnswerJob, Future[None]] = {}
        self._answers = 0
        self._jobs = 0
        self._samples = 0
        self._lock = threading.Lock()

    def start(self) -> Future[SessionInfo]:
        """Loads the model and proves the capture.

        Returns:
            Done when the engine may get work. It fails with a `UserError` for something to mend,
            `ProofFailed` where states would be wrong, and `EngineDead` where SGLang didn't come up within
            ``load_timeout_s``.
        """
        return self._host.start()

    @property
    def phase(self) -> str:
        """What it does on its way to work, for a person."""
        return self._host.phase

    def submit(
        self, batch: Batch, token_ids: Sequence[Array], positions: Sequence[Array] | None = None
    ) -> CaptureJob:
        """Hands a batch to the engine.

        Args:
            batch: the samples and their segments.
            token_ids: int32 [T] for each sample.
            positions: int32 [R] for each sample, the tokens whose states are stored; None for all.

        Raises:
            EngineDead: there is no engine any more.
        """
        self.check_alive()
        with self._lock:
            self._jobs, first = self._jobs + 1, self._samples
            self._samples += len(batch.samples)
            looked = [i for i in range(len(batch.samples)) if (first + i) % self._look_every == 0]
            watch = (self.statistics, self.alarms)
            job = CaptureJob(batch, self._spec, token_ids, self._jobs, looked, watch, positions)
        job.route(self._host.intake)
        with self._lock:
            self._tasks[job] = self._host.post(self._capture(job))
        if self._host.dead is not None:  # it died since the check above
            self._break_off(self._host.dead)
        return job

    def ask(self, batch: Batch, asks: Sequence[Ask], sampling: Mapping[str, Any]) -> AnswerJob:
        """Has the engine answer a batch of questions.

        Args:
            batch: the samples.
            asks: a question for each of them.
            sampling: of all answers.

        Raises:
            EngineDead: there is no engine any more.
        """
        self.check_alive()
        with self._lock:
            self._jobs += 1
            job = AnswerJob(batch, asks, sampling, self._spec.run_id, self._jobs)
            self._tasks[job] = self._host.post(self._answer(job))
        if self._host.dead is not None:  # it died since the check above
            self._break_off(self._host.dead)
        return job

    async def _answer(self, job: AnswerJob) -> None:
        await job.run(self._host)
        with self._lock:
            self._tasks.pop(job, None)

    def progress(self) -> int:
        """A counter that moves whenever states arrive, the engine answers, or it decodes a while longer."""
        intake = self._host.intake_or_none
        return self._answers + (intake.progress if intake else 0) + self._host.heard_ms

    def ring_wait_s(self) -> float:
        """Seconds that forwards have waited for room in the rings so far."""
        intake = self._host.intake_or_none
        return intake.ring_wait_s if intake else 0.0

    def check_alive(self) -> None:
        """Returns while the engine can work.

        Raises:
            EngineDead: one of its processes is gone, or it hasn't started.
        """
        self._host.check_alive()

    def abort_all(self) -> None:
        """Gives up every batch in flight; their futures are cancelled."""
        self._host.abort_all()
        self._break_off(None)

    def shutdown(self) -> None:
        """Ends the engine's processes and its thread."""
        self._host.close()
        self._break_off(EngineDead(f"{self._spec.name} was shut down"))
        self._host.shutdown()

    def _break_off(self, error: HsdumpError | None) -> None:
        with self._lock:
            tasks, self._tasks = self._tasks, {}
        for job, task in tasks.items():
            if isinstance(job, CaptureJob):
                job.forget_routes(self._host.intake)
            job.break_off(error)
            task.cancel()

    async def _capture(self, job: CaptureJob) -> None:
        intake = self._host.intake
        looks_ahead = job.looks_ahead(flags.chunk_tokens(self._spec) * self._spec.replicas)
        ahead, behind = (job.looks, ()) if looks_ahead else ((), job.looks)
        looks = [self._look(job, i) for i in ahead]
        await asyncio.gather(*looks, *(self._prefill(job, i) for i in job.looked_last))
        answered = time.monotonic()
        await asyncio.gather(*(self._look(job, i) for i in behind))
        if job.looks or not job.join.complete:
            await asyncio.wrap_future(intake.fence())
        job.judge_looks()
        job.finish(self._spec.name, intake, answered)
        with self._lock:
            self._tasks.pop(job, None)

    async def _look(self, job: CaptureJob, sample: int) -> None:
        """Captures a sample's first tokens as a request of their own."""
        look, rid = job.looks[sample], f"{job.rids[sample]}{AGAIN}"
        if job.join.failed(sample):
            return
        self._host.intake.route(rid, look)
        try:
            await self._host.engine.prefill(job.token_ids[sample][: look.tokens].tolist(), rid)
        except Exception as error:
            look.lost(rid, f"the engine refused the request: {error}")

    async def _prefill(self, job: CaptureJob, sample: int) -> None:
        ids = job.token_ids[sample]
        if len(ids) != job.batch.samples[sample].tokens or len(ids) == 0:
            text = f"{len(ids)} token ids were given for {job.batch.samples[sample].tokens} rows"
            return job.fail(sample, "row_mismatch", text)
        if len(ids) > self._host.max_tokens:
            text = f"{len(ids)} tokens, and this engine takes at most {self._host.max_tokens}"
            return job.fail(sample, "too_long", text)
        try:
            answer = await self._host.engine.prefill(ids.tolist(), job.rids[sample])
        except Exception as error:
            return job.fail(sample, "engine", f"the engine refused the request: {error}")
        self._answers += 1
        return job.judge(sample, answer)
