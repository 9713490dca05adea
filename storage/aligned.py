"""Memory that a disk can write from and read into without the page cache: aligned, in huge pages, used again.

Huge pages halve what a direct write costs: the kernel pins and describes one page instead of 512. Shared mappings,
which `mmap.mmap` makes unless it is told otherwise, get none on most machines.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20
"""A huge page of x86-64 and of Arm with pages of 4 KiB."""


def huge_pages(length: int) -> mmap.mmap:
    """A mapping of this process alone, ``length`` bytes of zeros, in huge pages where the kernel has such."""
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages is slower, not wrong
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def aligned_memory(length: int) -> npt.NDArray[np.uint8]:
    """Bytes [length] of zeros that begin at a huge page."""
    # More than is asked for, since a mapping may begin at any page; what nobody touches takes no memory.
    memory = np.frombuffer(huge_pages(length + HUGE_BYTES), np.uint8)
    start = -memory.ctypes.data % HUGE_BYTES
    return memory[start : start + length]
