"""What the driver and the coordinator say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from actors.balance import Limits
from actors.figures import Figures
from actors.rows import Counts
from storage.layout import Layout
from storage.table import Account, Outcome


@dataclass(frozen=True)
class CoordinatorSpec:
    """How a run is led.

    Attributes:
        dump_url: the dump, with its prompts prepared.
        run_id: of the run.
        layout: the dump's geometry.
        limits: bounds of batches, permits and samples' failures.
        generation: counts the coordinators of one invocation, from 0; attempts and batch ids differ by it.
        infrastructure_per_hour: lost engines, writers and batches within an hour that are still borne; losses
            to pre-emption aren't counted.
        stall_timeout_s: an engine with work and without progress for so long is killed.
        tick_s: time between two looks at an engine or a writer.
        full_timeout_s: longest time without space at the output before the run stops.
        drain_timeout_s: longest wait for work in flight when the run ends by an error.
        log_dir: where its log is kept on its node; empty keeps none.
    """

    dump_url: str
    run_id: str
    layout: Layout
    limits: Limits
    generation: int = 0
    infrastructure_per_hour: int = 100
    stall_timeout_s: float = 600.0
    tick_s: float = 5.0
    full_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    log_dir: str = ""

    def next_generation(self) -> CoordinatorSpec:
        """For the coordinator that replaces this one."""
        return replace(self, generation=self.generation + 1)


@dataclass(frozen=True)
class Loss:
    """An engine or a writer that is gone; its process has been killed in any case.

    Attributes:
        name: its name.
        role: what it was.
        node_id: where it was.
        reason: one line for a person.
        preempted: its node was taken away.
    """

    name: str
    role: Literal["engine", "writer"]
    node_id: str
    reason: str
    preempted: bool


@dataclass(frozen=True)
class MemberStatus:
    """What one engine or writer has to do.

    Attributes:
        batches: in flight, for an engine.
        tokens: outstanding, for an engine.
        done_samples: answered, for an engine.
        busy_s: with work, for an engine.
        waiting_s: without work while rows were waiting, for an engine.
        incoming_bytes: dispatched to it and not yet there, for a writer.
        figures: what it says of itself; None while it doesn't answer.
    """

    name: str
    node_id: str
    batches: int = 0
    tokens: int = 0
    done_samples: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    incoming_bytes: int = 0
    figures: Figures | None = None


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        counts: rows by state; all zero while the coordinator reads the dump.
        tokens: of all rows that are to be collected.
        committed_tokens: of the committed rows.
        captured_tokens: answered by engines in this coordinator's life; for a rate.
        stored_bytes: of the shards sealed in this coordinator's life.
        in_flight_bytes: permits in use, by node.
        in_flight_limit_bytes: permits of each node.
        engines: those that live.
        writers: those that live.
        events: what went wrong so far, counted by class.
        last_problem: the latest of it; None if all was well.
        paused: why nothing is dispatched just now; None if it is.
        task: what engines do; in the pass of the answers, ``tokens`` are the most that prompts and answers may have.
        answer_tokens: that engines said in this coordinator's life.
    """

    counts: Counts
    tokens: int
    committed_tokens: int
    captured_tokens: int
    stored_bytes: int
    in_flight_bytes: Mapping[str, int]
    in_flight_limit_bytes: int
    engines: tuple[MemberStatus, ...]
    writers: tuple[MemberStatus, ...]
    events: Mapping[str, int]
    last_problem: str | None
    paused: str | None
    task: Literal["answer", "capture"] = "capture"
    answer_tokens: int = 0


@dataclass(frozen=True)
class RunSummary:
    """How a run ended without an error of its own.

    Attributes:
        counts: rows by state at the end.
        account: what the finished dump says of itself; None if the run was stopped before its end.
        stopped: why it was stopped; None if every row is accounted for.
        stored_bytes: of the shards sealed in this coordinator's life.
        work_s: from the first dispatch to the last commit of this coordinator's life.
        events: what went wrong, counted by class.
        cpu_s: CPU time of this coordinator's process in the same span.
        peak_bytes: most memory that its process ever held.
        last_answer_s: seconds from the first dispatch to each engine's last answer: alike where the work was
            dealt out well.
        outcomes: of the pass of the answers: rows that couldn't be answered.
        answer_tokens: that engines said in this coordinator's life.
        answered_rows: by this coordinator.
    """

    counts: Counts
    account: Account | None
    stopped: str | None
    stored_bytes: int
    work_s: float
    events: Mapping[str, int]
    cpu_s: float = 0.0
    peak_bytes: int = 0
    last_answer_s: Mapping[str, float] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    answer_tokens: int = 0
    answered_rows: int = 0
