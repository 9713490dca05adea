"""The ring between a scheduler process and its actor: shared memory that no name refers to.

The memory is a memfd: nothing of it is left anywhere when both processes are gone, and posix_fallocate
reserves its pages, so that too little memory is an error here and not a SIGBUS at the first touch. Blocks are
contiguous, taken and given back in the same order. Only descriptors of blocks go over the socket.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from actors.capture.wire import Channel, ChannelClosed
from storage.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Blocks start on a page: what O_DIRECT and the GPU's copy engine like best."""
CGROUP = Path("/sys/fs/cgroup")
"""This container's limits, where cgroups v2 are mounted."""
ALARM_S = 10.0
"""A ring that has been full this long is worth a person's attention."""


def aligned(size: int) -> int:
    """``size`` rounded up to the ring's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def available_bytes() -> int:
    """Memory that this process may still take: the host's, or its container's where that is less."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = next(int(x.split()[1]) << 10 for x in meminfo.splitlines() if x.startswith("MemAvailable"))
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def _no_room(size: int, why: str) -> ResourceError:
    return ResourceError(
        f"no {size >> 20} MiB of shared memory for the ring of captured states: {why}; free memory on this node, "
        "or lower engine.args.chunked_prefill_size"
    )


class RingMemory:
    """A mapping of the ring, in either process."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.mapping = mmap.mmap(descriptor, size)

    @classmethod
    def create(cls, size: int) -> RingMemory:
        """Reserves ``size`` bytes of anonymous shared memory.

        Raises:
            ResourceError: this host, or this container's memory limit, doesn't have that much.
        """
        available = available_bytes()
        # The kernel would rather end a process than refuse memory, so ask before taking.
        if size > available:
            raise _no_room(size, f"{available >> 20} MiB are available")
        descriptor = os.memfd_create("hsdump-ring", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EINVAL):
                raise
            raise _no_room(size, str(error.strerror)) from error

    def close_descriptor(self) -> None:
        """Closes the descriptor; the mapping stays."""
        os.close(self.descriptor)


class RingAllocator:
    """Contiguous blocks in a circle, given back in the order they were taken. Pure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """Offset of a new block, or None while the ring is too full for it."""
        size = aligned(size)
        if not self._blocks:
            offset = 0 if size <= self.size else None
        else:
            tail, head = self._blocks[0][0], self._blocks[-1][1]
            if head > tail:
                offset = head if head + size <= self.size else (0 if size <= tail else None)
            else:
                offset = head if head + size <= tail else None
        if offset is not None:
            self._blocks.append((offset, offset + size))
        return offset

    def give_back(self) -> None:
        """Gives back the oldest block."""
        self._blocks.popleft()

    @property
    def blocks(self) -> int:
        """Blocks taken and not given back."""
        return len(self._blocks)


class RingProducer:
    """The scheduler's end: waits for room, and hears from the actor which blocks are free.

    Args:
        channel: to the actor; alarms go there too.
        memory: the mapped ring.
        on_message: gets every message that isn't about the ring.

    Attributes:
        waited_s: seconds that forwards have waited for room so far.
    """

    def __init__(
        self, channel: Channel, memory: RingMemory, on_message: Callable[[dict[str, object]], None]
    ) -> None:
        self.memory = memory
        self._channel = channel
        self._on_message = on_message
        self._allocator = RingAllocator(memory.size)
        self._changed = threading.Condition()
        self._closed = False
        self.waited_s = 0.0
        threading.Thread(target=self._listen, name="hsdump-ring", daemon=True).start()

    def take(self, size: int, alarm_s: float = ALARM_S) -> int | None:
        """Offset of a block of ``size`` bytes; waits while the ring is full. None when the actor is gone.

        Permits taken before dispatch cover the ring, so waiting means that the actor is being slow; after
        ``alarm_s`` seconds both processes log it.

        Raises:
            ConfigError: the block is larger than the ring.
        """
        if aligned(size) > self.memory.size:
            raise ConfigError(
                f"one forward's states take {size} bytes and the ring has {self.memory.size}; lower "
                "engine.args.chunked_prefill_size"
            )
        waited = False
        with self._changed:
            while True:
                if self._closed:
                    return None
                offset = self._allocator.take(size)
                if offset is not None:
                    return offset
                began_s = time.monotonic()
                in_time = self._changed.wait(alarm_s)
                self.waited_s += time.monotonic() - began_s
                if not in_time and not waited:
                    waited = True
                    self._alarm(size, alarm_s)

    def _alarm(self, size: int, alarm_s: float) -> None:
        text = (
            f"the ring of captured states has been full for {alarm_s:.0f} s: {self._allocator.blocks} blocks "
            f"in it, {size} bytes wanted of {self.memory.size}; the actor doesn't drain it"
        )
        logger.warning(text)
        try:
            self._channel.send({"alarm": text})
        except ChannelClosed:
            self._closed = True

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                if "free" in message:
                    with self._changed:
                        self._allocator.give_back()
                        self._changed.notify_all()
                else:
                    self._on_message(message)
        except ChannelClosed:
            logger.warning("the engine's actor is gone; captured states are dropped from here on")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
