"""A rehearsal's actors are small: many raylets with an engine, a writer and a coordinator fit on one host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, numpy as np
from pathlib import Path
sys.path.insert(0, "tests/unit")
import actors.coordinator
from actors.messages import Batch, BatchRecord, SampleOutcome, SampleRef, WriterSpec, plan_segments
from actors.synthetic import synthetic_states
from actors.writer import WriterActor
from made_dumps import IDENTITY, LAYOUT
from storage.dump import create_dump
from storage.files import Store
from storage.prompts import PreparedSummary
from storage.prompts.parts import PartWriter, write_prepared
from storage.prompts.spec import PreparedRow
import json

store = Store(sys.argv[1])
parts = PartWriter(store)
parts.add(PreparedRow(0, 0, "a", np.arange(5, dtype=np.int32), np.ones(5, np.uint8), None), None)
summary = PreparedSummary({}, "", 1, 1, 1, 0, 5, 5, 5, parts=parts.close())
write_prepared(store, summary)
create_dump(store, IDENTITY, LAYOUT, {})
writer = WriterActor(WriterSpec("writer-0", store.url, "run", 1 << 20, 60, 60))
batch = Batch("0-1", (SampleRef(0, 1, 5, 5),), plan_segments([5], LAYOUT))
writer.put(batch, 0, synthetic_states("a", 5, LAYOUT).ravel())
ack = writer.finish(batch, BatchRecord("0-1", "engine-0", (SampleOutcome(0, 1),), 0.0, 0.0))
assert ack.written == (0,), ack
assert [s.rows for s in writer.seal().sealed] == [(0,)]
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_synthetic_path_imports_neither_torch_nor_sglang_nor_transformers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "dump")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"actors", "storage", "ray", "numpy"} <= loaded
    assert not loaded & {"torch", "sglang", "transformers"}
