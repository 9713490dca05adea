"""``hsdump repair``, as a person runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_dumps import make_dump

from cluster.cli import run_cli
from storage.layout import hidden_key, manifest_key


def test_a_dry_run_lists_and_a_repair_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_dump(tmp_path, [5, 9])
    store.put_if_absent("claims/7.json", b'{"shard": 7, "run_id": "r", "writer": "w"}')
    store.put_if_absent(hidden_key(7), bytes(2048))
    assert run_cli(["repair", str(tmp_path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would remove hidden/c/7/0/0 (2.0 KiB)" in out
    assert "1 leftovers, 2.0 KiB, would be removed" in out
    assert store.exists(hidden_key(7))
    assert not store.exists(manifest_key(7))
    assert run_cli(["repair", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "removed hidden/c/7/0/0 (2.0 KiB)" in out
    assert "revoked the claims of uncommitted shards 7" in out
    assert not store.exists(hidden_key(7))
    assert run_cli(["repair", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 leftovers, 0 B, removed\n"


def test_no_dump_is_the_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["repair", str(tmp_path)]) == 2
    assert "there is no dump here" in capsys.readouterr().err
