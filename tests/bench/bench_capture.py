"""What capturing costs: prefill through hsdump to committed shards, against the same engine without it.

    python tests/bench/bench_capture.py --shape llama-8b --gpus 1 --tokens 400000

The baseline is SGLang's own engine with the flags that hsdump forces, and as many batches in flight; it keeps nothing.
Random weights and random tokens: what is measured is time. Prints tokens/s and the ratio, and
writes bench/out/capture.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]

from actors.capture import cpu  # noqa: E402
from actors.capture.boundary import capture_spec  # noqa: E402
from actors.capture.flags import installed_fields, server_args  # noqa: E402
from actors.messages import EngineSpec  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128, "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 64,
    },
}  # fmt: skip
BATCHES_IN_FLIGHT = 3


def make_model(shape: str, folder: Path) -> Path:
    """A Llama with random weights."""
    import torch
    from tiny_tokenizer import tiny_tokenizer
    from transformers import AutoModelForCausalLM, LlamaConfig

    target = folder / shape
    if not (target / "config.json").exists():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=16384)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            AutoModelForCausalLM.from_config(config).save_pretrained(target)
        tiny_tokenizer("chatml").save_pretrained(str(target))
    return target


def lengths(tokens: int, longest: int = 8192) -> list[int]:
    """Lognormal lengths with a mean of about 1,730 that add up to at least ``tokens``."""
    random.seed(0)
    made: list[int] = []
    while sum(made) < tokens:
        made.append(min(longest, max(16, int(random.lognormvariate(7.1, 0.85)))))
    return made


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    common = {"chunked_prefill_size": options.chunk, "mem_fraction_static": 0.7 if options.gpus else 0.3}
    gpu = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
    return {**common, **(gpu if options.gpus else {"max_total_tokens": 32768})}


def baseline(options: argparse.Namespace, model: Path, rows: list[list[int]]) -> float:
    """Tokens/s of the engine alone; the first round warms it up."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_baseline, args=(options, str(model), rows, queue))
    process.start()
    result: float = queue.get(timeout=900)
    process.join(timeout=60)
    if process.is_alive():
        process.kill()
    return result


def _baseline(options: argparse.Namespace, model: str, rows: list[list[int]], queue: Any) -> None:
    shape = SHAPES[options.shape]
    if not options.gpus:
        cpu.prepare_environment()
    spec = EngineSpec(
        name="baseline", kind="sglang", prompts_url="", run_id="", model_path=model, dtype="bfloat16",
        gpus=options.gpus, replicas=1, trust_remote_code=False, ring_bytes=0, log_dir="", load_timeout_s=0,
        stall_timeout_s=0, server_args=engine_args(options),
        capture=capture_spec("eagle3", final=False, final_normed=True, num_layers=shape["num_hidden_layers"],
                             hidden_size=shape["hidden_size"], dtype="bfloat16", chunk_rows=32, shard_rows=16384),
    )  # fmt: skip
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**{**server_args(spec, installed_fields()), "log_level": "error"})
    loop = asyncio.get_event_loop()
    speeds = [
        loop.run_until_complete(_prefill(engine, rows, options.batch)) for _ in range(options.rounds + 1)
    ]
    queue.put(sorted(speeds[1:])[len(speeds[1:]) // 2])
    engine.shutdown()


async def _prefill(engine: Any, rows: list[list[int]], batch_tokens: int) -> float:
    """Longest first in batches, as the coordinator does it."""
    ordered = sorted(rows, key=len, reverse=True)
    batches: list[list[list[int]]] = [[]]
    for row in ordered:
        if batches[-1] and sum(map(len, batches[-1])) + len(row) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    gate = asyncio.Semaphore(BATCHES_IN_FLIGHT)

    async def one(batch: list[list[int]]) -> None:
        async with gate:
            await engine.async_generate(input_ids=batch, sampling_params=[{"max_new_tokens": 0}] * len(batch))

    started = time.monotonic()
    await asyncio.gather(*map(one, batches))
    return sum(map(len, rows)) / (time.monotonic() - started)


def collect(options: argparse.Namespace, model: Path, rows: list[list[int]], folder: Path) -> float:
    """Tokens/s from the first dispatch to the last commit."""
    with open(folder / "prompts.jsonl", "w") as file:
        for i, row in enumerate(rows):
            file.write(json.dumps({"id": str(i), "input_ids": row, "loss_mask": [1] * len(row)}) + "\n")
    tree = {
        "model": {"path": str(model)},
        "prompts": {"url": str(folder / "prompts.jsonl"), "loss_mask": "all"},
        "output": str(folder / "dump"),
        "engine": {"gpus": options.gpus, "args": engine_args(options)},
        "limits": {"batch_tokens": options.batch, "object_store_bytes": options.store_gib << 30},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "cluster", "collect", str(folder / "run.yaml")]
    subprocess.run(command, cwd=ROOT, check=True)
    record = json.loads((folder / "dump/run.json").read_text())
    return sum(map(len, rows)) / float(record["work_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--chunk", type=int, default=8192, help="chunked_prefill_size")
    parser.add_argument("--batch", type=int, default=16_384, help="tokens in a batch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--store-gib", type=int, default=1, help="object store")
    parser.add_argument("--dir", type=Path, default=None, help="where model and dump are written")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="bench-capture-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(options.shape, folder)
    vocab = SHAPES[options.shape]["vocab_size"]
    rows = [[random.randint(3, vocab - 1) for _ in range(n)] for n in lengths(options.tokens)]
    alone = baseline(options, model, rows)
    captured = collect(options, model, rows, folder)
    results = [
        {"arm": "engine alone", "tokens_per_s": round(alone), "ratio": 1.0},
        {"arm": "hsdump collect", "tokens_per_s": round(captured), "ratio": round(captured / alone, 3)},
    ]
    for row in results:
        print(f"{row['arm']:16} {row['tokens_per_s']:>10,} tokens/s   {row['ratio']:.3f}")
    out = ROOT / "bench/out"
    out.mkdir(parents=True, exist_ok=True)
    (out / "capture.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
