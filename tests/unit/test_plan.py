"""The plan: what it foretells against what is really written, and every reason in one go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_dumps import states_of, write_whole
from tiny_tokenizer import tiny_tokenizer

from actors.capture.probe import Probe
from cluster.cli import run_cli
from cluster.forecast import forecast_size, memory_problems, size_problems
from cluster.placement import Node
from cluster.plan import make_plan
from storage.dump import create_dump
from storage.errors import ProofFailed
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import ShardWriter

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 64,
    "vocab_size": 4096,
}
NODE = Node("n0", "gpu-a", "10.0.0.1", 16, 8, 1 << 30, 64 << 30)


def row(number: int, words: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "four " * words}
    return {"id": f"s{number}", "messages": [{"role": "user", "content": f"What is {number}?"}, answer]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten rows, one of them twice, one over-long, one broken."""
    model = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    rows = [json.dumps(row(i, 3 + i)) for i in range(10)]
    lines = [*rows, rows[4], json.dumps(row(11, 300)), "{broken"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    tree = {
        "model": {"path": "model"},
        "prompts": {"url": "prompts.jsonl", "max_tokens": 200},
        "output": "dump",
        "engine": {"kind": "synthetic"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cluster.plan.this_machine", lambda object_store_bytes: NODE)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_cli(["plan", "run.yaml", "--json", *arguments])
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_rows_are_counted_and_nothing_is_written(folder, capsys):
    code, plan = planned(capsys, "--speed", "100", "--set", "engine.gpus=4")
    assert code == 0
    assert plan["ok"]
    rows = plan["rows"]
    assert (rows["to_collect"], rows["skipped"], rows["over_long"], rows["duplicates"]) == (10, 3, 1, 1)
    assert sum(count for _, count in rows["histogram"]) == 10
    assert 0 < rows["supervised_share"] < 1
    assert plan["size"]["states_bytes"] == rows["tokens"] * 4 * 64 * 2
    assert (plan["engines"]["engines"], plan["engines"]["gpus"], plan["engines"]["nodes"]) == (2, 8, 1)
    assert plan["time"]["seconds"] == pytest.approx(rows["tokens"] / 200)
    assert [b["state"] for b in plan["boundaries"]] == [2, 15, 27, "final_normed"]
    assert not (folder / "dump").exists()


def test_the_preview_is_the_rendered_text_with_its_mask(folder, capsys):
    _, plan = planned(capsys)
    pieces = plan["preview"]["pieces"]
    assert plan["preview"]["sample_id"] == "s0"
    assert [p["supervised"] for p in pieces] == [False, True, False]
    assert "What is 0?" in pieces[0]["text"]
    assert "four four four" in pieces[1]["text"]


def test_every_reason_is_named_at_once(folder, capsys):
    """Wrong model, output and cluster are three mistakes, and a person wants to hear of all three."""
    (folder / "dump").write_text("a file")
    code, plan = planned(capsys, "--set", "model.path=./nowhere", "--set", "engine.gpus=16")
    assert code == 2
    assert not plan["ok"]
    told = "\n".join(plan["problems"])
    for what in ("no such folder", "is a file; give a folder", "0 fit"):
        assert what in told, what
    assert all("\n" not in problem for problem in plan["problems"])
    assert plan["rows"] is None


def test_a_broken_prompt_file_leaves_the_rest_of_the_plan(folder, capsys):
    (folder / "prompts.jsonl").write_text("")
    code, plan = planned(capsys)
    assert code == 2
    assert "is empty" in plan["problems"][0]
    assert plan["engines"]["engines"] == 8
    assert plan["boundaries"]


def test_a_sample_that_no_budget_holds_is_refused_with_both_numbers(folder, capsys):
    code, plan = planned(capsys, "--set", "limits.inflight_bytes=10000")
    assert code == 2
    (problem,) = plan["problems"]
    assert f"{plan['memory']['largest_sample_bytes']:,} bytes, and only 10,000" in problem


@pytest.mark.parametrize(("samples", "said"), [(1.5, True), (2, False)])
def test_the_longest_rows_that_have_to_wait_for_each_other_are_told(folder, capsys, samples, said):
    _, plan = planned(capsys)
    room = int(samples * plan["memory"]["largest_sample_bytes"])
    run_cli(["plan", "run.yaml", "--set", f"limits.inflight_bytes={room}"])
    assert ("and two have no room" in capsys.readouterr().out) is said


def test_an_output_that_is_too_small_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1000)
    code, plan = planned(capsys)
    assert code == 2
    assert "1,000 are free" in plan["problems"][0]


def test_people_get_a_table_and_a_coloured_sample(folder, capsys):
    assert run_cli(["plan", "run.yaml", "--set", "engine.gpus=16"]) == 2
    out = capsys.readouterr().out
    for what in (
        "13 in the file; 10 to collect",
        "hidden_states[15]",
        "supervised tokens in green",
        "problem ",
    ):
        assert what in out, what


def test_the_forecast_is_what_a_writer_writes(tmp_path: Path):
    layout = Layout(states=(0, 2, "final"), hidden_size=16, chunk_rows=4, shard_rows=64)
    lengths = np.array([9, 20, 33, 5, 60, 11, 1, 40, 17, 25], np.int32)
    store = Store(str(tmp_path))
    create_dump(store, Identity({}, {}, {}, {}), layout, {})
    writer = ShardWriter(store, layout, "run", "writer-0", 6000)
    for number, tokens in enumerate(lengths):
        write_whole(writer, number, states_of(layout, number, int(tokens)))
    writer.seal_all()
    written = sum(size for key in ("hidden/c",) for size in sizes(tmp_path / key))
    written += sum(
        size for name in ("token_ids", "loss_mask") for size in sizes(tmp_path / "tokens" / name / "c")
    )
    size = forecast_size(layout, lengths, lengths, np.zeros(10, bool), 6000, 1, None)
    assert size.stored_bytes == pytest.approx(written, rel=0.1)
    assert size.states_bytes == int(lengths.sum()) * 3 * 16 * 2
    done = np.arange(10) < 5
    half = forecast_size(layout, lengths, lengths, done, 6000, 1, half_free := 1000)
    assert (half.committed_rows, half.left_tokens, half.free_bytes) == (5, int(lengths[5:].sum()), half_free)
    assert half.left_bytes < size.stored_bytes
    assert len(size_problems(half, "x")) == 1


def sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.rglob("*") if file.is_file()]


def test_a_model_that_no_gpu_holds_is_refused(folder):
    plan = make_plan("run.yaml", (), address=None, start=folder)
    assert plan.memory is not None
    assert memory_problems(plan.memory) == []
    tight = type(plan.memory)(**{**vars(plan.memory), "gpu_bytes": 100, "weights_bytes_per_gpu": 200})
    assert "raise engine.gpus" in memory_problems(tight)[0]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (Probe(True, ("go: ready",), {}, 4096, 30.0, 500.0), 0),
        (Probe(True, ("go: ready",), {}, 20, 30.0, 500.0), 2),
        (Probe(False, ("no-go",), {}, 0, 30.0, error=ProofFailed("boundary 2 is one layer off")), 2),
    ],
)
def test_a_probe_decides_and_gives_the_speed(folder, capsys, monkeypatch, found: Probe, code: int):
    monkeypatch.setattr("actors.capture.flags.installed_fields", lambda: ("disable_radix_cache", "tp_size"))
    given = []
    monkeypatch.setattr("cluster.probing.probe", lambda spec, rows: given.append((spec, rows)) or found)
    got, plan = planned(capsys, "--probe", "--set", "engine.kind=sglang")
    assert got == code
    assert plan["flags"] == {"disable_radix_cache": True, "tp_size": 1}
    assert plan["probe"] == list(found.lines)
    ((spec, rows),) = given
    assert (spec.gpus, len(rows)) == (1, 10)
    if code == 0:
        assert plan["time"]["tokens_per_s"] == 500.0
    elif found.go:
        assert "longer than the 20 tokens" in plan["problems"][0]
    else:
        assert plan["problems"] == ["boundary 2 is one layer off"]


def test_it_shows_what_storing_fewer_tokens_would_save(folder, capsys):
    _, plan = planned(capsys, "--set", "capture.keep=last:5")
    every, every_float8, supervised, _, last, _ = plan["savings"]
    assert (every["dtype"], every_float8["dtype"]) == ("bfloat16", "float8")
    assert every_float8["bytes_per_token"] == 4 * (64 + 4)
    tokens, lengths = plan["rows"]["tokens"], plan["rows"]["to_collect"]
    assert (every["keep"], every["kept"], every["bytes_per_token"]) == ("all", tokens, 4 * 64 * 2)
    assert supervised["kept"] == round(plan["rows"]["supervised_share"] * tokens)
    assert supervised["states_bytes"] == supervised["kept"] * 4 * 64 * 2
    assert (last["keep"], last["kept"], last["chosen"]) == ("last:5", 5 * lengths, True)
    assert plan["size"]["states_bytes"] == last["states_bytes"]
    run_cli(["plan", "run.yaml"])
    out = capsys.readouterr().out
    assert "float8: in all" in out
    assert "last:512" in out
