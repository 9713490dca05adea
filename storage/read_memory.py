"""Memory that reads go into, used again once nobody refers to it.

A sample is tens of megabytes. Fresh memory of that size is mapped, zeroed page by page and unmapped for every
read, which costs more CPU time than the copy out of the page cache itself. So the pages are kept: an array
that was handed out comes back when the last tensor over it is gone. And they are huge where the kernel has such
pages, into which a copy is half as fast again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.aligned import HUGE_BYTES, huge_pages

SMALL_BYTES = 1 << 20
"""Below this the C library's own heap does the same."""
KEEP_BYTES = 1 << 30
"""Idle memory that a process keeps, pieces of other lengths among it. With half as much, a third of the memory that a
stream of lognormal lengths read into was fresh."""
WASTE = 4
"""A piece isn't used for less than this part of it."""

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Of this container, page cache included, where cgroups v2 are mounted; ``max`` is none."""


def memory_bytes() -> int:
    """Memory of this machine, or of its container where that has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        return min(machine, int(MEMORY_LIMIT.read_text(encoding="ascii")))
    return machine


class ReadMemory:
    """Arrays whose pages are recycled. Safe under threads and fork: a child starts with none.

    Args:
        keep_bytes: idle memory that is kept at most.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[mmap.mmap] = []
        self._pid = os.getpid()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next read."""
        return sum(len(memory) for memory in list(self._idle))

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """An array of ``length`` bytes with any contents, aligned to pages when it is large."""
        if length < SMALL_BYTES:
            return np.empty(length, np.uint8)
        memory = self._fitting(length)
        if memory is None:
            # Private, since after a fork shared pages would be written by both processes.
            memory = huge_pages(_rounded(length))
        array = np.frombuffer(memory, np.uint8, length)
        # Views, and tensors made of them, refer to this array; it goes when the last of them does.
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def _fitting(self, length: int) -> mmap.mmap | None:
        """The smallest idle piece that holds ``length``, unless that would waste most of it."""
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), []
        # Other threads take and give back meanwhile; each step on the list is atomic by itself.
        for memory in sorted(self._idle, key=len):
            if length <= len(memory) <= WASTE * length:
                try:
                    self._idle.remove(memory)
                except ValueError:  # another thread was faster
                    continue
                return memory
        return None

    def _give_back(self, memory: mmap.mmap) -> None:
        # Runs wherever the last reference goes, even in the middle of the collector: no locks, and only
        # operations of the list that are atomic.
        self._idle.append(memory)
        while self.idle_bytes > self._keep_bytes:
            try:
                self._idle.pop(0)
            except IndexError:
                return


def _rounded(length: int) -> int:
    """A length that fits others later and wastes an eighth at most, in whole huge pages."""
    step = max(1 << (length.bit_length() - 4), HUGE_BYTES)
    return -(-length // step) * step
