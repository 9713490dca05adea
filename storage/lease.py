"""Who may run on an output: one owner at a time, told apart by numbered terms.

A term is an object ``lease/<n>.json`` that is put if absent, so of racing runs one gets it. Only its owner
writes to it again, to show that it lives. Whoever finds that the newest term's owner has released it, is dead on
this machine, or hasn't moved for the lease's time by the watcher's own clock takes the next term: clocks of
different machines are never compared. An owner that was only slow finds the newer term at its next renewal and
has to stop; it can commit nothing meanwhile, because the new owner has revoked its claims (`storage.claims`).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from storage.errors import AlreadyExists, LeaseLost, OutputError
from storage.files import Store

LEASE_FOLDER = "lease"
TIME_S = 40.0
"""An owner that doesn't move for so long is taken for dead."""
RENEW_EVERY_S = 10.0
_WATCH_EVERY_S = 1.0


@dataclass(frozen=True)
class Owner:
    """Who holds a term, for people and for the next one.

    Attributes:
        machine: boot id and process namespace: where ``process`` can be looked up.
        process: its id and start time, in clock ticks since the boot.
        beat: moves with every renewal.
        released: it has ended in order.
    """

    run_id: str
    host: str
    machine: str
    process: tuple[int, int]
    since_unix_s: float
    beat: int = 0
    released: bool = False

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return f"run {self.run_id} on {self.host} (process {self.process[0]}, since {since})"

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()


class Lease:
    """A term that this process holds; made by `take`."""

    def __init__(self, store: Store, term: int, owner: Owner) -> None:
        self._store = store
        self._term = term
        self._owner = owner

    def renew(self) -> None:
        """Shows that the owner lives.

        Raises:
            LeaseLost: somebody has taken over.
            StorageError: the storage failed; try again later.
        """
        newest = max(_terms(self._store), default=0)
        if newest > self._term:
            other = _owner(_read(self._store, newest))
            raise LeaseLost(
                f"output {self._store.url} was taken over by {other or 'another run'}, because this one didn't show "
                "that it was alive; what it committed stays, and it has to end"
            )
        self._owner = replace(self._owner, beat=self._owner.beat + 1)
        self._store.replace(_key(self._term), self._owner.to_bytes())

    def release(self) -> None:
        """Lets the next run in at once.

        Raises:
            StorageError: the storage failed; the lease runs out by itself.
        """
        if max(_terms(self._store), default=0) == self._term:
            self._store.replace(_key(self._term), replace(self._owner, released=True).to_bytes())


def take(
    store: Store,
    run_id: str,
    on_wait: Callable[[Owner | None], None] = lambda owner: None,
    time_s: float = TIME_S,
) -> Lease:
    """Takes the output for this process.

    Args:
        store: the output.
        run_id: of the run.
        on_wait: called once if an owner that may live has to be watched, for up to ``time_s``.
        time_s: of the lease.

    Raises:
        OutputError: another run is alive on it, by name.
        StorageError: the storage failed.
    """
    me = Owner(run_id, platform.node(), _machine(), (os.getpid(), _start(os.getpid()) or 0), time.time())
    while True:
        term = max(_terms(store), default=0)
        if term and not _vacant(store, term, on_wait, time_s):
            raise OutputError(
                f"output {store.url} is in use by {_owner(_read(store, term)) or 'another run'}; stop that one, or "
                "give this one another output"
            )
        try:
            store.put_if_absent(_key(term + 1), me.to_bytes())
        except AlreadyExists:
            continue  # somebody was faster, and shows in a moment whether it lives
        terms = _terms(store)
        if max(terms) == term + 1:
            for old in terms - {term + 1}:
                store.delete(_key(old))
            return Lease(store, term + 1, me)
        store.delete(_key(term + 1))  # a number from the past: others went on and removed it meanwhile


def _vacant(store: Store, term: int, on_wait: Callable[[Owner | None], None], time_s: float) -> bool:
    """Whether the newest term's owner is gone."""
    seen = _read(store, term)
    owner = _owner(seen)
    if owner is not None and (owner.released or _dead(owner)):
        return True
    on_wait(owner)
    until_s = time.monotonic() + time_s
    while time.monotonic() < until_s:
        time.sleep(min(_WATCH_EVERY_S, time_s / 10))
        if max(_terms(store), default=0) != term:
            return False
        now = _read(store, term)
        if now != seen:
            latest = _owner(now)
            return latest is not None and latest.released
    return True


def _dead(owner: Owner) -> bool:
    """Whether its process ran here and is gone."""
    return owner.machine == _machine() and _start(owner.process[0]) != owner.process[1]


def _machine() -> str:
    """This boot of this machine and this process namespace; unique where /proc doesn't tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {platform.node()} {os.getpid()}"


def _start(pid: int) -> int | None:
    """Start time of a process, field 22 of proc_pid_stat(5); None when there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _key(term: int) -> str:
    return f"{LEASE_FOLDER}/{term:08d}.json"


def _terms(store: Store) -> set[int]:
    names = (PurePosixPath(key).stem for key, _ in store.list(LEASE_FOLDER))
    return {int(name) for name in names if name.isdecimal()}


def _read(store: Store, term: int) -> bytes:
    try:
        return store.read(_key(term))
    except FileNotFoundError:
        return b""


def _owner(data: bytes) -> Owner | None:
    """The owner, None when the record can't be read."""
    try:
        tree = json.loads(data)
        return Owner(**{**tree, "process": tuple(tree["process"])})
    except (ValueError, KeyError, TypeError):
        return None
