"""A whole run with prompts and dump in S3, by the command that people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SECRET
from servers import ROOT
from tiny_tokenizer import tiny_tokenizer

from actors.synthetic import synthetic_states
from storage.account import check_account
from storage.files import Store
from storage.reader import open_dump
from storage.verify import run_item, work_items

pytestmark = pytest.mark.slow

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 300, 60)]
RUN = """
model: {{path: {model}}}
capture: {{boundaries: eagle3, final: true}}
prompts: {{url: "{prompts}", loss_mask: all}}
output: {output}
engine: {{kind: synthetic, count: 1, gpus: 0}}
writers: {{shard_bytes: 1048576}}
limits: {{object_store_bytes: 268435456}}
"""


def collect(run_file: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster", "collect", str(run_file), *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=run_file.parent, env=env, capture_output=True, text=True, timeout=240)


def test_a_run_from_s3_to_s3_is_complete_right_and_resumable(s3: Any, bucket: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    tiny_tokenizer().save_pretrained(model)
    rows = [{"id": f"row {i}", "input_ids": list(range(1, n + 1))} for i, n in enumerate(LENGTHS)]
    s3.put_object(
        Bucket=bucket, Key="in/prompts.jsonl", Body="".join(json.dumps(row) + "\n" for row in rows).encode()
    )
    output = f"s3://{bucket}/out/dump"
    run_file = tmp_path / "run.yaml"
    prompts = s3.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "in/prompts.jsonl"})
    assert "Signature=" in prompts
    run_file.write_text(RUN.format(model=model, prompts=prompts, output=output))
    result = collect(run_file)
    assert result.returncode == 0, result.stdout + result.stderr
    check(output)
    check_no_credential(s3, bucket, result.stdout + result.stderr)
    run_file.write_text(RUN.format(model=model, prompts=f"s3://{bucket}/in/prompts.jsonl", output=output))
    again = collect(run_file)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing to do" in again.stdout + again.stderr


def check_no_credential(s3: Any, bucket: str, said: str) -> None:
    listed = s3.list_objects_v2(Bucket=bucket, Prefix="out/")["Contents"]
    texts = [s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read() for item in listed]
    for text in (*texts, said.encode()):
        for secret in (SECRET, "planted-key-id", "Signature="):
            assert secret.encode() not in text


def check(url: str) -> None:
    store = Store(url)
    dump = open_dump(url)
    assert [sample.tokens for sample in dump] == LENGTHS
    for sample in dump:
        bits = sample.stack().contiguous().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(
            bits.transpose(1, 0, 2), synthetic_states(sample.sample_id, sample.tokens, dump.layout)
        )
    assert [p for item in work_items(store) for p in run_item(item).problems] == []
    assert check_account(store).problems == ()
