"""The driver of exports: resumes, refuses, splits, and names files safely."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from export_dumps import IDS, LENGTHS, make_export_dump, without

from cluster.cli import run_cli
from storage.errors import CorruptDump, OutputError, StorageFull
from storage.export import work
from storage.export.form import EVAL, TRAIN
from storage.export.formats import FORMATS
from storage.export.plan import ExportOptions, plan_export, split_of
from storage.export.work import finish, run_item, start
from storage.files import Store

NAMES = sorted(FORMATS)


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run_cli(["export", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_export_goes_on_and_ends_the_same(name: str, dump_url: str, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run_cli(["export", dump_url, "--to", name, str(whole), "--split", "0.4"]) == 0
    plan = plan_export(dump_url, FORMATS[name], str(stopped), ExportOptions(eval_fraction=0.4))
    start(plan)
    run_item(plan.items()[0])
    victim = next(key for key in contents(stopped) if key != "export.json")
    (stopped / victim).unlink()
    kept = {key: (stopped / key).stat().st_mtime_ns for key in contents(stopped) if key != "export.json"}
    assert json.loads((stopped / "export.json").read_text())["complete"] is False
    assert run_cli(["export", dump_url, "--to", name, str(stopped), "--split", "0.4"]) == 0
    assert contents(stopped) == contents(whole)
    assert kept == {key: (stopped / key).stat().st_mtime_ns for key in kept}
    assert json.loads((stopped / "export.json").read_text())["complete"] is True


@pytest.mark.parametrize("name", NAMES)
def test_no_file_is_named_after_a_sample(name: str, dump_url: str, tmp_path: Path) -> None:
    assert run_cli(["export", dump_url, "--to", name, str(tmp_path / "out")]) == 0
    for key in contents(tmp_path / "out"):
        assert len(key) < 100
        assert key.isascii()
        assert ".." not in key
    listed = pq.read_table(tmp_path / "out/samples.parquet").to_pydict()
    assert listed["sample_id"] == list(IDS)
    assert listed["place"] == list(range(len(IDS)))


def test_nothing_but_samples_lies_where_eagle_reads(dump_url: str, tmp_path: Path) -> None:
    assert (
        run_cli(
            [
                "export",
                dump_url,
                "--to",
                "eagle",
                str(tmp_path),
                "--draft-vocab-size",
                "9",
                "--vocab-size",
                "50",
            ]
        )
        == 0
    )
    assert len(list((tmp_path / TRAIN).rglob("*"))) == len(LENGTHS)


def test_a_split_depends_on_the_id_alone(dump_url: str, tmp_path: Path) -> None:
    plan = plan_export(dump_url, FORMATS["eagle"], str(tmp_path), ExportOptions(eval_fraction=0.4))
    held_out = {IDS[n] for part in plan.split_parts(EVAL) for n in part.numbers}
    assert held_out == {i for i in IDS if split_of(i, 0.4) == EVAL}
    assert 0 < len(held_out) < len(IDS)
    shares = [split_of(f"sample-{i}", 0.1) for i in range(5000)]
    assert shares.count(EVAL) / 5000 == pytest.approx(0.1, abs=0.02)
    few = plan_export(dump_url, FORMATS["eagle"], str(tmp_path), ExportOptions(max_samples=3))
    assert [n for part in few.parts for n in part.numbers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "lacking", "options", "remedy"),
    [
        ("speculators", ("final",), [], "capture.final: true"),
        ("specforge", ("final_normed",), [], "capture.final_normed: true"),
        ("modelopt", ("final_normed",), [], "capture.final_normed: true"),
        ("eagle", ("final_normed",), [], "capture.final_normed: true"),
        ("angelslim", (15,), [], "capture.boundaries: eagle3"),
        ("deepspec", (2, 15, 27), [], "capture.boundaries"),
        ("specforge", (), ["--boundaries", "3,15,27"], "capture.boundaries: [2, 3, 15, 27]"),
        ("specforge", (), ["--boundaries", "15,27"], "exactly 3"),
        ("eagle", (), ["--boundaries", "15"], "leave the option out"),
    ],
)
def test_what_a_dump_lacks_is_refused_with_the_option_to_add(
    name: str,
    lacking: tuple[object, ...],
    options: list[str],
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = make_export_dump(tmp_path / "dump", without(*lacking), [5, 9])
    code, said = say(capsys, url, "--to", name, str(tmp_path / "out"), *options)
    assert (code, remedy in said) == (2, True), said
    assert not (tmp_path / "out").exists()


def test_of_more_boundaries_eagle3s_are_taken_or_the_user_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = make_export_dump(tmp_path / "more", without(states=(2, 3, 15, 27, "final_normed")), [5])
    plan = plan_export(more, FORMATS["specforge"], str(tmp_path / "a"), ExportOptions())
    assert plan.selection.boundaries == (2, 15, 27)
    other = make_export_dump(tmp_path / "other", without(states=(1, 3, 15, 27, "final_normed")), [5])
    code, said = say(capsys, other, "--to", "specforge", str(tmp_path / "b"))
    assert code == 2
    assert "--boundaries 1,3,15" in said


def test_deepspec_refuses_other_types_than_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make_export_dump(tmp_path / "dump", without(dtype="float16"), [5])
    code, said = say(capsys, url, "--to", "deepspec", str(tmp_path / "out"))
    assert code == 2
    assert "model.dtype: bfloat16" in said


def test_another_export_or_other_files_are_never_mixed_with(
    dump_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert say(capsys, dump_url, "--to", "eagle", out)[0] == 0
    code, said = say(capsys, dump_url, "--to", "eagle", out, "--max-samples", "3")
    assert code == 2
    assert "splits: {'train': 3} here, {'train': 7} there" in said
    assert "format: 'angelslim' here" in say(capsys, dump_url, "--to", "angelslim", out)[1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    assert "isn't empty" in say(capsys, dump_url, "--to", "eagle", str(tmp_path / "mine"))[1]
    assert "inside the dump" in say(capsys, dump_url, "--to", "eagle", f"{dump_url}/export")[1]


def test_the_estimate_comes_first_and_a_full_disk_is_refused(
    dump_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = say(capsys, dump_url, "--to", "specforge", str(tmp_path / "out"), "--dry-run")
    assert code == 0
    assert "85 tokens x 128 bytes" in said
    assert "one file a sample" in said
    assert "numbering [1, 14, 26]" in said
    assert not (tmp_path / "out").exists()
    plan = plan_export(dump_url, FORMATS["specforge"], str(tmp_path / "out"), ExportOptions())
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1000)
    with pytest.raises(StorageFull, match="--max-samples"):
        start(plan)


def test_the_estimate_is_near_what_is_written(tmp_path: Path) -> None:
    url = make_export_dump(tmp_path / "dump", without(hidden_size=512, shard_rows=1024), [300] * 4)
    for name in NAMES:
        plan = plan_export(url, FORMATS[name], str(tmp_path / name), ExportOptions())
        start(plan)
        done = [run_item(item) for item in plan.items()]
        written = sum(p.stat().st_size for p in (tmp_path / name / TRAIN).rglob("*") if p.is_file())
        assert 0.9 * plan.bytes < written <= plan.bytes, name
        assert sum(d.written for d in done) >= plan.files


def test_a_machine_that_sees_another_destination_is_told(dump_url: str, tmp_path: Path) -> None:
    plan = plan_export(dump_url, FORMATS["eagle"], str(tmp_path), ExportOptions())
    with pytest.raises(OutputError, match="doesn't see the export"):
        run_item(plan.items()[0])


def test_an_export_never_ends_with_parts_missing(
    dump_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(FORMATS["eagle"]), "part_bytes", 500)
    plan = plan_export(dump_url, FORMATS["eagle"], str(tmp_path), ExportOptions())
    start(plan)
    assert len(plan.items()) > 2
    done = [run_item(item) for item in plan.items()[1:]]
    with pytest.raises(CorruptDump, match="missing"):
        finish(plan, done, work.ServingIds((), (), ()))


def test_damage_in_the_dump_is_never_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = make_export_dump(tmp_path / "dump")
    shard = tmp_path / "dump/hidden/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    code, said = say(capsys, url, "--to", "speculators", str(tmp_path / "out"))
    assert code == 1
    assert "sample" in said
    assert not (tmp_path / "out/train/state.json").exists()
