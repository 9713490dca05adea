"""Runs `hsdump collect` as its own process, the way a person does, and reads what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ROOT / "examples/conversations.jsonl"


def run_file(folder: Path, model: Path, output: Path, **prompts: object) -> Path:
    """A run file for a small model on the CPU."""
    tree = {
        "model": {"path": str(model)},
        "capture": {"boundaries": "eagle3", "final": True, "final_normed": True},
        "prompts": {"url": str(PROMPTS), "max_tokens": 2048, **prompts},
        "output": str(output),
        "engine": {"gpus": 0},
        "writers": {"shard_bytes": 32 << 20},
        "limits": {"batch_tokens": 2048, "object_store_bytes": 512 << 20},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def hsdump(*arguments: object, timeout_s: float = 540) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cluster", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


class Collecting:
    """A collect that goes on while the test acts on it."""

    def __init__(self, run: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "collect", str(run), *options],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Reads on until a line matches; fails with everything printed when none does."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"no line matches {pattern!r}:\n{''.join(self.lines)}")

    def wait(self, timeout_s: float = 400) -> int:
        """Reads to the end and gives the exit code."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def schedulers_of(pid: int) -> list[int]:
    """SGLang's scheduler processes below a process."""
    import psutil

    return [p.pid for p in psutil.Process(pid).children(recursive=True) if "sglang::scheduler" in p.name()]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
