"""Every family's captured states against Hugging Face in float32, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from capture_support import Reference, assert_right, engine_spec, random_ids, running, states_of, submit

from actors.capture.proof import report_lines
from actors.capture.session import CaptureSession

pytestmark = pytest.mark.slow

BOUNDARIES = {"llama": [0, 2, 4, 7], "qwen3": [1, 2, 5], "qwen3_moe": [0, 3, 7], "deepseek_v3": [0, 2, 4, 7]}
# A router that tips the other way moves single tokens of a mixture of experts far.
P99 = {"llama": 0.1, "qwen3": 0.1, "qwen3_moe": 0.35, "deepseek_v3": 0.35}


@pytest.fixture(scope="module", params=list(BOUNDARIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, models_dir: Path) -> Path:
    return tiny_models.make(family, models_dir)


@pytest.fixture(scope="module")
def session(family: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaptureSession]:
    spec = engine_spec(model, BOUNDARIES[family], tmp_path_factory.mktemp("logs"))
    with running(spec) as session:
        yield session


def test_states_equal_hugging_face_token_by_token(session: CaptureSession, family: str, model: Path) -> None:
    ids = random_ids([5, 33, 300, 700, 128], seed=1)
    record, captured = states_of(session, submit(session, ids))
    assert [o.failure for o in record.outcomes] == [None] * len(ids)
    reference = Reference(model)
    states = session._spec.capture.layout.states
    assert states == (*BOUNDARIES[family], "final", "final_normed")
    assert_right(states, captured, [reference.states(x) for x in ids], P99[family])


def test_the_proof_passes_and_says_where_the_hook_is(session: CaptureSession, family: str) -> None:
    report = session.start().result(0).capture_report
    assert report["passed"]
    assert report["not_provable"] == []
    assert {c["status"] for c in report["checks"]} == {"passed"}
    proved = {c["check"] for c in report["checks"]}
    assert {f"identity of {b}" for b in [*BOUNDARIES[family], "final"]} <= proved
    lines = report_lines(report)
    assert len(lines) == 5
    assert report["processes"][0]["hooked"] in lines[0]
