"""What `bench_gpu` compares with, each in a process of its own: SGLang by itself, and the ways that others go.

A process writes one line of JSON a round, so that what was measured survives whatever comes after.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_weights import run_stock, use_random_weights

TORCH_SAVE = "torch-save:"
RETURN_HIDDEN = "return-hidden-states:"
PLAIN = "plain:"

Array = np.ndarray[Any, Any]


def in_process(
    target: Callable[..., None], arguments: tuple[Any, ...], out: Path, timeout_s: float, start_s: float
) -> str | None:
    """Runs ``target(*arguments, out)`` in a fresh process, which writes its first line when it has started.

    Returns:
        What went wrong; None if nothing did. Rounds that it finished are in ``out`` in any case.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_guarded, args=(target, arguments, str(out)))
    process.start()
    process.join(min(timeout_s, start_s))
    if out.exists():  # it has started
        process.join(max(0.0, timeout_s - start_s))
    if process.is_alive():
        os.killpg(int(process.pid or 0), signal.SIGKILL)  # SGLang's processes are in its group
        process.join()
        return f"it wasn't {'done' if out.exists() else 'up'} in time and was ended"
    failed = [row["error"] for row in read_rounds(out) if "error" in row]
    if failed:
        return str(failed[-1])
    return None if process.exitcode == 0 else f"its process ended with exit code {process.exitcode}"


