"""What a rehearsal runs, and what it makes of what it measured."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from actors.rows import Counts
from actors.run_messages import RunSummary
from cluster.config import RunConfig
from cluster.rehearse import lengths, measured, rehearsal, write_prompts
from storage.errors import OutputError
from storage.files import Store
from storage.removal import remove_dump
from storage.table import Account

RUN = RunConfig.model_validate(
    yaml.safe_load(
        "{model: {path: m}, prompts: {url: p.jsonl, limit: 5}, output: 's3://b/dump/', "
        "engine: {gpus: 8, data_parallel: 2, args: {mem_fraction_static: 0.8}}, writers: {per_node: 3}}"
    )
)


def test_everything_but_the_engine_and_the_output_is_the_runs_own():
    made = rehearsal(RUN, 4, 1000.0, None, local=False)
    assert (made.engine.kind, made.engine.count, made.engine.gpus) == ("synthetic", 4, 8)
    assert made.engine.args == {"tokens_per_s": 1000.0}
    assert made.output.startswith("s3://b/dump-rehearsal-")
    assert (made.prompts, made.writers, made.limits) == (RUN.prompts, RUN.writers, RUN.limits)


def test_on_this_machine_engines_need_no_gpus_and_generated_prompts_are_all_taken():
    made = rehearsal(RUN, 4, 0.0, Path("/tmp/x.parquet"), local=True)
    assert (made.engine.gpus, made.engine.data_parallel) == (0, 1)
    assert (made.prompts.url, made.prompts.loss_mask, made.prompts.limit) == ("/tmp/x.parquet", "all", None)
    RunConfig.model_validate(made.model_dump())


def test_generated_lengths_are_those_of_conversations(tmp_path: Path):
    assert lengths(20_000, 1 << 20).mean() == pytest.approx(1730, rel=0.02)
    assert lengths(20_000, 4096).max() == 4096
    write_prompts(tmp_path / "p.parquet", 2500, 64)
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert [len(r["input_ids"]) for r in rows] == lengths(2500, 64).tolist()
    assert len({r["id"] for r in rows}) == 2500


def test_speeds_and_what_they_were_bound_by():
    counts = Counts(pending=0, in_flight=0, written=0, committed=100, skipped=0, failed=0)
    account = Account(rows=100, committed=100, skipped=0, failed=0, tokens=50_000, kept=50_000)
    summary = RunSummary(counts, account, None, 4 * 10**9, 2.0, {})
    point = {"busy_s": 3.0, "waiting_s": 1.0, "ring_wait_s": 0.0, "write_s": 2.5, "seal_s": 0.5}
    looks = [point | {"bottleneck": b} for b in ("nothing", "engine", "engine", "engine", "writer")]
    lines = measured(summary, looks)
    assert "50 samples/s, 25,000 tokens/s, 2.00 GB/s written" in lines[0]
    assert lines[1] == "bound by: engine 75%, writer 25% (of 4 looks)"
    assert "take more --rows" in measured(summary, looks[:1])[1]


def test_only_a_dump_is_removed(tmp_path: Path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(OutputError, match="nothing was removed"):
        remove_dump(Store(str(tmp_path)))
    assert (tmp_path / "mine").exists()
