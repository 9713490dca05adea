"""The collector on models that are made up: each with one of the ways that SGLang's models differ."""

import pytest
from torch import nn

from actors.capture.collector import Collector
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


def test_a_setter_of_the_list_does_not_count_where_the_loop_reads_flags():
    with pytest.raises(ProofFailed, match=r"other boundaries than \[2, 4\].*-> \[\]"):
        Collector(Shifting(FlagModel())).switch_on([2, 4])


def test_a_model_without_a_setter_is_refused_unless_no_boundaries_are_asked():
    collector = Collector(Plain(ListModel()))
    with pytest.raises(CaptureRefused, match="Plain collects no intermediate states"):
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
