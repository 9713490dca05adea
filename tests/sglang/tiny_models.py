"""Tiny random models of the families that capture is held against Hugging Face with; no download."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, VOCAB = 8, 256, 1024
PREFIX = "tiny-v5"
"""Of the folders' names; another one when the models change, since they are kept."""

MOE = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k25")

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
SPECIAL: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MLA: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_MOE: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 50000.0,
}


def config_of(family: str) -> Any:
    """The family's configuration in transformers' words."""
    import transformers as hf

    if family == "llama":
        return hf.LlamaConfig(**COMMON, **HEADS)
    if family == "qwen2":
        return hf.Qwen2Config(**COMMON, num_attention_heads=4, num_key_value_heads=2)
    if family == "qwen3":
        return hf.Qwen3Config(**COMMON, **HEADS)
    if family == "mistral":
        return hf.MistralConfig(**COMMON, **HEADS, sliding_window=None)
    if family == "apertus":
        return hf.ApertusConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, **SPECIAL)
    if family == "phi3":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return hf.Phi3Config(**COMMON, **heads, **SPECIAL)
    if family == "qwen3_moe":
        return hf.Qwen3MoeConfig(
            **COMMON,
            **HEADS,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            norm_topk_prob=True,
        )
    if family == "mixtral":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return hf.MixtralConfig(
            **COMMON, **heads, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
        )
    if family == "gemma2":
        return hf.Gemma2Config(**COMMON, **HEADS, **SPECIAL, sliding_window=4096, query_pre_attn_scalar=64)
    if family == "gemma3":
        return hf.Gemma3TextConfig(**COMMON, **HEADS, sliding_window=4096, query_pre_attn_scalar=64)
    if family == "gpt_oss":
        return hf.GptOssConfig(
            **COMMON, **HEADS, num_local_experts=8, num_experts_per_tok=2, sliding_window=128
        )
    if family == "deepseek_v2":
        # Without groups: transformers 5.12's own DeepSeek-V2 can't route with them.
        moe = DEEPSEEK_MOE | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False}
        # And transformers 5.12 leaves mscale_all_dim out of this family's attention.
        return hf.DeepseekV2Config(**COMMON, **MLA, **moe, rope_scaling=YARN | {"mscale_all_dim": 0.0})
    if family in ("deepseek_v3", "kimi_k25"):
        return hf.DeepseekV3Config(**COMMON, **MLA, **DEEPSEEK_MOE, rope_scaling=dict(YARN))
    raise ValueError(family)


def make(family: str, folder: Path) -> Path:
    """Writes the family's model once; a half-written one never has its name."""
    import torch
    from transformers import AutoModelForCausalLM

    target = folder / f"{PREFIX}-{family}"
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    # Scales of one would make a state and its norm much alike; Gemma's norms multiply by 1 + weight.
    low = -0.5 if family.startswith("gemma") else 0.5
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, low, low + 1.0)
        if family == "gpt_oss" and "experts.down_proj" in name:
            # Its experts outweigh all else when random: one of a hundred tokens, which bfloat16 tips to another
            # expert than float32, would have another state altogether.
            parameter.data.mul_(0.2)
    partial = Path(tempfile.mkdtemp(dir=folder))
    model.save_pretrained(partial)
    _finish(family, partial)
    if family == "kimi_k25":
        _put(partial, reference_of(family, folder))
        partial = _wrapped_in_kimi(reference_of(family, folder), folder)
    _put(partial, target)
    return target


def reference_of(family: str, folder: Path) -> Path:
    """The model that Hugging Face loads: the same one, or the text model inside a multimodal one."""
    return folder / (f"{PREFIX}-{family}-text" if family == "kimi_k25" else f"{PREFIX}-{family}")


def _put(partial: Path, target: Path) -> None:
    """Names a folder, unless another process was faster with the same one."""
    try:
        os.rename(partial, target)
    except OSError:
        if not (target / "config.json").exists():
            raise
        shutil.rmtree(partial)


def _finish(family: str, folder: Path) -> None:
    """What SGLang asks of a config.json and transformers doesn't write."""
    if family in ("deepseek_v3", "kimi_k25"):
        _edit_config(folder, {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    if family == "deepseek_v2":
        _edit_config(folder, {"moe_layer_freq": 1, "scoring_func": "softmax"})
    if family == "gemma2":
        _edit_config(folder, {"hidden_act": "gelu_pytorch_tanh"})
    if family == "gpt_oss":
        _edit_config(folder, {"swiglu_limit": 7.0})


def _wrapped_in_kimi(text: Path, folder: Path) -> Path:
    """Kimi-K2.5's layout round a DeepSeek-V3: its own class, a vision tower without weights, prefixed names."""
    from safetensors.torch import load_file, save_file

    partial = Path(tempfile.mkdtemp(dir=folder))
    text_config = json.loads((text / "config.json").read_text())
    vision = {
        "model_type": "kimi_k25",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vt_hidden_size": 64,
        "mm_hidden_size": 64,
        "text_hidden_size": HIDDEN,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": text_config | {"model_type": "kimi_k2"},
        "vision_config": vision,
        "media_placeholder_token_id": VOCAB - 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    weights = load_file(text / "model.safetensors")
    prefixed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(prefixed, partial / "model.safetensors", metadata={"format": "pt"})
    return partial


def _edit_config(folder: Path, more: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more, indent=1))
