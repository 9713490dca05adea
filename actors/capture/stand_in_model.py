"""The small random model of a stand-in, made by Hugging Face's class for the user's architecture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors.capture.shrink import shrunken

MOST_PARAMETERS = 400_000_000
"""It is on the disk once, in bfloat16, and in this process's memory once, in float32: 2.4 GB together at most."""
NORM_SPREAD = 0.5
"""Norms' weights differ by so much from what they start at, so that a state and its norm aren't alike."""
CONFIG = "config.json"


class NotProvable(Exception):
    """There is no stand-in for the model; the message says why, and what a person can do."""


def make_model(source: Path, folder: Path, dtype: str, trust_remote_code: bool, ranks: int) -> dict[str, Any]:
    """Writes a small random model of the architecture of the one in ``source``.

    Args:
        source: folder of the real model.
        folder: made; gets config.json, weights, and the model's own code where that is trusted.
        dtype: of the weights.
        trust_remote_code: runs code that comes with the model.
        ranks: tensor-parallel size of the engine that it is for.

    Returns:
        Its config.json.

    Raises:
        NotProvable: it can't be made.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    try:
        small = shrunken(config, ranks)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise NotProvable(f"its config.json has no form that can be made small: {error!r}") from error
    small = {**small, "dtype": dtype, "torch_dtype": dtype}
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(small))
    if trust_remote_code:
        for code in source.glob("*.py"):
            shutil.copy(code, folder)
    try:
        model = _random_model(folder, dtype, trust_remote_code)
        model.save_pretrained(folder)
    except NotProvable:
        raise
    except Exception as error:  # whatever transformers, or a model's own code, makes of it
        said = str(error).strip().splitlines() or [type(error).__name__]
        own_code = "auto_map" in small and not trust_remote_code
        remedy = "; its own code isn't run (set model.trust_remote_code if you trust it)" if own_code else ""
        raise NotProvable(
            f"Hugging Face transformers makes no small {small.get('model_type')} model: {said[0]}{remedy}"
        ) from error
    # As SGLang knows the real one: transformers leaves out what its own class doesn't read.
    architectures = small.get("architectures") or [type(model).__name__]
    small = {**small, "architectures": architectures}
    (folder / CONFIG).write_text(json.dumps(small, indent=1))
    return small


def _random_model(folder: Path, dtype: str, trust_remote_code: bool) -> Any:
    """Seeded; every norm's weights away from what they start at."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    options: Mapping[str, Any] = {
        "dtype": getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
    }
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **options).parameters())
    if parameters > MOST_PARAMETERS:
        raise NotProvable(
            f"its stand-in would have {parameters / 1e6:.0f} million parameters, over {MOST_PARAMETERS / 1e6:.0f}"
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-NORM_SPREAD, NORM_SPREAD))
    return model
