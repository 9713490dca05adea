"""How long failing storage is waited for; with a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from actors.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, Patience
from storage.errors import CorruptDump, StorageError


@dataclass
class Clock:
    now_s: float = 100.0
    slept: list[float] = field(default_factory=list)

    def patience(self, timeout_s: float) -> Patience:
        return Patience(timeout_s, self.sleep, lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Work:
    """Fails so many times, then gives 7."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self) -> int:
        self.left -= 1
        if self.left >= 0:
            raise StorageError(f"{self.left} to go")
        return 7


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    clock = Clock()
    patience = clock.patience(1000)
    assert patience.call(Work(8)) == 7
    assert clock.slept[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert clock.slept[-1] == LONGEST_PAUSE_S
    assert patience.pauses == 8
    patience.call(Work(1))
    assert clock.slept[-1] == FIRST_PAUSE_S


def test_total_time_is_bounded_and_the_last_error_is_raised() -> None:
    clock = Clock()
    with pytest.raises(StorageError):
        clock.patience(60).call(Work(1000))
    assert 60 - LONGEST_PAUSE_S <= sum(clock.slept) <= 60


def test_probe_that_works_is_no_success_yet() -> None:
    """Storage that answers small requests and fails large ones is given up after the time as well."""
    clock = Clock()
    patience = clock.patience(60)

    def write_for_ever() -> None:
        for _ in range(1000):
            patience.until_works(lambda: None, StorageError("large"))

    with pytest.raises(StorageError, match="large"):
        write_for_ever()
    assert sum(clock.slept) <= 60


def test_error_that_no_waiting_mends_is_raised_at_once() -> None:
    clock = Clock()
    with pytest.raises(CorruptDump):
        clock.patience(60).pause(CorruptDump("bytes differ"))
    assert clock.slept == []
