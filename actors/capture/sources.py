"""Where the states of one loaded model come from: its collector, its layers' inputs, its final norm.

The collector is preferred, since the model itself knows where its sums are complete. Boundary 0 is read at layer
0, because some releases' loops add a residual there that isn't yet one. A model without a collector, or with one
whose list says something else than was asked, is read at its layers' inputs; so is one whose collector the proof
finds wrong. Whatever the place, the proof at start decides whether what it gives is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from actors.capture.collector import Collector
from actors.capture.finalnorm import FinalNormTap
from actors.capture.layer_inputs import LayerInputs
from actors.capture.tap import Part, WrongStates
from actors.messages import CaptureSpec
from storage.errors import CaptureRefused, ProofFailed
from storage.layout import State

logger = logging.getLogger(__name__)


class Sources:
    """The places of one model in one scheduler process.

    Args:
        model: what SGLang loaded.
        capture: what to capture.
        copies: this rank owns the rows.

    Attributes:
        collector: of the model.
        final: keeps boundary N; None where it isn't asked for or another rank owns the rows.

    Raises:
        CaptureRefused: the model has no place where capture can take hold.
    """

    def __init__(self, model: Any, capture: CaptureSpec, copies: bool) -> None:
        self._capture = capture
        self.collector = Collector(model)
        self.final = FinalNormTap(self.collector.inner) if copies and capture.final else None
        self._inputs: LayerInputs | None = None
        self._collected: tuple[int, ...] = ()
        self._why = ""
        by_collector = tuple(b for b in capture.boundaries if b)
        try:
            self.collector.switch_on(by_collector)
        except (CaptureRefused, ProofFailed) as error:
            logger.warning("%s; boundaries are read at the layers' inputs instead", error)
            self.read_at_layers(str(error))
        else:
            self._collected = by_collector
            if 0 in capture.boundaries:
                self._inputs = LayerInputs(self.collector.layers, [0])

    def read_at_layers(self, why: str) -> None:
        """Reads every boundary at its layer's input from now on; ``why`` goes into the report.

        Raises:
            CaptureRefused: the layers have no place where that could be done.
        """
        self.collector.switch_off()
        already = self._inputs.boundaries if self._inputs else ()
        if already != self._capture.boundaries:
            self._inputs = LayerInputs(self.collector.layers, self._capture.boundaries)
        self._collected, self._why = (), why

    def describe(self) -> dict[str, Any]:
        """For the report: which boundaries come from where."""
        consulted = list(self.collector.consulted()) if self._collected else []
        read = list(self._inputs.boundaries) if self._inputs else []
        places = sorted(set(self._inputs.places)) if self._inputs else []
        return {
            "setter": self.collector.setter if self._collected else "",
            "consulted": consulted,
            "read_at_layers": read,
            "places": places,
            "why_at_layers": self._why,
            "contract_kept": self.collector.contract_kept(),
        }

    def run(self, forward: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs a forward on the rank that owns the rows; `parts` has its states afterwards.

        Returns:
            What the wrapper would have had, and what was collected.
        """
        for tap in (self._inputs, self.final):
            if tap is not None:
                tap.arm()
        return self.split(forward())

    def split(self, output: Any) -> tuple[Any, Any]:
        """What the wrapper would have had, and what was collected."""
        if self._collected and isinstance(output, tuple) and len(output) == 2:
            return output[0], output[1]
        return output, None

    def run_off(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward with nothing collected at all."""
        with ExitStack() as stack:
            stack.enter_context(self.collector.switched_off())
            if self._inputs is not None:
                stack.enter_context(self._inputs.switched_off())
            return forward()

    def parts(self, hidden: torch.Tensor, collected: Any) -> list[Part]:
        """Every state of the forward that just ran.

        Args:
            hidden: what the inner model returned [rows, H]: final_normed.
            collected: what its collector gave.

        Raises:
            WrongStates: the collector gave another number of states than asked for.
        """
        states = self._capture.layout.states
        parts = self._collected_parts(collected)
        read = self._inputs.take() if self._inputs else {}
        for b, state in read.items():
            parts.append(Part([states.index(b)], state))
        if self._capture.final:
            parts.append(Part([states.index("final")], self.final.take() if self.final else None))
        if self._capture.final_normed:
            parts.append(Part([states.index("final_normed")], hidden))
        return parts

    def _collected_parts(self, collected: Any) -> list[Part]:
        places = [self._capture.layout.states.index(b) for b in self._collected]
        if not places:
            return []
        if isinstance(collected, torch.Tensor):
            return [Part(places, collected)]
        if collected is None or len(collected) != len(places):
            count = 0 if collected is None else len(collected)
            raise WrongStates(f"the collector gave {count} states, {len(places)} were asked")
        return [Part([k], state) for k, state in zip(places, collected, strict=True)]


def state_of(parts: Sequence[Part], states: Sequence[State], state: State) -> torch.Tensor | None:
    """One state [rows, H] among a forward's parts, or None where its place wasn't passed."""
    k = states.index(state)
    for part in parts:
        if k in part.states and part.tensor is not None:
            packed = part.tensor.view(part.tensor.shape[0], len(part.states), -1)
            return packed[:, part.states.index(k)]
    return None
