"""The process of a stand-in: makes the small model, captures it with an engine, compares it with Hugging Face.

python -m actors.capture.stand_in_run FOLDER PARENT reads FOLDER/task and leaves FOLDER/answer; PARENT is the process id
of whoever waits for it.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.capture.boundary import capture_spec
from actors.capture.lifeline import end_with_parent
from actors.capture.model_info import parse_model_info
from actors.capture.proof import FAILED, Check, probe_tokens
from actors.capture.session import CaptureSession
from actors.capture.shrink import VOCABULARY, shrunken_boundaries
from actors.capture.stand_in import Task, judge, no_more
from actors.capture.stand_in_model import NotProvable, make_model
from actors.capture.statistics import to_float
from actors.messages import Batch, EngineSpec, SampleRef, plan_segments
from storage.errors import HsdumpError, ProofFailed
from storage.reference import ReferenceModel, compare

LENGTHS = (96, 300)
CHUNK_TOKENS = 256
"""So that one forward holds rows of both prompts, and one prompt is spread over two forwards."""
ANSWER_S = 120.0
LARGEST_RATIO = 1e6
"""Said of a state that is the reference's to the bit; JSON has no infinity."""
OWN_ARGUMENTS: Mapping[str, Any] = {
    "chunked_prefill_size": CHUNK_TOKENS,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
}
"""It lives in what the real engine left free."""
NOT_TAKEN_OVER = (
    "quantization", "quantization_param_path", "torchao_config", "modelopt_quant", "load_format", "context_length",
    "cpu_offload_gb", "download_dir", "model_loader_extra_config", "max_running_requests", "max_prefill_tokens",
    "nccl_port", "dist_init_addr", "init_expert_location", "ep_num_redundant_experts",
)  # fmt: skip
"""Arguments that speak of the real weights, their memory or their ports."""


def main(folder: Path, parent: int) -> None:
    """Answers a task, unless nobody waits for it any more."""
    end_with_parent()
    if os.getppid() != parent:
        return
    task: Task = pickle.loads((folder / "task").read_bytes())
    try:
        answer = run(task, folder / "model")
    except NotProvable as error:
        answer = {"why": str(error)}
    except ProofFailed as error:
        failed: list[Check] = [
            {"check": f"stand-in of {s}", "status": FAILED, "detail": str(error)} for s in task.states
        ]
        answer = {"checks": failed}
    except HsdumpError as error:
        answer = {"why": f"no engine for a stand-in: {type(error).__name__}: {error}"}
    (folder / "answer").write_text(json.dumps(answer))


