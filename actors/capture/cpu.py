"""What SGLang needs to run on a CPU: environment before it is imported, one handler after."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from pathlib import Path

from actors.capture import adapter

STANDIN = Path(__file__).with_name("standin")
"""Folder with the stand-in `sgl_kernel` package."""
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What Linux calls instructions for bfloat16, on x86-64 and on Arm."""


def has_driver() -> bool:
    """Whether an NVIDIA driver's library can be loaded on this host."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def slow_type(dtype: str) -> str | None:
    """A warning where this CPU converts every value of the model's type; None elsewhere, and where nobody knows."""
    if dtype != "bfloat16" or not CPU_INFO.exists():
        return None
    if BFLOAT16_FLAGS.intersection(CPU_INFO.read_text(encoding="utf-8").split()):
        return None
    return (
        "this CPU has no instructions for bfloat16 and is slow at it; model.dtype: float32 is several times faster, "
        "and states take twice the bytes"
    )


def prepare_environment() -> None:
    """Sets this process up for a CPU engine; its children inherit it. Call it before SGLang is imported."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang warns once for each thing that only GPUs have, in every process.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    if has_driver():
        return
    standin = str(STANDIN)
    if standin not in sys.path:
        sys.path.insert(0, standin)
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != standin]
    os.environ["PYTHONPATH"] = os.pathsep.join([standin, *paths])


def register_mla_handler() -> None:
    """Lets multi-head latent attention (DeepSeek-V2/V3, Kimi-K2) run on the backend ``torch_native``.

    SGLang's default for a backend that it doesn't know is the MHA path, whose heads don't fit the latent KV
    pool. The absorbed path does.
    """
    handlers = adapter.mla_handlers()
    if handlers is None:
        return
    handlers.AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: handlers._dispatch_mla_subtype(attention, batch)
    )
