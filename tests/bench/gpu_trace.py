"""How much of the copies to the host runs while kernels run: read off a torch profiler trace. Pure but for `read`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Interval = tuple[float, float]

STATES_BYTES = 1 << 20
"""Smaller copies to the host are the scheduler's own: token ids, lengths."""


def read(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, compressed or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return list(trace["traceEvents"])


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Time that intervals take together."""
    return sum(end - start for start, end in intervals)


def common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Time that is in both of two merged lists."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a trace says of the copies of states.

    Returns:
        Copies of at least a mebibyte from the device to the host: how many, bytes, streams, time, and the share
        of that time in which a kernel of another stream was running; the share of the trace in which any
        kernel ran.
    """
    copies: list[Mapping[str, Any]] = []
    kernels: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") == "kernel":
            kernels.append(event)
        elif event.get("cat") == "gpu_memcpy" and "DtoH" in str(event.get("name")):
            copies.append(event)
    copies = [c for c in copies if int(c.get("args", {}).get("bytes", 0)) >= STATES_BYTES]
    streams = {event["args"].get("stream") for event in copies}
    copying = merged(map(_interval, copies))
    computing = merged(_interval(k) for k in kernels if k["args"].get("stream") not in streams)
    size, seconds = sum(int(c["args"]["bytes"]) for c in copies), length(copying) / 1e6
    span = (computing[-1][1] - computing[0][0]) / 1e6 if computing else 0.0
    return {
        "copies": len(copies),
        "bytes": size,
        "streams": sorted(map(str, streams)),
        "copy_s": round(seconds, 4),
        "gb_per_s": round(size / seconds / 1e9, 1) if seconds else None,
        "overlapped": round(common(copying, computing) / 1e6 / seconds, 3) if seconds else None,
        "kernel_s": round(length(computing) / 1e6, 4),
        "trace_s": round(span, 4),
        "gpu_busy": round(length(computing) / 1e6 / span, 3) if span else None,
    }


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
