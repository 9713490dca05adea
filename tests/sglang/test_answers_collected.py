"""A real model answers rows in a real engine, and its answers are captured: held against Hugging Face."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from collect_support import hsdump

from storage import open_dump
from storage.files import Store
from storage.prompts import PromptTable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = ROOT / "examples/questions.jsonl"
END_OF_TURN = 2
TOKEN_GAP = 0.3
"""Logits by which a greedy token may miss the largest one, of 6 to 20: the engine computes in bfloat16."""


@pytest.fixture(scope="module")
def collected(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("answers")
    tree = {
        "model": {"path": str(smollm2)},
        "prompts": {"url": str(QUESTIONS), "max_tokens": 2048, "loss_mask": "last_turn"},
        "generate": {"max_new_tokens": 24},
        "output": str(folder / "dump"),
        "engine": {"gpus": 0},
        "limits": {"object_store_bytes": 512 << 20},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    done = hsdump("collect", folder / "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dump", done


def test_answers_are_the_greedy_ones_of_hugging_face(collected, smollm2):
    from transformers import AutoModelForCausalLM

    dump, _ = collected
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    table, agree, total, finishes = PromptTable(Store(str(dump))), 0, 0, set()
    for sample in open_dump(str(dump)):
        answer = table.answer(sample.row)
        if answer is None:
            continue
        ids = sample.token_ids.long()
        start = answer.answer_start
        with torch.no_grad():
            logits = model(ids[None]).logits[0, start - 1 : -1]
        best = logits.max(dim=-1).values
        said = logits.gather(1, ids[start:, None])[:, 0]
        assert (best - said).max() <= TOKEN_GAP, sample.sample_id
        agree += int((logits.argmax(dim=-1) == ids[start:]).sum())
        total += len(ids) - start
        finishes.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            assert ids[-1] == END_OF_TURN
            assert (ids[start:-1] != END_OF_TURN).all()
        else:
            assert len(ids) - start == 24
    assert finishes == {"stop", "length"}
    assert total > 150
    assert agree / total > 0.95


def test_masks_are_the_answers_and_a_row_that_was_answered_passes(collected):
    dump, _ = collected
    table = PromptTable(Store(str(dump)))
    for sample in open_dump(str(dump)):
        answer = table.answer(sample.row)
        if answer is None:
            assert sample.sample_id == "answered"
            continue
        assert not sample.loss_mask[: answer.answer_start].any()
        assert sample.loss_mask[answer.answer_start :].all()
    assert table.answer(open_dump(str(dump))["answered"].row) is None


def test_states_of_answered_rows_agree_with_the_reference(collected):
    dump, _ = collected
    done = hsdump("verify", dump, "--reference", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("3 of 3 good") == 4


def test_nothing_of_the_answers_was_captured_while_they_were_said(collected):
    dump, done = collected
    record = json.loads((dump / "run.json").read_text())
    assert record["answering"]["rows"] == 11
    assert record["counts"]["committed"] == 12
    assert record["events"] == {}
    (engine,) = json.loads((dump / "capture_report.json").read_text()).values()
    assert engine["passed"]
    assert "answers of" in done.stdout


def test_inspect_shows_an_answer(collected):
    dump, _ = collected
    done = hsdump("inspect", dump, "capital")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "the model's own answer begins at token" in done.stdout
