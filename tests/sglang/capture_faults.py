"""Scheduler functions with one thing wrong, for the tests that show that it is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.capture import identity
from actors.capture.captured import CapturedModel
from actors.capture.collector import CONTRACT_FLAG, Collector
from actors.capture.hook import HookSpec, run_scheduler_with_hook
from actors.capture.layer_inputs import LayerInputs


def one_layer_off(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """The list is one off, and what is read back of it says that it isn't."""
    switch_on, consulted = Collector.switch_on, Collector.consulted

    def switch_on_one_off(self: Collector, boundaries: Sequence[int]) -> None:
        switch_on(self, [b + 1 for b in boundaries])
        Collector.consulted = lambda self: tuple(b - 1 for b in consulted(self))

    Collector.switch_on = switch_on_one_off
    run_scheduler_with_hook(spec, *args, **kwargs)


def every_place_one_layer_off(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """The collector and the places at the layers' inputs are one off."""
    watch = LayerInputs.__init__

    def init_one_off(self: LayerInputs, layers: Any, boundaries: Sequence[int]) -> None:
        watch(self, [*layers[1:], layers[-1]], boundaries)

    LayerInputs.__init__ = init_one_off
    one_layer_off(spec, *args, **kwargs)


def models_own_flag(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """The model's own capture flag is left on, so that the wrapper expects another return type."""
    init = CapturedModel.__init__

    def with_flag(self: CapturedModel, *a: Any, **k: Any) -> None:
        init(self, *a, **k)
        setattr(self._collector.wrapper, CONTRACT_FLAG, True)

    CapturedModel.__init__ = with_flag
    run_scheduler_with_hook(spec, *args, **kwargs)


def unwatchable(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """A family whose input norms the identity check doesn't find; nothing else is wrong."""
    identity.input_norm = lambda layer: None
    run_scheduler_with_hook(spec, *args, **kwargs)


def unwatchable_and_one_layer_off(spec: HookSpec, *args: Any, **kwargs: Any) -> None:
    """The same with a collector that is one off, which the identity check would have noticed."""
    identity.input_norm = lambda layer: None
    one_layer_off(spec, *args, **kwargs)
