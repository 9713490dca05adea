"""Which forwards and which of their rows are captured, read from SGLang's forward batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.capture.tap import Request

CAPTURED = "hs:"
PROOF = "hs-proof:"
OFF = "hs-off:"
AT_LAYERS = "hs-at-layers:"
"""Prefixes of request ids: captured; captured and checked; run with the collector switched off; from this forward
on, boundaries are read at the layers' inputs. Every rank sees the ids of a forward, so all ranks change together.
Anything else, such as warm-up and health checks, passes through untouched."""
ANSWERED = "hs-answer:"
"""Of requests that the model answers: none of the above, so they pass through untouched."""
AGAIN = ":again"
"""Suffix of the ids under which samples are captured a second time."""
CHECKED = ":checked"
"""Suffix of the ids of captured requests whose next token is judged as the proof's is."""


def rows_of(batch: Any, prefixes: tuple[str, ...]) -> list[Request]:
    """Which rows of an EXTEND forward belong to requests with one of ``prefixes``, in the forward's order."""
    found: list[Request] = []
    row = 0
    lengths, starts = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    # Padding may lengthen the lists of lengths, never that of request ids.
    for rid, length, start in zip(batch.rids, lengths, starts, strict=False):
        if rid.startswith(prefixes):
            found.append(Request(rid, int(start), int(length), row))
        row += int(length)
    return found


def forward_batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The forward's batch among its arguments, wherever this model takes it."""
    return next((x for x in [*args, *kwargs.values()] if hasattr(x, "forward_mode")), None)


def is_extend(batch: Any) -> bool:
    """Whether this forward prefills: EXTEND, and nothing that merely resembles it."""
    return bool(batch is not None and batch.forward_mode.name == "EXTEND" and batch.rids)


def has_request(batch: Any, prefix: str) -> bool:
    """Whether any request of the forward has the prefix."""
    return bool(batch is not None and batch.rids and any(r.startswith(prefix) for r in batch.rids))
