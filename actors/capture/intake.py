"""The actor's end: gives each replica its ring, drains it at once, hears when a process is gone."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from actors.capture.ring import RingMemory
from actors.capture.wire import Channel, ChannelClosed, Listener, Message
from storage.errors import ResourceError
from storage.layout import Layout

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


PUT_ROWS = 2048
"""A chunk of more rows is put in parts of so many, so that several threads share a long sample."""


class Sink(Protocol):
    """Who gets the chunks of a request. What comes of one forward comes from several threads at a time."""

    def put(self, rid: str, start: int, states: list[Array], ids: Array) -> None:
        """Takes rows; the arrays are views of the ring and are gone when this returns."""

    def lost(self, rid: str, reason: str) -> None:
        """Hears that rows of a request won't come."""

    def found(self, kind: str, finding: Message) -> None:
        """Hears what a check in the scheduler process found: ``identity`` or ``next_token``."""


def drain_threads() -> int:
    """Threads that empty one engine's rings: one for every four cores that this process may use, four at most."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


class Intake:
    """Accepts the engine's scheduler processes and routes what they send.

    Args:
        layout: geometry of the states.
        ring_bytes: size of each replica's ring.
        on_gone: called once for each process that is gone, with what it said last.
        threads: that empty the rings. One copies and checks 2 to 5 GB of states a second.
    """

    def __init__(
        self, layout: Layout, ring_bytes: int, on_gone: Callable[[str], None], threads: int = 1
    ) -> None:
        self._layout = layout
        self._ring_bytes = ring_bytes
        self._on_gone = on_gone
        self._listener = Listener()
        self.address, self.token = self._listener.address, self._listener.token
        self._hooked: dict[int, Message] = {}
        self.failures: list[Message] = []
        self._sinks: dict[str, Sink] = {}
        self._rings: list[Channel] = []
        self._channels: list[Channel] = []
        self._fences: dict[int, tuple[int, Future[None]]] = {}
        self._fence_number = 0
        self._lock = threading.Lock()
        self._closed = False
        self._waits_s: dict[Channel, float] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hsdump-drain")
        self.progress = 0
        threading.Thread(target=self._accept, name="hsdump-accept", daemon=True).start()

    @property
    def hooked(self) -> list[Message]:
        """What each scheduler process said of its hook last, by replica and rank."""
        return sorted(self._hooked.values(), key=lambda h: (h["dp_rank"], h["tp_rank"]))

    @property
    def ring_wait_s(self) -> float:
        """Seconds that forwards have waited for room in the rings so far."""
        return sum(self._waits_s.copy().values())

    def route(self, rid: str, sink: Sink) -> None:
        """Chunks of ``rid`` go to ``sink`` from now on."""
        with self._lock:
            self._sinks[rid] = sink

    def forget(self, rid: str) -> None:
        """Chunks of ``rid`` are dropped from now on."""
        with self._lock:
            self._sinks.pop(rid, None)

    def fence(self) -> Future[None]:
        """Done when everything that any ring was given before this call has been drained.

        An answer of the engine overtakes states that are still on their way; what is missing after a fence
        that was asked for after the answer will never come.
        """
        done: Future[None] = Future()
        with self._lock:
            self._fence_number += 1
            number, rings = self._fence_number, list(self._rings)
            self._fences[number] = (len(rings), done)
        if not rings:
            done.set_result(None)
        for channel in rings:
            try:
                channel.send({"fence": number})
            except ChannelClosed:
                self._passed(number)
        return done

    def close(self) -> None:
        """Stops listening; connections that end from now on aren't reported."""
        self._closed = True
        self._listener.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, greeting = self._listener.accept()
            except ChannelClosed:
                return
            with self._lock:
                self._channels.append(channel)
            threading.Thread(
                target=self._serve, args=(channel, greeting), name="hsdump-intake", daemon=True
            ).start()

    def _serve(self, channel: Channel, greeting: Message) -> None:
        """Reads one scheduler process's messages until it is gone."""
        memory: Array | None = None
        said = "its last words are in its log"
        try:
            while True:
                message, _ = channel.receive()
                if "block" in message and memory is not None:
                    self._drain(memory, message)
                    self._waits_s[channel] = float(message["waited_s"])
                    channel.send({"free": message["block"]})
                elif "ring" in message:
                    memory = self._give_ring(channel)
                elif "failed" in message:
                    said = str(message["failed"]["message"])
                    self.failures.append(message["failed"])
                else:
                    self._note(message, greeting)
        except ChannelClosed:
            pass
        except ResourceError as error:
            said = str(error)
        except Exception as error:
            logger.exception("draining the ring failed")
            said = f"draining its ring failed: {error}"
        channel.close()
        if not self._closed:
            self._on_gone(
                f"scheduler process {greeting.get('pid')} (replica {greeting.get('dp_rank')}, "
                f"tensor-parallel rank {greeting.get('tp_rank')}) is gone; {said}"
            )

    def _note(self, message: Message, greeting: Message) -> None:
        self.progress += 1
        if "hooked" in message:
            self._hooked[int(message["hooked"]["pid"])] = message["hooked"]
        elif "fenced" in message:
            self._passed(int(message["fenced"]))
        elif "lost" in message:
            for rid in message["lost"]:
                sink = self._sinks.get(rid)
                if sink is not None:
                    sink.lost(rid, str(message["reason"]))
        elif "alarm" in message:
            logger.warning("replica %s: %s", greeting.get("dp_rank"), message["alarm"])
        else:
            for kind, finding in message.items():
                sink = self._sinks.get(str(finding["rid"]))
                if sink is not None:
                    sink.found(kind, finding)

    def _give_ring(self, channel: Channel) -> Array:
        try:
            memory = RingMemory.create(self._ring_bytes)
        except ResourceError as error:
            self.failures.append({"error": "ResourceError", "message": str(error)})
            raise
        channel.send({"size": memory.size}, memory.descriptor)
        memory.close_descriptor()
        with self._lock:
            self._rings.append(channel)
        return np.frombuffer(memory.mapping, dtype=np.uint8)

    def _drain(self, memory: Array, block: Message) -> None:
        layout, offset, rows = self._layout, int(block["offset"]), int(block["rows"])
        states: list[Array] = [np.empty(0)] * layout.num_states
        for part in block["parts"]:
            width = len(part["states"]) * layout.hidden_size
            at = offset + int(part["at"])
            flat = memory[at : at + rows * width * layout.itemsize].view(layout.storage_dtype)
            packed = flat.reshape(rows, len(part["states"]), layout.hidden_size)
            for i, k in enumerate(part["states"]):
                states[k] = packed[:, i]
        at = offset + int(block["ids_at"])
        ids = memory[at : at + rows * 4].view(np.int32)
        puts = []
        for rid, start, count, row in block["requests"]:
            sink = self._sinks.get(rid)
            if sink is None:
                continue
            for a in range(0, count, PUT_ROWS):
                some = slice(row + a, row + min(a + PUT_ROWS, count))
                puts.append(self._pool.submit(sink.put, rid, start + a, [s[some] for s in states], ids[some]))
        wait(puts)  # all of them, also when one fails: the ring is written again after this
        for put in puts:
            put.result()
        self.progress += 1

    def _passed(self, number: int) -> None:
        with self._lock:
            left, done = self._fences[number]
            if left > 1:
                self._fences[number] = (left - 1, done)
                return
            del self._fences[number]
        done.set_result(None)
