"""How fast an engine's actor empties the ring: rows copied into segments and checked, by 1, 2 and 4 threads.

    python tests/bench/bench_drain.py [--rounds 5] [--tokens 8192] [--hidden 4096]

One forward's states lie in memory as they do in the ring, lognormal samples of them joined into segments, whose
memory is used again; the numbers of threads take turns. More threads than cores gain nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np
from gpu_models import lognormal_lengths
from on_disk import cpu_s, machine

from actors.capture.boundary import capture_spec
from actors.capture.intake import Intake
from actors.capture.job import CaptureJob
from actors.capture.statistics import Alarms, StateStatistics
from actors.messages import Batch, CaptureSpec, EngineSpec, SampleRef, plan_segments
from storage.layout import Layout

THREADS = (1, 2, 4)


def forward(layout: Layout, tokens: int) -> tuple[np.ndarray[Any, Any], dict[str, Any], list[int]]:
    """A ring with one forward in it, the message that announces it, and the samples' lengths."""
    lengths = lognormal_lengths(tokens)
    lengths[-1] -= sum(lengths) - tokens
    random = np.random.default_rng(0)
    states = random.integers(0x3C00, 0x3F80, tokens * layout.bytes_per_token // 2, dtype=np.uint16)
    ids = np.arange(tokens, dtype=np.int32)
    size = tokens * layout.row_bytes
    block = {
        "offset": 0,
        "rows": tokens,
        "parts": [{"states": [k], "at": k * size} for k in range(layout.num_states)],
        "ids_at": layout.num_states * size,
    }
    return np.concatenate([states.view(np.uint8), ids.view(np.uint8)]), block, lengths


def turn(
    intake: Intake, capture: CaptureSpec, memory: Any, block: dict[str, Any], lengths: list[int]
) -> float:
    """Seconds that one forward takes."""
    layout = capture.layout
    refs = tuple(SampleRef(i, 1, n, n) for i, n in enumerate(lengths))
    batch = Batch("bench", refs, plan_segments(lengths, layout))
    starts = np.cumsum([0, *lengths])
    ids = [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]
    spec = EngineSpec(
        name="bench", kind="sglang", prompts_url="", run_id="", model_path="", dtype="bfloat16", gpus=0, replicas=1,
        trust_remote_code=False, capture=capture, ring_bytes=0, log_dir="", load_timeout_s=0, stall_timeout_s=0,
        server_args={},
    )  # fmt: skip
    job = CaptureJob(batch, spec, ids, 0, watch=(StateStatistics(layout), Alarms(layout)))
    job.route(intake)
    requests = [[rid, 0, n, int(at)] for rid, n, at in zip(job.rids, lengths, starts, strict=False)]
    start_s = time.perf_counter()
    intake._drain(memory, {**block, "requests": requests})
    took_s = time.perf_counter() - start_s
    for s in range(job.num_segments):
        assert job.segment(s).result(0).size
        job.forget(s)
    return took_s


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    args = parser.parse_args()
    capture = capture_spec(
        "eagle3", final=False, final_normed=True, num_layers=32, hidden_size=args.hidden, dtype="bfloat16",
        chunk_rows=32, shard_rows=16384,
    )  # fmt: skip
    layout = capture.layout
    memory, block, lengths = forward(layout, args.tokens)
    size = args.tokens * layout.bytes_per_token
    print(f"{machine()}; {args.rounds} rounds of {len(lengths)} samples, {size / 2**20:.0f} MiB")
    intakes = {n: Intake(layout, 0, lambda said: None, threads=n) for n in THREADS}
    took: dict[int, list[tuple[float, float]]] = {n: [] for n in THREADS}
    for number in range(args.rounds + 1):
        for n, intake in intakes.items():
            before_s = cpu_s()
            wall_s = turn(intake, capture, memory, block, lengths)
            if number:  # the first round makes the memory
                took[n].append((wall_s, cpu_s() - before_s))
    print("threads     MB/s  x one  CPU s/GB")
    for n, turns in took.items():
        ratio = statistics.median(one[0] / some[0] for one, some in zip(took[1], turns, strict=True))
        wall_s, used_s = (statistics.median(t[i] for t in turns) for i in (0, 1))
        print(f"{n:>7} {size / wall_s / 1e6:>8.0f} {ratio:>6.2f} {used_s / size * 1e9:>9.2f}")


if __name__ == "__main__":
    main()
