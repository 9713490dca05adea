"""A run to watch: a live view on a terminal, a structured line every ten seconds in a log, metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live

from actors.run_messages import RunSummary, Status
from cluster.lines import LOGGER, set_up_lines
from cluster.live import problems, view
from cluster.metrics import RunMetrics
from cluster.pace import MemberPace, Pace, Pacer, spoken_rate
from cluster.report import duration, size

LINE_EVERY_S = 10.0
_POINTS = 240
"""Points of the timeline that a run leaves; beyond, every second one is dropped."""


class Watch:
    """Takes every status of a run and shows it. A context manager: what is live ends with it.

    Args:
        json_logs: lines are JSON objects, also on a terminal.
        console: where to draw; standard output unless given.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        json_logs: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._json = json_logs
        self._clock = clock
        self._pacer = Pacer()
        self._live: Live | None = None
        self._line_s = self._began_s = clock()
        self._metrics: RunMetrics | None = None
        self.timeline: list[dict[str, Any]] = []
        self._every = 1
        self._looks = 0

    def __enter__(self) -> Watch:
        live = self._console.is_terminal and not self._json
        set_up_lines(self._console if live else None, self._json)
        if live:
            self._live = Live(console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        set_up_lines(as_json=self._json)

    def export(self, run_id: str) -> None:
        """Shows the run to Prometheus from now on; Ray is connected."""
        self._metrics = RunMetrics(run_id)

    def restarted(self, role: str) -> None:
        """An engine, a writer or the coordinator was replaced."""
        if self._metrics is not None:
            self._metrics.restarted(role)

    def update(self, status: Status, hosts: Mapping[str, str], loading: Mapping[str, float]) -> None:
        """A further status.

        Args:
            status: of the run.
            hosts: node id -> name.
            loading: engine -> seconds since its start, of those that load.
        """
        now_s = self._clock()
        pace = self._pacer.look(status, now_s)
        if status.task == "capture":
            self._keep(pace, now_s)
        if self._metrics is not None:
            self._metrics.update(pace, hosts, len(loading))
        if self._live is not None:
            self._live.update(view(pace, hosts, loading))
        elif now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            LOGGER.info("%s", progress_line(pace, loading), extra={"fields": progress_fields(pace, loading)})

    def ended(self, status: Status) -> None:
        """The status after the last commit: the timeline's last point, however near to the one before."""
        if status.task == "capture":
            now_s = self._clock()
            self._add_point(self._pacer.look(status, now_s), now_s)

    def summary(self, summary: RunSummary) -> None:
        """How the run ended, in one structured line."""
        counts, seconds = summary.counts, summary.work_s
        captured = self.timeline[-1]["captured_tokens"] if self.timeline else 0
        line = (
            f"ended after {duration(seconds)} of work: {counts.committed} committed, {counts.skipped} skipped, "
            f"{counts.failed} failed, {size(summary.stored_bytes)} stored"
        )
        if summary.events:
            line += "; retries: " + ", ".join(f"{n} {kind}" for kind, n in sorted(summary.events.items()))
        fields = {
            "event": "summary",
            "rows": vars(counts),
            "work_s": round(seconds, 1),
            "done_tokens": captured,
            "stored_bytes": summary.stored_bytes,
            "retries": dict(summary.events),
            "stopped": summary.stopped,
        }
        LOGGER.info("%s", line, extra={"fields": fields})

    def _keep(self, pace: Pace, now_s: float) -> None:
        """Every so many looks, a point of the timeline."""
        self._looks += 1
        if self._looks % self._every:
            return
        self._add_point(pace, now_s)
        if len(self.timeline) > _POINTS:
            del self.timeline[1::2]
            self._every *= 2

    def _add_point(self, pace: Pace, now_s: float) -> None:
        status = pace.status
        self.timeline.append(
            {
                "s": round(now_s - self._began_s, 1),
                "captured_tokens": pace.done_tokens,
                "committed_tokens": status.committed_tokens,
                "in_flight_bytes": sum(status.in_flight_bytes.values()),
                "engines": len(status.engines),
                "busy_s": round(sum(e.busy_s for e in status.engines), 3),
                "waiting_s": round(sum(e.waiting_s for e in status.engines), 3),
                "write_s": round(sum(w.figures.write_s for w in status.writers if w.figures), 3),
                "seal_s": round(sum(w.figures.seal_s for w in status.writers if w.figures), 3),
                "ring_wait_s": round(sum(e.figures.ring_wait_s for e in status.engines if e.figures), 3),
                "bottleneck": pace.bottleneck,
            }
        )


def progress_fields(pace: Pace, loading: Mapping[str, float]) -> dict[str, Any]:
    """What a progress line says, for programs."""
    status = pace.status
    return {
        "event": "progress",
        "task": status.task,
        "answer_tokens": status.answer_tokens,
        "done_tokens": pace.done_tokens,
        "total_tokens": pace.total_tokens,
        "tokens_per_s": None if pace.tokens_per_s is None else round(pace.tokens_per_s, 1),
        "left_s": None if pace.left_s is None else round(pace.left_s, 1),
        "rows": vars(status.counts),
        "engines": {e.status.name: _engine_fields(e) for e in pace.engines},
        "loading": {name: round(seconds, 1) for name, seconds in loading.items()},
        "in_flight_bytes": dict(status.in_flight_bytes),
        "in_flight_limit_bytes": status.in_flight_limit_bytes,
        "bottleneck": pace.bottleneck,
        "retries": dict(status.events),
        "last_problem": status.last_problem,
        "paused": status.paused,
    }


def _engine_fields(engine: MemberPace) -> dict[str, Any]:
    busy = None if engine.busy is None else round(engine.busy, 3)
    return {"rows": engine.status.done_samples, "batches": engine.status.batches, "busy": busy}


def progress_line(pace: Pace, loading: Mapping[str, float]) -> str:
    """One line of ``key=value``, for people and for grep."""
    status, counts = pace.status, pace.status.counts
    share = pace.done_tokens / max(1, pace.total_tokens)
    if status.task == "answer":
        parts = [f"answering {share:.0%}", f"said={status.answer_tokens:,}"]
    else:
        parts = [f"progress {share:.0%}", f"tokens={pace.done_tokens:,}/{pace.total_tokens:,}"]
    if (rate := spoken_rate(pace)) is not None:
        parts.append(f"rate={rate:,.0f}/s")
    if pace.left_s is not None:
        parts.append(f"left={duration(pace.left_s).replace(' ', '')}")
    parts += [
        f"committed={counts.committed}/{counts.total - counts.skipped}",
        f"failed={counts.failed}",
        f"engines={sum(e.batches > 0 for e in status.engines)}/{len(status.engines)}",
        f"in_flight={size(sum(status.in_flight_bytes.values())).replace(' ', '')}",
        f"bound_by={pace.bottleneck.replace(' ', '-')}",
    ]
    if loading:
        since = duration(max(loading.values())).replace(" ", "")
        parts.append(f"loading={','.join(loading)} since={since}")
    trouble = problems(status)
    return " ".join(parts) + (f"; {trouble}" if trouble else "")
