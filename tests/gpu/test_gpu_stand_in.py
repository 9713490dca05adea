"""A stand-in beside an engine on the same GPU, where the identity check can't watch the family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import capture_faults
import pytest
from capture_support import engine_spec, running
from conformance_cases import CPU_ARGS, GPU_ARGS, TEST_GPUS
from tiny_models import make

from actors.messages import EngineSpec
from storage.errors import ProofFailed

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def spec_of(models_dir: Path, logs: Path) -> EngineSpec:
    args = GPU_ARGS if TEST_GPUS else CPU_ARGS
    return replace(engine_spec(make("llama", models_dir), (2, 4, 6), logs, **args), gpus=TEST_GPUS)


def test_a_stand_in_proves_the_places_that_the_identity_check_cannot(models_dir: Path, tmp_path: Path):
    with running(spec_of(models_dir, tmp_path), capture_faults.unwatchable) as session:
        report = session.start().result(0).capture_report
    assert report["not_provable"] == ["identity of 2", "identity of 4", "identity of 6"]
    passed = {c["check"]: c["detail"] for c in report["checks"] if c["status"] == "passed"}
    for boundary in (2, 4, 6):
        assert f"{boundary} of 8 random layers: median 0.00" in passed[f"stand-in of {boundary}"]
    print(report["stand_in"]["took_s"], *passed.items(), sep="\n")


def test_a_stand_in_refuses_a_capture_that_is_one_boundary_off(models_dir: Path, tmp_path: Path):
    with (
        pytest.raises(ProofFailed, match=r"stand-in of 2: .* the nearest is 3"),
        running(spec_of(models_dir, tmp_path), capture_faults.unwatchable_and_one_layer_off),
    ):
        pass
