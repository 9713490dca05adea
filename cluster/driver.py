"""The driver: starts engines, writers and the coordinator, replaces what dies, and ends the run.

It decides nothing about samples. It waits for a handful of calls (actors starting, losses, status, the run
itself) and answers each with one method; `cluster.staff` answers those of engines and writers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answering import AnsweringCoordinator
from actors.capture.proof import report_lines
from actors.coordinator import RUNTIME_ENV, Coordinator
from actors.failures import one_line
from actors.messages import EngineInfo
from actors.run_messages import CoordinatorSpec, RunSummary
from cluster.admission import Admission
from cluster.answering import AnswerPass
from cluster.calls import Calls
from cluster.config import RunConfig
from cluster.fleet import Fleet
from cluster.losses import LossBudget
from cluster.placement import Node
from cluster.report import say
from cluster.staff import Staff, cause_of
from cluster.statistics import StateStatisticsFile
from cluster.tenure import Tenure
from cluster.watch import Watch
from storage.errors import IncompleteRun, StorageError
from storage.files import Store

logger = logging.getLogger(__name__)

REPORT_KEY = "capture_report.json"
LOOK_EVERY_S = 2.0
"""Time between two looks at the cluster's nodes; a spot node's notice may be half a minute."""
_TURN_S = 1.0
_LAST_WORD_S = 10.0


class Driver:
    """One run's life.

    Args:
        store: the dump.
        config: the run file.
        fleet: creates engines and writers.
        gpus: of one engine.
        coordinator: what the coordinator is given; its generation counts up with every replacement.
        admission: judges nodes.
        tenure: says whether the output is still this run's own.
        watch: shows how far it is.
        answering: the pass before the capture, if the model is to answer rows; the same engines serve both.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        fleet: Fleet,
        gpus: int,
        coordinator: CoordinatorSpec,
        admission: Admission,
        tenure: Tenure,
        watch: Watch,
        answering: AnswerPass | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._fleet = fleet
        self._answering = answering
        self._spec = self._capture = coordinator
        if answering is not None:
            self._spec = answering.spec
        self._tenure = tenure
        self._watch = watch
        self._calls = Calls()
        self._losses = LossBudget(config.limits.losses_per_hour, config.limits.reload_s)
        self._staff = Staff(config, fleet, gpus, admission, self._calls, self._losses, self._keep_report)
        self._asked_status = False
        self._summary: RunSummary | None = None
        self._reports: dict[str, Any] = {}
        self._reports_wait = False
        self._statistics = StateStatisticsFile(store, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        self._stop_asked = False
        self._stop_deadline: float | None = None

    def run(self, nodes: Sequence[Node]) -> RunSummary:
        """Runs to the end.

        Args:
            nodes: of the cluster, each of them admitted.

        Raises:
            ProofFailed, CaptureRefused: captured states would be wrong; nothing was collected.
            IncompleteRun: nothing is left to run on, too much died, or it was asked to stop.
            LeaseLost: another run took the output over.
        """
        self._catch_signals()
        try:
            self._start_coordinator()
            self._staff.begin(nodes, self._coordinator)
            summary = self._loop()
            self._keep_last_status()
            if self._reports_wait:
                self._write_reports()
            return summary
        finally:
            self._staff.close()
            self._fleet.shutdown()
            ray.kill(self._coordinator)

    def _loop(self) -> RunSummary:
        next_look_s = time.monotonic() + LOOK_EVERY_S
        while self._summary is None:
            self._calls.turn(_TURN_S)
            if self._stop_asked and self._stop_deadline is None:
                self._stop()
            now_s = time.monotonic()
            if self._stop_deadline is not None and now_s > self._stop_deadline:
                raise IncompleteRun(
                    "stopped as asked; work in flight didn't end within limits.drain_timeout_s and is lost. What is "
                    "committed is safe: the same command goes on from there"
                )
            if now_s >= next_look_s:
                next_look_s = now_s + LOOK_EVERY_S
                self._tenure.check()
                self._staff.look()
                if not self._asked_status:
                    self._asked_status = True
                    self._calls.expect(self._coordinator.status.remote(), self._on_status)
        return self._summary

    # ---- the coordinator

    def _start_coordinator(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        self._coordinator = (
            ray.remote(Coordinator if self._answering is None else AnsweringCoordinator)
            .options(
                name=f"coordinator-{self._spec.generation}",
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                runtime_env=RUNTIME_ENV,
                # Beside the driver: on a node that Ray takes for dead, its process could go on leading.
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(self._spec)
        )
        self._calls.expect(self._coordinator.run.remote(), self._on_end)
        self._expect_loss()

    def _expect_loss(self) -> None:
        told = partial(self._on_loss, self._coordinator)
        self._calls.expect(self._coordinator.next_loss.remote(), told)

    def _on_end(self, ref: ray.ObjectRef) -> None:
        try:
            summary = ray.get(ref)
        except RayTaskError as error:
            raise cause_of(error) from error
        except RayActorError as error:
            self._replace_coordinator(error)
            return
        if self._answering is None or summary.account is None:
            self._summary = summary
        elif self._stop_asked:
            self._summary = replace(summary, account=None, stopped="asked to stop")
        else:
            self._begin_capture(self._answering, summary)

    def _begin_capture(self, answering: AnswerPass, summary: RunSummary) -> None:
        """Every row is answered: the engines go on under a coordinator that captures."""
        answering.finish(summary)
        self._answering = None
        before = self._coordinator
        self._spec = replace(self._capture, generation=self._spec.generation + 1)
        self._staff.new_prompts()
        self._start_coordinator()
        self._staff.serve(self._coordinator)
        ray.kill(before)

    def _replace_coordinator(self, error: RayActorError) -> None:
        reason = one_line(error)
        self._losses.lost("the coordinator", reason, time.monotonic())
        self._watch.restarted("coordinator")
        say("the coordinator died; a new one starts from the manifests, engines go on")
        logger.warning("coordinator died: %s", reason)
        self._fleet.quiesce()
        self._spec = self._spec.next_generation()
        self._start_coordinator()
        self._staff.serve(self._coordinator)

    def _on_loss(self, coordinator: Any, ref: ray.ObjectRef) -> None:
        try:
            losses = ray.get(ref)
        except RayError:
            return  # the coordinator itself died: its run call says so and is answered there
        if coordinator is self._coordinator:
            self._expect_loss()
        for loss in losses:
            self._watch.restarted(loss.role)
        self._staff.on_losses(losses)

    # ---- progress and the end

    def _on_status(self, ref: ray.ObjectRef) -> None:
        self._asked_status = False
        try:
            status = ray.get(ref)
        except RayError:
            return  # a dead coordinator is answered by `_on_end`
        self._staff.relax(status)
        for line in self._statistics.take(status.engines):
            say(line)
        self._watch.update(status, self._staff.hosts, self._staff.loading())

    def _keep_report(self, info: EngineInfo) -> None:
        made_up = ["its states are made up: there is no model, and nothing to prove"]
        for line in report_lines(info.capture_report) if info.capture_report else made_up:
            say(f"{info.name}: {line}")
        self._reports[info.name] = dict(info.capture_report)
        self._write_reports()

    def _write_reports(self) -> None:
        """An output that fails now mustn't end the run: what can't be written is tried again at the end."""
        try:
            self._store.replace(REPORT_KEY, json.dumps(self._reports, indent=1).encode())
        except StorageError as error:
            self._reports_wait = True
            logger.warning("the capture report can't be written now: %s", error)
        else:
            self._reports_wait = False

    def _keep_last_status(self) -> None:
        """What the engines that still live say at the end; without an answer, what they said last."""
        with contextlib.suppress(RayError, StorageError):
            status = ray.get(self._coordinator.status.remote(), timeout=_LAST_WORD_S)
            self._watch.ended(status)
            self._statistics.take(status.engines)
        with contextlib.suppress(StorageError):
            self._statistics.write()

    def _catch_signals(self) -> None:
        # After ray.init, which installs handlers of its own. A handler may only set a flag.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask_to_stop)

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        if self._stop_asked:
            raise KeyboardInterrupt
        self._stop_asked = True

    def _stop(self) -> None:
        timeout_s = self._config.limits.drain_timeout_s
        say(f"stopping: no more work is handed out; open shards are sealed within {timeout_s:.0f} s")
        self._stop_deadline = time.monotonic() + timeout_s
        self._staff.close()
        self._coordinator.stop.remote("asked to stop")