def run(task: Task, folder: Path) -> dict[str, Any]:
    """Checks of the task's states, and what the stand-in was.

    Raises:
        NotProvable: there can be no stand-in, or it doesn't do what the real engine does.
        HsdumpError: its engine doesn't start.
    """
    real = task.spec
    ranks = max(1, real.gpus // real.replicas)
    config = make_model(Path(real.model_path), folder, real.dtype, real.trust_remote_code, ranks)
    few = parse_model_info(config, str(folder)).num_layers
    stands_for = shrunken_boundaries(real.capture.boundaries, real.capture.num_layers, few)
    spec = _spec(real, config, folder, sorted(set(stands_for.values())))
    prompts = [probe_tokens(VOCABULARY, length) for length in LENGTHS]
    process, captured = _captured(spec, task, prompts)
    _same_way(task.process, process)
    reference = _reference(ReferenceModel(str(folder), "float32", "cpu", real.trust_remote_code), prompts)
    results = {
        s: compare(s, torch.from_numpy(captured[k]), few, reference)
        for k, s in enumerate(spec.capture.layout.states)
    }
    checks = []
    for state in task.states:
        own = stands_for[state] if isinstance(state, int) else state
        where = f"{own} of {few} random layers"
        checks.append(judge(state, where, results[own], results["final_normed"]))
    about = {
        "class": process["hooked"],
        "config": config,
        "boundaries": {str(b): s for b, s in stands_for.items()},
        "prompts_tokens": list(LENGTHS),
        "tensor_parallel": ranks,
        "states": {
            str(s): {"median": r.summary.median, "ratio": min(r.ratio, LARGEST_RATIO)}
            for s, r in results.items()
        },
    }
    return {"checks": checks, "about": about}


def _spec(real: EngineSpec, config: Mapping[str, Any], folder: Path, boundaries: Sequence[int]) -> EngineSpec:
    info = parse_model_info(config, str(folder))
    capture = capture_spec(
        boundaries,
        final=real.capture.final,
        final_normed=True,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        dtype=real.dtype,
        chunk_rows=32,
        shard_rows=4096,
    )
    taken = {
        k: v for k, v in real.server_args.items() if k.lstrip("-").replace("-", "_") not in NOT_TAKEN_OVER
    }
    return replace(
        real,
        name=f"{real.name}-stand-in",
        model_path=str(folder),
        gpus=real.gpus // real.replicas,
        replicas=1,
        capture=capture,
        ring_bytes=0,
        server_args={**taken, **OWN_ARGUMENTS},
    )


def _captured(
    spec: EngineSpec, task: Task, prompts: Sequence[np.ndarray[Any, Any]]
) -> tuple[Mapping[str, Any], np.ndarray[Any, Any]]:
    """What a scheduler process said of its hook, and the states of all prompts' tokens: float32 [K, T, H]."""
    session = CaptureSession(spec, task.function, second_proof=no_more)
    layout = spec.capture.layout
    try:
        report = session.start().result().capture_report
        samples = tuple(SampleRef(i, 1, len(ids), len(ids)) for i, ids in enumerate(prompts))
        batch = Batch("stand-in", samples, plan_segments([len(ids) for ids in prompts], layout))
        job = session.submit(batch, prompts)
        record = job.record().result(ANSWER_S)
        flats = [job.segment(i).result(ANSWER_S) for i in range(job.num_segments)]
    finally:
        session.shutdown()
    lost = next((o.failure.reason for o in record.outcomes if o.failure), None)
    if lost is not None:
        raise NotProvable(f"its stand-in's states were lost: {lost}")
    starts = np.cumsum([0, *(len(ids) for ids in prompts)])
    found = np.empty((layout.num_states, int(starts[-1]), layout.hidden_size), np.float32)
    for pieces, flat in zip(batch.segments, flats, strict=True):
        at = 0
        for piece in pieces:
            shape = (layout.num_states, piece.rows, layout.hidden_size)
            size = int(np.prod(shape))
            first = int(starts[piece.sample]) + piece.start
            found[:, first : first + piece.rows] = to_float(flat[at : at + size].reshape(shape), layout.dtype)
            at += size
    return report["processes"][0], found


def _reference(model: ReferenceModel, prompts: Sequence[np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """Every state of all prompts' tokens by Hugging Face: name -> [T, H]."""
    each = [model.named_states(torch.from_numpy(ids.astype(np.int64)))[1] for ids in prompts]
    return {name: torch.cat([states[name] for states in each]) for name in each[0]}


def _same_way(real: Mapping[str, Any], small: Mapping[str, Any]) -> None:
    """Refuses to conclude from another class, or from states that are taken elsewhere.

    Raises:
        NotProvable: the stand-in isn't captured as the real model is.
    """
    for what, ours, theirs in (
        ("class", real["hooked"], small["hooked"]),
        ("place", _place(real), _place(small)),
    ):
        if ours != theirs:
            raise NotProvable(f"its stand-in has another {what}: {theirs}, not {ours}")


def _place(process: Mapping[str, Any]) -> list[Any]:
    """The collector's setter, and the kinds of places at layers."""
    return [str(process["setter"]).partition("(")[0], *process["places"]]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
