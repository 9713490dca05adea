"""One engine, many ways to use it: chunks, mixed batches, repeats, refusals, outputs, and its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from capture_support import (
    ANSWER_S,
    CHUNK_TOKENS,
    Reference,
    ask,
    assert_right,
    engine_spec,
    random_ids,
    running,
    states_of,
    submit,
)

from actors.capture.forwards import CAPTURED, OFF
from actors.capture.second_look import SecondLook
from actors.capture.session import CaptureSession
from actors.messages import Batch, SampleRef, plan_segments
from storage.errors import EngineDead

pytestmark = pytest.mark.slow

BOUNDARIES = [2, 4, 7]


@pytest.fixture(scope="module")
def llama(models_dir: Path) -> Path:
    return tiny_models.make("llama", models_dir)


@pytest.fixture(scope="module")
def session(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaptureSession]:
    with running(engine_spec(llama, BOUNDARIES, tmp_path_factory.mktemp("logs"))) as session:
        yield session


@pytest.fixture(scope="module")
def reference(llama: Path) -> Reference:
    return Reference(llama)


def check(session: CaptureSession, reference: Reference, groups: list[list[np.ndarray]]) -> None:
    """All groups at once in the engine, every state of every token against Hugging Face."""
    states = session._spec.capture.layout.states
    jobs = [submit(session, ids) for ids in groups]
    for ids, job in zip(groups, jobs, strict=True):
        record, captured = states_of(session, job)
        assert [o.failure for o in record.outcomes] == [None] * len(ids)
        assert_right(states, captured, [reference.states(x) for x in ids], p99=0.1)


def test_mixed_batches_of_1_to_3000_tokens_in_flight_at_once(
    session: CaptureSession, reference: Reference
) -> None:
    lengths = [[3000, 1, 255], [256, 257, 2, 31], [32, 33, 1000]]
    check(session, reference, [random_ids(g, seed=i) for i, g in enumerate(lengths)])


def test_a_second_call_with_the_same_prompts_comes_out_right_again(
    session: CaptureSession, reference: Reference
) -> None:
    ids = random_ids([40, 300], seed=5)
    check(session, reference, [ids])
    check(session, reference, [ids])


def test_a_prompt_that_repeats_anothers_prefix_is_computed_whole(
    session: CaptureSession, reference: Reference
) -> None:
    first, tail = random_ids([400, 50], seed=6)
    check(session, reference, [[first]])
    check(session, reference, [[np.concatenate([first[:300], tail]), first]])


def test_a_sample_that_is_looked_at_twice_is_right_and_its_next_token_was_judged(
    session: CaptureSession, reference: Reference
) -> None:
    session._look_every = 1
    try:
        ids = random_ids([300, 40], seed=14)
        job = submit(session, ids)
        record, captured = states_of(session, job)
    finally:
        session._look_every = 1000
    assert [o.failure for o in record.outcomes] == [None, None]
    assert sorted(job.looks) == [0, 1]
    for sample, look in job.looks.items():
        assert look.difference() is None
        assert look._captures[1].any()
        assert job._next_tokens[sample]["gap"] <= 0.02
    assert_right(session._spec.capture.layout.states, captured, [reference.states(x) for x in ids], p99=0.1)


def test_norms_of_every_state_were_counted(session: CaptureSession, reference: Reference) -> None:
    (ids,) = random_ids([2000], seed=15)
    check(session, reference, [[ids]])
    summary = session.statistics.summary()
    assert list(summary) == ["2", "4", "7", "final", "final_normed"]
    for state in (2, "final_normed"):
        norms = reference.states(ids)[state].norm(dim=-1)
        median = summary[str(state)]["norm_quantiles"]["0.5"]
        assert abs(median / float(norms.median()) - 1) < 0.1


def test_in_a_full_batch_the_second_capture_goes_ahead_in_another_forward(
    session: CaptureSession, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: dict[str, int] = {}
    for name in ("first", "put"):
        keep = getattr(SecondLook, name)

        def noted(look: SecondLook, *given: Any, name: str = name, keep: Any = keep) -> None:
            forwards.setdefault(name, session._host.intake.progress)
            keep(look, *given)

        monkeypatch.setattr(SecondLook, name, noted)
    monkeypatch.setattr(session, "_look_every", 1 << 40)
    ids = random_ids([40, CHUNK_TOKENS, 300], seed=16)
    monkeypatch.setattr(session, "_samples", 1 << 40)  # the first of them is looked at
    job = submit(session, ids)
    record, captured = states_of(session, job)
    assert [o.failure for o in record.outcomes] == [None] * 3
    assert forwards["put"] < forwards["first"]
    assert job.looks[0].difference() is None
    assert_right(session._spec.capture.layout.states, captured, [reference.states(x) for x in ids], p99=0.1)


def test_requests_of_others_pass_through_and_are_not_captured(session: CaptureSession) -> None:
    (ids,) = random_ids([300], seed=7)
    arrived = session._host.intake.progress
    assert len(ask(session, ids, "HEALTH_CHECK_1", new_tokens=4)) == 4
    assert session._host.intake.progress == arrived


def test_outputs_with_capture_equal_outputs_without(session: CaptureSession) -> None:
    for i, ids in enumerate(random_ids([3, 300], seed=8)):
        outputs = [
            ask(session, ids, f"{prefix}outputs:{i}", new_tokens=6) for prefix in (CAPTURED, OFF, "plain:")
        ]
        assert outputs[0] == outputs[1] == outputs[2]


def test_a_sample_that_is_too_long_is_skipped_and_the_rest_of_its_batch_is_right(
    session: CaptureSession, reference: Reference
) -> None:
    most = session.start().result(0).max_sample_tokens
    ids = random_ids([most + 1, 50, most], seed=9)
    job = submit(session, ids)
    record, captured = states_of(session, job)
    assert [o.failure.kind if o.failure else None for o in record.outcomes] == ["too_long", None, None]
    states = session._spec.capture.layout.states
    assert_right(states, [captured[1]], [reference.states(ids[1])], p99=0.1)


def test_token_ids_of_another_length_than_the_sample_says_are_refused(session: CaptureSession) -> None:
    (ids,) = random_ids([50], seed=10)
    layout = session._spec.capture.layout
    batch = Batch("wrong", (SampleRef(0, 1, 51, 51),), plan_segments([51], layout))
    job = session.submit(batch, [ids])
    failure = job.record().result(ANSWER_S).outcomes[0].failure
    assert failure is not None
    assert failure.kind == "row_mismatch"
    assert job.segment(0).result(0).size == 0


def test_after_abort_all_the_same_attempts_can_be_sent_again(
    session: CaptureSession, reference: Reference
) -> None:
    ids = random_ids([1500, 300], seed=11)
    job = submit(session, ids)
    session.abort_all()
    with pytest.raises(CancelledError):
        job.record().result(ANSWER_S)
    check(session, reference, [ids])


def test_nothing_is_left_in_shared_memory_and_the_logs_are_files(session: CaptureSession) -> None:
    pid = session.start().result(0).process_ids[0]
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "memfd:hsdump-ring (deleted)" in maps
    log = Path(session._spec.log_dir) / "engine-0-dp0-tp0.log"
    assert os.readlink(f"/proc/{pid}/fd/1") == str(log)
    assert "Load weight end" in log.read_text()


def test_when_a_scheduler_process_is_killed_everything_in_flight_is_told(session: CaptureSession) -> None:
    job = submit(session, random_ids([3000, 3000], seed=12))
    os.kill(session.start().result(0).process_ids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"scheduler process \d+ .* is gone|exit code -9"):
        job.record().result(60)
    with pytest.raises(EngineDead):
        job.segment(job.num_segments - 1).result(60)
    with pytest.raises(EngineDead):
        session.check_alive()
    with pytest.raises(EngineDead):
        submit(session, random_ids([5], seed=13))
