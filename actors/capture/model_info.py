"""What a model's config.json says, read without importing torch, transformers or SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.messages import EngineSpec
from storage.errors import ModelError
from storage.layout import STORED_AS

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep the configuration of their text model."""


@dataclass(frozen=True)
class ModelInfo:
    """A model's shape.

    Attributes:
        architecture: first of the config's architectures.
        num_layers: N, decoder layers of the text model.
        hidden_size: H.
        vocab_size: token ids are below it.
        dtype: element type that the checkpoint names; bfloat16 where it names none.
        max_positions: longest context that the config promises, if it says so.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_positions: int | None


def read_model_info(model_path: str) -> ModelInfo:
    """Reads ``config.json`` in a local model directory.

    Raises:
        ModelError: the directory or its config.json is missing or doesn't describe a decoder.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(
            f"model.path: {model_path} isn't a directory; give the local directory of a Hugging Face model"
        )
    config = folder / "config.json"
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model.path: {model_path} has no config.json; point it at the directory that holds the model's "
            "config.json and weights"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{config} can't be read ({error}); download the model again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{config} isn't a JSON object; download the model again")
    return parse_model_info(data, str(config))


def parse_model_info(config: Mapping[str, Any], where: str) -> ModelInfo:
    """The shape that a parsed config.json describes; ``where`` names the file in errors.

    Raises:
        ModelError: a number that every decoder has is missing.
    """
    text = next((config[k] for k in TEXT_CONFIGS if isinstance(config.get(k), dict)), config)
    architectures = config.get("architectures") or text.get("architectures") or []
    if not architectures:
        raise ModelError(f"{where} names no architecture; SGLang needs one to choose the model's class")
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = str(named).removeprefix("torch.") if named else "bfloat16"
    return ModelInfo(
        architecture=str(architectures[0]),
        num_layers=_number(text, where, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_number(text, where, "hidden_size", "n_embd", "d_model"),
        vocab_size=_number({**config, **text}, where, "vocab_size"),
        dtype=dtype if dtype in STORED_AS else "bfloat16",
        max_positions=_optional(text.get("max_position_embeddings")),
    )


def check_same_model(info: ModelInfo, spec: EngineSpec) -> None:
    """Holds the model on this node against the one that the run was planned for.

    Raises:
        ModelError: another number of layers or another hidden size.
    """
    planned = (spec.capture.num_layers, spec.capture.layout.hidden_size)
    if (info.num_layers, info.hidden_size) != planned:
        raise ModelError(
            f"{spec.model_path} has {info.num_layers} layers of hidden size {info.hidden_size}, and the run was "
            f"made for {planned[0]} of {planned[1]}; is it the same model on every node?"
        )


def _number(config: Mapping[str, Any], where: str, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ModelError(f"{where} has no {names[0]}; is this a decoder-only language model?")


def _optional(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
