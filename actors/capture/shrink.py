"""A model's configuration made small: fewer layers and widths, the same structure. Pure, no I/O.

What decides the path through an engine's code stays as it is: kinds of layers and their order, attention's form and
head size, normalisation, rotary embedding, the router. What only costs memory shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from actors.capture.model_info import TEXT_CONFIGS

LAYERS = 8
WIDTH = 512
INNER = 256
EXPERT_INNER = 128
EXPERTS = 16
VOCABULARY = 1024
HEADS = 4
Q_RANK = 256
MLA_HEADS = 16
"""Heads of a rank that kernels of multi-head latent attention ask for."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
INNER_ENDINGS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
AT_MOST_ONE = ("first_k_dense_replace", "num_nextn_predict_layers")
"""Layers at the start or the end that differ from the rest: one of them shows it."""
LEFT_OUT = ("quantization_config", "compression_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config.json."""
    return next((config[k] for k in TEXT_CONFIGS if isinstance(config.get(k), dict)), config)


def shrunken(config: Mapping[str, Any], tensor_parallel: int) -> dict[str, Any]:
    """The configuration of a small random model of the same structure.

    Args:
        config: parsed config.json; of a multimodal model its text model is taken.
        tensor_parallel: ranks that heads and widths are divided by.

    Raises:
        KeyError, TypeError, ValueError, ZeroDivisionError: it isn't a configuration of a form that is known.
    """
    text = dict(text_config(config))
    layers, hidden = _first(text, LAYER_COUNTS), _first(text, HIDDEN)
    few = min(layers, LAYERS)
    small = {k: _cut(v, layers, few) for k, v in text.items() if k not in LEFT_OUT}
    small |= {k: min(int(v), _limit(k)) for k, v in small.items() if _limit(k) and isinstance(v, int)}
    routed = int(text.get("num_experts_per_tok") or 0)
    small |= {k: min(int(text[k]), max(EXPERTS, 2 * routed)) for k in EXPERT_COUNTS if small.get(k)}
    small |= {k: _below(small[k], VOCABULARY) for k in TOKEN_IDS if small.get(k) is not None}
    small |= {k: few for k in LAYER_COUNTS if k in small}
    width, heads = _attention(text, hidden, tensor_parallel)
    # Some configurations name the hidden size more than once: conv_dim, block_dim.
    same = [k for k, v in text.items() if v == hidden and (k in HIDDEN or k.endswith("_dim"))]
    return small | heads | {k: width for k in same if k not in heads and "head" not in k}


def shrunken_boundaries(boundaries: Sequence[int], layers: int, few: int) -> dict[int, int]:
    """Boundary of the model -> boundary of the small one that stands for it.

    One near either end keeps its distance to that end, since a release's setter may treat the first or the last
    specially; the others are all stood for by the middle.

    Args:
        boundaries: below N.
        layers: N of the model.
        few: N of the small one.
    """
    half = few // 2
    found: dict[int, int] = {}
    for b in boundaries:
        from_end = layers - b
        found[b] = b if b < half or few == layers else few - from_end if from_end < half else half
    return found


def _attention(text: Mapping[str, Any], hidden: int, tensor_parallel: int) -> tuple[int, dict[str, int]]:
    """The small hidden size, and numbers of heads with the model's own head size and kind of grouping."""
    if "num_attention_heads" not in text:
        return min(hidden, WIDTH), {}
    heads = int(text["num_attention_heads"])
    groups = int(text.get("num_key_value_heads") or heads)
    enough = tensor_parallel * -(-HEADS // tensor_parallel)
    few = min(groups, enough) if groups > tensor_parallel else groups
    if "kv_lora_rank" in text:
        few = few_heads = min(heads, MLA_HEADS * tensor_parallel)
    elif groups == heads:
        few_heads = few
    else:
        common = math.lcm(few, tensor_parallel)
        few_heads = min(heads, common if common >= 2 * few else 2 * common)
    small = {"num_attention_heads": few_heads}
    if text.get("num_key_value_heads"):
        small["num_key_value_heads"] = few
    head_dim = int(text.get("head_dim") or hidden // heads)
    tied = "kv_lora_rank" not in text and heads * head_dim == hidden
    return few_heads * head_dim if tied else min(hidden, WIDTH), small


def _limit(key: str) -> int:
    """Largest value of a number that only costs memory; 0 for any other number."""
    if key in AT_MOST_ONE:
        return 1
    if key.endswith(INNER_ENDINGS):
        return EXPERT_INNER if "moe" in key or "expert" in key else INNER
    return {"vocab_size": VOCABULARY, "q_lora_rank": Q_RANK}.get(key, 0)


def _first(text: Mapping[str, Any], names: Sequence[str]) -> int:
    name = next((n for n in names if n in text), names[0])
    return int(text[name])


def _cut(value: Any, layers: int, few: int) -> Any:
    """Lists and strings with one entry a layer lose those of the layers that aren't there."""
    return value[:few] if isinstance(value, list | str) and len(value) == layers and layers > 1 else value


def _below(ids: Any, limit: int) -> Any:
    return [_below(i, limit) for i in ids] if isinstance(ids, list) else int(ids) % limit
