"""How fast a dump is written: hsdump beside the disk itself and beside the formats that people use.

    python tests/bench/bench_storage.py [--rounds 5] [--mib 896] [--dir FOLDER] [--states DUMP]

In every round all writers take turns on the same tensors, and each write ends when its bytes are durable. The
medians over the rounds are printed and written to bench/out/storage.json. ``--dir`` must be on the disk that is
to be measured. Speed is in bytes of states (padding apart); CPU seconds are of this process and its threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from codec_table import print_codecs
from storage_writers import PREPARE, WRITERS, States

from storage.layout import Layout

HIDDEN_SIZES = (4096, 7168)
NUM_STATES = 4
MEAN_TOKENS, SIGMA, LONGEST = 1730, 0.7, 16_384
SLOW = {"ckpt-gz": 24 << 20}
"""Writers that get only so many bytes."""
OUT = Path("bench/out/storage.json")


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        writer: its name.
        hidden: H.
        mb_per_s: durable speed, 10^6 bytes of states a second.
        ratio_to_raw: median over the rounds of its speed over the raw write's of the same round.
        cpu_s_per_gb: CPU seconds for 10^9 bytes of states.
    """

    writer: str
    hidden: int
    mb_per_s: float
    ratio_to_raw: float
    cpu_s_per_gb: float


def make_samples(hidden_size: int, total_bytes: int, seed: int = 0) -> list[States]:
    """Samples [K, T, H] with lognormal lengths; bits of noise in bfloat16 with a few large channels."""
    rng = np.random.default_rng(seed)
    token_bytes = NUM_STATES * hidden_size * 2
    scale = np.where(rng.random(hidden_size) < 0.002, 50.0, 1.0).astype(np.float32)
    rows = rng.standard_normal((4096, hidden_size), np.float32) * scale
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    samples, left = [], total_bytes // token_bytes
    while left:
        drawn = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA)
        tokens = min(left, LONGEST, max(1, int(drawn)))
        picked = rng.integers(len(bits), size=NUM_STATES * tokens)
        samples.append(bits[picked].reshape(NUM_STATES, tokens, hidden_size))
        left -= tokens
    return samples


def first_bytes(samples: Sequence[States], limit_bytes: int) -> list[States]:
    """As much of the first sample as a slow writer can take."""
    whole = samples[0]
    tokens = min(whole.shape[1], max(1, limit_bytes // (whole.nbytes // whole.shape[1])))
    return [np.ascontiguousarray(whole[:, :tokens])]


def measure(name: str, folder: Path, layout: Layout, samples: Sequence[States]) -> tuple[float, float]:
    """MB/s and CPU seconds per GB of one durable write."""
    if name in PREPARE:
        PREPARE[name](folder, layout)
    else:
        folder.mkdir()
    gc.collect()
    os.sync()  # what the one before has left to be written or discarded isn't this one's
    before, start_s = _cpu_s(), time.perf_counter()
    WRITERS[name](folder, layout, samples)
    wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s() - before
    shutil.rmtree(folder)
    size = sum(s.nbytes for s in samples)
    return size / wall_s / 1e6, cpu_s / (size / 1e9)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def bench(hidden_size: int, rounds: int, total_bytes: int, folder: Path) -> list[Row]:
    """All writers in turn, several times over."""
    layout = Layout(states=(2, 16, 29, "final"), hidden_size=hidden_size)
    samples = make_samples(hidden_size, total_bytes)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WRITERS}
    names = list(WRITERS)
    for number in range(rounds):
        speeds = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            given = first_bytes(samples, SLOW[name]) if name in SLOW else samples
            speeds[name] = measure(name, folder / name, layout, given)
        for name, (mb_per_s, cpu_s) in speeds.items():
            found[name].append((mb_per_s, mb_per_s / speeds["raw"][0], cpu_s))
    return [
        Row(name, hidden_size, *(round(statistics.median(column), 3) for column in zip(*values, strict=True)))
        for name, values in found.items()
    ]


def print_rows(rows: Sequence[Row]) -> None:
    """A table for people."""
    print(f"{'writer':<20} {'H':>5} {'MB/s':>7} {'x raw':>6} {'CPU s/GB':>9}")
    for row in rows:
        print(
            f"{row.writer:<20} {row.hidden:>5} {row.mb_per_s:>7.0f} {row.ratio_to_raw:>6.2f} "
            f"{row.cpu_s_per_gb:>9.2f}"
        )


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="states in one write, MiB")
    parser.add_argument("--dir", type=Path, default=Path("bench/out"), help="folder on the disk to measure")
    parser.add_argument("--states", default="dump-demo", help="dump whose states the codecs are tried on")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {args.rounds} rounds"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for hidden_size in HIDDEN_SIZES:
            rows += bench(hidden_size, args.rounds, args.mib << 20, Path(folder))
    print_rows(rows)
    OUT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"written to {OUT}")
    print_codecs(args.states)


if __name__ == "__main__":
    main()
