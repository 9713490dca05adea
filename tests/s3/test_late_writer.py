"""A writer that is stopped, given up and woken up again fails without changing a committed byte."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from made_dumps import IDENTITY, states_of, write_whole
from servers import python

from storage.claims import revoke
from storage.dump import create_dump
from storage.files import Store
from storage.layout import Layout, hidden_key
from storage.manifest import committed_samples, read_manifest, read_manifests
from storage.reader import Dump
from storage.shard import ShardWriter
from storage.verify import run_item, work_items

BIG = Layout(states=(0, 2, "final"), hidden_size=2048, chunk_rows=32, shard_rows=8192)

WRITER = """
import sys
import storage.shard
from made_dumps import *
from test_late_writer import BIG
from storage.errors import AlreadyExists, LeaseLost

url, stop_before = sys.argv[1:]

stopped = []

def stop(where):
    if where == stop_before and not stopped:
        stopped.append(where)
        print("here", flush=True)
        sys.stdin.readline()

def stopping(function, where):
    def call(*args):
        stop(where + (args[1].partition("/")[0] if where == "put " else ""))
        return function(*args)
    return call

real_holds = storage.shard.holds
def holds_then_stop(*args):
    held = real_holds(*args)
    stop("commit")
    return held
storage.shard.holds = holds_then_stop
Store.put_if_absent = stopping(Store.put_if_absent, "put ")
writer = ShardWriter(Store(url), BIG, "run", "writer-0", 1 << 30)
for row in range(3):
    write_whole(writer, row, states_of(BIG, row, 1000 + row))
stop("seal")
try:
    writer.seal_all()
except (LeaseLost, AlreadyExists) as error:
    print(type(error).__name__, flush=True)
else:
    print("committed", flush=True)
"""


def objects_of(s3: Any, bucket: str) -> dict[str, tuple[str, Any]]:
    """Key -> (hash, time of writing) of everything in the bucket."""
    listed = s3.list_objects_v2(Bucket=bucket).get("Contents", [])
    return {o["Key"]: (o["ETag"], o["LastModified"]) for o in listed}


@pytest.mark.parametrize(
    ("stop_before", "ends_with"),
    [
        ("seal", "LeaseLost"),
        ("commit", "AlreadyExists"),
        ("put tokens", "AlreadyExists"),
        ("put manifest", "AlreadyExists"),
    ],
)
def test_a_stopped_writer_fails_when_its_samples_were_taken_over(
    s3: Any, bucket: str, stop_before: str, ends_with: str
) -> None:
    store = Store(f"s3://{bucket}/dump")
    create_dump(store, IDENTITY, BIG, {})
    with python(WRITER, store.url, stop_before) as late:
        try:
            assert late.stdout is not None
            assert late.stdin is not None
            assert late.stdout.readline() == "here\n"
            os.kill(late.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, late.pid, os.WSTOPPED | os.WNOWAIT)
            assert revoke(store, BIG, "run", lambda claim: claim.writer == "writer-0") == (0,)
            take_over(store)
            before = objects_of(s3, bucket)
            os.kill(late.pid, signal.SIGCONT)
            late.stdin.write("\n")
            late.stdin.flush()
            assert late.stdout.readline() == f"{ends_with}\n"
            assert late.wait() == 0
        finally:
            late.kill()
    after = objects_of(s3, bucket)
    assert {key: after[key] for key in before} == before
    uncommitted = {f"dump/{hidden_key(0)}", "dump/tokens/token_ids/c/0", "dump/tokens/loss_mask/c/0"}
    assert after.keys() - before.keys() <= uncommitted
    check_dump(store)


def take_over(store: Store) -> None:
    writer = ShardWriter(store, BIG, "run", "writer-1", 1 << 30)
    for row in range(3):
        write_whole(writer, row, states_of(BIG, row, 1000 + row))
    writer.seal_all()


def check_dump(store: Store) -> None:
    assert {row: c.shard for row, c in committed_samples(read_manifests(store)).items()} == {0: 1, 1: 1, 2: 1}
    assert read_manifest(store, 0).samples == ()
    assert [run_item(item).problems for item in work_items(store)] == [(), ()]
    for sample in Dump(store):
        bits = sample.stack().contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, states_of(BIG, sample.row, sample.tokens).transpose(1, 0, 2))


KILLED = """
import sys
from made_dumps import *
from test_late_writer import BIG
writer = ShardWriter(Store(sys.argv[1]), BIG, "run", "writer-0", 1 << 30)
for row in range(3):
    write_whole(writer, row, states_of(BIG, row, 2000))
print("here", flush=True)
sys.stdin.readline()
"""


def test_a_killed_writer_leaves_an_upload_that_nobody_sees(s3: Any, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    create_dump(store, IDENTITY, BIG, {})
    with python(KILLED, store.url) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    uploads = s3.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [u["Key"] for u in uploads] == [f"dump/{hidden_key(0)}"]
    assert not store.exists(hidden_key(0))
    assert store.list("hidden/c/0/0") == []
    take_over(store)
    assert [m.shard for m in read_manifests(store)] == [1]
    foreign = s3.create_multipart_upload(Bucket=bucket, Key="dump-of-somebody-else/o")["UploadId"]
    store.remove_sinks()
    assert [u["UploadId"] for u in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [foreign]
    assert [run_item(item).problems for item in work_items(store)] == [()]
