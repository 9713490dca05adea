"""Every conformance case on the GPUs of this host, several engines at a time; results as JSON.

    PYTHONPATH=. python tests/gpu/run_conformance.py OUT --gpus 1 --jobs 7

Each case runs in a process of its own and leaves OUT/<case>.json as soon as it is done, so that a run that is cut
off keeps what it has; OUT/models-gpu.json holds all of them, and OUT/logs the engines' logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/sglang"), str(ROOT / "tests/gpu")]

import conformance_results  # noqa: E402

RESULTS = "models-gpu.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--jobs", type=int, default=7, help="engines at a time")
    parser.add_argument(
        "--deadline", type=float, default=540, help="seconds after which what runs is given up"
    )
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        run_one(args)
        return 0
    return run_all(args)


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    from conformance_cases import cases

    found = cases(args.gpus, args.cpu)
    return {n: found[n] for n in args.only.split(",")} if args.only else found


def run_one(args: argparse.Namespace) -> None:
    """One case, in its own process."""
    import torch
    from conformance import run

    # The reference runs beside other engines on the same cores.
    torch.set_num_threads(2)
    row = run(chosen(args)[args.one], ROOT / ".models", args.out / "logs" / args.one)
    path = args.out / f"{args.one}.json"
    path.with_suffix(".part").write_text(json.dumps({"case": args.one, **row}, indent=1))
    path.with_suffix(".part").rename(path)


def run_all(args: argparse.Namespace) -> int:
    """Keeps ``jobs`` cases going, and says each one's outcome as it comes."""
    begun = time.monotonic()
    waiting = list(chosen(args))
    running: dict[str, subprocess.Popen[bytes]] = {}
    rows: list[dict[str, Any]] = []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            running[name] = start(name, args)
        over = time.monotonic() - begun > args.deadline
        for name, process in list(running.items()):
            if process.poll() is None and not over:
                continue
            end(process)
            del running[name]
            rows.append(outcome(name, args, over))
            print(line(rows[-1], time.monotonic() - begun), flush=True)
            conformance_results.write(args.out / RESULTS, rows)
        if over:
            rows += [
                {"case": n, "right": False, "refused": "not started before the deadline"} for n in waiting
            ]
            break
        time.sleep(0.2)
    conformance_results.write(args.out / RESULTS, rows)
    bad = [r["case"] for r in rows if not r["right"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} cases right in {time.monotonic() - begun:.0f} s", *bad)
    return 1 if bad else 0


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(args.out), "--gpus", str(args.gpus), "--one", name]
    log = (args.out / f"{name}.log").open("wb")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Ranks that start while other engines fill the same GPUs don't find equal memory free.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    }
    return subprocess.Popen(
        command + (["--cpu"] if args.cpu else []),
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the case's process and the engine that it may have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome(name: str, args: argparse.Namespace, over: bool) -> dict[str, Any]:
    path = args.out / f"{name}.json"
    if path.exists():
        row: dict[str, Any] = json.loads(path.read_text())
        return row
    last = (args.out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
    why = "not done before the deadline" if over else f"its process ended: {''.join(last)}"
    return {"case": name, "right": False, "refused": why}


def line(row: dict[str, Any], at_s: float) -> str:
    states = row.get("states", [])
    worst = max((s["median"] for s in states), default=float("nan"))
    said = "right" if row["right"] else row.get("refused") or "; ".join(row.get("wrong", []))
    return f"{at_s:5.0f} s  {row['case']:24} worst median {worst:.4f}  {said}"


if __name__ == "__main__":
    sys.exit(main())
