"""A real Ray cluster with its job server: own folder, own ports, token authentication, ended by process id."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collect_support import ROOT
from ray.job_submission import JobDetails, JobSubmissionClient
from raylets import PATIENT

BIN = Path(sys.executable).parent


class JobServer:
    """One cluster of one node.

    Args:
        folder: of its sessions and its token.
    """

    def __init__(self, folder: Path) -> None:
        token = uuid.uuid4().hex * 2
        (folder / "token").write_text(token)
        dashboard, client, agent = free_ports(3)
        self.url = f"http://127.0.0.1:{dashboard}"
        self.headers = {"Authorization": f"Bearer {token}"}
        self.environment = (
            os.environ
            | PATIENT
            | {
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
                "RAY_API_SERVER_ADDRESS": self.url,
                "RAY_TMPDIR": str(folder),
            }
        )
        command = (
            f"ray start --head --block --port=0 --num-cpus=2 --object-store-memory={200 << 20} "
            f"--dashboard-host=127.0.0.1 --dashboard-port={dashboard} --ray-client-server-port={client} "
            f"--dashboard-agent-listen-port={agent} --temp-dir={folder / 'ray'} --disable-usage-stats"
        )
        self._log = (folder / "ray.log").open("w+")
        self._head = subprocess.Popen(
            shlex.split(command), env=self.environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.address = self._until_it_answers()

    def _until_it_answers(self) -> str:
        while True:
            assert self._head.poll() is None, self._said()
            address = re.search(r"--address='([\d.:]+)'", self._said())
            if address and self.ray("job list").returncode == 0:
                return address.group(1)
            time.sleep(0.5)

    def _said(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def ray(self, line: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        """``ray LINE`` as a person types it in the checkout, to its end."""
        return subprocess.run(
            ["ray", *shlex.split(line)],
            cwd=folder,
            env=self.environment | environment,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )

    def details(self, job: str) -> JobDetails:
        """What the job server knows of a job, by its submission id."""
        return JobSubmissionClient(self.url, headers=self.headers).get_job_info(job)

    def run_code(self, job: str) -> int:
        """The exit code of the run that the job was, as a person asks for it."""
        asked = [sys.executable, "-m", "cluster", "status", "--job", job]
        return subprocess.run(asked, cwd=ROOT, env=self.environment, timeout=100, check=False).returncode

    def status(self) -> dict[str, Any]:
        """The one run that goes on, as ``hsdump status`` sees it from outside."""
        asked = [sys.executable, "-m", "cluster", "status", "--json", "--address", self.address]
        done = subprocess.run(
            asked, cwd=ROOT, env=self.environment, text=True, capture_output=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = done.stdout.splitlines()
        seen: dict[str, Any] = json.loads(line)
        return seen

    def log_until(self, job: str, pattern: str) -> str:
        """Reads ``ray job logs`` until it matches."""
        while True:
            log = self.ray(f"job logs {job}").stdout
            if re.search(pattern, log):
                return log
            assert not self.details(job).status.is_terminal(), log
            time.sleep(0.3)

    def let_engines_go_on(self) -> None:
        """Ends the wait of engines that hold, by a job of its own."""
        go_on = (
            "import ray; ray.init(); from ray.util import list_named_actors; "
            "[ray.get(ray.get_actor(**a).go_on.remote()) for a in list_named_actors(all_namespaces=True) "
            "if a['name'].startswith('engine-')]"
        )
        assert self.ray(f"job submit -- python -c {shlex.quote(go_on)}").returncode == 0

    def until_it_ended(self, job: str) -> JobDetails:
        while not (details := self.details(job)).status.is_terminal():
            time.sleep(0.3)
        return details

    def close(self) -> None:
        self._head.terminate()
        self._head.wait(timeout=60)
        self._log.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def job_server(folder: Path) -> Iterator[JobServer]:
    server = JobServer(folder)
    try:
        yield server
    finally:
        server.close()
