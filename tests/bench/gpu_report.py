"""Rows of `bench_gpu`: from rounds to ratios, a file that several invocations add to, and a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Round = Mapping[str, Any]
MARGIN_S = 12.0
"""Time that is left over for the end of an invocation."""


def rows_of(
    rounds: Sequence[Round], baseline: str, common: Mapping[str, Any], single: str | None = None
) -> list[dict[str, Any]]:
    """A row for each arm: medians over the rounds, and of the ratios to the baseline of the same round.

    Args:
        rounds: ``round``, ``arm``, ``tokens``, ``seconds`` and whatever else an arm said.
        baseline: the arm that ratios are to.
        common: fields of every row.
        single: the arm of one engine, where several run at a time; ``times_one_engine`` is to it.
    """
    speeds: dict[str, dict[int, float]] = {}
    for r in rounds:
        speeds.setdefault(r["arm"], {})[r["round"]] = r["tokens"] / r["seconds"]
    rows = []
    for arm, by_round in speeds.items():
        mine = [r for r in rounds if r["arm"] == arm]
        row = {
            "case": arm,
            **common,
            "tokens_per_s": round(statistics.median(by_round.values())),
            "ratio_to_plain": _ratio(by_round, speeds.get(baseline, {})),
            "ratios": _ratios(by_round, speeds.get(baseline, {})),
            "rounds": len(by_round),
            "tokens": mine[0]["tokens"],
            "seconds": [round(r["seconds"], 2) for r in mine],
        }
        if single is not None:
            row["times_one_engine"] = _ratio(by_round, speeds.get(single, {}))
        if "rows_back" in mine[0]:
            row["rows_back"] = [r["rows_back"] for r in mine]
        if "until_last_answer_s" in mine[0]:
            row["tail_s"] = [round(r["seconds"] - r["until_last_answer_s"], 2) for r in mine]
            row["mb_per_s"] = round(statistics.median(r["stored_bytes"] / r["seconds"] for r in mine) / 1e6)
        rows.append(row)
    return rows


def _ratios(by_round: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [round(speed / base[r], 4) for r, speed in by_round.items() if r in base]


def _ratio(by_round: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    ratios = _ratios(by_round, base)
    return round(statistics.median(ratios), 4) if ratios else None


def environment() -> dict[str, Any]:
    """Host, versions and date, for every row."""
    versions = {"python": platform.python_version()}
    for name in ("sglang", "torch", "ray", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    memory = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
    shm = os.statvfs("/dev/shm")
    host = {
        "gpu": _gpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20),
        "shm_gib": round(shm.f_blocks * shm.f_frsize / 2**30),
        "kernel": platform.release(),
    }
    return {"host": host, "versions": versions, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0]


class Report:
    """``gpu.json`` and ``gpu-rounds.jsonl`` in a folder; written after every step, so that a kill loses none.

    Args:
        folder: where to; rows of earlier invocations stay.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._rows_file, self._rounds_file = folder / "gpu.json", folder / "gpu-rounds.jsonl"
        self._earlier = json.loads(self._rows_file.read_text()) if self._rows_file.exists() else []
        self._environment = environment()
        self.rows: list[dict[str, Any]] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows; a case of the same model and GPUs replaces its row of before."""
        for row in rows:
            key = _key(row)
            self.rows = [r for r in self.rows if _key(r) != key] + [{**row, **self._environment}]
        mine = {_key(r) for r in self.rows}
        kept = [r for r in self._earlier if _key(r) not in mine]
        self._rows_file.write_text(json.dumps(kept + self.rows, indent=1) + "\n")

    def plain_speed(self, common: Mapping[str, Any]) -> float | None:
        """The speed of ``plain`` with the same model and GPUs, from this invocation or an earlier one."""
        rows = [*self._earlier, *self.rows]
        same = [r for r in rows if _key(r) == _key({"case": "plain", **common}) and r["tokens_per_s"]]
        return float(same[-1]["tokens_per_s"]) if same else None

    def failed(self, case: str, common: Mapping[str, Any], error: str) -> None:
        """A case without a figure, and why."""
        say(f"{case}: {error}")
        self.add([{"case": case, **common, "tokens_per_s": None, "ratio_to_plain": None, "error": error}])

    def log(self, **entry: Any) -> None:
        """A line of the raw log."""
        with self._rounds_file.open("a") as file:
            file.write(json.dumps({"at": round(time.time(), 1), **entry}) + "\n")

    def table(self) -> str:
        """Every row of the file, for people."""
        lines = [f"{'case':22} {'model':18} {'GPUs':>4} {'tokens/s':>10} {'of plain':>9}  rounds, notes"]
        for row in json.loads(self._rows_file.read_text()) if self._rows_file.exists() else []:
            speed = f"{row['tokens_per_s']:,}" if row.get("tokens_per_s") else "-"
            ratio = f"{row['ratio_to_plain']:.3f}" if row.get("ratio_to_plain") else "-"
            notes = row.get("error") or ", ".join(_notes(row))
            lines.append(
                f"{row['case']:22} {row['model']:18} {row['gpus']:>4} {speed:>10} {ratio:>9}  {notes}"
            )
        return "\n".join(lines)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["model"], row["gpus"], row.get("engines")


def _notes(row: Mapping[str, Any]) -> list[str]:
    notes = []
    if "ratios" in row:
        notes.append(f"{row['rounds']} x {row['tokens']:,} tokens, ratios {row['ratios']}")
    for name in ("times_one_engine", "tail_s", "mb_per_s", "rows_back", "profile", "memory", "note"):
        if row.get(name) is not None:
            notes.append(f"{name} {row[name]}")
    return notes


def say(text: str) -> None:
    """A line with the time, at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
