"""The ledger under any order of events: invariants, and the end of every run with finitely many faults."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.balance import Dispatch, Limits
from actors.ledger import Ledger
from actors.messages import SampleFailure, SampleOutcome
from actors.rows import State

BYTES_PER_TOKEN = 3
NODES = ("a", "b")
KINDS = st.sampled_from([None, None, None, "bad_states", "row_mismatch", "too_long", "engine", "other"])


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger as a careless shell would, beside a model of which writer really holds which row."""

    @initialize(
        tokens=st.lists(st.integers(0, 40), min_size=1, max_size=25),
        batch_tokens=st.integers(1, 60),
        batches=st.integers(1, 4),
        budget=st.integers(40, 120),
    )
    def begin(self, tokens: list[int], batch_tokens: int, batches: int, budget: int) -> None:
        lengths = np.array(tokens, dtype=np.int32)
        limits = Limits(
            batch_tokens=batch_tokens,
            batch_bytes=10_000,
            batch_samples=5,
            batches_per_engine=batches,
            in_flight_bytes=budget * BYTES_PER_TOKEN,
            failures_in_a_row=10_000,
        )
        self.n = len(tokens)
        self.ledger = Ledger(lengths, lengths == 0, BYTES_PER_TOKEN, limits)
        self.given: list[Dispatch] = []  # every batch ever, lost ones too
        self.phase: dict[str, str] = {}  # what this careless shell believes of each
        self.held: dict[str, set[int]] = {}  # live writer -> rows written and not sealed
        self.committed: set[int] = set()
        self.names = 0
        for node in NODES:
            self.add_engine(node)
            self.add_writer(node)

    def new_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}-{self.names}"

    # ---- crew

    @rule(node=st.sampled_from(NODES))
    def add_engine(self, node: str) -> None:
        self.ledger.add_engine(self.new_name("engine"), node)

    @rule(node=st.sampled_from(NODES))
    def add_writer(self, node: str) -> None:
        name = self.new_name("writer")
        self.ledger.add_writer(name, node)
        self.held[name] = set()

    @precondition(lambda self: len(self.ledger.engines))
    @rule(data=st.data(), blame=st.booleans())
    def lose_engine(self, data: Any, blame: bool) -> None:
        name = data.draw(st.sampled_from([e.name for e in self.ledger.engines.all()]))
        self.ledger.engine_lost(name, blame)
        for batch in self.given:
            if batch.engine == name and self.phase[batch.batch_id] == "engine":
                self.phase[batch.batch_id] = "dead"

    @precondition(lambda self: len(self.ledger.engines))
    @rule(data=st.data())
    def drain_engine(self, data: Any) -> None:
        self.ledger.drain_engine(data.draw(st.sampled_from([e.name for e in self.ledger.engines.all()])))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lose_writer(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.writer_lost(name)
        for row in self.held.pop(name) - self.committed:
            assert self.ledger.rows.state(row) == State.PENDING

    # ---- batches

    @rule()
    def dispatch(self) -> None:
        before = self.ledger.counts()
        batch = self.ledger.next_batch()
        if batch is None:
            assert self.ledger.counts() == before
            return
        self.given.append(batch)
        self.phase[batch.batch_id] = "engine"
        assert all(self.ledger.rows.attempt(s.row) == s.attempt for s in batch.samples)
        assert batch.engine in self.ledger.engines
        assert not self.ledger.engines[batch.engine].draining

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def advance(self, data: Any) -> None:
        """Any batch takes its next step, whether the ledger still knows it or not."""
        batch = data.draw(st.sampled_from(self.given))
        self.step(batch, [data.draw(KINDS) for _ in batch.samples])

    def step(self, batch: Dispatch, kinds: list[Any]) -> None:
        before = self.snapshot()
        phase = self.phase[batch.batch_id]
        if phase == "engine":
            known = self.ledger.captured(batch.batch_id, self.answers(batch, kinds))
            self.phase[batch.batch_id] = "store"
        elif phase == "store":
            known = self.ledger.moved(batch.batch_id)
            self.phase[batch.batch_id] = "writer"
        elif phase == "dead":
            known = self.ledger.captured(batch.batch_id, self.answers(batch, kinds))
            assert not known
            self.ledger.batch_lost(batch.batch_id)
            self.phase[batch.batch_id] = "over"
            return
        elif phase == "writer":
            known = self.write(batch)
            self.phase[batch.batch_id] = "over"
        else:
            known = self.ledger.captured(batch.batch_id, [])
        assert known or self.snapshot() == before, "a stale result changed something"

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def finish_batch(self, data: Any) -> None:
        """The newest batch goes all the way, as nearly all do."""
        batch = self.given[-1]
        while self.phase[batch.batch_id] != "over":
            self.step(batch, [None] * len(batch.samples))

    def answers(self, batch: Dispatch, kinds: list[Any]) -> list[SampleOutcome]:
        stale = [
            SampleOutcome(s.row, s.attempt + 1, SampleFailure("too_long", "stale")) for s in batch.samples
        ]
        now = [
            SampleOutcome(s.row, s.attempt, kind and SampleFailure(kind, "drawn"))
            for s, kind in zip(batch.samples, kinds, strict=True)
        ]
        return stale + now

    def write(self, batch: Dispatch) -> bool:
        in_flight = {s.row for s in batch.samples if self.in_flight(s.row, s.attempt)}
        known = self.ledger.written(batch.batch_id, [s.row for s in batch.samples])
        if known and batch.writer in self.held:
            now = {row for row in in_flight if self.ledger.rows.state(row) == State.WRITTEN}
            self.held[batch.writer] |= now
        return known

    def in_flight(self, row: int, attempt: int) -> bool:
        return self.ledger.rows.state(row) == State.IN_FLIGHT and self.ledger.rows.attempt(row) == attempt

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def lose_batch(self, data: Any) -> None:
        self.ledger.batch_lost(data.draw(st.sampled_from(self.given)).batch_id)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def fail_batch(self, data: Any) -> None:
        batch = data.draw(st.sampled_from(self.given))
        self.ledger.batch_failed(batch.batch_id, SampleFailure("other", "drawn"))

    # ---- shards

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def seal(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.commit(self.held[name])
        self.held[name] = set()

    @rule(data=st.data())
    def find_manifest(self, data: Any) -> None:
        """A manifest may name any row that was ever dispatched: its ack may have been lost."""
        ever = sorted({s.row for b in self.given for s in b.samples})
        if ever:
            self.commit({data.draw(st.sampled_from(ever))})

    def commit(self, rows: set[int]) -> None:
        self.ledger.committed(rows)
        self.committed |= rows
        for held in self.held.values():
            held -= rows

    # ---- invariants

    def snapshot(self) -> list[tuple[State, int]]:
        return [(self.ledger.rows.state(r), self.ledger.rows.attempt(r)) for r in range(self.n)]

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.ledger.counts()
        states = [self.ledger.rows.state(row) for row in range(self.n)]
        assert counts.total == self.n
        assert list(vars(counts).values()) == [states.count(state) for state in State]

    @invariant()
    def permits_stay_within_the_budget(self) -> None:
        used = self.ledger.permits.used()
        assert all(0 <= held <= self.ledger.limits.in_flight_bytes for held in used.values())
        if not self.ledger.open_batches:
            assert not any(used.values())
            assert all(e.tokens == 0 and not e.batches for e in self.ledger.engines.all())
            assert all(w.size_bytes == 0 for w in self.ledger.writers.all())

    @invariant()
    def no_row_is_in_two_places(self) -> None:
        waiting = self.ledger.rows.pending
        lengths = self.ledger.rows.tokens
        pending = list(self.ledger.rows.in_state(State.PENDING))
        assert waiting.tokens == sum(int(lengths[row]) for row in pending)
        flying = [r for f in self.ledger._flights.values() for r in f.samples]
        in_flight = set(self.ledger.rows.in_state(State.IN_FLIGHT))
        assert len(flying) == len(set(flying))
        assert in_flight <= set(flying)
        assert {r for r in flying if self.ledger.rows.state(r) != State.COMMITTED} == in_flight
        assert len(in_flight) == self.ledger.counts().in_flight

    @invariant()
    def committed_is_for_ever_and_written_has_a_live_writer(self) -> None:
        assert set(self.ledger.rows.in_state(State.COMMITTED)) == self.committed
        held = set().union(*self.held.values()) if self.held else set()
        assert set(self.ledger.rows.in_state(State.WRITTEN)) == held

    @invariant()
    def work_is_found_whenever_there_is_some(self) -> None:
        ledger = self.ledger
        if ledger.open_batches or not ledger.counts().pending:
            return
        if ledger.engines.active and len(ledger.writers):
            batch = ledger.next_batch()
            assert batch is not None
            self.given.append(batch)
            self.phase[batch.batch_id] = "engine"

    def teardown(self) -> None:
        """No fault any more: everything comes to its end."""
        if not hasattr(self, "ledger"):
            return
        self.add_engine("a")
        self.add_writer("a")
        for batch in self.given:
            self.ledger.batch_lost(batch.batch_id)
        steps = 0
        while not self.ledger.settled:
            steps += 1
            assert steps <= self.n + 1
            batch = self.ledger.next_batch()
            assert batch is not None
            self.ledger.captured(batch.batch_id, self.answers(batch, [None] * len(batch.samples)))
            self.ledger.moved(batch.batch_id)
            self.write(batch)
        for rows in tuple(self.held.values()):
            self.commit(set(rows))
        assert self.ledger.finished
        counts = self.ledger.counts()
        assert counts.committed + counts.skipped + counts.failed == self.n


LedgerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
