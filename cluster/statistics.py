"""What the captured states looked like, kept in the dump: ``capture_statistics.json``, for people."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from actors.run_messages import MemberStatus
from storage.files import Store

STATISTICS_KEY = "capture_statistics.json"
WRITE_EVERY_S = 60.0


def norm_counts(kept: Mapping[str, Any]) -> dict[str, Counter[float]]:
    """The distribution of norms over all invocations and engines: state by name -> norm -> tokens.

    Args:
        kept: content of the file.
    """
    found: dict[str, Counter[float]] = {}
    for engines in kept.values():
        for engine in engines.values():
            for state, told in engine["states"].items():
                for norm, tokens in told.get("norm_counts", ()):
                    found.setdefault(state, Counter())[norm] += tokens
    return found


class StateStatisticsFile:
    """Keeps every engine's statistics, those of earlier invocations of the run included.

    Args:
        store: the dump.
        invocation: names this one; engines of several have the same names.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, invocation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: dict[str, Any] = (
            json.loads(store.read(STATISTICS_KEY)) if store.exists(STATISTICS_KEY) else {}
        )
        self._own: dict[str, Any] = {}
        self._kept[invocation] = self._own
        self._alarms: dict[str, int] = {}
        self._written_s = clock()

    def take(self, engines: Iterable[MemberStatus]) -> list[str]:
        """Keeps what engines say, and writes it now and then.

        Returns:
            A line for each engine that saw unusual tokens since it was heard last.
        """
        lines: list[str] = []
        for engine in engines:
            figures = engine.figures
            if figures is None or not figures.states:
                continue
            self._own[engine.name] = {"states": figures.states, "alarms": figures.alarms}
            new = figures.alarms - self._alarms.get(engine.name, 0)
            if new > 0:
                lines.append(
                    f"{engine.name}: {new} tokens with unusual norms, the last in {figures.last_alarm}"
                )
            self._alarms[engine.name] = figures.alarms
        if self._clock() - self._written_s > WRITE_EVERY_S:
            self.write()
        return lines

    def write(self) -> None:
        """Puts the file into the dump.

        Raises:
            StorageError: it can't be written.
        """
        self._written_s = self._clock()
        if self._own:
            self._store.replace(STATISTICS_KEY, json.dumps(self._kept, indent=1).encode())


def float8_errors(store: Store) -> list[str]:
    """How far states that are stored as 8-bit floats are from what was computed: the worst of all engines, a state."""
    if not store.exists(STATISTICS_KEY):
        return []
    worst: dict[str, Mapping[str, float]] = {}
    for engines in json.loads(store.read(STATISTICS_KEY)).values():
        for engine in engines.values():
            for state, found in engine["states"].items():
                quantiles = found.get("float8_error_quantiles", {})
                if quantiles and quantiles["0.5"] >= worst.get(state, {"0.5": 0.0})["0.5"]:
                    worst[state] = quantiles
    return [f"{s}: error a token {q['0.5']:.4f} (median), {q['0.99']:.4f} (p99)" for s, q in worst.items()]
