"""A map from digests to what was seen with them, in flat arrays: some 60 bytes an entry and no object. Pure."""

from __future__ import annotations

from array import array

_FREE = -1
_FIRST_SLOTS = 1 << 10


class DigestMap:
    """64-bit digest -> (64-bit content, row). Open addressing with linear probing; nothing is ever removed."""

    def __init__(self) -> None:
        self._used = 0
        self._allocate(_FIRST_SLOTS)

    def __len__(self) -> int:
        return self._used

    def get(self, key: int) -> tuple[int, int] | None:
        """Content and row of ``key``; None if it wasn't set."""
        slot = self._slot(key)
        return None if self._rows[slot] == _FREE else (self._contents[slot], self._rows[slot])

    def set(self, key: int, content: int, row: int) -> None:
        """Sets what ``key`` stands for.

        Args:
            key: 0 to 2**64 - 1, evenly spread as digests are.
            content: 0 to 2**64 - 1.
            row: from 0.
        """
        slot = self._slot(key)
        if self._rows[slot] == _FREE:
            self._used += 1
        self._keys[slot], self._contents[slot], self._rows[slot] = key, content, row
        if 3 * self._used > 2 * len(self._rows):
            self._double()

    def _slot(self, key: int) -> int:
        """Where the key is, or would be put."""
        slot = key & self._mask
        while self._rows[slot] != _FREE and self._keys[slot] != key:
            slot = (slot + 1) & self._mask
        return slot

    def _allocate(self, slots: int) -> None:
        self._mask = slots - 1
        self._keys = array("Q", bytes(8 * slots))
        self._contents = array("Q", bytes(8 * slots))
        self._rows = array("q", [_FREE]) * slots

    def _double(self) -> None:
        keys, contents, rows = self._keys, self._contents, self._rows
        self._allocate(2 * len(rows))
        for key, content, row in zip(keys, contents, rows, strict=True):
            if row != _FREE:
                slot = self._slot(key)
                self._keys[slot], self._contents[slot], self._rows[slot] = key, content, row
