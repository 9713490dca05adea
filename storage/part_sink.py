"""An object in an object store under construction: parts that are filled in any order and uploaded in theirs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from storage.aligned import aligned_memory
from storage.localdisk import storage_error
from storage.sinks import ByteArray

PART_BYTES = 16 << 20
"""S3 wants at least 5 MiB and at most 10,000 parts: 160 GB, ten times the largest shard."""
HELD_PARTS = 16
"""Parts that wait in memory; the others wait in a temporary file."""
KEEP_IDLE = 8
"""Parts whose memory a process keeps for the next object: fresh memory of this size costs as much as sending it."""

_idle: list[ByteArray] = []


class Upload(Protocol):
    """An object that is sent from its start to its end and appears when it is completed."""

    def write(self, part: ByteArray) -> None:
        """Sends the next part; waits while too many are on their way. ``part`` is never written to again."""

    def complete(self) -> None:
        """Makes the object appear, if absent; durable when it returns."""

    def abort(self) -> None:
        """Forgets what was sent."""


@dataclass
class _Part:
    """A part that isn't full: in a buffer of `PART_BYTES`, or at its place in the temporary file.

    Attributes:
        buffer: its memory, with anything where nothing was written yet; None when it is in the file.
        written: (start, end) of what was written, in the order of the calls; neighbours are one.
    """

    buffer: ByteArray | None
    written: list[tuple[int, int]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return sum(end - start for start, end in self.written) == PART_BYTES

    def note(self, start: int, end: int) -> None:
        if self.written and self.written[-1][1] == start:
            start = self.written.pop()[0]
        self.written.append((start, end))

    def gaps(self) -> Iterator[tuple[int, int]]:
        at = 0
        for start, end in sorted(self.written):
            yield at, start
            at = end
        yield at, PART_BYTES


class PartSink:
    """See `storage.sinks.ObjectSink`.

    Shards are written nearly in order: a sample's states follow each other, but the segments of a long sample
    go to K places each. Clients that upload in order are all that is common to the providers, so parts ahead
    of the first gap wait: up to `HELD_PARTS` in memory and the rest in an unlinked file in ``$TMPDIR``.

    Args:
        where: the object's URL, for messages.
        open_upload: starts the upload; called once, for objects of more than one part.
        put: puts a smaller object, if absent.
    """

    def __init__(self, where: str, open_upload: Callable[[], Upload], put: Callable[[bytes], None]) -> None:
        self._where, self._open_upload, self._put = where, open_upload, put
        self._upload: Upload | None = None
        self._parts: dict[int, _Part] = {}
        self._next = 0
        self._spill: IO[bytes] | None = None

    def write_at(self, offset: int, data: ByteArray, pad_bytes: int = 0) -> None:
        """See `ObjectSink.write_at`."""
        done = 0
        while done < data.size:
            number, at = divmod(offset + done, PART_BYTES)
            piece = data[done : done + PART_BYTES - at]
            self._fill(number, at, piece)
            done += piece.size
        done, offset = 0, offset + data.size
        while done < pad_bytes:
            number, at = divmod(offset + done, PART_BYTES)
            count = min(pad_bytes - done, PART_BYTES - at)
            self._fill(number, at, np.zeros(count, np.uint8))
            done += count

    def commit(self, length: int) -> None:
        """See `ObjectSink.commit`."""
        try:
            if self._upload is None and length <= PART_BYTES:
                self._put(self._take(0)[:length].tobytes())
                return
            while self._next * PART_BYTES < length:
                # A part with a gap, where a sample was given up, never became full.
                self._send(min(PART_BYTES, length - self._next * PART_BYTES))
            assert self._upload is not None
            self._upload.complete()
            self._upload = None
        finally:
            self.abort()

    def abort(self) -> None:
        """See `ObjectSink.abort`."""
        upload, self._upload = self._upload, None
        self._parts.clear()
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        if upload is not None:
            upload.abort()

    def _fill(self, number: int, at: int, piece: ByteArray) -> None:
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = _Part(_new_buffer())
            self._bound_memory()
        if part.buffer is not None:
            part.buffer[at : at + piece.size] = piece
        else:
            self._spill_at(number, at, piece)
        part.note(at, at + piece.size)
        while (first := self._parts.get(self._next)) is not None and first.full:
            self._send(PART_BYTES)

    def _send(self, length: int) -> None:
        if self._upload is None:
            self._upload = self._open_upload()
        part = self._take(self._next)
        self._next += 1
        self._upload.write(part[:length])

    def _take(self, number: int) -> ByteArray:
        """A part's bytes, with zeros where nothing was written."""
        part = self._parts.pop(number, _Part(None))
        buffer = part.buffer
        if buffer is None:
            buffer = _new_buffer()
            if part.written:
                assert self._spill is not None
                with _local_errors(self._where):
                    os.preadv(self._spill.fileno(), [buffer.data], number * PART_BYTES)
        for start, end in part.gaps():
            buffer[start:end] = 0
        return buffer

    def _bound_memory(self) -> None:
        """Moves the part that is needed last to the temporary file when too many are in memory."""
        held = [n for n, part in self._parts.items() if part.buffer is not None and n != self._next]
        if len(held) <= HELD_PARTS:
            return
        last = max(held)
        part = self._parts[last]
        assert part.buffer is not None
        self._spill_at(last, 0, part.buffer)
        part.buffer = None

    def _spill_at(self, number: int, at: int, piece: ByteArray) -> None:
        with _local_errors(self._where):
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(prefix="hsdump-")  # noqa: SIM115  it outlives this call
            view, offset = np.ascontiguousarray(piece).data, number * PART_BYTES + at
            while view:
                count = os.pwrite(self._spill.fileno(), view, offset)
                view, offset = view[count:], offset + count


def _new_buffer() -> ByteArray:
    """Bytes [`PART_BYTES`] of any value; their memory is used again once nobody refers to it."""
    try:
        memory = _idle.pop()
    except IndexError:
        memory = aligned_memory(PART_BYTES)
    # Of the memory's buffer, not of the array: parts cut out of it must refer to this one, whose end frees it.
    buffer = np.frombuffer(memory.data, np.uint8)
    # The client holds a part's memory until it is sent, and lets go of it in a thread of its own.
    weakref.finalize(buffer, _give_back, memory).atexit = False
    return buffer


def _give_back(memory: ByteArray) -> None:
    if len(_idle) < KEEP_IDLE and memory.size == PART_BYTES:
        _idle.append(memory)


@contextlib.contextmanager
def _local_errors(where: str) -> Iterator[None]:
    """Turns errors of the temporary file into the project's."""
    try:
        yield
    except OSError as exc:
        folder = tempfile.gettempdir()
        raise storage_error(f"holding parts of {where} in TMPDIR,", folder, exc, Path(folder)) from exc
