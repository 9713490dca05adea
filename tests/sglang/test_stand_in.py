"""A family that the identity check can't watch: a small random model of its class decides, and it decides rightly."""

from __future__ import annotations

from pathlib import Path

import capture_faults
import pytest
from capture_support import engine_spec, running

from actors.capture.proof import report_lines
from storage.errors import ProofFailed

pytestmark = pytest.mark.slow


def test_a_stand_in_shows_that_the_right_places_are_captured(smollm2: Path, tmp_path: Path) -> None:
    with running(engine_spec(smollm2, "eagle3", tmp_path), capture_faults.unwatchable) as session:
        report = session.start().result(0).capture_report
    assert report["not_provable"] == ["identity of 2", "identity of 15", "identity of 27"]
    passed = {c["check"]: c["detail"] for c in report["checks"] if c["status"] == "passed"}
    assert passed["stand-in of 2"].startswith("2 of 8 random layers: median 0.00")
    assert passed["stand-in of 15"].startswith("4 of 8 random layers: median 0.00")
    assert passed["stand-in of 27"].startswith("5 of 8 random layers: median 0.00")
    small = report["stand_in"]
    assert small["class"] == "sglang.srt.models.llama.LlamaModel.forward"
    assert (small["config"]["num_hidden_layers"], small["config"]["vocab_size"]) == (8, 1024)
    assert small["config"]["rope_theta" if "rope_theta" in small["config"] else "rope_parameters"]
    line = report_lines(report)[2]
    assert "2 not provable here: layer 2 has no input norm that this check knows" in line
    assert "a small random model of this class against Hugging Face: 2 2 of 8 random layers: median" in line


def test_a_capture_that_is_one_boundary_off_is_refused_by_the_stand_in_alone(
    smollm2: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(
            ProofFailed, match=r"stand-in of 2: 2 of 8 .* the nearest is 3; stand-in of 15: "
        ) as failed,
        running(engine_spec(smollm2, "eagle3", tmp_path), capture_faults.unwatchable_and_one_layer_off),
    ):
        pass
    assert "identity" not in str(failed.value)
