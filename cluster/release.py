"""Which engines have nothing to do any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from actors.run_messages import Status

_BATCHES = 3
"""Full batches an engine; when less than that comes back, the engines that are left do it."""


def has_enough(before: bool, status: Status, batch_samples: int) -> bool:
    """Whether the engines that are left can do the rest by themselves.

    From the moment when nothing is pending; samples that come back by a loss change that only if they are many.

    Args:
        before: what it was.
        status: of the run.
        batch_samples: most samples in a batch.
    """
    pending = status.counts.pending
    if status.task == "answer":
        return False  # the capture comes after it, and needs them all
    if not before:
        return pending == 0 and status.counts.total > 0
    return pending <= _BATCHES * batch_samples * max(1, len(status.engines))


def idle_engines(status: Status, started: Mapping[str, bool]) -> list[str]:
    """Engines that can go; one that has started always stays, for what may come back.

    Args:
        status: of a run in which nothing is pending.
        started: engine -> whether it has started, of those that weren't told to leave.
    """
    busy = {engine.name for engine in status.engines if engine.batches}
    ready = [name for name, ready in started.items() if ready]
    stays = next((name for name in ready if name in busy), ready[0] if ready else None)
    return [] if stays is None else [name for name in started if name != stays and name not in busy]
