"""What the benches of a local disk share: their options, their clock and where their rows go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

OUT = Path("bench/out")


def options(description: str | None, rounds: int, mib: int, mib_help: str) -> argparse.ArgumentParser:
    """A parser with ``--rounds``, ``--mib`` and ``--dir``; makes the folder of the rows."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--mib", type=int, default=mib, help=mib_help)
    parser.add_argument("--dir", type=Path, default=OUT, help="folder on the disk to measure")
    OUT.mkdir(parents=True, exist_ok=True)
    return parser


def machine() -> str:
    """What a table's first line says."""
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def cpu_s() -> float:
    """CPU seconds of this process and its threads so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def keep_rows(name: str, rows: Sequence[Any]) -> None:
    """Writes dataclasses to ``bench/out/<name>.json``."""
    path = OUT / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"written to {path}")
