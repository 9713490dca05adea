"""What keeps a node from working for a run, and that it is said with value and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.admission import Needs
from cluster.node_report import NodeReport, Question, look, problems, versions
from cluster.placement import Node
from storage.files import Store

GIB = 1 << 30
HERE = {"python": "3.11.7", "hsdump": "0.1.0", "ray": "2.60.0", "sglang": "0.5.23", "torch": "2.14.1"}
GOOD = NodeReport(HERE, shm_bytes=8 * GIB)


def said(report: NodeReport, with_model: bool = True) -> str:
    return "; ".join(problems(report, HERE, 4 * GIB, with_model))


def test_a_node_like_this_one_may_work():
    assert said(GOOD) == ""
    assert said(replace(GOOD, versions=HERE | {"python": "3.11.9"})) == ""


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("python", "3.12.1"),
        ("ray", "2.59.0"),
        ("sglang", "0.5.22"),
        ("torch", "2.14.0"),
        ("hsdump", "not installed"),
    ],
)
def test_another_version_is_named_with_both(name: str, has: str):
    line = said(replace(GOOD, versions=HERE | {name: has}))
    assert line.startswith(f"{name} is {has} there and {HERE[name]} here")


def test_a_node_without_the_model_needs_no_engine_software():
    bare = replace(GOOD, versions=HERE | {"sglang": "not installed", "torch": "2.0"})
    assert said(bare, with_model=False) == ""
    assert "sglang" in said(bare)


def test_a_head_without_sglang_says_nothing_about_the_nodes():
    here = HERE | {"sglang": "not installed"}
    assert problems(GOOD, here, GIB, with_model=True) == []


def test_an_object_store_that_doesnt_fit_into_shared_memory_is_named_with_both():
    line = said(replace(GOOD, shm_bytes=GIB // 16))
    assert "/dev/shm has 0.1 GiB and the object store 4.0 GiB" in line
    assert "--shm-size" in line


def test_everything_that_is_wrong_is_said_at_once():
    bad = replace(
        GOOD, shm_bytes=0, output_problem="what this machine wrote isn't there", model_problem="no model"
    )
    line = said(bad)
    assert "/dev/shm" in line
    assert "it doesn't see the output: what this machine wrote isn't there; use a shared file system" in line
    assert line.endswith("no model")


def test_a_node_looks_at_output_and_model(tmp_path: Path):
    store = Store(str(tmp_path / "dump"))
    store.put_if_absent(".tmp/probe-n", b"n")
    question = Question("run", store, "n", str(tmp_path / "model"), None)
    report = look(question, [])
    assert store.exists(".tmp/answer-n")
    assert report.output_problem == ""
    assert "no such folder" in report.model_problem
    assert report.versions == versions()
    (tmp_path / "model").mkdir()
    assert look(replace(question, nonce="other"), []).output_problem == "what this machine wrote isn't there"
    assert look(replace(question, nonce=None), []).model_problem == ""


def test_a_node_that_doesnt_see_the_output_gets_a_copy_of_the_prompts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    question = Question("run", Store(str(tmp_path / "dump")), None, None, None)
    report = look(question, ["prompts/a"], b"rows")
    assert report.prompts_url is not None
    assert (Path(report.prompts_url) / "prompts/a").read_bytes() == b"rows"


def test_an_engine_fits_by_gpus_or_by_cpus():
    node = Node("n", "host", "127.0.0.1", 8, 4, GIB)
    assert Needs(gpus=4).engine_on(node)
    assert not Needs(gpus=8).engine_on(node)
    assert Needs(gpus=0).engine_on(node)
    assert not Needs(gpus=0).engine_on(replace(node, cpus=0))
