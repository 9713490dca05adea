"""What the ledger costs: microseconds and bytes per sample, from a thousand rows to a million.

    python tests/bench/bench_ledger.py [--engines 32] [--batch-samples 64]

Each row is dispatched, captured, moved, written and committed once, through batches as a run makes them. The
cost per sample should not grow with the number of rows.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections import deque

import numpy as np

from actors.balance import Dispatch, Limits
from actors.ledger import Ledger
from actors.messages import SampleOutcome

BYTES_PER_TOKEN = 64


def make(rows: int, engines: int, batch_samples: int) -> Ledger:
    tokens = np.random.default_rng(0).integers(16, 64, rows).astype(np.int32)
    limits = Limits(
        batch_tokens=16_384,
        batch_bytes=1 << 30,
        batch_samples=batch_samples,
        batches_per_engine=3,
        in_flight_bytes=1 << 30,
    )
    ledger = Ledger(tokens, tokens == 0, BYTES_PER_TOKEN, limits)
    for i in range(engines):
        ledger.add_engine(f"engine-{i}", f"node-{i}")
        ledger.add_writer(f"writer-{i}", f"node-{i}")
    return ledger


def run(ledger: Ledger) -> None:
    in_flight: deque[Dispatch] = deque()
    while not ledger.settled:
        in_flight.extend(iter(ledger.next_batch, None))
        batch = in_flight.popleft()
        ledger.captured(batch.batch_id, [SampleOutcome(s.row, s.attempt) for s in batch.samples])
        ledger.moved(batch.batch_id)
        rows = [s.row for s in batch.samples]
        ledger.written(batch.batch_id, rows)
        ledger.committed(rows)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--batch-samples", type=int, default=64)
    args = parser.parse_args()
    print(f"{args.engines} engines, {args.batch_samples} samples a batch")
    print(f"{'rows':>9} {'us/sample':>10} {'samples/s':>10} {'start s':>8} {'bytes/row':>10}")
    for rows in (1_000, 10_000, 100_000, 1_000_000):
        tracemalloc.start()
        began = time.process_time()
        ledger = make(rows, args.engines, args.batch_samples)
        start_s = time.process_time() - began
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        began = time.process_time()
        run(ledger)
        took_s = time.process_time() - began
        assert ledger.finished
        us = took_s / rows * 1e6
        print(f"{rows:>9} {us:>10.2f} {rows / took_s:>10.0f} {start_s:>8.3f} {held / rows:>10.1f}")


if __name__ == "__main__":
    main()
