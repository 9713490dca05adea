"""Real object store servers on loopback, each a process of its own that is ended by its id."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
AZURITE = ROOT / ".cache" / "azurite"
AZURITE_VERSION = "3.35.0"
ACCOUNT = "testaccount"
ACCOUNT_KEY = base64.b64encode(b"planted secret of sixty-four bytes, which nobody may ever see..!").decode()
START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    """Runs a server until it listens, then for as long as the block takes."""
    env = {**os.environ, **environment}
    with (
        open(log, "wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=env) as process,
    ):
        try:
            _wait_for(process, port, log)
            yield
        finally:
            process.kill()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{process.args!r} doesn't listen on port {port}: {log.read_text()[-2000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def moto(log: Path) -> Iterator[str]:
    """A moto S3 server; yields its endpoint."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("atomic_moto.py")), str(port)]
    with running(command, port, log):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def azurite(log: Path) -> Iterator[str]:
    """An azurite blob server; yields its account's endpoint."""
    port = free_port()
    command = ["node", str(_azurite_main()), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with running(command, port, log, AZURITE_ACCOUNTS=f"{ACCOUNT}:{ACCOUNT_KEY}"):
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"


def _azurite_main() -> Path:
    """Azurite's program, installed from npm on first use."""
    main = AZURITE / "node_modules/azurite/dist/src/blob/main.js"
    if not main.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError(
                "the Azure tests need azurite, and npm isn't there to install it: install Node.js"
            )
        AZURITE.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-fund", "--no-audit", "--prefix", str(AZURITE)]
        subprocess.run([*command, f"azurite@{AZURITE_VERSION}"], check=True, stdout=subprocess.DEVNULL)
    return main


def python(code: str, *args: str) -> subprocess.Popen[str]:
    """Runs code in another process that can import the tests' helpers."""
    paths = [str(ROOT), str(ROOT / "tests/unit"), str(ROOT / "tests/s3")]
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
