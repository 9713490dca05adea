"""Shared by the capture tests: engines on the CPU, batches, and Hugging Face as the oracle."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.capture.boundary import capture_spec
from actors.capture.engine import SchedulerFunction
from actors.capture.hook import run_scheduler_with_hook
from actors.capture.job import CaptureJob
from actors.capture.model_info import read_model_info
from actors.capture.session import CaptureSession
from actors.messages import Batch, BatchRecord, EngineSpec, SampleRef, plan_segments

Array = np.ndarray[Any, Any]
START_S = 600.0
ANSWER_S = 300.0


CHUNK_TOKENS = 256
"""Most tokens of one forward."""


def engine_spec(
    model: Path,
    boundaries: Sequence[int] | str,
    logs: Path,
    chunk: int = CHUNK_TOKENS,
    dtype: str = "bfloat16",
    **args: Any,
) -> EngineSpec:
    info = read_model_info(str(model))
    capture = capture_spec(
        boundaries,
        final=True,
        final_normed=True,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        dtype=dtype,
        chunk_rows=32,
        shard_rows=4096,
    )
    return EngineSpec(
        name="engine-0",
        kind="sglang",
        prompts_url="",
        run_id="test",
        model_path=str(model),
        dtype=dtype,
        gpus=0,
        replicas=1,
        trust_remote_code=False,
        capture=capture,
        ring_bytes=0,
        log_dir=str(logs),
        load_timeout_s=START_S,
        stall_timeout_s=60.0,
        server_args={"chunked_prefill_size": chunk, **args},
    )


NEEDED_MODULES = (
    "apertus",
    "llama",
    "mistral",
    "phi3",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gpt_oss",
    "deepseek",
    "kimi",
)


def import_few_models() -> None:
    """Has SGLang import the modules of the families under test alone: half of an engine's start is imports."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    (package,) = found.submodule_search_locations or ()
    names = sorted(p.stem for p in Path(package, "srt/models").glob("*.py"))
    others = [n for n in names if not n.startswith((*NEEDED_MODULES, "_", "registry", "utils"))]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


@contextmanager
def running(
    spec: EngineSpec, function: SchedulerFunction = run_scheduler_with_hook
) -> Iterator[CaptureSession]:
    import_few_models()
    session = CaptureSession(spec, function)
    try:
        session.start().result(START_S)
        yield session
    finally:
        session.shutdown()


_batches = iter(range(1_000_000))


def submit(
    session: CaptureSession,
    ids: Sequence[Array],
    max_bytes: int = 1 << 20,
    positions: Sequence[Array] | None = None,
) -> CaptureJob:
    """Hands prompts over as one batch of small segments, so that samples are cut."""
    layout = session._spec.capture.layout
    kept = [len(x) for x in positions or ids]
    refs = tuple(SampleRef(i, 1, len(x), n) for i, (x, n) in enumerate(zip(ids, kept, strict=True)))
    segments = plan_segments(kept, layout, max_bytes)
    return session.submit(Batch(f"b{next(_batches)}", refs, segments), ids, positions)


def states_of(session: CaptureSession, job: CaptureJob) -> tuple[BatchRecord, list[Array]]:
    """The record and each sample's states, float32 [K, T, H]."""
    layout = session._spec.capture.layout
    record = job.record().result(ANSWER_S)
    samples = [
        np.zeros((layout.num_states, s.kept, layout.hidden_size), np.float32) for s in job.batch.samples
    ]
    for s, pieces in enumerate(job.batch.segments):
        flat, base = job.segment(s).result(ANSWER_S), 0
        if flat.size == 0:
            continue
        for piece in pieces:
            size = layout.num_states * piece.rows * layout.hidden_size
            bits = flat[base : base + size].reshape(layout.num_states, piece.rows, layout.hidden_size)
            samples[piece.sample][:, piece.start : piece.start + piece.rows] = bits_to_float(
                bits, layout.dtype
            )
            base += size
    return record, samples


def bits_to_float(bits: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(dtype).astype(np.float32)


def ask(session: CaptureSession, ids: Array, rid: str, new_tokens: int = 8) -> list[int]:
    """Runs a request with an id of the test's own choice and returns its greedy tokens."""
    host = session._host
    work = host.engine.prefill(ids.tolist(), rid, new_tokens)
    answer = asyncio.run_coroutine_threadsafe(work, host._loop).result(ANSWER_S)
    return [int(t) for t in answer["output_ids"]]


class Reference:
    """Hugging Face in float32; boundary N is what its final norm gets."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model.eval()
        self._before_norm: list[torch.Tensor] = []
        self._model.norm.register_forward_pre_hook(lambda m, args: self._before_norm.append(args[0]))
        self.num_layers = len(self._model.layers)

    def states(self, ids: Array) -> Mapping[Any, torch.Tensor]:
        """Every boundary below N, final and final_normed: [T, H] each."""
        self._before_norm.clear()
        with torch.no_grad():
            out = self._model(torch.tensor(ids.astype(np.int64))[None], output_hidden_states=True)
        states: dict[Any, torch.Tensor] = {b: out.hidden_states[b][0] for b in range(self.num_layers)}
        states["final"] = self._before_norm[-1][0]
        states["final_normed"] = out.last_hidden_state[0]
        return states


def error_per_token(captured: Array, reference: torch.Tensor) -> torch.Tensor:
    """|captured - reference| / |reference| for each token."""
    difference = torch.from_numpy(captured) - reference
    return difference.norm(dim=-1) / reference.norm(dim=-1)


def assert_right(
    states: Sequence[Any],
    captured: Sequence[Array],
    references: Sequence[Mapping[Any, torch.Tensor]],
    p99: float,
) -> None:
    """Right: median under 0.02, p99 bounded, and of all the reference's states the right one nearest by 3."""
    for k, state in enumerate(states):
        own = torch.cat([error_per_token(c[k], r[state]) for c, r in zip(captured, references, strict=True)])
        assert own.median() < 0.02, f"state {state}: median {own.median():.4f}"
        assert own.quantile(0.99) < p99, f"state {state}: p99 {own.quantile(0.99):.4f}"
        for other in references[0]:
            if other == state:
                continue
            far = torch.cat(
                [error_per_token(c[k], r[other]) for c, r in zip(captured, references, strict=True)]
            )
            assert far.median() > 3 * own.median(), f"state {state} is as near to {other}: {far.median():.4f}"


def random_ids(lengths: Sequence[int], seed: int, vocab: int = 1024) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab - 20, size=n).astype(np.int32) for n in lengths]
