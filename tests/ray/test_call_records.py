"""What Ray keeps of the coordinator's calls while the head doesn't take it stays small."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from actors.coordinator import RUNTIME_ENV

CALLS = 6_000
UNBOUNDED_BYTES = CALLS * 6_700
"""What the records of so many calls with arguments of 1,500 bytes were measured to take in Ray 2.60 without a bound."""

SCRIPT = f"""
import os, sys, ray
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[1])

def anonymous_bytes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) << 10

@ray.remote(num_cpus=0)
class Callee:
    def take(self, message):
        pass

@ray.remote(num_cpus=0)
class Caller:
    def call(self, callee):
        message = os.urandom(1500)
        ray.get([callee.take.remote(message) for _ in range(100)])
        before = anonymous_bytes()
        for _ in range({CALLS} // 100):
            ray.get([callee.take.remote(message) for _ in range(100)])
        return anonymous_bytes() - before

caller = Caller.options(runtime_env={RUNTIME_ENV!r}).remote()
print("grew by", ray.get(caller.call.remote(Callee.remote())))
"""


def test_records_of_calls_are_bounded_while_the_head_takes_none() -> None:
    env = {**os.environ, "RAY_task_events_report_interval_ms": "3600000", "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_ADDRESS", None)
    # pytest's own folder is too long for a socket's path
    with tempfile.TemporaryDirectory(prefix="hsdump-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder], env=env, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    grown_bytes = int(done.stdout.rpartition("grew by ")[2].split()[0])
    assert grown_bytes < UNBOUNDED_BYTES / 2
