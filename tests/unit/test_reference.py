"""Right states pass against Hugging Face, and wrong ones fail: one layer off, normed for un-normed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from made_dumps import IDENTITY

import storage
from storage.dump import create_dump
from storage.errors import ModelError
from storage.files import Store
from storage.layout import Layout, State
from storage.reference import (
    ReferenceItem,
    SampleResult,
    compare,
    per_token_error,
    pick_samples,
    run_reference,
    summarise,
    text_model,
)
from storage.shard import SampleHead, ShardWriter

LAYERS = 4
STATES: tuple[State, ...] = (0, 2, 3, "final", "final_normed")
LENGTHS = [12, 40, 7]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2.0)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def true_states(path: Path, token_ids: torch.Tensor) -> dict[State, torch.Tensor]:
    """All boundaries by stepping through the layers: a way of its own, without output_hidden_states."""
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).model
    entered: list[torch.Tensor] = []
    for module in [*model.layers, model.norm]:
        module.register_forward_pre_hook(lambda _, args: entered.append(args[0][0].clone()))
    with torch.no_grad():
        normed = model(input_ids=token_ids[None]).last_hidden_state[0]
    return {**dict(enumerate(entered[:-1])), "final": entered[-1], "final_normed": normed}


def dump_of(url: Path, model_path: Path, stored: dict[State, State]) -> ReferenceItem:
    """A dump of three samples that stores, under each state's name, the state that ``stored`` says."""
    layout = Layout(STATES, hidden_size=64, chunk_rows=4, shard_rows=64)
    store = Store(str(url))
    create_dump(store, IDENTITY, layout, {})
    writer = ShardWriter(store, layout, "run", "writer-0", 1 << 30)
    for row, tokens in enumerate(LENGTHS):
        ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(row))
        truth = true_states(model_path, ids)
        states = torch.stack([truth[stored.get(s, s)] for s in STATES]).bfloat16()
        writer.place(SampleHead(row, f"s{row}", ids.numpy().astype(np.int32), np.ones(tokens, np.uint8)))
        writer.write(row, 0, states.view(torch.int16).numpy().view(np.uint16))
        writer.finish(row)
    writer.seal_all()
    return ReferenceItem(str(url), ("s1", "s0"), str(model_path))


def verdicts(results: list[SampleResult]) -> dict[State, bool]:
    return {
        r.state: all(s.passed for res in results for s in res.states if s.state == r.state)
        for r in results[0].states
    }


def test_right_states_pass_everywhere(tmp_path: Path, model_path: Path) -> None:
    item = dump_of(tmp_path / "dump", model_path, {})
    results = run_reference(pickle.loads(pickle.dumps(item)))
    assert [(r.sample_id, r.tokens) for r in results] == [("s1", 40), ("s0", 12)]
    assert verdicts(results) == dict.fromkeys(STATES, True)
    for result in results:
        for state in result.states:
            assert state.summary.max < 0.01  # what rounding to bfloat16 costs
            assert state.ratio > 10


def test_states_one_layer_off_fail_and_the_nearest_is_named(tmp_path: Path, model_path: Path) -> None:
    wrong: dict[State, State] = {2: 3, 3: 2, "final": 3}
    results = run_reference(dump_of(tmp_path / "dump", model_path, wrong))
    assert verdicts(results) == {0: True, 2: False, 3: False, "final": False, "final_normed": True}
    nearest = {s.state: s.nearest for s in results[0].states}
    assert (nearest[2], nearest[3], nearest["final"]) == ("3", "2", "3")
    assert "the nearest reference state is 3" in results[0].states[1].why


def test_normed_and_unnormed_final_states_are_told_apart(tmp_path: Path, model_path: Path) -> None:
    swapped: dict[State, State] = {"final": "final_normed", "final_normed": "final"}
    results = run_reference(dump_of(tmp_path / "dump", model_path, swapped))
    assert verdicts(results) == {0: True, 2: True, 3: True, "final": False, "final_normed": False}
    nearest = {s.state: s.nearest for s in results[0].states}
    assert (nearest["final"], nearest["final_normed"]) == ("final_normed", "final")


def test_the_error_of_one_token_does_not_hide_behind_another() -> None:
    reference = torch.ones(100, 8)
    reference[0] = 1e4  # a massive activation
    captured = reference.clone()
    captured[1:] *= 1.25
    errors = per_token_error(captured, reference)
    assert errors[0] == 0
    assert summarise(errors).median == pytest.approx(0.25)
    assert summarise(errors).share_over_0_1 == pytest.approx(0.99)
    assert (captured - reference).norm() / reference.norm() < 0.001


def test_zero_and_non_finite_tokens_have_a_defined_error() -> None:
    reference = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    captured = torch.tensor([[0.0, 0.0], [1.0, 0.0], [float("nan"), 1.0]])
    assert per_token_error(captured, reference).tolist() == [0.0, float("inf"), float("inf")]


def test_a_boundary_that_the_model_lacks_is_an_error_that_names_it() -> None:
    with pytest.raises(ModelError, match="boundary 9, the model has 2 layers"):
        compare(9, torch.ones(3, 4), 2, {"0": torch.ones(3, 4)})


def test_the_longest_sample_is_among_those_that_are_picked(tmp_path: Path, model_path: Path) -> None:
    item = dump_of(tmp_path / "dump", model_path, {})
    dump = storage.open_dump(item.dump_url)
    assert pick_samples(dump, 1) == ["s1"]
    for count in (2, 3, 10):
        picked = pick_samples(dump, count)
        assert picked[0] == "s1"
        assert len(picked) == len(set(picked)) == min(count, 3)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path, model_path: Path) -> None:
    item = dump_of(tmp_path / "dump", model_path, {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: the reference model can't be loaded"):
        run_reference(ReferenceItem(item.dump_url, item.sample_ids, str(tmp_path / "empty")))


def test_the_text_model_is_found_inside_a_multimodal_wrapper(model_path: Path) -> None:
    causal = transformers.LlamaForCausalLM.from_pretrained(model_path)
    wrapper = torch.nn.Module()
    wrapper.vision_tower = torch.nn.Linear(1, 1)
    wrapper.model = torch.nn.Module()
    wrapper.model.language_model = causal
    assert text_model(wrapper) is causal.model
    with pytest.raises(ModelError, match="no decoder with layers"):
        text_model(torch.nn.Linear(1, 1))
