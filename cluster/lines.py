"""How lines get out of a running command: with the time, above a live view, or as JSON objects.

Everything that `report.say` says goes through one logger of the standard library, so that other threads and a live
view don't tear each other's lines. Libraries' own loggers aren't touched here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from rich.console import Console

LOGGER = logging.getLogger("hsdump.lines")
"""Where `report.say` puts its lines; ``fields`` of a record are what programs read."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``event`` and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = fields.get("event", "message")
        head = {"time": f"{stamp}.{int(record.msecs):03d}Z", "event": event}
        return json.dumps(head | {"text": record.getMessage()} | fields)


class ConsoleHandler(logging.Handler):
    """Puts lines above whatever is live on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line; text of others isn't markup."""
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


class _NewestStdout(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stdout`` is at the time, at once."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        self.stream = sys.stdout
        super().emit(record)


def set_up_lines(console: Console | None = None, as_json: bool = False) -> None:
    """Chooses how lines look from now on.

    Args:
        console: a terminal's, to print above a live view; None writes to standard output.
        as_json: one JSON object a line.
    """
    handler: logging.Handler = ConsoleHandler(console) if console is not None else _NewestStdout()
    handler.setFormatter(
        JsonFormatter() if as_json else logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S")
    )
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


set_up_lines()
