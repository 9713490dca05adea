"""From a forward's tensors into the ring, without holding up the forward.

Each tensor goes to a contiguous destination in one copy: a strided copy from the GPU ran at less than half
the speed of the whole engine where contiguous ones cost nothing. On the GPU the copies run on a side stream
and a thread of its own waits for them; on the CPU they are plain memcpy.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.capture.ring import RingProducer, aligned
from actors.capture.wire import Channel, ChannelClosed
from storage.layout import Layout

logger = logging.getLogger(__name__)

ID_BYTES = 4
COPIES_UNDER_WAY = 2
"""Forwards whose states are on their way to the host while the next one is computed."""


@dataclass(frozen=True)
class Request:
    """Rows of one request inside a forward.

    Attributes:
        rid: SGLang's request id.
        start: position of its first row in the request's prompt.
        rows: how many.
        row: index of its first row in the forward.
    """

    rid: str
    start: int
    rows: int
    row: int


@dataclass(frozen=True)
class Part:
    """One tensor of a forward.

    Attributes:
        states: indices into the layout's states, in the order in which the tensor holds them.
        tensor: [rows or more, len(states) * H]; None where the place that gives it wasn't passed.
    """

    states: list[int]
    tensor: torch.Tensor | None


class WrongStates(Exception):
    """A forward gave states of another number, shape or element type than asked for."""


def block_bytes(layout: Layout, rows: int) -> int:
    """Room that a forward of ``rows`` tokens takes in the ring: every state, then the token ids."""
    per_state = aligned(rows * layout.hidden_size * layout.itemsize)
    return per_state * layout.num_states + aligned(rows * ID_BYTES)


class Tap:
    """Copies captured forwards into the ring and publishes them in order.

    Args:
        layout: states, hidden size and element type that are asked for.
        ring: where to.
        channel: where blocks are published.
        device: of the model; "cuda" pins the ring.
    """

    def __init__(self, layout: Layout, ring: RingProducer, channel: Channel, device: str) -> None:
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._ring = ring
        self._channel = channel
        self._memory = torch.frombuffer(ring.memory.mapping, dtype=torch.uint8)
        self._cuda = device == "cuda"
        self._stream: Any = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        if self._cuda:
            self._pin()
        self._copies: deque[Any] = deque()
        self._blocks = 0
        self._queue: queue.SimpleQueue[tuple[Any, dict[str, Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._publish, name="hsdump-publish", daemon=True).start()

    def take(self, requests: Sequence[Request], parts: Sequence[Part], input_ids: torch.Tensor) -> None:
        """Starts copying the rows of a forward; returns before they are there.

        Args:
            requests: which rows are whose.
            parts: every state of the layout, in any order.
            input_ids: [rows].

        Raises:
            WrongStates: number, shape or element type isn't what was asked for.
        """
        rows = max(r.row + r.rows for r in requests)
        sources = self._sources(rows, parts)
        ids = input_ids[:rows].to(torch.int32)
        sizes = [aligned(s.numel() * s.element_size()) for _, s in sources]
        offset = self._ring.take(sum(sizes) + aligned(rows * ID_BYTES))
        if offset is None:
            return
        places, at = [], 0
        placed: list[tuple[torch.Tensor, int]] = []
        for (states, source), size in zip(sources, sizes, strict=True):
            places.append({"states": states, "at": at})
            placed.append((source, offset + at))
            at += size
        placed.append((ids, offset + at))
        event = self._copy(placed)
        self._blocks += 1
        block = {
            "block": self._blocks,
            "waited_s": self._ring.waited_s,
            "offset": offset,
            "rows": rows,
            "parts": places,
            "ids_at": at,
            "requests": [[r.rid, r.start, r.rows, r.row] for r in requests],
        }
        self._queue.put((event, block))

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message after every block that was taken before it."""
        self._queue.put((None, message))

    def _sources(self, rows: int, parts: Sequence[Part]) -> list[tuple[list[int], torch.Tensor]]:
        names, hidden = self._layout.states, self._layout.hidden_size
        sources: list[tuple[list[int], torch.Tensor]] = []
        for part in parts:
            asked = ", ".join(str(names[k]) for k in part.states)
            tensor, width = part.tensor, len(part.states) * hidden
            if tensor is None:
                raise WrongStates(f"the model's forward didn't pass where {asked} would be read")
            if tensor.dim() != 2 or tensor.shape[0] < rows or tensor.shape[1] != width:
                raise WrongStates(f"{asked} came as {tuple(tensor.shape)}, {(rows, width)} was asked")
            if tensor.dtype != self._dtype:
                raise WrongStates(f"{asked} came as {tensor.dtype}, the dump holds {self._dtype}")
            sources.append((part.states, tensor[:rows]))
        if sorted(k for states, _ in sources for k in states) != list(range(len(names))):
            raise WrongStates(f"{sum(len(s) for s, _ in sources)} states came, {len(names)} were asked")
        return sources

    def _copy(self, placed: Sequence[tuple[torch.Tensor, int]]) -> Any:
        if self._stream is None:
            for source, offset in placed:
                self._at(source, offset).copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, offset in placed:
                self._at(source, offset).copy_(source, non_blocking=True)
        for source, _ in placed:
            source.record_stream(self._stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._copies.append(event)
        if len(self._copies) > COPIES_UNDER_WAY:
            # Bounds the GPU memory that copies hold; two forwards on, this one is over: no wait.
            self._copies.popleft().synchronize()
        return event

    def _at(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        size = like.numel() * like.element_size()
        return self._memory[offset : offset + size].view(like.dtype).view(like.shape)

    def _publish(self) -> None:
        while True:
            event, message = self._queue.get()
            if event is not None:
                event.synchronize()
            try:
                self._channel.send(message)
            except ChannelClosed:
                return

    def _pin(self) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(
                f"cudaHostRegister of the ring's {self._memory.numel() >> 20} MiB failed with {status}; "
                "raise the locked memory limit (ulimit -l) of the node's Ray process"
            )
