"""The main job on a GPU: a tiny model of each family through Ray to a dump that agrees with Hugging Face."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml
from collect_support import hsdump
from conformance_cases import TEST_GPUS
from tiny_models import VOCAB, make
from tiny_tokenizer import tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def write_run(folder: Path, model: Path, **capture: object) -> Path:
    """A run of 40 samples of 1 to 3,000 random tokens."""
    tiny_tokenizer("chatml").save_pretrained(str(model))
    random.seed(1)
    lengths = [1, 2, 31, 32, 33, 3000, *(random.randint(40, 900) for _ in range(34))]
    rows = [
        {"id": f"s{i}", "input_ids": [random.randint(3, VOCAB - 30) for _ in range(n)], "loss_mask": [1] * n}
        for i, n in enumerate(lengths)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
    tree = {
        "model": {"path": str(model)},
        "capture": {"boundaries": [2, 4, 6], "final": True, "final_normed": True, **capture},
        "prompts": {"url": str(folder / "prompts.jsonl"), "loss_mask": "all", "max_tokens": 4000},
        "output": str(folder / "dump"),
        "engine": {
            "gpus": TEST_GPUS,
            "args": {"mem_fraction_static": 0.3, "chunked_prefill_size": 1024, **(args if TEST_GPUS else {})},
        },
        "limits": {"object_store_bytes": 2 << 30, "batch_tokens": 4096},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_collected_dump_agrees_with_hugging_face(family: str, tmp_path: Path, models_dir: Path):
    run = write_run(tmp_path, make(family, models_dir))
    done = hsdump("collect", run)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "40 rows = 40 committed + 0 skipped + 0 failed" in done.stdout
    verified = hsdump("verify", tmp_path / "dump", "--reference", "6")
    print(verified.stdout, verified.stderr)
    assert verified.returncode == 0
