"""What one coordinator drives: samples a second, its CPU time and its memory, over nodes and over samples.

    python tests/bench/bench_scale.py                                  # both sweeps
    python tests/bench/bench_scale.py --nodes 4 --samples 1000 10000   # chosen points

Every node is a raylet of this host with a synthetic engine and a writer; prompts, shards and manifests are real,
the samples tiny. The coordinator's CPU time is that of its process from the first dispatch to the last commit, its
peak memory that of its whole life, finishing the dump included. Each point has a cluster of its own, whose daemons
have come to rest before it begins; rows in the output file are replaced point by point. ``load`` is the machine's at
the end, this run's own processes among it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scale_run import ROOT, Collection, make_dump, raylets, spilled_bytes

from storage.layout import Layout

OUT = ROOT / "bench" / "out" / "scale.json"
SWEEPS = [(nodes, 10_000) for nodes in (1, 2, 4, 8, 16, 32)] + [(4, n) for n in (1_000, 100_000, 1_000_000)]
LAYOUT = Layout(states=(1, "final_normed"), hidden_size=8)
COLUMNS = (
    "nodes",
    "samples",
    "samples_per_s",
    "tokens_per_s",
    "coordinator_cpu_s_per_1k",
    "peak_mb",
    "spilled_bytes",
)


def measure(nodes: int, samples: int, folder: Path) -> dict[str, Any]:
    """One run on a cluster of its own."""
    tokens = np.random.default_rng(0).integers(8, 33, samples).astype(np.int32)
    store = make_dump(folder, tokens, LAYOUT)
    with raylets(nodes) as ids:
        began = time.monotonic()
        summary = Collection(store, LAYOUT, ids, [0.0] * nodes).run()
        took_s = time.monotonic() - began
        spilled = spilled_bytes()
    account = summary.account
    if account is None or account.committed != samples or sum(summary.events.values()):
        raise SystemExit(f"{nodes} nodes, {samples} samples: {summary}")
    return {
        "nodes": nodes,
        "samples": samples,
        "samples_per_s": round(samples / summary.work_s, 1),
        "tokens_per_s": round(account.tokens / summary.work_s),
        "coordinator_cpu_s_per_1k": round(summary.cpu_s / samples * 1000, 4),
        "peak_mb": round(summary.peak_bytes / 1e6, 1),
        "spilled_bytes": spilled,
        "work_s": round(summary.work_s, 2),
        "whole_s": round(took_s, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Prints a table and keeps the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", help="raylets; with --samples, every pair of the two")
    parser.add_argument("--samples", type=int, nargs="+")
    parser.add_argument("--dir", help="folder for the dumps; they are deleted")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if (args.nodes is None) != (args.samples is None):
        parser.error("--nodes and --samples go together")
    points = SWEEPS if args.nodes is None else [(n, s) for n in args.nodes for s in args.samples]
    if len(points) > 1:
        for nodes, samples in points:  # a process each: nothing of one cluster is left for the next
            chosen = ["--nodes", str(nodes), "--samples", str(samples), "--out", str(args.out)]
            chosen += ["--dir", args.dir] if args.dir else []
            subprocess.run([sys.executable, __file__, *chosen], check=True)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        row = measure(*points[0], Path(folder) / "dump")
    keep(args.out, row)


def keep(out: Path, row: dict[str, Any]) -> None:
    print("  ".join(f"{name} {row[name]:,}" for name in COLUMNS), flush=True)
    rows = json.loads(out.read_text()) if out.exists() else []
    rows = [r for r in rows if (r["nodes"], r["samples"]) != (row["nodes"], row["samples"])]
    rows = sorted([*rows, row], key=lambda r: (r["samples"], r["nodes"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
