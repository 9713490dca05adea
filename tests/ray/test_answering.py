"""The pass in which the model answers rows: killed in the middle of it and resumed, with made-up answers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from collect_support import Collecting, hsdump
from run_files import made_up_run_file

from actors.questions import Ask
from actors.synthetic import synthetic_reply, synthetic_states
from storage import open_dump
from storage.files import Store
from storage.prompts import ASKED, PromptTable

pytestmark = pytest.mark.slow

ROWS = 40
ANSWERS = 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose answers take some twenty seconds; a part of them is committed every five."""
    rows = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(ROWS)]
    rows.append({"id": "said", "messages": [*rows[0]["messages"], {"role": "assistant", "content": "four"}]})
    return made_up_run_file(
        tmp_path,
        rows,
        prompts={"max_tokens": 200, "loss_mask": "last_turn"},
        generate={"max_new_tokens": 80, "temperature": 1.0, "n": ANSWERS, "concurrent_rows": 8},
        # The first engine dies with its 30th row.
        engine={"args": {"tokens_per_s": 200.0, "die_at_sample": 30, "engines": ["engine-0"]}},
        limits={"object_store_bytes": 200 << 20},
    )


def committed(dump: Path) -> dict[str, list[int]]:
    """Rows of each part of the answers."""
    parts = sorted((dump / "prompts/answers").glob("*.parquet"))
    return {part.name: pq.read_table(part, columns=["row"])["row"].to_pylist() for part in parts}


def wait_for_parts(collecting: Collecting, dump: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(committed(dump)) < count:
        assert collecting.process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def coordinator_of(collecting: Collecting) -> int:
    """The process that leads the pass, by the title that Ray gives it."""
    found = []
    for process in psutil.Process(collecting.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith("ray::AnsweringCoordinator") for part in process.cmdline()):
                found.append(process.pid)
    assert len(found) == 1
    return found[0]


def test_a_run_killed_while_the_model_answers_goes_on_with_what_is_left(run: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    collecting = Collecting(run)
    try:
        collecting.until("engine-0 is gone")
        wait_for_parts(collecting, dump, 1)
        os.kill(coordinator_of(collecting), signal.SIGKILL)
        collecting.until("the coordinator died; a new one starts from the manifests, engines go on")
        wait_for_parts(collecting, dump, len(committed(dump)) + 1)
        collecting.process.kill()
        collecting.process.wait()
    finally:
        collecting.end()
    before = committed(dump)
    kept = [row for rows in before.values() for row in rows]
    assert 0 < len(kept) < ROWS * ANSWERS
    assert not (dump / "prompts/_prepared.json").exists()

    done = hsdump("collect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    after = committed(dump)
    assert {name: after[name] for name in before} == before
    said = sorted(row for rows in after.values() for row in rows)
    assert said == list(range(ROWS * ANSWERS)), "every row was answered once"
    assert f"{ROWS * ANSWERS + 1} rows = {ROWS * ANSWERS + 1} committed + 0 skipped + 0 failed" in done.stdout
    assert_samples(dump)


def assert_samples(folder: Path) -> None:
    """Every sample is its question and its made-up answer, with the states of just these tokens."""
    dump, store = open_dump(str(folder)), Store(str(folder))
    asked, table = PromptTable(store, ASKED), PromptTable(store)
    longest, seeds = asked.questions()
    assert len(dump) == ROWS * ANSWERS + 1
    for sample in dump:
        row, question = table.load(sample.row), asked.load(sample.row)
        assert sample.sample_id == row.sample_id == question.sample_id
        ids = question.token_ids
        if sample.sample_id != "said":
            ask = Ask(ids, int(longest[sample.row]), int(seeds[sample.row]))
            ids = np.concatenate([ids, synthetic_reply(sample.row, ask).token_ids])
            assert sample.loss_mask.tolist() == [0] * len(question.token_ids) + [1] * (
                len(ids) - len(question.token_ids)
            )
        assert sample.token_ids.tolist() == ids.tolist()
    first = dump["s0/answer-1"]
    expected = synthetic_states(first.sample_id, first.tokens, dump.layout)
    bits = first.stack().transpose(0, 1).contiguous().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, expected)
