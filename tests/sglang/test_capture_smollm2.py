"""A real model on real text: massive activations, tied embeddings, the preset eagle3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from capture_support import Reference, assert_right, engine_spec, running, states_of, submit

pytestmark = pytest.mark.slow

CONVERSATIONS = [
    ("What is the capital of France?", "The capital of France is Paris, a city on the river Seine."),
    (
        "Explain gravity to a child.",
        "Gravity is the pull that keeps your feet on the ground and makes apples fall from trees. The Earth is big "
        "and pulls on everything near it, and so does the Moon, only less.",
    ),
    ("Écris une phrase sur la mer.", "La mer était calme ce matin-là, et les bateaux rentraient au port."),
]


def test_states_of_real_text_equal_hugging_face_whether_all_or_some_are_stored(
    smollm2: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = []
    for question, answer in CONVERSATIONS:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32))
    spec = engine_spec(smollm2, "eagle3", tmp_path, chunk=128)
    assert spec.capture.boundaries == (2, 15, 27)
    stored = [np.arange(1, len(x), 3, dtype=np.int32) for x in ids]
    with running(spec) as session:
        record, captured = states_of(session, submit(session, ids))
        _, some = states_of(session, submit(session, ids, positions=stored))
        report = session.start().result(0).capture_report
    assert [o.failure for o in record.outcomes] == [None] * len(ids)
    reference = Reference(smollm2)
    states = spec.capture.layout.states
    assert_right(states, captured, [reference.states(x) for x in ids], p99=0.1)
    assert report["not_provable"] == []
    # Not bit for bit: another batch rounds otherwise.
    wholes = [reference.states(x) for x in ids]
    parts = [{s: x[p] for s, x in whole.items()} for whole, p in zip(wholes, stored, strict=True)]
    assert_right(states, some, parts, p99=0.1)
