"""One run of the real command on a Ray cluster of its own, several raylets on this host, and what has to hold after.

A `Site` is a context manager. On its way out it ends everything that it started and checks that no process and
nothing in /dev/shm is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from run_files import made_up_run_file

from actors.run_messages import Status

ROOT = Path(__file__).parents[2]
MARK = "HSDUMP_CHAOS"
"""Environment variable by which everything that a site started is found, whoever is its parent by then."""
LENGTHS = [int(n) for n in np.random.default_rng(11).integers(1, 300, 100)]
_STORE_BYTES = 120 << 20
_SETTINGS = {
    "worker_niceness": 0,  # or a busy machine starves what is tested, and nothing else
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 5,
}
_POLL_S = 0.1
_LINE_S = 400.0


class Site:
    """A cluster, each of whose nodes gets an engine and a writer, and a run file.

    Args:
        folder: for the run's files.
        nodes: the first is the head, where the driver is.
        store_bytes: object store of each.
        output: of the run; a folder below ``folder`` unless given.
        sections: of the run file (engine, writers, limits, capture), over what is in `write_run`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        *,
        store_bytes: int = _STORE_BYTES,
        output: str | None = None,
        **sections: dict[str, Any],
    ) -> None:
        self.output = output or str(folder / "dump")
        self._nodes, self._store_bytes = nodes, store_bytes
        self._run_file = write_run(folder, self.output, **sections)
        self._log = folder / "collect.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._namespace = ""
        self._released: set[str] | None = None

    def __enter__(self) -> Site:
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._mark = uuid.uuid4().hex
        self._patched = {name: os.environ.get(name) for name in (MARK, "RAY_ADDRESS")}
        os.environ[MARK] = self._mark
        os.environ.pop("RAY_ADDRESS", None)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            head = {"include_dashboard": False, "_system_config": _SETTINGS, **self._node()}
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
            self.nodes = [self.cluster.head_node, *(self.add_node() for _ in range(self._nodes - 1))]
            ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        if exc == (None, None, None):
            gone_or_fail(self._marked)
            assert left_in_shared_memory(self._shared_memory) == set()

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        ray.shutdown()
        if hasattr(self, "cluster"):
            self.cluster.shutdown()
        for name, value in self._patched.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def add_node(self, gpus: int = 0) -> Any:
        """Another raylet; its GPUs are only told to Ray."""
        return self.cluster.add_node(num_gpus=gpus, **self._node())

    def _node(self) -> dict[str, int]:
        return {"num_cpus": 1, "object_store_memory": self._store_bytes}

    # ---- the command

    def collect(self) -> None:
        """Starts the command; call it again for a resume once the first one has ended."""
        self._released = None
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster", "collect", str(self._run_file)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": self.cluster.address},
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def until_line(self, pattern: str) -> re.Match[str]:
        """Waits for a line that matches; fails with everything printed when the command ends or takes too long."""
        return self._until(lambda: re.search(pattern, self.text), f"no line matches {pattern!r}")

    def until(self, condition: Callable[[Status], Any]) -> Status:
        """Waits until ``condition`` holds of the run's status."""

        def look() -> Status | None:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                for name in self.actors("coordinator"):
                    status: Status = ray.get(self.actor(name).status.remote())
                    if condition(status):
                        return status
            return None

        return self._until(look, "the run's status doesn't come to what is wanted")

    def _until(self, look: Callable[[], Any], what: str) -> Any:
        assert self._process is not None
        deadline_s = time.monotonic() + _LINE_S
        while True:
            ended = self._process.poll() is not None
            self._let_go()
            if found := look():
                return found
            if ended or time.monotonic() > deadline_s:
                raise AssertionError(f"{what}:\n{self.text}")
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Lets engines that hold go on, and from now on those too that are still to come."""
        self._released = set()
        self._let_go()

    def _let_go(self) -> None:
        if self._released is None:
            return
        for name in set(self.actors("engine")) - self._released:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                self.actor(name).go_on.remote()
                self._released.add(name)

    def finish(self) -> int:
        """Lets engines go on and waits for the command's exit code."""
        assert self._process is not None
        self._released = self._released or set()
        deadline_s = time.monotonic() + 2 * _LINE_S
        while self._process.poll() is None:
            assert time.monotonic() < deadline_s, f"the run hangs:\n{self.text}"
            self._let_go()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
        return self._process.returncode

    def kill_driver(self) -> None:
        """As a lost head would; returns when Ray has taken its actors away."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        while self.actors(""):
            time.sleep(_POLL_S)

    # ---- its actors

    def actors(self, kind: str) -> list[str]:
        """Names of the living actors of the run that begin so."""
        found = ray.util.list_named_actors(all_namespaces=True)
        self._namespace = found[0]["namespace"] if found else ""
        return sorted(a["name"] for a in found if a["name"].startswith(kind))

    def actor(self, name: str) -> Any:
        return ray.get_actor(name, namespace=self._namespace)

    def pid(self, name: str) -> int:
        """The process of an engine or a writer."""
        self.actors("")
        pid: int = ray.get(self.actor(name).start.remote()).actor_pid
        return pid

    def coordinator_pid(self) -> int:
        found = [p.pid for p in self._marked() if "ray::Coordinator" in " ".join(p.cmdline())]
        assert len(found) == 1, f"{len(found)} coordinators"
        return found[0]

    def engine_pids(self) -> dict[str, int]:
        return {name: self.pid(name) for name in self.actors("engine")}

    def on(self, node: Any, kind: str) -> str:
        """The one engine or writer on a node."""
        status = self.until(lambda status: True)
        members = status.engines if kind == "engine" else status.writers
        (name,) = [m.name for m in members if m.node_id == node.node_id]
        return name

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.pid != os.getpid():
                    found.append(process)
        return found


def write_run(folder: Path, output: str, **sections: dict[str, Any]) -> Path:
    """Model, prompts and run file; returns the run file."""
    rows = [{"id": f"s{i}", "input_ids": list(range(i, i + n))} for i, n in enumerate(LENGTHS)]
    ours: dict[str, dict[str, Any]] = {
        "engine": {"args": {"hold_at_sample": 20}},
        "writers": {"shard_bytes": 4 << 20},
        "limits": {"batch_samples": 4},
    }
    merged = {name: ours.get(name, {}) | sections.get(name, {}) for name in ours | sections}
    return made_up_run_file(folder, rows, hidden_size=256, output=output, **merged)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def raylet_pid(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def processes_of(node: Any) -> list[psutil.Process]:
    """A node's raylet and all below it: what goes with the machine."""
    raylet = psutil.Process(raylet_pid(node))
    return [raylet, *raylet.children(recursive=True)]


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing for as long as the block takes."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def gone_or_fail(living: Callable[[], list[psutil.Process]]) -> None:
    """Every process has ended by itself; what hasn't is ended, and is a failure."""
    _, alive = psutil.wait_procs(living(), timeout=60)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:100])
            process.kill()
    assert names == [], "processes that are left"


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Names in /dev/shm that weren't there and that no living process has open: other programs have theirs."""
    new = set(os.listdir("/dev/shm")) - before
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process.pid}/maps").read_text()))
            for fd in os.scandir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(fd.path).removeprefix("/dev/shm/"))
    return {name for name in new - used if os.path.exists(f"/dev/shm/{name}")}
