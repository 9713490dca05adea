"""The reference run at full count: 10,000 samples, 17.3 million tokens, on four raylets of this host.

    python tests/bench/bench_reference.py [--samples 10000] [--dir FOLDER]

Lengths are lognormal with a mean of 1,730 tokens, as in real conversations; the hidden size is small, so that the
dump takes about a gigabyte. Afterwards tensorstore, which shares no code with this project, reads every shard, and
every state and token id of every sample is compared with the generator. Any difference, failure, loss or spilled
byte is an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import tensorstore
from numpy.typing import NDArray
from scale_run import ROOT, Collection, make_dump, raylets, sample_id, spilled_bytes

from actors.synthetic import synthetic_states
from storage.layout import Layout

LAYOUT = Layout(states=(3, 31, 59, "final_normed"), hidden_size=8)
MEAN_TOKENS = 1730
LONGEST = 16_384
NODES = 4
OUT = ROOT / "bench" / "out" / "reference.json"


def lengths(samples: int) -> NDArray[np.int32]:
    """Lognormal, from 16 to `LONGEST`, with exactly ``samples * MEAN_TOKENS`` in all."""
    drawn = np.random.default_rng(0).lognormal(0.0, 1.0, samples)
    low, high = 0.0, 1e6
    while high - low > 1e-6:  # the scale at which the clipped lengths have the wanted mean
        scale = (low + high) / 2
        low, high = (
            (scale, high) if np.clip(drawn * scale, 16, LONGEST).mean() < MEAN_TOKENS else (low, scale)
        )
    tokens = np.clip(drawn * low, 16, LONGEST).astype(np.int32)
    short = samples * MEAN_TOKENS - int(tokens.sum())
    free = np.flatnonzero((tokens > 16) & (tokens < LONGEST))[: abs(short)]
    tokens[free] += np.sign(short)
    return tokens


def compare(folder: Path, tokens: NDArray[np.int32]) -> int:
    """Holds every committed row against the generator; returns bytes of states compared.

    Raises:
        SystemExit: a row is missing or differs.
    """
    table = pq.read_table(folder / "samples.parquet").sort_by("array_start").to_pylist()
    if sorted(r["row"] for r in table) != list(range(tokens.size)):
        raise SystemExit("samples.parquet doesn't have every row once")
    hidden, ids = (
        tensorstore.open({"driver": "zarr3", "kvstore": f"file://{folder / name}/"}).result()
        for name in ("hidden", "tokens/token_ids")
    )
    at, states, token_ids, compared = -1, None, None, 0
    for record in table:
        row, length = record["row"], int(tokens[record["row"]])
        shard, start = divmod(record["array_start"], LAYOUT.shard_rows)
        if shard != at:
            span = slice(shard * LAYOUT.shard_rows, (shard + 1) * LAYOUT.shard_rows)
            at, states, token_ids = shard, hidden[span].read().result(), ids[span].read().result()
        expected = synthetic_states(sample_id(row), length, LAYOUT)
        got = states[start : start + length].transpose(1, 0, 2)
        same = (
            record["status"] == "committed" and record["tokens"] == length and np.array_equal(got, expected)
        )
        if not same or not np.array_equal(token_ids[start : start + length], np.arange(row, row + length)):
            raise SystemExit(f"row {row} isn't what the generator made: {record}")
        compared += expected.nbytes
    return compared


def main() -> None:
    """Runs, compares, and prints one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--dir", help="folder for the dump; it is deleted")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    tokens = lengths(args.samples)
    with tempfile.TemporaryDirectory(dir=args.dir) as parent:
        folder = Path(parent) / "dump"
        store = make_dump(folder, tokens, LAYOUT)
        with raylets(NODES) as nodes:
            summary = Collection(store, LAYOUT, nodes, [0.0] * NODES, shard_bytes=64 << 20).run()
            spilled = spilled_bytes()
        account = summary.account
        whole = account is not None and (account.committed, account.tokens) == (tokens.size, tokens.sum())
        if not whole or spilled or sum(summary.events.values()):
            raise SystemExit(f"not without errors: {spilled} bytes spilled, {summary}")
        began = time.monotonic()
        compared = compare(folder, tokens)
    row = {
        "nodes": NODES,
        "samples": tokens.size,
        "tokens": int(tokens.sum()),
        "longest_tokens": int(tokens.max()),
        "work_s": round(summary.work_s, 1),
        "coordinator_cpu_s": round(summary.cpu_s, 2),
        "coordinator_peak_mb": round(summary.peak_bytes / 1e6, 1),
        "spilled_bytes": spilled,
        "compared_bytes": compared,
        "compare_s": round(time.monotonic() - began, 1),
    }
    if compared != row["tokens"] * LAYOUT.bytes_per_token:
        raise SystemExit(f"{compared} bytes were compared, {row['tokens']} tokens have more")
    print("  ".join(f"{name} {value:,}" for name, value in row.items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
