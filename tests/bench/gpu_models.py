"""Models with random weights and prompts of random tokens for `bench_gpu`: a config.json, and no weights at all.

SGLang fills the weights itself (``load_format: dummy``), which takes seconds where sixteen gigabytes of
safetensors take a minute. What is measured is time, which the weights' values don't change.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]

LONGEST = 8192
"""Longest sample of the lognormal corpus, in tokens."""

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_bias": False, "tie_word_embeddings": False,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_shared_experts": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "ep_size": 1,
    "rope_theta": 50000.0, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Attributes:
        config: its config.json.
        rate: tokens/s of one engine, roughly: how many tokens make a round of so many seconds.
    """

    config: dict[str, Any]
    rate: int

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.config["vocab_size"])


SHAPES: dict[str, Shape] = {
    "llama-8b": Shape(
        {
            **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 16384,
        },
        37_000,
    ),
    # Four states of 7168 make the 57,344 bytes a token of a DeepSeek-V3 or Kimi-K2; twelve layers with sixteen
    # experts cost about as much a token as the 8B model, so that the states come at a rate that a disk can meet.
    "deepseek-v3-slice": Shape(
        {
            **_DEEPSEEK, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 12, "first_k_dense_replace": 3, "num_attention_heads": 128,
            "num_key_value_heads": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "q_lora_rank": 1536,
            "vocab_size": 129280, "max_position_embeddings": 131072,
        },
        25_000,
    ),
    # As many bytes a token, and cheap attention: for samples of 65,536 tokens.
    "wide-7168": Shape(
        {
            **_LLAMA, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 8, "head_dim": 128,
            "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 32000,
            "max_position_embeddings": 131072,
        },
        50_000,
    ),
    "tiny": Shape(
        {
            **_LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
            "max_position_embeddings": 16384,
        },
        3_000,
    ),
    "tiny-deepseek": Shape(
        {
            **_DEEPSEEK, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
            "num_hidden_layers": 8, "first_k_dense_replace": 1, "num_attention_heads": 16,
            "num_key_value_heads": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 96,
            "vocab_size": 1024, "max_position_embeddings": 16384,
        },
        1_500,
    ),
}  # fmt: skip


def make_model(shape: str, folder: Path) -> Path:
    """A model folder without weights, once."""
    from tiny_tokenizer import tiny_tokenizer

    target = folder / shape
    target.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer("chatml").save_pretrained(str(target))
    (target / "config.json").write_text(json.dumps(SHAPES[shape].config, indent=1))
    return target


def lognormal_lengths(tokens: int, longest: int = LONGEST) -> list[int]:
    """Lengths with a mean of about 1,730 that add up to at least ``tokens``; the same in every run."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(random.lognormal(7.1, 0.85), 16, longest)))
    return lengths


def write_prompts(lengths: list[int], vocab_size: int, path: Path) -> None:
    """A prompt file of random token ids."""
    random = np.random.default_rng(1)
    with path.open("w") as file:
        for i, length in enumerate(lengths):
            ids = random.integers(3, vocab_size, length).tolist()
            file.write(json.dumps({"id": str(i), "input_ids": ids, "loss_mask": [1] * length}) + "\n")


def thin_out(lengths: np.ndarray[Any, Any], tokens: int) -> list[int]:
    """Rows of about ``tokens`` tokens, longest first as a run takes them, with the lengths' distribution."""
    order = np.argsort(-lengths, kind="stable")
    step = max(1, round(int(lengths.sum()) / max(1, tokens)))
    return [int(row) for row in order[min(step // 2, len(order) - 1) :: step]]
