"""How fast a dump is written: hsdump beside the disk itself and beside the formats that people use.

    python tests/bench/bench_storage.py [--rounds 3] [--pairs 15] [--mib 1536] [--dir FOLDER] [--states DUMP]

All writers write the same tensors, and each write ends when its bytes are durable. A disk, a virtual one above
all, is now faster and now slower, so a raw write goes before and after each other write, and what counts is the ratio
between neighbours: ``ratio_to_raw`` is the median over the pairs. hsdump and the raw write of copied bytes get
``--pairs`` of them, the others ``--rounds``. The medians are printed and written to bench/out/storage.json. ``--dir``
must be on the disk that is to be measured. Speed is in bytes of states (padding apart); CPU seconds are of this process
and its threads.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from codec_table import print_codecs
from on_disk import cpu_s, keep_rows, machine, options
from storage_writers import PREPARE, WRITERS, States

from storage.layout import Layout

HIDDEN_SIZES = (4096, 7168)
NUM_STATES = 4
MEAN_TOKENS, SIGMA, LONGEST = 1730, 0.7, 16_384
SLOW = {"ckpt-gz": 24 << 20, "zarr-python-sharded": 512 << 20}
"""Writers that get only so many bytes."""
PAIRED = ("raw-copied", "hsdump", "hsdump-hashed")
"""Writers that get more turns than the others."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        writer: its name.
        hidden: H.
        mb_per_s: durable speed, 10^6 bytes of states a second.
        ratio_to_raw: median of its speed over that of the raw writes before and after it, taken together.
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
    """As many samples as a slow writer can take, the last one cut."""
    taken, left = [], limit_bytes
    for states in samples:
        tokens = min(states.shape[1], left // (states.nbytes // states.shape[1]))
        if tokens == 0:
            break
        taken.append(np.ascontiguousarray(states[:, :tokens]))
        left -= taken[-1].nbytes
    return taken


@dataclass(frozen=True)
class Write:
    """One durable write: seconds, CPU seconds, bytes of states."""

    wall_s: float
    cpu_s: float
    bytes: int

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes a second."""
        return self.bytes / self.wall_s / 1e6


def measure(name: str, folder: Path, layout: Layout, samples: Sequence[States]) -> Write:
    """One durable write into a new folder, which is gone afterwards."""
    if name in PREPARE:
        PREPARE[name](folder, layout)
    else:
        folder.mkdir()
    gc.collect()
    os.sync()  # what the one before has left to be written or discarded isn't this one's
    before, start_s = cpu_s(), time.perf_counter()
    WRITERS[name](folder, layout, samples)
    wall_s, spent_s = time.perf_counter() - start_s, cpu_s() - before
    shutil.rmtree(folder)
    return Write(wall_s, spent_s, sum(s.nbytes for s in samples))


def bench(hidden_size: int, rounds: int, pairs: int, total_bytes: int, folder: Path) -> list[Row]:
    """All writers in a random order, each between two raw writes."""
    layout = Layout(states=(2, 16, 29, "final"), hidden_size=hidden_size)
    samples = make_samples(hidden_size, total_bytes)
    others = [name for name in WRITERS if name not in ("raw", *PAIRED)]
    turns = pairs * list(PAIRED) + rounds * others
    random.Random(hidden_size).shuffle(turns)
    writes: dict[str, list[Write]] = {name: [] for name in WRITERS}
    ratios: dict[str, list[float]] = {name: [] for name in WRITERS}
    raw = measure("raw", folder / "raw", layout, samples)
    for name in turns:
        given = first_bytes(samples, SLOW[name]) if name in SLOW else samples
        write = measure(name, folder / name, layout, given)
        raw, before = measure("raw", folder / "raw", layout, samples), raw
        writes[name].append(write)
        writes["raw"].append(raw)
        ratios[name].append(write.mb_per_s * (before.wall_s + raw.wall_s) / (before.bytes + raw.bytes) * 1e6)
        ratios["raw"].append(raw.mb_per_s / before.mb_per_s)
    return [
        Row(
            name,
            hidden_size,
            round(statistics.median(w.mb_per_s for w in found), 1),
            round(statistics.median(ratios[name]), 3),
            round(statistics.median(w.cpu_s / (w.bytes / 1e9) for w in found), 3),
        )
        for name, found in writes.items()
        if found
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
    parser = options(__doc__, rounds=3, mib=1536, mib_help="states in one write, MiB")
    parser.add_argument("--pairs", type=int, default=15, help="turns of hsdump and of copied bytes")
    parser.add_argument("--states", default="dump-demo", help="dump whose states the codecs are tried on")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {args.pairs} pairs, {args.rounds} rounds of the others")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for hidden_size in HIDDEN_SIZES:
            rows += bench(hidden_size, args.rounds, args.pairs, args.mib << 20, Path(folder))
    print_rows(rows)
    keep_rows("storage", rows)
    print_codecs(args.states)


if __name__ == "__main__":
    main()
