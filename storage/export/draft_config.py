"""The ``config.json`` that a drafter starts from, with the layer ids that servers need. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
_FROM_TARGET = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id", "vocab_size",
)  # fmt: skip
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class ServingIds:
    """Which layer ids make a server feed a drafter the boundaries that it was trained on.

    Attributes:
        boundaries: those.
        sglang: for ``eagle_config.eagle_aux_hidden_state_layer_ids``; None where this SGLang can't.
        vllm: for ``eagle_aux_hidden_state_layer_ids``: vLLM's ids are boundaries.
        why_not: why ``sglang`` is None.
    """

    boundaries: tuple[int, ...]
    sglang: tuple[int, ...] | None
    vllm: tuple[int, ...]
    why_not: str = ""

    def lines(self) -> list[str]:
        """For people, a line a server."""
        sglang = f"none: {self.why_not}" if self.sglang is None else list(self.sglang)
        return [
            f"boundaries {list(self.boundaries)}",
            f"SGLang     eagle_config.eagle_aux_hidden_state_layer_ids {sglang}",
            f"vLLM       eagle_aux_hidden_state_layer_ids {list(self.vllm)}",
        ]


def vocab_size_of(target_config: Mapping[str, Any]) -> int | None:
    """The target's vocabulary, None where its config doesn't say."""
    value = _text(target_config).get("vocab_size")
    return None if value is None else int(value)


def draft_config(
    target_config: Mapping[str, Any],
    hidden_size: int,
    dtype: str,
    serving: ServingIds,
    draft_vocab_size: int | None,
) -> dict[str, Any]:
    """A one-layer EAGLE-3 drafter in the target's shape, to be changed at will; the layer ids are what matters.

    SGLang reads ``eagle_config``, vLLM the key of the same name outside it, so both go into one file.

    Args:
        target_config: the target's config.json; empty where it isn't at hand.
        hidden_size: H of the target.
        dtype: element type of the states.
        serving: layer ids.
        draft_vocab_size: V' of the drafter; None for the target's vocabulary.
    """
    text = _text(target_config)
    config = {key: text[key] for key in _FROM_TARGET if key in text}
    eagle: dict[str, Any] = {"use_aux_hidden_state": bool(serving.boundaries)}
    if serving.sglang is not None:
        eagle["eagle_aux_hidden_state_layer_ids"] = list(serving.sglang)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **config,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "target_hidden_size": hidden_size,
        "num_aux_hidden_states": len(serving.boundaries),
        "draft_vocab_size": draft_vocab_size or text.get("vocab_size"),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_config": eagle,
        "eagle_aux_hidden_state_layer_ids": list(serving.vllm),
    }


def plain_ids(boundaries: Sequence[int], why_not: str) -> ServingIds:
    """Ids where no SGLang is at hand to ask."""
    return ServingIds(tuple(boundaries), None, tuple(boundaries), why_not)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((config[k] for k in _TEXT_CONFIGS if isinstance(config.get(k), Mapping)), config)
