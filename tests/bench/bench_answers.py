"""What each pass costs when the model answers rows itself: rows and tokens a second of answering and of capturing.

    python tests/bench/bench_answers.py [--rows 24] [--new-tokens 32] [--n 1] [--model FOLDER] [--gpus 0] [--dir FOLDER]

Questions are the first user turns of ``examples/conversations.jsonl``. The run is `hsdump collect`, end to end, and
both passes are timed from the first dispatch to the last commit. For comparison the same requests are given at once to
an untouched SGLang engine with the same flags: what the pass has beside it are the hook, batches, Ray and the commits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
CONVERSATIONS = ROOT / "examples/conversations.jsonl"
OUT = ROOT / "bench" / "out" / "answers.json"


def questions(rows: int) -> list[dict[str, Any]]:
    """So many rows that end in a user's turn; the same ones come again where the file is short."""
    found = []
    for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines():
        try:
            turns = json.loads(line).get("messages") or []
        except ValueError:
            continue  # the file has a broken line on purpose
        first = next((m for m in turns if m["role"] == "user"), None)
        if first is not None and len(first["content"]) < 400:
            found.append([first])
    return [{"id": f"q{i}", "messages": found[i % len(found)]} for i in range(rows)]


def collect(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """``run.json`` of a run with both passes."""
    prompts = folder / "questions.jsonl"
    prompts.write_text("\n".join(map(json.dumps, questions(args.rows))), encoding="utf-8")
    generate = {"max_new_tokens": args.new_tokens, "n": args.n, "temperature": 0.0 if args.n == 1 else 0.8}
    tree = {
        "model": {"path": str(args.model)},
        "prompts": {"url": str(prompts), "max_tokens": 4096, "loss_mask": "last_turn"},
        "generate": generate,
        "output": str(folder / "dump"),
        "engine": {"gpus": args.gpus},
        "limits": {"object_store_bytes": 512 << 20},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "cluster", "collect", str(folder / "run.yaml")]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    record: dict[str, Any] = json.loads((folder / "dump/run.json").read_text())
    return record


def alone(folder: Path, gpus: int) -> dict[str, float]:
    """The questions of a dump, answered at once by an SGLang engine without a hook."""
    from actors.capture import adapter, cpu, flags
    from cluster.run import resolve
    from cluster.run_file import load_run
    from cluster.specs import engine_spec
    from storage.files import Store
    from storage.prompts import ASKED, PromptTable

    if gpus == 0:
        cpu.prepare_environment()
    from sglang.srt.entrypoints.engine import Engine

    run = resolve(load_run(str(folder / "run.yaml")), folder)
    spec = engine_spec(run, run.layout(1), gpus, "", str(folder))
    table = PromptTable(Store(str(folder / "dump")), ASKED)
    (longest, seeds), generate = table.questions(), table.summary.identity["generate"]
    sampling = {name: generate[name] for name in ("temperature", "top_p", "top_k", "stop_token_ids")}
    engine = Engine(**flags.server_args(spec, adapter.installed_fields()))

    async def ask(row: int) -> int:
        answer = await engine.async_generate(
            input_ids=table.load(row).token_ids.tolist(),
            sampling_params=sampling
            | {"max_new_tokens": int(longest[row]), "sampling_seed": int(seeds[row])},
        )
        return len(answer["output_ids"])

    async def all_of_them() -> list[int]:
        await ask(0)  # the first request of an engine pays for what is made lazily
        return list(await asyncio.gather(*(ask(row) for row in range(len(table)))))

    began_s = time.perf_counter()
    tokens = engine.loop.run_until_complete(all_of_them())
    seconds = time.perf_counter() - began_s
    engine.shutdown()
    return {"rows": len(tokens), "tokens": sum(tokens), "seconds": seconds}


def line(name: str, rows: float, tokens: float, seconds: float) -> dict[str, Any]:
    """One arm's figures, printed and returned."""
    print(f"{name:28} {rows:6.0f} rows {tokens:8.0f} tokens {seconds:8.1f} s "
          f"{rows / seconds:8.2f} rows/s {tokens / seconds:10.1f} tokens/s")  # fmt: skip
    return {"case": name, "rows": rows, "tokens": tokens, "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the dump is made; a temporary folder unless given")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(alone(args.alone, args.gpus)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        record = collect(folder, args)
        command = [sys.executable, __file__, "--alone", name, "--gpus", str(args.gpus)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        bare = json.loads(done.stdout.splitlines()[-1])
        said = record["answering"]
        rows = [
            line("answer", said["work_rows"], said["work_tokens"], said["work_seconds"]),
            line("answer, SGLang alone", bare["rows"], bare["tokens"], bare["seconds"]),
        ]
        prepared = json.loads((folder / "dump/prompts/_prepared.json").read_text())
        rows.append(
            line("capture", record["counts"]["committed"], prepared["tokens"], record["work_seconds"])
        )
        print(f"{'making the table':28} {said['table_seconds']:.1f} s")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1))
    print(f"written: {OUT}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
