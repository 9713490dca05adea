"""An object as a seekable file, for libraries that want one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class RangeFile(io.RawIOBase):
    """An object that doesn't change, as a raw file; wrap it in `io.BufferedReader`.

    Args:
        read: fills a buffer from an offset and returns how many bytes there were.
        size: the object's bytes.
    """

    def __init__(self, read: Callable[[int, memoryview], int], size: int) -> None:
        self._read, self._size = read, size
        self._at = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next read starts."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves there; nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads as much as there is, up to the buffer's size; 0 at the end."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        got = self._read(self._at, view)
        self._at += got
        return got
