"""How fast a dump is read back: hsdump beside plain preads and beside the formats that people use.

    python tests/bench/bench_read.py [--rounds 5] [--mib 1024] [--dir FOLDER] [--readers NAME ...]

In every round all readers take turns on the same samples, sequentially and in one random order, cold and warm. A
row is called cold only if /proc/self/io says that the bytes came from the disk (else it is ``not-cold``). The
medians over the rounds are printed and written to bench/out/read.json. ``--dir`` must be on the disk that is to be
measured. Speed is in bytes of states, padding apart.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_storage import make_samples
from on_disk import cpu_s, keep_rows, machine, options
from readers import PAST_PAGE_CACHE, RANDOM, SEQUENTIAL, Corpus, Reader
from storage_writers import hsdump_hashed, safetensors_per_sample, torch_per_sample

import storage
from storage.dump import create_dump, finalise
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout

HIDDEN_SIZE = 7168
COLD_SHARE = 0.95
"""Of the bytes that were asked for, to come from the disk in a cold row."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        reader: its name.
        pattern: ``sequential`` or ``random``.
        cache: ``cold``, ``warm``, or ``not-cold`` when the page cache couldn't be emptied.
        mb_per_s: 10^6 bytes of states a second.
        samples_per_s: whole samples a second.
        ratio_to_raw: median over the rounds of its speed over that of plain preads in the same round.
        cpu_s_per_gb: CPU seconds for 10^9 bytes of states.
    """

    reader: str
    pattern: str
    cache: str
    mb_per_s: float
    samples_per_s: float
    ratio_to_raw: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Run:
    """One reader's turn: seconds, CPU seconds and the share of the bytes that came from the disk."""

    wall_s: float
    cpu_s: float
    from_disk: float


def make_corpus(folder: Path, total_bytes: int) -> Corpus:
    """The same samples in every format, durable on the disk."""
    layout = Layout(states=(2, 16, 29, "final"), hidden_size=HIDDEN_SIZE)
    samples = make_samples(HIDDEN_SIZE, total_bytes)
    folders = [folder / name for name in ("dump", "safetensors", "torch")]
    for made, write in zip(folders, (hsdump_hashed, safetensors_per_sample, torch_per_sample), strict=True):
        made.mkdir()
        if write is hsdump_hashed:
            create_dump(Store(str(made)), Identity({}, {}, {}, {}), layout, {})
        write(made, layout, samples)
    finalise(Store(str(folders[0])), [])
    return Corpus(*folders, samples=list(storage.open_dump(str(folders[0]))))


def evict(folder: Path) -> None:
    """Empties the page cache of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(read: Reader, corpus: Corpus, order: Sequence[int], folder: Path, cold: bool) -> Run:
    """One turn; a warm one reads everything once before."""
    if cold:
        evict(folder)
    else:
        read(corpus, order)
    gc.collect()
    disk, before_s, start_s = _disk_bytes(), cpu_s(), time.perf_counter()
    read(corpus, order)
    wall_s = time.perf_counter() - start_s
    return Run(wall_s, cpu_s() - before_s, (_disk_bytes() - disk) / corpus.bytes_of(order))


def _disk_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def bench(
    corpus: Corpus, pattern: str, cold: bool, rounds: int, root: Path, only: Sequence[str] | None
) -> list[Row]:
    """All readers in turn, several times over."""
    readers = SEQUENTIAL if pattern == "sequential" else RANDOM
    readers = {name: read for name, read in readers.items() if cold or name not in PAST_PAGE_CACHE}
    if only is not None:
        readers = {name: read for name, read in readers.items() if name in ("raw", *only)}
    order = list(range(len(corpus.samples)))
    if pattern == "random":
        random.Random(1).shuffle(order)
    runs: dict[str, list[Run]] = {name: [] for name in readers}
    names = list(readers)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(measure(readers[name], corpus, order, root, cold))
    size = corpus.bytes_of(order)
    rows = []
    for name, turns in runs.items():
        wall_s = statistics.median(turn.wall_s for turn in turns)
        ratio = statistics.median(r.wall_s / t.wall_s for r, t in zip(runs["raw"], turns, strict=True))
        verified = all(turn.from_disk >= COLD_SHARE for turn in turns)
        cache = ("cold" if verified else "not-cold") if cold else "warm"
        cpu_s_per_gb = statistics.median(turn.cpu_s for turn in turns) / (size / 1e9)
        numbers = (size / wall_s / 1e6, len(order) / wall_s, ratio, cpu_s_per_gb)
        rows.append(Row(name, pattern, cache, *(round(value, 3) for value in numbers)))
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    """A table for people."""
    print(
        f"{'reader':<18} {'pattern':<11} {'cache':<8} {'MB/s':>7} {'samples/s':>9} {'x raw':>6} {'CPU s/GB':>9}"
    )
    for row in rows:
        print(
            f"{row.reader:<18} {row.pattern:<11} {row.cache:<8} {row.mb_per_s:>7.0f} {row.samples_per_s:>9.1f} "
            f"{row.ratio_to_raw:>6.2f} {row.cpu_s_per_gb:>9.2f}"
        )


def main() -> None:
    """Runs the bench."""
    mib_help = "states, MiB; three times as much disk is used"
    parser = options(__doc__, rounds=5, mib=1024, mib_help=mib_help)
    parser.add_argument("--readers", nargs="+", help="only these beside raw")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        corpus = make_corpus(Path(folder), args.mib << 20)
        lengths = [sample.tokens for sample in corpus.samples]
        print(
            f"{machine()}; {args.rounds} rounds; "
            f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, "
            f"{corpus.bytes_of(range(len(lengths))) / 2**20:.0f} MiB"
        )
        rows = [
            row
            for pattern in ("sequential", "random")
            for cold in (True, False)
            for row in bench(corpus, pattern, cold, args.rounds, Path(folder), args.readers)
        ]
    print_rows(rows)
    keep_rows("read", rows)


if __name__ == "__main__":
    main()
