"""Which models and flags are held against Hugging Face on one and on two GPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from conformance import Case

TEST_GPUS = int(os.environ.get("HSDUMP_TEST_GPUS", "1"))
"""Of the engines that pytest starts; 0 rehearses the same on a CPU."""
GPU_ARGS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 16384,
}
"""Several engines share a GPU, so each takes a small part of what is free when it starts."""
CPU_ARGS: dict[str, Any] = {"mem_fraction_static": 0.1, "max_total_tokens": 8192}
"""For a rehearsal without a GPU."""
UNFUSED: dict[str, Any] = {"enforce_disable_flashinfer_allreduce_fusion": True}
FUSED: dict[str, Any] = {"flashinfer_allreduce_fusion_backend": "trtllm"}
"""trtllm doesn't use NVLink multicast; its kernels are compiled at the first start."""

FIRST_PORT = 21_000

SLOWEST_FIRST = ("kimi_k25", "deepseek_v3", "gpt_oss", "deepseek_v2", "qwen3_moe", "mixtral", "gemma3")
DENSE = ("gemma2", "llama", "qwen2", "qwen3", "mistral", "phi3")


def cases(gpus: int, cpu: bool = False) -> dict[str, Case]:
    """Name -> case.

    Args:
        gpus: 1 for every family and flag; 2 for tensor parallel and data parallel.
        cpu: the same on a CPU, as far as that goes.
    """
    base = CPU_ARGS if cpu else GPU_ARGS

    def case(family: str, chunk: int = 256, dtype: str = "bfloat16", **args: Any) -> Case:
        return Case(family, base | args, chunk, dtype, gpus=0 if cpu else 1)

    def two(family: str, replicas: int = 1, **args: Any) -> Case:
        return Case(family, base | args, gpus=0 if cpu else 2, replicas=replicas)

    found = _on_one(case, base, cpu) if gpus == 1 else _on_two(two)
    # Engines that start together would draw the same port now and then; replicas need one each, and draw theirs.
    return {
        name: dataclasses.replace(c, args={**c.args, "nccl_port": FIRST_PORT + i}) if c.replicas == 1 else c
        for i, (name, c) in enumerate(found.items())
    }


def _on_one(case: Callable[..., Case], base: dict[str, Any], cpu: bool) -> dict[str, Case]:
    found = {family: case(family) for family in (*SLOWEST_FIRST, *DENSE)}
    found["llama-chunk-64"] = case("llama", chunk=64)
    found["qwen3-chunk-4096"] = case("qwen3", chunk=4096)
    found["llama-float16"] = case("llama", dtype="float16")
    found["llama-fp8"] = Case("llama", base | {"quantization": "fp8"}, gpus=0 if cpu else 1, quantised=True)
    return found


def _on_two(two: Callable[..., Case]) -> dict[str, Case]:
    return {
        "deepseek_v3-tp2-fused": two("deepseek_v3", **FUSED),
        "deepseek_v3-tp2": two("deepseek_v3", **UNFUSED),
        "llama-tp2": two("llama", **UNFUSED),
        "llama-tp2-fused": two("llama", **FUSED),
        "qwen3_moe-tp2-fused": two("qwen3_moe", **FUSED),
        "kimi_k25-tp2": two("kimi_k25", **UNFUSED),
        "mixtral-tp2": two("mixtral", **UNFUSED),
        "llama-dp2": two("llama", replicas=2),
    }
