"""The collector on models that are made up: each with one of the ways that SGLang's models differ."""

import pytest
import torch
from torch import nn

from actors.capture.boundary import capture_spec
from actors.capture.collector import Collector
from actors.capture.sources import Sources, state_of
from storage.errors import CaptureRefused, ProofFailed


class ListModel(nn.Module):
    """The decoder loop reads a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(8))
        self.layers_to_capture = []

    def forward(self):
        return [i for i in range(8) if i in self.layers_to_capture]


class FlagModel(nn.Module):
    """The decoder loop reads a flag of each layer, whatever the list says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(8))
        self.layers_to_capture = []

    def forward(self):
        return [i for i, layer in enumerate(self.layers) if getattr(layer, "_is_layer_to_capture", False)]


class Plain(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.model = inner
        self.capture_aux_hidden_states = False


class Shifting(Plain):
    """Ids mean the output of a layer."""

    def set_dflash_layers_to_capture(self, ids):
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [i + 1 for i in ids]


class ShiftingOnlyFromOne(Plain):
    """As DeepSeek-V2's eagle3 setter: ids are shifted when the first is 1, and taken as they are otherwise."""

    def set_eagle3_layers_to_capture(self, ids):
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [i + 1 for i in ids] if ids[0] == 1 else list(ids)


class Flagging(Plain):
    def set_dflash_layers_to_capture(self, ids):
        self.capture_aux_hidden_states = True
        for i in ids:
            self.model.layers[i + 1]._is_layer_to_capture = True


class Following(nn.Module):
    """As LFM2: the flag follows from the list and can't be set; the wrapper goes by what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.model = inner

    @property
    def capture_aux_hidden_states(self):
        return bool(self.model.layers_to_capture)

    def set_dflash_layers_to_capture(self, ids):
        self.model.layers_to_capture = [i + 1 for i in ids]


class Multimodal(nn.Module):
    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model
        self.capture_aux_hidden_states = True


@pytest.mark.parametrize("boundaries", [(0, 2, 4), (2, 4, 7), (3,)])
@pytest.mark.parametrize(
    ("wrapper", "inner"), [(Shifting, ListModel), (ShiftingOnlyFromOne, ListModel), (Flagging, FlagModel)]
)
def test_the_loop_collects_the_boundaries_whatever_the_setter_does_to_ids(wrapper, inner, boundaries):
    model = wrapper(inner())
    collector = Collector(model)
    collector.switch_on(boundaries)
    assert model.model.forward() == list(boundaries)
    assert collector.consulted() == boundaries
    assert model.capture_aux_hidden_states is False
    assert collector.contract_kept()


def test_a_flag_that_follows_from_the_list_is_left_alone():
    model = Following(ListModel())
    collector = Collector(model)
    collector.switch_on([2, 4])
    assert model.model.forward() == [2, 4]
    assert collector.contract_kept()


def test_a_setter_of_the_list_does_not_count_where_the_loop_reads_flags():
    with pytest.raises(ProofFailed, match=r"other boundaries than \[2, 4\].*-> \[\]"):
        Collector(Shifting(FlagModel())).switch_on([2, 4])


def test_a_model_without_a_setter_is_refused_unless_no_boundaries_are_asked():
    collector = Collector(Plain(ListModel()))
    with pytest.raises(CaptureRefused, match="Plain has no setter"):
        collector.switch_on([2])
    collector.switch_on([])
    assert collector.consulted() == ()


@pytest.mark.parametrize(("wrapper", "inner"), [(Shifting, ListModel), (Flagging, FlagModel)])
def test_switched_off_collects_nothing_and_comes_back(wrapper, inner):
    model = wrapper(inner())
    collector = Collector(model)
    collector.switch_on([2, 4])
    with collector.switched_off():
        assert model.model.forward() == []
    assert model.model.forward() == [2, 4]


def test_the_text_model_of_a_multimodal_wrapper_is_found_and_every_flag_put_back():
    model = Multimodal(Shifting(ListModel()))
    collector = Collector(model)
    collector.switch_on([2])
    assert collector.wrapper is model.language_model
    assert collector.inner is model.language_model.model
    assert model.capture_aux_hidden_states is False


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(CaptureRefused, match="no inner model with decoder layers"):
        Collector(nn.Linear(2, 2))


class Layer(nn.Module):
    """A decoder layer that keeps the residual apart, as most models do."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = AddNorm()

    def forward(self, hidden, residual):
        hidden, residual = self.input_layernorm(hidden, residual)
        return hidden + 1.0, residual


class AddNorm(nn.Module):
    def forward(self, hidden, residual=None):
        if residual is None:
            return hidden / 2, hidden
        return (hidden + residual) / 2, hidden + residual


class Inner(nn.Module):
    """Boundary b is what layer b adds up; its own collector, where one is switched on, gives deltas alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.norm = AddNorm()
        self.layers_to_capture = []

    def forward(self, hidden):
        residual, collected = torch.zeros_like(hidden), []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                collected.append(hidden)
            hidden, residual = layer(hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, collected) if collected else hidden


def residuals(hidden):
    """Boundaries 0..8 of `Inner`, computed apart from it."""
    stream, found = hidden, []
    for _ in range(8):
        found.append(stream)
        stream = stream + stream / 2 + 1.0
    return [*found, stream]


CAPTURE = capture_spec(
    [0, 2, 7], final=True, final_normed=True, num_layers=8, hidden_size=4, dtype="float32", chunk_rows=32,
    shard_rows=64,
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch):
    monkeypatch.setattr("actors.capture.finalnorm._watch_residual_streams", lambda tap: None)


def taken(sources, hidden):
    out, collected = sources.run(lambda: sources.collector.inner(hidden))
    parts = sources.parts(out, collected)
    return {s: state_of(parts, CAPTURE.layout.states, s) for s in CAPTURE.layout.states}


def test_without_a_setter_boundaries_are_read_at_the_layers_and_are_the_residual_stream():
    hidden = torch.arange(8.0).view(2, 4)
    sources = Sources(Plain(Inner()), CAPTURE, copies=True)
    assert sources.describe()["read_at_layers"] == [0, 2, 7]
    assert "Plain has no setter" in sources.describe()["why_at_layers"]
    states = taken(sources, hidden)
    for state, b in ((0, 0), (2, 2), (7, 7), ("final", 8)):
        assert torch.equal(states[state], residuals(hidden)[b])


def test_a_setter_that_means_other_layers_is_not_used():
    class Off(Plain):
        def set_dflash_layers_to_capture(self, ids):
            self.capture_aux_hidden_states = True
            self.model.layers_to_capture = [i + 2 for i in ids]

    sources = Sources(Off(Inner()), CAPTURE, copies=True)
    assert "would collect other boundaries than [2, 7]" in sources.describe()["why_at_layers"]
    assert sources.describe()["contract_kept"]
    assert torch.equal(taken(sources, torch.ones(2, 4))[2], residuals(torch.ones(2, 4))[2])


def test_the_place_changes_while_the_model_lives_and_off_means_off():
    sources = Sources(Shifting(Inner()), CAPTURE, copies=True)
    assert sources.describe()["consulted"] == [2, 7]
    hidden = torch.ones(2, 4)
    assert not torch.equal(taken(sources, hidden)[2], residuals(hidden)[2])  # it gives deltas
    sources.read_at_layers("it was wrong")
    assert torch.equal(taken(sources, hidden)[2], residuals(hidden)[2])
    assert torch.is_tensor(sources.run_off(lambda: sources.collector.inner(hidden)))


def test_a_model_without_a_collector_and_without_input_norms_is_refused():
    with pytest.raises(CaptureRefused, match="Identity has no input norm"):
        Sources(Plain(ListModel()), CAPTURE, copies=True)
