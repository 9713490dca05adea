"""Run files for synthetic engines on the CPU, with their model's configuration, tokenizer and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from tiny_tokenizer import tiny_tokenizer


def made_up_run_file(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    hidden_size: int = 64,
    output: str | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """Writes a run of three states of a model of eight layers; returns the run file.

    Args:
        folder: where everything goes.
        rows: of the prompt file.
        hidden_size: of the model.
        output: of the run; ``folder/dump`` unless given.
        sections: of the run file, each over what would be in it.
    """
    model = folder / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": hidden_size,
        "vocab_size": 4096,
    }
    (model / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "capture": {"boundaries": [2, 4], "final_normed": True},
        "prompts": {"url": str(folder / "prompts.jsonl"), "loss_mask": "all"},
        "output": output or str(folder / "dump"),
        "engine": {"kind": "synthetic", "gpus": 0},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
