"""Everything that differs between releases of SGLang, each found by looking for it and not by a version's number.

The rest of capture depends on names that all supported releases have: `Engine.run_scheduler_process_func`,
`ModelRunner.load_model`, the models' setters and the forward batch's fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

OLDEST_TRIED = (0, 5, 17)
NEWEST_TRIED = (0, 5, 23)
"""Releases that the conformance suite has run with."""


def untried(version: str) -> str | None:
    """A warning for a release that the suite hasn't seen; the proof at start decides whether it can be used."""
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:3])
    if OLDEST_TRIED <= numbers <= NEWEST_TRIED:
        return None
    return (
        f"SGLang {version} hasn't been tried with this release (0.5.17 to 0.5.23 have); it is used because the "
        "proof at start passes"
    )


def installed_fields() -> tuple[str, ...]:
    """Names of the installed SGLang's server arguments; imports SGLang, which takes seconds.

    A msgspec structure in newer releases, a dataclass in older ones.
    """
    from sglang.srt.server_args import ServerArgs

    declared = getattr(ServerArgs, "__struct_fields__", ()) or ServerArgs.__dataclass_fields__
    return tuple(str(name) for name in declared if not str(name).startswith("_"))


def residual_streams() -> Any | None:
    """The module whose ``final_norm`` ends a layer stack, in releases where the norm module needn't be called."""
    try:
        from sglang.srt.layers.layer_boundary.residual import batch
    except ImportError:
        return None
    return batch


def layer_entry(layer: Any) -> Any | None:
    """The boundary object before a layer's attention, whose ``prepare`` takes ``capture``; None in older releases."""
    stage = getattr(layer, "attn_boundary", None)
    return stage if hasattr(stage, "capture_output") and hasattr(stage, "prepare") else None


def load_snapshots() -> Any | None:
    """The module that names a scheduler's load snapshot in /dev/shm, in releases that write one."""
    try:
        from sglang.srt.managers import load_snapshot
    except ImportError:
        return None
    return load_snapshot


def mla_handlers() -> Any | None:
    """The module in which multi-head latent attention chooses its path by attention backend."""
    try:
        from sglang.srt.models.deepseek_common import attention_backend_handler
    except ImportError:
        return None
    return attention_backend_handler


def replica_argument(generate: Callable[..., Any]) -> str:
    """What ``async_generate`` calls the data-parallel replica that a request goes to."""
    names = inspect.signature(generate).parameters
    return "routed_dp_rank" if "routed_dp_rank" in names else "data_parallel_rank"
