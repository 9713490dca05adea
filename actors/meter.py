"""What a coordinator costs: wall time and CPU time of its work, and its memory."""

from __future__ import annotations

import time
from pathlib import Path


class Meter:
    """Wall and CPU seconds of this process from the first `begin` to the last `lap`."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    def begin(self) -> None:
        """Work begins; further calls change nothing."""
        self._began = self._began or _clocks()

    def since_begin_s(self, at_s: float) -> float:
        """Seconds from the first `begin` to ``at_s`` of ``time.monotonic()``."""
        return 0.0 if self._began is None else at_s - self._began[0]

    def lap(self) -> None:
        """Something was finished."""
        self._last = _clocks()

    def spent(self) -> tuple[float, float]:
        """(wall, CPU) seconds; zeros where nothing was begun or nothing finished."""
        if self._began is None or self._last is None:
            return 0.0, 0.0
        return self._last[0] - self._began[0], self._last[1] - self._began[1]


def peak_memory_bytes() -> int:
    """Most resident memory that this process ever had (VmHWM of proc_pid_status(5)); 0 where nobody says."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()
