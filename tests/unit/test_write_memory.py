"""A long sample goes through join and shard writer segment by segment: nobody holds it whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LONG_SAMPLE = """
import resource, sys
import numpy as np
from actors.capture.job import CaptureJob
from actors.messages import Batch, CaptureSpec, EngineSpec, SampleRef, plan_segments
from storage.dump import create_dump
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import SampleHead, ShardWriter

TOKENS, SEGMENT, STEP = 12_288, 16 << 20, 512
layout = Layout((1, 2, 3, "final"), hidden_size=2048)
store = Store(sys.argv[1])
create_dump(store, Identity({}, {}, {}, {}), layout, {})
writer = ShardWriter(store, layout, "run", "writer-0", 1 << 30)
ids = np.arange(TOKENS, dtype=np.int32)
writer.place(SampleHead(0, "long", ids, np.ones(TOKENS, np.uint8)))
batch = Batch("b", (SampleRef(0, 1, TOKENS, TOKENS),), plan_segments([TOKENS], layout, SEGMENT))
spec = EngineSpec(
    name="engine-0", kind="sglang", prompts_url=sys.argv[1], run_id="run", model_path="", dtype="bfloat16", gpus=0,
    replicas=1, trust_remote_code=False, capture=CaptureSpec((1, 2, 3), True, False, 4, layout), ring_bytes=0,
    log_dir="", load_timeout_s=60, stall_timeout_s=60, server_args={},
)
job = CaptureJob(batch, spec, [ids], 0)
chunk = [np.full((STEP, 2048), k + 1, np.uint16) for k in range(4)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
put = 0
for start in range(0, TOKENS, STEP):
    job.put(job.rids[0], start, chunk, ids[start : start + STEP])
    while put < len(batch.segments) and job.segment(put).done():
        (piece,) = batch.segments[put]
        states = job.segment(put).result().reshape(4, piece.rows, 2048)
        job.forget(put)
        writer.write(0, piece.start, states)
        del states
        put += 1
writer.finish(0)
writer.seal_all()
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
print(len(batch.segments), TOKENS * layout.bytes_per_token, SEGMENT, grown)
"""


def test_a_long_sample_takes_a_few_segments_of_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LONG_SAMPLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    segments, sample_bytes, segment_bytes, grown_bytes = (int(word) for word in done.stdout.split())
    assert segments >= 12
    assert sample_bytes == 12 * segment_bytes
    assert grown_bytes < 3 * segment_bytes, "the sample was held whole somewhere"
