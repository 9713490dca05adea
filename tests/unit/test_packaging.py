"""What an installation holds, and that the example runs are valid."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pydantic import BaseModel

from cluster.config import RunConfig
from cluster.run_file import load_run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_and_no_tests(tmp_path: Path):
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            ".",
            "./source",
        ],
        cwd=tmp_path,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.startswith("hsdump-")}
    assert tops == {"actors", "cluster", "storage"}
    assert "actors/capture/standin/sgl_kernel/__init__.py" in names


@pytest.mark.parametrize("name", ["demo", "kimi-k2.5", "llama-3.1-8b-s3"])
def test_example_runs_are_valid(name: str):
    load_run(str(ROOT / f"examples/{name}.yaml"))


def test_the_kimi_example_is_the_reference_run():
    run = load_run(str(ROOT / "examples/kimi-k2.5.yaml"))
    assert run.capture.boundaries == (3, 31, 59)
    assert run.engine.gpus == 8


def sections(model: type[BaseModel], path: str = ""):
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field.description
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{path}{name}.")


def test_every_key_of_a_run_file_is_documented():
    undocumented = [name for name, description in sections(RunConfig) if not description]
    assert undocumented == []
