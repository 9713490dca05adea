"""A small HTTP proxy in front of a real server that fails requests on purpose."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CUT_AFTER_BYTES = 1 << 20

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass
class Fault:
    """What to do to the next ``times`` requests that match.

    Attributes:
        matches: of method and path with query.
        times: how often.
        status: answered without asking the server; 0 for the others.
        cut: ``request``: the connection is cut in the middle of its body; ``answer``: the server does the work,
            and the connection is cut in the middle of its answer.
        body: of the answer.
    """

    matches: Callable[[str, str], bool]
    times: int
    status: int = 0
    cut: str = ""
    body: bytes = b""


@dataclass
class FaultyProxy:
    """Context manager; ``endpoint`` is where it listens."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    dropped_headers: tuple[str, ...] = ("connection",)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FaultyProxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, method: str, part: str, times: int, **what: Any) -> Fault:
        """Fails the next ``times`` requests of ``method`` whose path or query has ``part`` in it."""
        fault = Fault(lambda m, path: m == method and part in path, times, **what)
        self.faults.append(fault)
        return fault

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, path):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def _forward(self) -> None:
        fault = self.owner.take_fault(self.command, self.path)
        length = int(self.headers.get("Content-Length", 0))
        if fault is not None and fault.cut == "request":
            self.rfile.read(min(length // 2, CUT_AFTER_BYTES))
            self._cut()
            return
        body = self.rfile.read(length)
        if fault is not None and fault.status:
            self._answer(fault.status, [("Content-Type", "application/xml")], fault.body)
            return
        upstream = http.client.HTTPConnection(urlsplit(self.owner.upstream).netloc)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in self.owner.dropped_headers}
        upstream.request(self.command, self.path, body, headers)
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if fault is not None and fault.cut == "answer":
            self._answer(response.status, response.getheaders(), data, len(data) // 2)
            self._cut()
            return
        self._answer(response.status, response.getheaders(), data)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, only: int | None = None
    ) -> None:
        length = next((v for k, v in headers if k.lower() == "content-length"), str(len(data)))
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {length if self.command == 'HEAD' else len(data)}"]
        skip = ("content-length", "transfer-encoding", "connection")
        lines += [f"{k}: {v}" for k, v in headers if k.lower() not in skip]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if only == 0:  # an answer without a body is cut in its head
            head = head[: len(head) // 2]
        self.wfile.write(head + data[:only])
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward
