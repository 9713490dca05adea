"""Parts go up in their order whatever the order of the writes, from bounded memory."""

from __future__ import annotations

import errno
import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import part_sink
from storage.errors import StorageFull
from storage.part_sink import PartSink

PART = 4096


class Sent:
    """Stands in for an upload: like the real client it reads a part's memory later than it is given."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray[Any, Any]] = []
        self.completed = self.aborted = False

    def write(self, part: np.ndarray[Any, Any]) -> None:
        self.parts.append(part)

    def complete(self) -> None:
        self.completed = True

    def abort(self) -> None:
        self.aborted = True

    @property
    def data(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_sink, "PART_BYTES", PART)
    monkeypatch.setattr(part_sink, "HELD_PARTS", 2)
    monkeypatch.setattr(part_sink, "KEEP_IDLE", 4)
    monkeypatch.setattr(part_sink, "_idle", [])


def new_sink() -> tuple[PartSink, Sent, list[bytes]]:
    sent, puts = Sent(), []
    return PartSink("s3://b/o", lambda: sent, puts.append), sent, puts


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, bool]]]:
    """Length, and (offset, bytes, padding, written or a gap) in the order of the calls."""
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 3 * PART), st.sampled_from([0, 0, 1, PART + 7])), max_size=12)
    )
    offset, pieces = 0, []
    for size, pad in sizes:
        pieces.append((offset, size, pad, draw(st.integers(0, 5)) > 0))
        offset += size + pad
    return offset, draw(st.permutations(pieces))


@settings(max_examples=150, deadline=None)
@given(plan=writes())
def test_what_was_written_is_sent_in_order_and_gaps_are_zeros(
    plan: tuple[int, list[tuple[int, int, int, bool]]],
) -> None:
    length, pieces = plan
    sink, sent, puts = new_sink()
    expected = np.zeros(length, np.uint8)
    source = np.zeros(3 * PART, np.uint8)
    for number, (offset, size, pad, written) in enumerate(pieces):
        if written:
            source[:size] = number + 1
            expected[offset : offset + size] = number + 1
            sink.write_at(offset, source[:size], pad)
            source[:] = 255  # the caller may use its memory again
        assert sum(part.buffer is not None for part in sink._parts.values()) <= 2 + 2
    sink.commit(length)
    if length <= PART and not sent.parts:
        assert puts == [expected.tobytes()]
    else:
        assert sent.completed
        assert all(part.size == PART for part in sent.parts[:-1])
        assert sent.data == expected.tobytes()
    assert not sent.aborted


def test_a_part_that_is_on_its_way_keeps_its_memory_and_gives_it_back_later() -> None:
    sink, sent, _ = new_sink()
    for number in range(6):
        sink.write_at(number * PART, np.full(PART, number + 1, np.uint8))
    assert [int(part[0]) for part in sent.parts] == [1, 2, 3, 4, 5, 6]
    assert part_sink._idle == []
    sent.parts.clear()
    gc.collect()
    assert len(part_sink._idle) == 4
    other, _, _ = new_sink()  # the next object takes it
    other.write_at(0, np.full(PART - 1, 7, np.uint8))
    assert len(part_sink._idle) == 3


def test_aborted_sinks_abort_their_upload_once() -> None:
    sink, sent, puts = new_sink()
    sink.write_at(0, np.ones(PART, np.uint8))
    sink.abort()
    assert (sent.aborted, sent.completed, puts) == (True, False, [])
    sent.aborted = False
    sink.abort()
    assert not sent.aborted


def test_an_upload_that_fails_is_aborted() -> None:
    sink, sent, _ = new_sink()

    def fail() -> None:
        raise StorageFull("no space")

    sent.complete = fail  # type: ignore[method-assign]
    sink.write_at(0, np.ones(2 * PART, np.uint8))
    with pytest.raises(StorageFull):
        sink.commit(2 * PART)
    assert sent.aborted


def test_a_full_folder_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    sink, _, _ = new_sink()
    with pytest.raises(StorageFull, match=r"holding parts of s3://b/o in TMPDIR, .*no space left"):
        sink.write_at(PART, np.ones(8 * PART, np.uint8))
    sink.abort()
