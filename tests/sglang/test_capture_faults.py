"""What would make states wrong stops the start, by the proof itself and without a list of bad models."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import capture_faults
import pytest
import tiny_models
from capture_support import Reference, engine_spec, import_few_models, random_ids, running
from conformance import P99_DENSE, measure

from actors.capture.probe import probe
from storage.errors import EngineDead, ModelError, ProofFailed, ResourceError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llama(models_dir: Path) -> Path:
    return tiny_models.make("llama", models_dir)


def test_a_collector_that_is_one_layer_off_is_noticed_and_not_used(llama: Path, tmp_path: Path) -> None:
    with running(engine_spec(llama, [2, 4], tmp_path), capture_faults.one_layer_off) as session:
        report = session.start().result(0).capture_report
        (process,) = report["processes"]
        assert (process["consulted"], process["read_at_layers"]) == ([], [2, 4])
        assert report["passed"]
        assert not [e.wrong(P99_DENSE) for e in measure(session, Reference(llama)) if e.wrong(P99_DENSE)]


def test_where_every_place_is_one_layer_off_a_probe_says_no_go_and_identity_alone_notices(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import_few_models()
    rows = random_ids([20], seed=1)
    found = probe(engine_spec(llama, [2, 4], tmp_path), rows, capture_faults.every_place_one_layer_off)
    assert not found.go
    assert isinstance(found.error, ProofFailed)
    assert re.search(r"identity of 2: median .*identity of 4: median", found.lines[0])
    assert "taken once" not in found.lines[0]
    assert "outputs" not in found.lines[0]
    logs = re.search(r"no-go after \d+ s; the logs are in (\S+) on", found.lines[1])
    assert logs is not None
    assert "Load weight end" in Path(logs[1], "engine-0-dp0-tp0.log").read_text()
    shutil.rmtree(logs[1])
    assert capfd.readouterr() == ("", "")


def test_the_models_own_flag_breaks_the_wrappers_contract(llama: Path, tmp_path: Path) -> None:
    """Why the flag stays off: the wrapper unpacks a pair that it doesn't get, and the engine dies."""
    begun = time.monotonic()
    with (
        pytest.raises(EngineDead, match="is gone"),
        running(engine_spec(llama, [2, 4], tmp_path), capture_faults.models_own_flag),
    ):
        pass
    assert time.monotonic() - begun < 120, "a dead engine was waited for"
    assert "values to unpack" in (tmp_path / "engine-0-dp0-tp0.log").read_text()


def test_a_model_that_does_not_load_is_named(llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in ("config.json", "generation_config.json"):
        (broken / file).write_bytes((llama / file).read_bytes())
    with (
        pytest.raises(ModelError, match="Cannot find any model weights"),
        running(engine_spec(broken, [2, 4], tmp_path)),
    ):
        pass


def test_gpus_that_are_not_there_are_counted_before_anything_is_loaded(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import dataclasses

    spec = dataclasses.replace(engine_spec(llama, [2], tmp_path), gpus=8)
    with pytest.raises(ResourceError, match="needs 8 GPUs and sees 0"), running(spec):
        pass
