"""How far a long reading command is: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cluster.report import size

LINE_EVERY_S = 10.0


class ByteProgress:
    """Counts bytes up to a total. A context manager.

    Args:
        console: where to show it; it decides whether that is a terminal.
        what: one word, in front.
        total_bytes: when it is done.
    """

    def __init__(self, console: Console, what: str, total_bytes: int) -> None:
        self._console, self._what, self._total = console, what, total_bytes
        self._done = 0
        self._started_s = self._said_s = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(TextColumn(what), *columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total_bytes)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count_bytes: int) -> None:
        """That many more are done."""
        self._done += count_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        now_s = time.monotonic()
        if now_s - self._said_s >= LINE_EVERY_S and self._done < self._total:
            self._said_s = now_s
            self._console.print(
                progress_line(self._what, self._done, self._total, now_s - self._started_s), markup=False
            )


def progress_line(what: str, done_bytes: int, total_bytes: int, seconds: float) -> str:
    """``reading   12.0 GiB of 923.9 GiB, 2.1 GiB/s, 434 s left``."""
    speed = done_bytes / max(seconds, 1e-9)
    left = f"{(total_bytes - done_bytes) / speed:,.0f} s left" if speed else "time left unknown"
    return f"{what:<9} {size(done_bytes)} of {size(total_bytes)}, {size(speed)}/s, {left}"
