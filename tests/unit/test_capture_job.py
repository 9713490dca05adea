"""What a batch says of samples that were looked at twice, and of unusual tokens."""

import numpy as np
import pytest

from actors.capture.boundary import capture_spec
from actors.capture.job import CaptureJob
from actors.capture.statistics import Alarms, StateStatistics
from actors.messages import Batch, EngineSpec, SampleRef, plan_segments

CAPTURE = capture_spec(
    [2], final=False, final_normed=True, num_layers=8, hidden_size=16, dtype="bfloat16", chunk_rows=32,
    shard_rows=64,
)  # fmt: skip
SPEC = EngineSpec(
    "engine-0", "sglang", "", "run", "/models/m", "bfloat16", 0, 1, False, CAPTURE, 0, "/logs", 60.0, 60.0
)
TOKENS = 40


def states(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0x3F00, 0x4000, (TOKENS, 16)).astype(np.uint16) for _ in range(2)]


@pytest.fixture
def job():
    ids = [np.arange(TOKENS, dtype=np.int32) for _ in range(2)]
    refs = (SampleRef(7, 1, TOKENS, TOKENS), SampleRef(8, 1, TOKENS, TOKENS))
    batch = Batch("b", refs, plan_segments([TOKENS, TOKENS], CAPTURE.layout))
    watch = (StateStatistics(CAPTURE.layout), Alarms(CAPTURE.layout))
    job = CaptureJob(batch, SPEC, ids, 1, [1], watch)
    for i, rid in enumerate(job.rids):
        job.put(rid, 0, states(i), ids[i])
    return job


def second(job, seed):
    job.looks[1].put("again", 0, states(seed), np.arange(TOKENS))


def failures(job):
    job.judge_looks()
    return [o.failure and (o.failure.kind, o.failure.reason) for o in job.join.outcomes()]


def test_only_the_sample_that_is_looked_at_has_an_id_that_says_so(job):
    assert job.rids == ["hs:run:7:1:1", "hs:run:8:1:1:checked"]


def test_two_equal_captures_and_a_fitting_next_token_pass(job):
    second(job, 1)
    job.found("next_token", {"rid": job.rids[1], "end": TOKENS, "gap": 0.001})
    assert failures(job) == [None, None]


def test_a_second_capture_that_differs_fails_its_sample_alone(job):
    second(job, 99)
    first, (kind, reason) = failures(job)
    assert first is None
    assert kind == "bad_states"
    assert reason.startswith("state 2, captured in another forward, differs by")


def test_a_next_token_that_lm_head_does_not_give_fails_its_sample(job):
    second(job, 1)
    job.found("next_token", {"rid": job.rids[1], "end": 10, "gap": 0.0})
    job.found("next_token", {"rid": job.rids[1], "end": TOKENS, "gap": 0.3})
    assert failures(job)[1] == (
        "bad_states",
        "the engine's next token is 0.300 of the largest logit below the maximum of lm_head over final_normed",
    )


def test_samples_looked_at_come_last_and_may_be_preceded_where_the_others_fill_a_forward(job):
    assert job.looked_last == [0, 1]
    job.looks = {0: job.looks[1]}
    assert job.looked_last == [1, 0]
    assert job.looks_ahead(TOKENS)
    assert not job.looks_ahead(TOKENS + 1)


def test_every_sample_is_counted(job):
    statistics, _ = job._watch
    assert statistics.summary()["2"]["tokens"] == 2 * 2  # rows 0 and 32
