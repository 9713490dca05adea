"""Waiting for storage that fails: a server that restarts costs time, not engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import AlreadyExists, CorruptDump, StorageDenied, StorageError, StorageFull

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
_FINAL = (AlreadyExists, CorruptDump, StorageDenied, StorageFull)
"""Storage errors that no waiting mends, or, for a full disk, that somebody has to mend: the coordinator pauses."""
_T = TypeVar("_T")


def may_pass(error: StorageError) -> bool:
    """Whether the same call may succeed a while later."""
    return not isinstance(error, _FINAL)


class Patience:
    """Pauses between tries, of growing length and bounded in total.

    The time runs from the first failure since the last `succeeded`, so that storage which answers small
    requests and fails large ones isn't waited for again and again.

    Args:
        timeout_s: longest time without success.
        sleep: waits so many seconds.
        clock: a monotonic clock, in seconds.

    Attributes:
        pauses: made so far: a sign of life for a watchdog.
        trouble: what is waited for now, one line for a person; empty while all is well.
    """

    def __init__(
        self,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._sleep, self._clock = sleep, clock
        self._since_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self.pauses = 0
        self.trouble = ""

    def pause(self, error: StorageError) -> None:
        """Waits once.

        Raises:
            StorageError: ``error`` itself, when waiting doesn't help or has lasted too long.
        """
        now_s = self._clock()
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        if not may_pass(error) or now_s + self._pause_s - since_s > self._timeout_s:
            self.trouble = ""
            raise error
        self.trouble = f"the storage has failed for {now_s - since_s:.0f} s: {error}"
        logger.warning("%s; trying again in %.1f s", self.trouble, self._pause_s)
        self._sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.pauses += 1

    def succeeded(self) -> None:
        """What failed has worked since."""
        self._since_s = None
        self._pause_s = FIRST_PAUSE_S
        self.trouble = ""

    def until_works(self, probe: Callable[[], object], error: StorageError) -> None:
        """Waits until ``probe`` works again after ``error``; the time goes on running.

        Raises:
            StorageError: the last one, when waiting doesn't help or has lasted too long.
        """
        while True:
            self.pause(error)
            try:
                probe()
            except StorageError as again:
                error = again
            else:
                self.trouble = ""
                return

    def call(self, work: Callable[[], _T]) -> _T:
        """Does something that can be done again until it works.

        Raises:
            StorageError: the last one, when waiting doesn't help or has lasted too long.
        """
        while True:
            try:
                result = work()
            except StorageError as error:
                self.pause(error)
            else:
                self.succeeded()
                return result
