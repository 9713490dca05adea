"""The main job as a person runs it: a real model in a real engine, through Ray, to a committed dump."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from collect_support import hsdump, run_file, shared_memory
from torch.utils.data import DataLoader

from storage import DumpDataset, open_dump
from storage.float8 import EXPECTED_ERROR
from storage.reference import per_token_error

pytestmark = pytest.mark.slow

BYTES_A_TOKEN = 5 * 576 * 2


@pytest.fixture(scope="module")
def collected(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path
) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """Run file, dump and the finished command."""
    folder = tmp_path_factory.mktemp("collect")
    # Rows with every reason to skip one, and short ones: bfloat16 is slow on a CPU that has no instructions for it.
    run = run_file(folder, smollm2, folder / "dump", limit=42, max_tokens=300)
    before = shared_memory()
    done = hsdump("collect", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() == before
    return run, folder / "dump", done


def test_the_account_adds_up_and_is_printed(collected):
    _, dump, done = collected
    prepared = json.loads((dump / "prompts/_prepared.json").read_text())
    assert prepared["rows"] == prepared["to_collect"] + prepared["skipped"]
    assert {r["kind"] for r in prepared["reasons"]} == {"broken", "duplicate", "over_long"}
    opened = open_dump(str(dump))
    assert len(opened) == prepared["to_collect"]
    assert sum(s.tokens for s in opened) == prepared["tokens"]
    counts = f"{prepared['to_collect']} committed + {prepared['skipped']} skipped + 0 failed"
    assert f"{prepared['rows']} rows = {counts}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_nothing_but_our_own_lines_is_printed(collected):
    *_, done = collected
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) < 60


def test_stock_zarr_and_tensorstore_read_what_our_reader_reads(collected):
    _, dump, _ = collected
    array = zarr.open(str(dump))["hidden"]
    store = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(dump / "hidden")}}
    ).result()
    assert array.shape == store.shape
    for record in open_dump(str(dump)).samples.to_pylist()[:5]:
        if record["status"] != "committed":
            continue
        sample = open_dump(str(dump))[record["sample_id"]]
        ours = sample.stack().contiguous().view(torch.int16).numpy().view(np.uint16)
        rows = slice(record["array_start"], record["array_start"] + record["tokens"])
        np.testing.assert_array_equal(array[rows], ours)
        np.testing.assert_array_equal(store[rows].read().result(), ours)


def test_states_agree_with_hugging_face(collected):
    _, dump, _ = collected
    done = hsdump("verify", dump, "--reference", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 of 4 good") == 5


def test_the_proof_is_in_the_dump(collected):
    _, dump, _ = collected
    (report,) = json.loads((dump / "capture_report.json").read_text()).values()
    assert report["checks"]
    assert {check["status"] for check in report["checks"]} == {"passed"}


def test_the_timeline_reaches_the_end(collected):
    _, dump, _ = collected
    last = json.loads((dump / "run.json").read_text())["timeline"][-1]
    assert last["committed_tokens"] == sum(s.tokens for s in open_dump(str(dump)))
    assert (last["engines"], last["bottleneck"]) == (1, "nothing")
    assert last["busy_s"] > 0
    assert last["seal_s"] > 0


def test_what_the_states_looked_like_is_in_the_dump(collected):
    _, dump, _ = collected
    ((engine,),) = (
        run.values() for run in json.loads((dump / "capture_statistics.json").read_text()).values()
    )
    assert list(engine["states"]) == ["2", "15", "27", "final", "final_normed"]
    assert engine["alarms"] == 0
    assert all(s["tokens"] > 100 and s["std"] > 0 for s in engine["states"].values())


def test_root_attributes_name_the_model_that_was_loaded(collected, smollm2):
    _, dump, _ = collected
    attributes = zarr.open(str(dump)).attrs
    assert attributes["identity"]["model"]["path"] == str(smollm2.resolve())
    assert attributes["bytes_per_token"] == BYTES_A_TOKEN


def test_a_spawned_data_loader_reads_the_dump(collected):
    _, dump, _ = collected
    loader = DataLoader(
        DumpDataset(str(dump)), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    item = next(iter(loader))
    tokens = len(item["input_ids"])
    assert item["hidden_states"].shape == (tokens, 5, 576)
    assert item["hidden_states"].dtype == torch.bfloat16


def test_less_is_stored_of_the_supervised_tokens_and_it_is_the_same_within_the_format_s_error(
    collected, tmp_path
):
    run, dump, _ = collected
    small = tmp_path / "small"
    less = ("--set", "capture.keep=supervised", "--set", "capture.dtype=float8", "--set", "prompts.limit=22")
    done = hsdump("collect", run, *less, "--set", f"output={small}")
    assert done.returncode == 0, done.stdout + done.stderr
    whole, some = open_dump(str(dump)), open_dump(str(small))
    assert [s.sample_id for s in some] == [s.sample_id for s in whole][: len(some)]
    assert len(some) > 15
    errors = []
    for sample in some:
        other = whole[sample.sample_id]
        assert torch.equal(sample.token_ids, other.token_ids)
        assert torch.equal(sample.positions, other.loss_mask.nonzero()[:, 0])
        errors.append(per_token_error(sample.stack(), other.stack()[other.loss_mask]))
    median = torch.cat(errors).median(dim=0).values
    assert (median < EXPECTED_ERROR).all()
    verified = hsdump("verify", small, "--reference", 2)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.count("2 of 2 good") == 5
    kept = int(some.places.kept.sum())
    assert f"states of {kept:,} (keep: supervised) x {5 * (576 + 4):,} bytes" in verified.stdout
    assert "27: error a token 0.02" in hsdump("inspect", small).stdout


def test_a_plan_with_a_probe_starts_an_engine_proves_it_and_measures_it(collected, tmp_path):
    run, dump, _ = collected
    before = {p: p.stat().st_mtime_ns for p in dump.rglob("*")}
    done = hsdump("plan", run, "--probe", "--json", "--set", f"output={tmp_path / 'dump'}")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert plan["ok"]
    assert len(plan["probe"]) == 6
    assert plan["probe"][0].startswith("capture: probe runs LlamaForCausalLM on SGLang")
    assert " 0 failed, 0 not provable here" in plan["probe"][4]
    assert re.fullmatch(r"go: ready after \d+ s; samples of up to \d+ tokens", plan["probe"][5])
    assert plan["time"]["seconds"] == pytest.approx(plan["rows"]["tokens"] / plan["time"]["tokens_per_s"])
    assert done.stderr.splitlines() == [
        "starting an engine to prove its capture: a minute, longer for a large model"
    ]
    assert list(tmp_path.iterdir()) == []
    assert {p: p.stat().st_mtime_ns for p in dump.rglob("*")} == before


def test_collecting_again_does_nothing_and_says_so(collected):
    run, dump, _ = collected
    before = {p: p.stat().st_mtime_ns for p in dump.rglob("*")}
    done = hsdump("collect", run)
    assert done.returncode == 0
    assert "is complete: nothing to do" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in dump.rglob("*")} == before


def test_another_run_into_the_same_dump_is_refused_with_the_differing_field(collected):
    run, _, _ = collected
    done = hsdump("collect", run, "--set", "capture.boundaries=[2,15,28]")
    assert done.returncode == 2
    assert "capture.boundaries: [2, 15, 28] here, [2, 15, 27] in the dump" in done.stderr


def test_one_deleted_byte_is_found_and_the_sample_named(collected, tmp_path):
    _, dump, _ = collected
    copy = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(dump), str(copy)], check=True)
    sample = open_dump(str(copy))[0]
    victim = copy / f"hidden/c/{sample.shard}/0/0"
    data = victim.read_bytes()
    victim.write_bytes(data[: sample.offset + 10] + data[sample.offset + 11 :])
    done = hsdump("verify", copy)
    assert done.returncode == 1
    assert f"sample {sample.sample_id}:" in done.stdout


def test_inspect_shows_the_dump_and_a_sample(collected):
    _, dump, _ = collected
    whole = hsdump("inspect", dump)
    assert whole.returncode == 0
    assert "2, 15, 27, final, final_normed" in whole.stdout
    one = hsdump("inspect", dump, open_dump(str(dump))[0].sample_id)
    assert one.returncode == 0
    assert "<|im_start|>assistant" in one.stdout
    missing = hsdump("inspect", dump, "no such sample")
    assert missing.returncode == 2
