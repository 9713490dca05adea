"""One run at a time on an output, and what happens when the one before is gone or only slow."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from storage import lease
from storage.errors import LeaseLost, OutputError
from storage.files import Store

TIME_S = 0.5
HOLD = """
import sys
from storage.files import Store
from storage.lease import take
take(Store(sys.argv[1]), "killed")
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "dump"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch):
    """As if every process looked at the output from a machine of its own."""
    machines = iter(range(1_000_000))
    monkeypatch.setattr(lease, "_machine", lambda: f"machine {next(machines)}")


def test_a_second_run_is_refused_by_name_while_the_first_one_lives(store: Store, elsewhere: None):
    first = lease.take(store, "one", time_s=TIME_S)
    watched = threading.Event()

    def renew_when_watched():
        watched.wait()
        first.renew()

    renewing = threading.Thread(target=renew_when_watched)
    renewing.start()
    with pytest.raises(OutputError, match=r"is in use by run one on .* \(process \d+, since"):
        lease.take(store, "two", lambda owner: watched.set(), time_s=60)
    renewing.join()
    first.renew()


def test_a_run_that_ended_in_order_is_followed_at_once(store: Store, elsewhere: None):
    lease.take(store, "one").release()
    lease.take(store, "two", lambda owner: pytest.fail("waited"))


def test_a_run_that_was_killed_on_this_machine_is_followed_at_once(store: Store):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    with pytest.raises(OutputError, match="is in use by run killed"):
        lease.take(store, "two", lambda owner: lease_moves(store))
    holder.kill()
    holder.communicate()
    lease.take(store, "two", lambda owner: pytest.fail("waited"))


def lease_moves(store: Store) -> None:
    """What the holder's own renewal would do."""
    ((key, _),) = store.list(lease.LEASE_FOLDER)
    owner = lease._owner(store.read(key))
    assert owner is not None
    threading.Timer(0.2, lambda: store.replace(key, replace(owner, beat=1).to_bytes())).start()


def test_a_run_elsewhere_that_doesnt_move_is_taken_over_and_finds_out(store: Store, elsewhere: None):
    slow = lease.take(store, "slow", time_s=TIME_S)
    lease.take(store, "two", time_s=TIME_S)
    with pytest.raises(LeaseLost, match="was taken over by run two"):
        slow.renew()
    slow.release()
    with pytest.raises(LeaseLost):
        slow.renew()


def test_of_runs_that_start_at_once_one_gets_the_output(store: Store, elsewhere: None):
    stale = lease.take(store, "stale", time_s=TIME_S)
    together = threading.Barrier(8)

    def start(i: int) -> lease.Lease | None:
        together.wait()
        try:
            return lease.take(store, f"run {i}", time_s=TIME_S * (1 + i % 3))
        except OutputError:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [found for found in pool.map(start, range(8)) if found is not None]
    holding = []
    for one in won:
        try:
            one.renew()
            holding.append(one)
        except LeaseLost:
            pass
    assert len(holding) == 1
    with pytest.raises(LeaseLost):
        stale.renew()


def test_a_number_from_the_past_doesnt_win(store: Store, elsewhere: None, monkeypatch: pytest.MonkeyPatch):
    """It looked at term 1; before it writes term 2, others have had terms 2 and 3 and removed 2."""
    lease.take(store, "one").release()
    real = store.put_if_absent

    def others_first(key: str, data: bytes) -> None:
        monkeypatch.setattr(store, "put_if_absent", real)
        other = Store(store.url)
        lease.take(other, "two").release()
        lease.take(other, "three", time_s=TIME_S)
        real(key, data)

    monkeypatch.setattr(store, "put_if_absent", others_first)
    seen = []
    late = lease.take(store, "late", seen.append, time_s=TIME_S)
    assert [owner.run_id for owner in seen if owner] == [
        "three"
    ]  # three lives, as far as anyone knows: watched
    late.renew()


def test_a_record_that_nobody_can_read_is_watched_too(store: Store, elsewhere: None):
    store.put_if_absent("lease/00000004.json", b"not json")
    seen = []
    lease.take(store, "two", seen.append, time_s=TIME_S)
    assert seen == [None]
    assert [key for key, _ in store.list("lease")] == ["lease/00000005.json"]


def test_a_process_of_another_machine_isnt_looked_up_here(store: Store, elsewhere: None):
    """Its id may be free, or somebody else's, on this machine."""
    lease.take(store, "there", time_s=TIME_S)
    ((key, _),) = store.list(lease.LEASE_FOLDER)
    owner = lease._owner(store.read(key))
    assert owner is not None
    store.replace(key, replace(owner, process=(2**22 + 1, 1)).to_bytes())
    watched: list[object] = []
    lease.take(store, "two", watched.append, time_s=TIME_S)
    assert len(watched) == 1
