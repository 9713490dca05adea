"""Object stores fail for a while, cut connections, and lose answers after having done the work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from faulty_proxy import SLOW_DOWN, FaultyProxy
from made_dumps import IDENTITY, LAYOUT, make_dump

from storage import remote_target
from storage.claims import claim_next
from storage.dump import create_dump
from storage.errors import AlreadyExists, OutputError, StorageError
from storage.files import Store
from storage.verify import run_item, work_items

PART = 5 << 20
CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code></Error>"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_target, "FIRST_BACKOFF", timedelta(milliseconds=10))
    monkeypatch.setattr("storage.part_sink.PART_BYTES", PART)
    monkeypatch.setattr("storage.part_sink._idle", [])
    monkeypatch.setattr("storage.remote.PART_BYTES", PART)


def write_parts(store: Store, key: str = "hidden/c/0/0/0", parts: int = 4) -> np.ndarray[Any, Any]:
    data = np.random.default_rng(0).integers(0, 255, parts * PART, np.uint8)
    sink = store.object_sink(key)
    try:
        sink.write_at(0, data)
        sink.commit(data.size)
    finally:
        sink.abort()
    return data


@pytest.mark.parametrize(("status", "body"), [(500, b""), (503, SLOW_DOWN)])
def test_a_server_that_fails_for_a_while_is_waited_for(
    proxy: FaultyProxy, bucket: str, status: int, body: bytes
) -> None:
    store = Store(f"s3://{bucket}/dump")
    faults = [
        proxy.fail(method, part, 3, status=status, body=body)
        for method, part in [
            ("POST", "uploads"),
            ("PUT", "partNumber=2"),
            ("POST", "uploadId"),
            ("PUT", "claims/"),
        ]
    ]
    assert claim_next(store, "run", "writer-0", 0) == 0
    data = write_parts(store)
    faults += [proxy.fail(method, "", 3, status=status, body=body) for method in ("GET", "HEAD")]
    assert store.size("hidden/c/0/0/0") == data.size
    assert store.read("hidden/c/0/0/0") == data.tobytes()
    assert [fault.times for fault in faults] == [0] * 6


def test_a_connection_that_is_cut_in_the_middle_of_a_part_costs_that_part_only(
    proxy: FaultyProxy, bucket: str
) -> None:
    store = Store(f"s3://{bucket}/dump")
    fault = proxy.fail("PUT", "partNumber=3", 2, cut="request")
    data = write_parts(store)
    assert fault.times == 0
    sent = [path.partition("partNumber=")[2][0] for method, path in proxy.seen if "partNumber" in path]
    assert sorted(sent) == ["1", "2", "3", "3", "3", "4"]
    assert store.read("hidden/c/0/0/0") == data.tobytes()


def test_a_read_that_is_cut_goes_on(proxy: FaultyProxy, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    data = write_parts(store)
    fault = proxy.fail("GET", "hidden", 2, cut="answer")
    assert store.read_range("hidden/c/0/0/0", 1000, 2 * PART) == data[1000 : 1000 + 2 * PART].tobytes()
    assert fault.times == 0


@pytest.mark.parametrize("fault", [{"cut": "answer"}, {"cut": "request"}])
def test_a_put_whose_answer_is_lost_still_knows_that_it_won(
    proxy: FaultyProxy, bucket: str, fault: dict[str, Any]
) -> None:
    store = Store(f"s3://{bucket}/dump")
    lost = proxy.fail("PUT", "manifest/0.json", 1, **fault)
    store.put_if_absent("manifest/0.json", b"ours")
    assert lost.times == 0
    assert store.read("manifest/0.json") == b"ours"


def test_a_put_whose_answer_is_lost_does_not_take_another_ones_object_for_its_own(
    proxy: FaultyProxy, bucket: str
) -> None:
    store = Store(f"s3://{bucket}/dump")
    store.put_if_absent("manifest/0.json", b"the same bytes")
    proxy.fail("PUT", "manifest/0.json", 1, cut="answer")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("manifest/0.json", b"the same bytes")


def test_a_put_that_meets_another_one_which_fails_is_tried_again(proxy: FaultyProxy, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    conflict = proxy.fail("PUT", "manifest/0.json", 3, status=409, body=CONFLICT)
    store.put_if_absent("manifest/0.json", b"ours")
    assert conflict.times == 0
    assert store.read("manifest/0.json") == b"ours"


def test_an_upload_whose_last_answer_is_lost_is_complete(proxy: FaultyProxy, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    lost = proxy.fail("POST", "uploadId", 1, cut="answer")
    data = write_parts(store)
    assert lost.times == 0
    assert store.read("hidden/c/0/0/0") == data.tobytes()


def test_a_server_that_stays_broken_ends_in_an_error_and_leaves_nothing(
    proxy: FaultyProxy, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_target, "MAX_RETRIES", 2)
    monkeypatch.setattr("storage.remote.RETRY_TIMEOUT", timedelta(0))
    store = Store(f"s3://{bucket}/dump")
    proxy.fail("PUT", "", 1_000, status=503, body=SLOW_DOWN)
    with pytest.raises(StorageError, match=r"writing s3://.*/hidden/c/0/0/0 failed: .*503.*SlowDown"):
        write_parts(store)
    with pytest.raises(StorageError, match=r"writing s3://.*/claims/0\.json failed"):
        claim_next(store, "run", "writer-0", 0)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    assert store.list("hidden/c/0/0") == []


def test_a_dump_is_whole_after_faults_everywhere(proxy: FaultyProxy, bucket: str) -> None:
    for method in ("GET", "HEAD", "PUT", "POST"):
        proxy.fail(method, "", 5, status=503, body=SLOW_DOWN)
        proxy.fail(method, "", 5, cut="request")
    store = make_dump(f"s3://{bucket}/dump", [5, 30, 64, 17])
    assert all(fault.times == 0 for fault in proxy.faults if not fault.matches("POST", ""))
    assert [run_item(item).problems for item in work_items(store)] == [(), (), ()]


def test_racing_creators_make_one_dump(proxy: FaultyProxy, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    proxy.fail("PUT", "zarr.json", 1, cut="answer")
    create_dump(store, IDENTITY, LAYOUT, {})
    with pytest.raises(AlreadyExists):
        create_dump(store, IDENTITY, LAYOUT, {})


def test_a_server_that_ignores_the_condition_of_a_put_is_refused(proxy: FaultyProxy, bucket: str) -> None:
    store = Store(f"s3://{bucket}/dump")
    store.require_put_if_absent()
    proxy.dropped_headers = ("connection", "if-none-match")
    with pytest.raises(OutputError, match="ignores the condition of a put-if-absent"):
        store.require_put_if_absent()
    assert store.list(".tmp") == []
