"""Holds the lease on an output for as long as a command runs on it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from cluster.report import say
from storage.errors import LeaseLost, StorageError
from storage.files import Store
from storage.lease import RENEW_EVERY_S, TIME_S, Lease, Owner, take

logger = logging.getLogger(__name__)


class Tenure:
    """Renews a lease in a thread of its own, since the command itself may wait for minutes.

    Args:
        lease: of the output.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._lost: LeaseLost | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Does nothing as long as the output is ours.

        Raises:
            LeaseLost: another run has taken over.
        """
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Lets the next run in."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError):  # then it runs out by itself
            self._lease.release()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            try:
                self._lease.renew()
            except LeaseLost as error:
                self._lost = error
                return
            except StorageError as error:
                logger.warning("the lease can't be renewed, trying again: %s", error)


@contextlib.contextmanager
def hold(store: Store, run_id: str) -> Iterator[Tenure]:
    """The output is this command's own for as long as the context lasts.

    Raises:
        OutputError: another run is alive on it.
    """
    tenure = Tenure(take(store, run_id, _say_wait))
    try:
        yield tenure
    finally:
        tenure.end()


def _say_wait(owner: Owner | None) -> None:
    say(f"{owner or 'another run'} may still use this output; watching it for up to {TIME_S:.0f} s")
