"""Framed JSON messages between a scheduler process and its actor, over a Unix socket.

A frame is its length as a little-endian u32 and a JSON object; it may carry one file descriptor. No pickle: a
peer can't run code here. The listener has a random abstract name, so that it leaves nothing in any file
system, and takes only peers of the same user that know the session's token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
HANDSHAKE_S = 10.0


class ChannelClosed(Exception):
    """The peer is gone: its process ended or closed the socket."""


class Channel:
    """One connected peer. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Sends a message, with a file descriptor if given.

        Raises:
            ChannelClosed: the peer is gone.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        head = struct.pack("<I", len(body))
        try:
            with self._send_lock:
                if descriptor is None:
                    self._socket.sendall(head + body)
                else:
                    socket.send_fds(self._socket, [head], [descriptor])
                    self._socket.sendall(body)
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def receive(self) -> tuple[Message, int | None]:
        """The next message, and the file descriptor that came with it.

        Raises:
            ChannelClosed: the peer is gone.
        """
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, 4, 1)
            if len(head) < 4:
                head += self._exactly(4 - len(head))
            body = self._exactly(struct.unpack("<I", head)[0])
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error
        return json.loads(body), (descriptors[0] if descriptors else None)

    def _exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise ChannelClosed("the peer closed the connection")
            view = view[got:]
        return bytes(buffer)

    def set_timeout(self, seconds: float | None) -> None:
        """Bounds every following send and receive; None waits for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Ends the connection, also for a thread that is receiving."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """The actor's end: accepts this user's processes that know the token."""

    def __init__(self) -> None:
        self.address = f"hsdump-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(128)

    def accept(self) -> tuple[Channel, Message]:
        """Waits for the next peer that identifies itself, and returns it with its greeting.

        Raises:
            ChannelClosed: the listener was closed.
        """
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                raise ChannelClosed("the listener is closed") from error
            channel = Channel(peer)
            greeting = self._greeting(peer, channel)
            if greeting is not None:
                return channel, greeting
            channel.close()

    def _greeting(self, peer: socket.socket, channel: Channel) -> Message | None:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            return None
        channel.set_timeout(HANDSHAKE_S)
        try:
            greeting, _ = channel.receive()
        except (ChannelClosed, ValueError):
            return None
        channel.set_timeout(None)
        known = hmac.compare_digest(str(greeting.pop("token", "")), self.token)
        return greeting if known else None

    def close(self) -> None:
        """Stops accepting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: str, token: str, greeting: Mapping[str, Any]) -> Channel:
    """A scheduler's end: connects to the actor's listener and greets it.

    Raises:
        ChannelClosed: the actor doesn't listen any more.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"the engine's actor doesn't answer: {error}") from error
    channel = Channel(sock)
    channel.send({**greeting, "token": token})
    return channel
