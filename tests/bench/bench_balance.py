"""When each of several engines of unequal speed has done its work, under three ways of dealing samples out.

    python tests/bench/bench_balance.py            # a simulation with a virtual clock
    python tests/bench/bench_balance.py --ray      # and one run on Ray, by the real coordinator

Samples have 16 to 32,768 tokens (log-uniform); the engines' speeds are as 1 : 1 : 2 : 4. A simulated engine does its
batches one after another and its answer comes a little later; the ledger under test is the one that runs use.

* hsdump: the ledger's balance.
* slices: each engine has a quarter of the samples from the start.
* round robin: batches of the same size in the samples' order, to each engine in turn.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.balance import Limits
from actors.ledger import Ledger
from actors.messages import SampleOutcome

SPEEDS = (1.0, 1.0, 2.0, 4.0)
TOKENS_PER_S = 5_000
ANSWER_S = 0.2
"""From the end of a batch's work to the coordinator's knowing of it."""
LIMITS = Limits(
    batch_tokens=16_384, batch_bytes=1 << 40, batch_samples=64, batches_per_engine=3, in_flight_bytes=1 << 40
)
OUT = Path(__file__).parents[2] / "bench" / "out" / "balance.json"


def lengths(samples: int) -> NDArray[np.int32]:
    """Log-uniform from 16 to 32,768; both are among them."""
    tokens = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(32_768), samples)).astype(np.int32)
    tokens[:2] = 16, 32_768
    return tokens


def by_hsdump(tokens: NDArray[np.int32], speeds: Sequence[float]) -> list[float]:
    """Seconds at which each engine has done its last batch, on a virtual clock."""
    ledger = Ledger(tokens, tokens == 0, 1, LIMITS)
    for i in range(len(speeds)):
        ledger.add_engine(str(i), str(i))
        ledger.add_writer(f"writer-{i}", str(i))
    free_s = [0.0] * len(speeds)
    answers: list[tuple[float, int, str, list[SampleOutcome]]] = []
    now_s, count = 0.0, 0
    while not ledger.settled:
        while (batch := ledger.next_batch(now_s)) is not None:
            engine, work = int(batch.engine), sum(s.tokens for s in batch.samples)
            free_s[engine] = max(now_s, free_s[engine]) + work / speeds[engine]
            outcomes = [SampleOutcome(s.row, s.attempt) for s in batch.samples]
            count += 1
            heapq.heappush(answers, (free_s[engine] + ANSWER_S, count, batch.batch_id, outcomes))
        now_s, _, batch_id, outcomes = heapq.heappop(answers)
        ledger.captured(batch_id, outcomes, now_s)
        ledger.moved(batch_id)
        ledger.written(batch_id, [o.row for o in outcomes])
    return free_s


def by_slices(tokens: NDArray[np.int32], speeds: Sequence[float]) -> list[float]:
    parts = np.array_split(tokens, len(speeds))
    return [float(part.sum()) / speed for part, speed in zip(parts, speeds, strict=True)]


def by_round_robin(tokens: NDArray[np.int32], speeds: Sequence[float]) -> list[float]:
    work, turn, batch, samples = [0.0] * len(speeds), 0, 0, 0
    for length in tokens.tolist():
        if samples == LIMITS.batch_samples or (samples and batch + length > LIMITS.batch_tokens):
            turn, batch, samples = (turn + 1) % len(speeds), 0, 0
        work[turn] += length
        batch += length
        samples += 1
    return [w / speed for w, speed in zip(work, speeds, strict=True)]


def show(name: str, samples: int, finished_s: Sequence[float]) -> dict[str, object]:
    mean_s = sum(finished_s) / len(finished_s)
    times = "  ".join(f"{s:8.1f}" for s in finished_s)
    print(f"{samples:>7}  {name:<12} {times}  {mean_s:8.1f}  {max(finished_s) / mean_s:6.3f}", flush=True)
    return {
        "samples": samples,
        "way": name,
        "finished_s": [round(s, 2) for s in finished_s],
        "last_over_mean": round(max(finished_s) / mean_s, 4),
    }


def main() -> None:
    """Prints when each engine ended, the mean, and the last over the mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[200, 1_000, 10_000])
    parser.add_argument("--ray", action="store_true", help="also a real run of the fewest samples")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    speeds = [s * TOKENS_PER_S for s in SPEEDS]
    print("samples  way          " + "  ".join(f"x{s:<7.0f}" for s in SPEEDS) + "      mean  last/mean")
    rows = []
    for samples in args.samples:
        tokens = lengths(samples)
        for name, deal in (("hsdump", by_hsdump), ("slices", by_slices), ("round robin", by_round_robin)):
            rows.append(show(name, samples, deal(tokens, speeds)))
    if args.ray:
        from balance_run import finished_on_ray

        with tempfile.TemporaryDirectory() as folder:
            tokens = lengths(min(args.samples))
            rows.append(show("hsdump, Ray", tokens.size, finished_on_ray(tokens, speeds, Path(folder))))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"speeds": speeds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
