"""Memory that reads go into, used again once nobody refers to it.

A sample is tens of megabytes. Fresh memory of that size is mapped, zeroed page by page and unmapped for every
read, which costs more CPU time than the copy out of the page cache itself. So the pages are kept: an array
that was handed out comes back when the last tensor over it is gone.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 1 << 20
"""Below this the C library's own heap does the same."""
KEEP_BYTES = 256 << 20
"""Idle memory that a process keeps."""
_ROUND_BYTES = 2 << 20


class ReadMemory:
    """Arrays whose pages are recycled. Safe under threads and fork: a child starts with none.

    Args:
        keep_bytes: idle memory that is kept at most.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._idle: deque[mmap.mmap] = deque()
        self._pid = os.getpid()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next read."""
        return sum(len(memory) for memory in self._idle)

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """An array of ``length`` bytes with any contents, aligned to pages when it is large."""
        if length < SMALL_BYTES:
            return np.empty(length, np.uint8)
        memory = self._fitting(length)
        if memory is None:
            # Private: after a fork, shared pages would be written by both processes.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, -(-length // _ROUND_BYTES) * _ROUND_BYTES, flags)
        array = np.frombuffer(memory, np.uint8, length)
        # Views, and tensors made of them, refer to this array; it goes when the last of them does.
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def _fitting(self, length: int) -> mmap.mmap | None:
        """An idle piece that holds ``length``, but isn't wasted on it; the oldest one first."""
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), deque()
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread took it
                return None
            if length <= len(memory) <= 4 * length:
                return memory
            self._idle.append(memory)
        return None

    def _give_back(self, memory: mmap.mmap) -> None:
        # Runs wherever the last reference goes, even in the middle of the collector: no locks, and only
        # operations of the deque that are atomic.
        self._idle.append(memory)
        while self.idle_bytes > self._keep_bytes:
            try:
                self._idle.popleft()
            except IndexError:
                return
