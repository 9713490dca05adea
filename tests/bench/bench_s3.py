"""What sending a shard to S3 costs this machine: CPU seconds for 10^9 bytes, over loopback.

    python tests/bench/bench_s3.py [--mib 1024] [--rounds 3] [--writers NAME ...]

The server takes every body and keeps none, so the figure is the client's alone; it says nothing about the speed
of a real store. hsdump's sink is beside obstore's own writer and s3fs, default and tuned.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

PIECE_BYTES = 1 << 20
PART_BYTES = 16 << 20
ANSWERS = {
    b"POST uploads": b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
    b"POST": b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>',
}


def serve() -> None:
    """Prints its port and swallows requests for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_swallow, args=(connection,), daemon=True).start()


def _swallow(connection: socket.socket) -> None:
    scratch, left = bytearray(PIECE_BYTES), b""
    while True:
        while b"\r\n\r\n" not in left:
            got = connection.recv(1 << 16)
            if not got:
                return
            left += got
        head, _, left = left.partition(b"\r\n\r\n")
        first, *lines = head.lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines)
        if fields.get(b"expect") == b"100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = int(fields.get(b"content-length", 0)) - len(left)
        left = b""
        while body > 0:
            body -= connection.recv_into(scratch, min(body, len(scratch)))
        method = first.split()[0].upper()
        answer = ANSWERS.get(method + (b" uploads" if b"uploads" in first else b""), b"")
        status = b"404 Not Found" if method in (b"HEAD", b"GET") else b"200 OK"
        connection.sendall(
            b'HTTP/1.1 %s\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n' % (status, len(answer)) + answer
        )


@contextmanager
def server() -> Iterator[str]:
    """Runs `serve` in a process of its own; yields its endpoint."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def with_hsdump(states: np.ndarray, pieces: int) -> None:
    from storage.files import Store

    sink = Store("s3://bucket/dump").object_sink("hidden/c/0/0/0")
    for number in range(pieces):
        sink.write_at(number * PIECE_BYTES, states)
    sink.commit(pieces * PIECE_BYTES)


def with_obstore(states: np.ndarray, pieces: int) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", unsigned_payload=True, client_options={"allow_http": True})
    with obstore.open_writer(store, "o", buffer_size=PART_BYTES, max_concurrency=4) as writer:
        for _ in range(pieces):
            writer.write(states.copy())  # the client keeps what it is given until it is sent


def with_s3fs(states: np.ndarray, pieces: int, tuned: bool = False) -> None:
    import s3fs

    config = {"request_checksum_calculation": "when_required", "s3": {"payload_signing_enabled": False}}
    fs = s3fs.S3FileSystem(
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        config_kwargs=config if tuned else {},
        skip_instance_cache=True,
    )
    with fs.open("bucket/o", "wb", block_size=PART_BYTES) as file:
        for _ in range(pieces):
            file.write(states.data)


WRITERS: dict[str, Callable[[np.ndarray, int], None]] = {
    "hsdump": with_hsdump,
    "obstore": with_obstore,
    "s3fs-tuned": lambda states, pieces: with_s3fs(states, pieces, tuned=True),
    "s3fs": with_s3fs,
}


def measure(write: Callable[[np.ndarray, int], None], pieces: int) -> tuple[float, float]:
    """CPU seconds for 10^9 bytes, and 10^6 bytes a second."""
    states = np.random.default_rng(0).integers(0, 255, PIECE_BYTES, np.uint8)
    before, started_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    write(states, pieces)
    seconds = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    sent = pieces * PIECE_BYTES
    return cpu_s / (sent / 1e9), sent / 1e6 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    with server() as endpoint:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }
        writers = {name: WRITERS[name] for name in args.writers}
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
        for write in writers.values():
            write(np.zeros(PIECE_BYTES, np.uint8), 32)
        for _ in range(args.rounds):
            for name, write in writers.items():
                results[name].append(measure(write, args.mib))
    print(f"{'writer':12} {'CPU s/GB':>9} {'MB/s':>7}   (median of {args.rounds}, {args.mib} MiB each)")
    for name, found in results.items():
        cpu, speed = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:12} {cpu:9.2f} {speed:7.0f}")


if __name__ == "__main__":
    main()
