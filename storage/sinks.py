"""Objects under construction: positional writes, then one commit that makes the object appear, if absent."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from storage.aligned import aligned_memory
from storage.errors import AlreadyExists, StorageError
from storage.localdisk import (
    BLOCK_BYTES,
    SINK_SUFFIX,
    allocate,
    finish_writeback,
    has_block_device,
    open_direct,
    publish_if_absent,
    start_writeback,
    storage_error,
    temporary,
)

BUFFER_BYTES = 4 << 20
"""A virtual disk's largest request; six buffers of 2 MiB took a third more CPU time."""
BUFFERS = 5
"""Few enough to stay in the processor's cache: copying into 48 MiB of buffers instead took half as much CPU time
again."""
DEPTH = 2
"""Writes on their way to the disk at a time."""
ALLOCATE_BYTES = 512 << 20
"""Space that is allocated ahead of the writes."""

ByteArray = npt.NDArray[np.uint8]

_idle_buffers: list[ByteArray] = []


class ObjectSink(Protocol):
    """One object that is written at any positions and appears only when it is committed."""

    def write_at(self, offset: int, data: ByteArray, pad_bytes: int = 0) -> None:
        """Puts ``data`` [n] uint8 at ``offset``, followed by ``pad_bytes`` zeros.

        The data is copied before it returns, so the caller may reuse its memory. Ranges never overlap.

        Raises:
            StorageFull: no space is left; it may be reported by a later call.
            StorageError: writing failed; the same.
        """

    def commit(self, length: int) -> None:
        """Makes the object's ``length`` bytes appear under their name; durable when it returns.

        Raises:
            AlreadyExists: the name is taken; nothing was overwritten.
            StorageFull: no space is left.
            StorageError: writing failed.
        """

    def abort(self) -> None:
        """Forgets the object; after a commit or a second time it does nothing."""


