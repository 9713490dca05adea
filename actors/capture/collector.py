"""SGLang's own collector of intermediate states: switched on by the model's setter, checked against its loop.

Adding up "hidden_states + residual" outside is wrong under fused all-reduce and sequence parallelism, where
that is a partial sum. The collector is where the model itself knows. Setters shift ids differently from model
to model, so what counts is the list that the decoder loop consults afterwards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from actors.capture.boundary import setter_ids
from storage.errors import CaptureRefused, ProofFailed

LIST = "layers_to_capture"
FLAG = "_is_layer_to_capture"
CONTRACT_FLAG = "capture_aux_hidden_states"


class Collector:
    """The collector of one loaded model.

    Attributes:
        loaded: what SGLang loaded; a multimodal model holds the text model that is captured.
        wrapper: the CausalLM model that calls the inner one.
        inner: the model with the decoder loop; its forward returns the collected states.
        setter: how the collector was switched on, for the report.
    """

    def __init__(self, model: Any) -> None:
        self._chain = _chain(model)
        self.loaded = model
        self.wrapper, self.inner = _wrapper_and_inner(self._chain)
        self.setter = "off: no boundaries below N asked for"

    @property
    def layers(self) -> Any:
        """Decoder layers, 0-based."""
        return self.inner.layers

    def switch_on(self, boundaries: Sequence[int]) -> None:
        """Makes the decoder loop collect exactly ``boundaries``, and leaves the wrapper's contract alone.

        Raises:
            CaptureRefused: the model has no collector.
            ProofFailed: no setter brings the loop to consult these boundaries.
        """
        if not boundaries:
            return
        attempts = list(self._setters(boundaries))
        if not attempts:
            raise CaptureRefused(
                f"{type(self.wrapper).__name__} has no setter that makes it collect intermediate states in "
                "this SGLang"
            )
        seen: list[str] = []
        for name, switch in attempts:
            self._clear()
            switch()
            self.restore_contract()
            if self.consulted() == tuple(boundaries):
                self.setter = name
                return
            seen.append(f"{name} -> {list(self.consulted())}")
        raise ProofFailed(
            f"{type(self.inner).__name__} would collect other boundaries than {list(boundaries)}: "
            f"{'; '.join(seen)}"
        )

    def _setters(self, boundaries: Sequence[int]) -> Iterator[tuple[str, Callable[[], None]]]:
        ids, entries = setter_ids(boundaries), list(boundaries)
        for name, given in (
            ("set_dflash_layers_to_capture", ids),
            ("set_eagle3_layers_to_capture", ids),
            ("set_eagle3_layers_to_capture", entries),
        ):
            setter = getattr(self.wrapper, name, None)
            if setter is not None:
                yield f"{name}({given})", functools.partial(setter, list(given))

    def restore_contract(self) -> None:
        """Puts the flag back that would change what the wrapper expects of the inner model."""
        for module in self._chain:
            if vars(module).get(CONTRACT_FLAG, False):
                setattr(module, CONTRACT_FLAG, False)

    def contract_kept(self) -> bool:
        """Whether no module of the model has `CONTRACT_FLAG` set.

        Where it is a property (LFM2), it follows from the list, and the wrapper goes by what the inner model returns.
        """
        return not any(vars(module).get(CONTRACT_FLAG, False) for module in self._chain)

    def consulted(self) -> tuple[int, ...]:
        """Boundaries that the decoder loop collects: entries of its list or layers that carry the flag.

        Entry i means the input of layer i, which is boundary i. Which of both a loop reads is seen from the
        names in its code.
        """
        listed = tuple(sorted(getattr(self.inner, LIST, None) or ()))
        flagged = tuple(i for i, layer in enumerate(self.layers) if getattr(layer, FLAG, False))
        names = _names(inspect.unwrap(type(self.inner).forward).__code__)
        if FLAG in names:
            return flagged
        if LIST in names or not flagged:
            return listed
        return flagged

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Nothing is collected inside the context."""
        listed = getattr(self.inner, LIST, None)
        flagged = [layer for layer in self.layers if getattr(layer, FLAG, False)]
        self._clear()
        try:
            yield
        finally:
            if listed is not None:
                setattr(self.inner, LIST, listed)
            for layer in flagged:
                setattr(layer, FLAG, True)

    def switch_off(self) -> None:
        """Collects nothing from now on."""
        self._clear()
        self.restore_contract()
        self.setter = "off"

    def _clear(self) -> None:
        listed = getattr(self.inner, LIST, None)
        if listed is not None:
            setattr(self.inner, LIST, type(listed)())
        for layer in self.layers:
            if getattr(layer, FLAG, False):
                setattr(layer, FLAG, False)


def _names(code: CodeType) -> set[str]:
    """Attributes and strings in a function's code, that of its comprehensions included."""
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _chain(model: Any) -> list[Any]:
    """The loaded model and what it wraps, outermost first: multimodal wrappers hold a ``language_model``."""
    chain = [model]
    while (deeper := getattr(chain[-1], "language_model", None)) is not None and deeper not in chain:
        chain.append(deeper)
    return chain


def _wrapper_and_inner(chain: Sequence[Any]) -> tuple[Any, Any]:
    innermost = chain[-1]
    inner = getattr(innermost, "model", None)
    if inner is not None and hasattr(inner, "layers"):
        return innermost, inner
    if hasattr(innermost, "layers") and len(chain) > 1:
        return chain[-2], innermost
    raise CaptureRefused(
        f"{type(chain[0]).__name__} has no inner model with decoder layers where capture can take hold of it"
    )
