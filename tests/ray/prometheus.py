"""A real Prometheus on loopback, ended by its id; Debian's package, unpacked into .cache where it isn't installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[2] / ".cache" / "prometheus"
START_S = 60.0
SCRAPE_S = 1
_CONFIG = """
global: {{scrape_interval: {every}s}}
scrape_configs:
  - job_name: ray
    static_configs: [{{targets: {targets}}}]
"""


def binary() -> Path:
    """Prometheus' program."""
    installed = shutil.which("prometheus")
    if installed:
        return Path(installed)
    program = CACHE / "usr/bin/prometheus"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        if not shutil.which("apt-get"):
            raise RuntimeError("the test needs Prometheus: install it, or run the test on Debian")
        if subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, check=False).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, check=True)
        package = next(CACHE.glob("prometheus_*.deb"))
        subprocess.run(["dpkg", "-x", package, CACHE], check=True)
        package.unlink()
    return program


class Prometheus:
    """A server's HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an instant query gives."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


@contextlib.contextmanager
def scraping(targets: Sequence[str], folder: Path) -> Iterator[Prometheus]:
    """Runs Prometheus over ``host:port`` targets for as long as the block takes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(every=SCRAPE_S, targets=json.dumps(list(targets))))
    command = [
        binary(),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            server, deadline_s = Prometheus(port), time.monotonic() + START_S
            while not server.ready():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"Prometheus doesn't come up: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield server
        finally:
            process.kill()