def read_rounds(out: Path) -> list[dict[str, Any]]:
    """The lines that a process wrote."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def note(out: str, **row: Any) -> None:
    """Writes one line."""
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")


def _guarded(target: Callable[..., None], arguments: tuple[Any, ...], out: str) -> None:
    os.setpgrp()
    try:
        target(*arguments, out)
    except Exception as error:
        note(out, error=f"{type(error).__name__}: {error}"[:500])
        raise


# ---- SGLang by itself


def serve(
    server_args: dict[str, Any],
    arms: dict[str, list[Array]],
    rounds: int,
    window: int,
    capture: Any,
    out: str,
) -> None:
    """Rounds of passes through one SGLang engine.

    Args:
        server_args: of the engine; as it is, when ``capture`` is None.
        arms: prefix of the requests' ids -> samples, in this order in every round.
        rounds: besides one to warm up, which is short.
        window: tokens in flight.
        capture: what the collector is switched on for; None: SGLang isn't touched.
        out: where rounds are written.
    """
    if server_args.get("device") == "cpu":
        from actors.capture.cpu import prepare_environment

        prepare_environment()
    started = time.monotonic()
    from sglang.srt.entrypoints.engine import Engine

    folder = f"/dev/shm/hsdump-bench-{os.getpid()}"
    function: Callable[..., None] = run_stock
    if capture is not None:
        cpu = server_args.get("device") == "cpu"
        function = functools.partial(run_scheduler_that_saves, capture, folder, cpu)
    engine = type("BenchEngine", (Engine,), {"run_scheduler_process_func": staticmethod(function)})(
        **server_args
    )
    note(out, started_s=round(time.monotonic() - started, 1))
    loop = asyncio.get_event_loop()
    try:
        for prefix, samples in arms.items():
            loop.run_until_complete(_pass(engine, prefix, samples[:: max(1, len(samples) // 24)], window))
        for i in range(rounds):
            for prefix, samples in arms.items():
                shutil.rmtree(folder, ignore_errors=True)
                engine.flush_cache()  # or the second pass would find its prompts cached, where a prefix cache is on
                found = loop.run_until_complete(_pass(engine, f"{prefix}{i}:", samples, window))
                note(out, round=i, arm=prefix.rstrip(":"), tokens=sum(map(len, samples)), **found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        engine.shutdown()


async def _pass(engine: Any, prefix: str, samples: list[Array], window_tokens: int) -> dict[str, Any]:
    from gpu_engine import TokenWindow

    window = TokenWindow(window_tokens)
    more = {"return_hidden_states": True} if prefix.startswith(RETURN_HIDDEN) else {}

    async def one(i: int, ids: Array) -> None:
        # SGLang returns states with a token that it has made, so there is one where they are asked for.
        sampling = {"max_new_tokens": 1 if more else 0, "temperature": 0.0, "ignore_eos": True}
        answer = await engine.async_generate(
            input_ids=ids.tolist(), sampling_params=sampling, rid=f"{prefix}{i}", **more
        )
        await window.give_back(len(ids))
        cached.append(answer["meta_info"].get("cached_tokens") or 0)
        if more:
            rows.append(max(map(_rows_of, answer["meta_info"]["hidden_states"]), default=0))

    rows: list[int] = []
    cached: list[int] = []
    started = time.monotonic()
    tasks = []
    for i, ids in enumerate(samples):
        await window.take(len(ids))
        tasks.append(asyncio.create_task(one(i, ids)))
    await asyncio.gather(*tasks)
    # Fewer rows than tokens came back where SGLang cut a sample into chunks: it keeps those of the last one.
    found = {"seconds": time.monotonic() - started, "cached_tokens": sum(cached)}
    return {**found, "rows_back": sum(rows)} if more else found


def _rows_of(states: list[Any]) -> int:
    """Rows of one step: a list of rows for the prompt, one row for a token that was made."""
    return len(states) if states and isinstance(states[0], list) else 1


def run_scheduler_that_saves(capture: Any, folder: str, cpu: bool, *args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler with a patch in the model's forward that saves each sample's states as a .pt file.

    It is what people do by hand: the states of a request's rows go to the CPU and to torch.save before the
    forward returns. Requests of other arms run with the collector switched off.
    """
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner

    from actors.capture.collector import Collector
    from actors.capture.cpu import register_mla_handler
    from actors.capture.forwards import forward_batch_of, is_extend, rows_of

    if cpu:
        register_mla_handler()
    load_model = ModelRunner.load_model

    def load_and_patch(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(runner, *args, **kwargs)
        collector = Collector(runner.model)
        collector.switch_on(capture.boundaries)
        forward = collector.inner.forward

        def patched(*args: Any, **kwargs: Any) -> Any:
            batch = forward_batch_of(args, kwargs)
            requests = rows_of(batch, (TORCH_SAVE,)) if is_extend(batch) else []
            if not requests:
                with collector.switched_off():
                    return forward(*args, **kwargs)
            hidden, aux = forward(*args, **kwargs)
            states = [*(aux if not isinstance(aux, torch.Tensor) else [aux]), hidden]
            os.makedirs(folder, exist_ok=True)
            for r in requests:
                rows = [state[r.row : r.row + r.rows].cpu() for state in states]
                torch.save(
                    {"start": r.start, "states": rows}, f"{folder}/{r.rid.replace(':', '-')}-{r.start}.pt"
                )
            return hidden

        collector.inner.forward = patched
        return result

    use_random_weights()
    ModelRunner.load_model = load_and_patch
    run_scheduler_process(*args, **kwargs)


# ---- Hugging Face


def hugging_face(
    model_path: str, samples: list[Array], boundaries: tuple[int, ...], seconds: float, gpu: bool, out: str
) -> None:
    """One sample a forward with output_hidden_states, the wanted states to the CPU, for about so many seconds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if gpu else "cpu"
    started = time.monotonic()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        config = AutoConfig.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    note(out, started_s=round(time.monotonic() - started, 1))

    @torch.inference_mode()
    def run(ids: Array) -> None:
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(device)[None]
        found = model.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
        torch.stack([found[b][0] for b in (*boundaries, -1)]).cpu()

    for ids in samples[:: max(1, len(samples) // 4)]:
        run(ids)
    order = np.random.default_rng(0).permutation(len(samples))
    started, tokens = time.monotonic(), 0
    for i in order:
        run(samples[i])
        tokens += len(samples[i])
        if time.monotonic() - started > seconds:
            break
    note(out, round=0, arm="hf", tokens=tokens, seconds=time.monotonic() - started)
