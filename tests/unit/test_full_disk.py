"""A disk that really is full: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
FILL = """
import sys
import numpy as np
from storage.dump import create_dump, finalise
from storage.errors import StorageFull
from storage.files import Store
from storage.identity import Identity
from storage.layout import Layout
from storage.shard import SampleHead, ShardWriter
from storage.verify import run_item, work_items

layout = Layout((1, 2), hidden_size=2048, shard_rows=4096)
store = Store(sys.argv[1])
create_dump(store, Identity({}, {}, {}, {}), layout, {})
writer = ShardWriter(store, layout, "run", "writer-0", 1 << 30)

def write(row, tokens):
    writer.place(SampleHead(row, str(row), np.ones(tokens, np.int32), np.ones(tokens, np.uint8)))
    writer.write(row, 0, np.full((2, tokens, 2048), 0x3F80 + row, np.uint16))
    writer.finish(row)

write(0, 512)
writer.seal_all()
free = store.free_bytes()
try:
    write(1, 3000)
    writer.seal_all()
except StorageFull as error:
    print(error)
writer.abort()
assert store.free_bytes() > free - 100_000, "the shard that was given up still takes space"
write(2, 512)
writer.seal_all()
print([row for sealed in writer.take_sealed() for row in sealed.rows])
print([run_item(item).problems for item in work_items(store)])
"""


def in_small_tmpfs(folder: Path, size_bytes: int, code: str) -> str:
    """What a Python program prints that runs with a tmpfs of that size mounted on ``folder``."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    mount = f'mount -t tmpfs -o size={size_bytes} none {folder} || exit 77; exec {sys.executable} -c "$1" {folder}'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("this user may not mount a tmpfs in a namespace of its own")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_named_and_its_space_serves_the_next_shard(tmp_path: Path) -> None:
    error, rows, problems = in_small_tmpfs(tmp_path, 20 * MIB, FILL).splitlines()
    assert "hidden/c/1/0/0: no space left (free bytes: " in error
    assert "run the same command again" in error
    assert rows == "[0, 2]"
    assert problems == "[(), ()]"
