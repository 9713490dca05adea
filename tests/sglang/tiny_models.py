"""Tiny random models of the families that capture is held against Hugging Face with; no download."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, VOCAB = 8, 256, 1024

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def config_of(family: str) -> Any:
    import transformers as hf

    if family == "llama":
        return hf.LlamaConfig(**COMMON, **HEADS)
    if family == "qwen3":
        return hf.Qwen3Config(**COMMON, **HEADS)
    if family == "qwen3_moe":
        return hf.Qwen3MoeConfig(
            **COMMON,
            **HEADS,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            norm_topk_prob=True,
        )
    if family == "deepseek_v3":
        return hf.DeepseekV3Config(
            **COMMON,
            moe_intermediate_size=128,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=96,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=1,
            n_shared_experts=1,
            rope_scaling={
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "rope_theta": 50000.0,
            },
        )
    if family == "gemma3":
        return hf.Gemma3TextConfig(**COMMON, **HEADS, sliding_window=4096, query_pre_attn_scalar=64)
    raise ValueError(family)


def make(family: str, folder: Path) -> Path:
    """Writes the family's model once; a half-written one never has its name."""
    import torch
    from transformers import AutoModelForCausalLM

    target = folder / f"tiny-{family}"
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    partial = Path(tempfile.mkdtemp(dir=folder))
    model.save_pretrained(partial)
    if family == "deepseek_v3":
        path = partial / "config.json"
        config = json.loads(path.read_text())
        config.update(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
        path.write_text(json.dumps(config, indent=1))
    os.rename(partial, target)
    return target