class LocalSink:
    """A file that is written past the page cache by threads of its own, out of a few aligned buffers.

    One copy into an aligned buffer and O_DIRECT costs less CPU time than a buffered write without a copy, and
    evicts nobody's cache. Writes that follow each other in the file share a buffer, so short samples still
    make long writes. Blocks that are only partly covered, and file systems that refuse O_DIRECT (tmpfs, some
    FUSE and NFS), take buffered writes, of which only a few buffers' worth is dirty at a time. Mixing both in
    one file is safe because a direct write covers whole blocks.

    On a block device space is allocated ahead: two direct writes go on at a time only where neither of them
    makes the file longer.
    """

    def __init__(self, root: Path, final: Path) -> None:
        self._root, self._final = root, final
        self._temp = temporary(root, SINK_SUFFIX)
        self._fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct_fd = open_direct(self._temp, os.O_WRONLY)
        self._direct = self._direct_fd is not None
        self._ahead = self._direct and has_block_device(self._fd)
        self._allocated = 0
        self._free: queue.SimpleQueue[ByteArray | None] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(None)  # taken on first use: small objects need one
        self._work: queue.SimpleQueue[tuple[ByteArray, int, int] | None] = queue.SimpleQueue()
        self._buffer: ByteArray | None = None
        self._start = self._fill = 0
        self._error: OSError | None = None
        self._open = True
        self._threads = [
            threading.Thread(target=self._drain, name=f"sink {final}", daemon=True) for _ in range(DEPTH)
        ]
        for thread in self._threads:
            thread.start()

    def write_at(self, offset: int, data: ByteArray, pad_bytes: int = 0) -> None:
        """See `ObjectSink.write_at`."""
        self._append(offset, data.size, lambda view, at: np.copyto(view, data[at : at + view.size]))
        self._append(offset + data.size, pad_bytes, lambda view, at: view.fill(0))

    def _append(self, offset: int, length: int, fill: Callable[[ByteArray, int], None]) -> None:
        done = 0
        while done < length:
            if self._error is not None:
                raise self._failed(self._error)
            if self._buffer is not None and self._start + self._fill != offset + done:
                self._submit()
            if self._buffer is None:
                used = self._free.get()
                self._buffer = _take_buffer() if used is None else used
                self._start, self._fill = offset + done, 0
            count = min(length - done, BUFFER_BYTES - self._fill)
            fill(self._buffer[self._fill : self._fill + count], done)
            self._fill += count
            done += count
            if self._fill == BUFFER_BYTES:
                self._submit()

    def _submit(self) -> None:
        if self._buffer is None:
            return
        end = self._start + self._fill
        if self._ahead and end > self._allocated:
            self._allocated = end + ALLOCATE_BYTES
            allocate(self._fd, self._allocated)
        self._work.put((self._buffer, self._start, self._fill))
        self._buffer = None

    def _drain(self) -> None:
        behind: tuple[int, int] | None = None
        while (item := self._work.get()) is not None:
            buffer, start, length = item
            if self._error is None:
                try:
                    behind = self._write(buffer.data[:length], start, behind)
                except OSError as exc:
                    self._error = exc
            self._free.put(buffer)

    def _write(self, view: memoryview, offset: int, behind: tuple[int, int] | None) -> tuple[int, int] | None:
        """Writes a buffer; returns the range of dirty pages that this thread hasn't waited for."""
        if self._direct and self._direct_fd is not None and offset % BLOCK_BYTES == 0:
            whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
            try:
                _pwrite_all(self._direct_fd, view[:whole], offset)
                view, offset = view[whole:], offset + whole
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                # Opened but not writable that way: this file system has no O_DIRECT after all.
                self._direct = False
        _pwrite_all(self._fd, view, offset)
        if len(view) < BLOCK_BYTES:
            return behind
        start_writeback(self._fd, offset, len(view))
        if behind is not None:
            finish_writeback(self._fd, *behind)
        return offset, len(view)

    def commit(self, length: int) -> None:
        """See `ObjectSink.commit`."""
        try:
            self._submit()
            self._join()
            if self._error is not None:
                raise self._error
            os.ftruncate(self._fd, length)
            os.fsync(self._fd)
            publish_if_absent(self._temp, self._final)
        except AlreadyExists:
            raise
        except OSError as exc:
            raise self._failed(exc) from exc
        finally:
            self.abort()

    def abort(self) -> None:
        """See `ObjectSink.abort`."""
        if not self._open:
            return
        self._open = False
        self._join()
        while not self._free.empty():
            if (buffer := self._free.get()) is not None:
                _idle_buffers.append(buffer)
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        with contextlib.suppress(OSError):  # left to repair; the error that led here says more
            self._temp.unlink(missing_ok=True)

    def _join(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _failed(self, exc: OSError) -> StorageError:
        return storage_error("writing", str(self._final), exc, self._root)


class BufferSink:
    """An object that is collected in memory and put in one request: for object stores and memory://.

    Args:
        put: puts the finished object, if absent.
    """

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put
        self._bytes = bytearray()

    def write_at(self, offset: int, data: ByteArray, pad_bytes: int = 0) -> None:
        """See `ObjectSink.write_at`."""
        end = offset + data.size + pad_bytes
        if end > len(self._bytes):
            self._bytes.extend(bytes(end - len(self._bytes)))
        self._bytes[offset : offset + data.size] = data.data

    def commit(self, length: int) -> None:
        """See `ObjectSink.commit`."""
        with memoryview(self._bytes) as view:
            data = bytes(view[:length])
        self._bytes = bytearray()
        self._put(data)

    def abort(self) -> None:
        """See `ObjectSink.abort`."""
        self._bytes = bytearray()


def _take_buffer() -> ByteArray:
    """An aligned buffer of `BUFFER_BYTES`; used ones first, whose pages needn't be faulted in again."""
    try:
        return _idle_buffers.pop()
    except IndexError:
        return aligned_memory(BUFFER_BYTES)


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
