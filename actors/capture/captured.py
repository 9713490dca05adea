"""The loaded model with the hook round its inner forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from actors.capture.collector import Collector
from actors.capture.finalnorm import FinalNormTap
from actors.capture.forwards import (
    CAPTURED,
    OFF,
    PROOF,
    call_in,
    forward_batch_of,
    has_request,
    is_extend,
    rows_of,
)
from actors.capture.identity import (
    AttentionInputs,
    judge_boundaries,
    judge_final,
    judge_next_token,
    watched_layers,
)
from actors.capture.ring import RingMemory, RingProducer
from actors.capture.tap import Request, Tap, WrongStates
from actors.capture.wire import Channel
from actors.messages import CaptureSpec

logger = logging.getLogger(__name__)


class CapturedModel:
    """One model in one scheduler process.

    Args:
        capture: what to capture.
        vocab_size: V, without padding.
        channel: to the actor.
        model: what SGLang loaded.
        device: "cuda" or "cpu".
        copies: this rank owns the rows.

    Raises:
        CaptureRefused: the model has no place where capture can take hold.
        ProofFailed: its decoder loop would collect other boundaries.
    """

    def __init__(
        self,
        capture: CaptureSpec,
        vocab_size: int,
        channel: Channel,
        model: Any,
        device: str,
        copies: bool,
    ) -> None:
        self._capture = capture
        self._vocab_size = vocab_size
        self._collector = Collector(model)
        self._collector.switch_on(capture.boundaries)
        self._tap: Tap | None = None
        self._final = FinalNormTap(self._collector.inner) if copies and capture.final else None
        self._channel = channel
        self._judged: tuple[Request, torch.Tensor] | None = None
        if copies:
            self._tap = self._connect_ring(channel, device)
            self._watch_logits()
        self._forward = self._collector.inner.forward
        self._collector.inner.forward = self.forward if copies else self.forward_without_copy

    def describe(self) -> dict[str, Any]:
        """For the report: where the hook is and what it will do."""
        inner = type(self._collector.inner)
        return {
            "model": type(self._collector.wrapper).__name__,
            "hooked": f"{inner.__module__}.{inner.__qualname__}.forward",
            "setter": self._collector.setter,
            "consulted": list(self._collector.consulted()) if self._capture.boundaries else [],
            "contract_kept": self._collector.contract_kept(),
            "copies": self._tap is not None,
        }

    def forward_without_copy(self, *args: Any, **kwargs: Any) -> Any:
        """The inner forward on a rank that doesn't own the rows."""
        off = has_request(forward_batch_of(args, kwargs), OFF)
        contexts = [self._collector.switched_off()] if off else []
        hidden, _ = self._split(call_in(contexts, lambda: self._forward(*args, **kwargs)))
        return hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner forward on the rank that owns the rows."""
        batch = forward_batch_of(args, kwargs)
        if has_request(batch, OFF):
            return self.forward_without_copy(*args, **kwargs)
        requests = rows_of(batch, (CAPTURED, PROOF)) if is_extend(batch) else []
        if not requests:
            return self._split(self._forward(*args, **kwargs))[0]
        proof = next((r for r in requests if r.rid.startswith(PROOF)), None)
        inputs = self._attention_inputs() if proof else None
        if self._final is not None:
            self._final.arm()
        contexts = [inputs.watched()] if inputs else []
        hidden, aux = self._split(call_in(contexts, lambda: self._forward(*args, **kwargs)))
        final = self._final.take() if self._final is not None else None
        self._take(requests, aux, final, hidden, batch.input_ids)
        if proof and inputs:
            self._judge(proof, inputs, aux, final, hidden)
        return hidden

    def _split(self, output: Any) -> tuple[Any, Any]:
        """What the wrapper would have had, and what was collected."""
        if self._capture.boundaries and isinstance(output, tuple) and len(output) == 2:
            return output[0], output[1]
        return output, None

    def _take(self, requests: Sequence[Request], aux: Any, final: Any, hidden: Any, input_ids: Any) -> None:
        assert self._tap is not None
        try:
            self._tap.take(requests, aux, final, hidden, input_ids)
        except WrongStates as error:
            logger.error("states of this forward are lost: %s", error)
            self._tap.send({"lost": [r.rid for r in requests], "reason": str(error)})

    def _attention_inputs(self) -> AttentionInputs:
        layers = watched_layers(self._capture.boundaries, self._capture.num_layers)
        return AttentionInputs(self._collector, layers)

    def _judge(
        self, proof: Request, inputs: AttentionInputs, aux: Any, final: Any, hidden: torch.Tensor
    ) -> None:
        assert self._tap is not None
        rows = slice(proof.row, proof.row + proof.rows)
        capture = self._capture
        states = judge_boundaries(inputs, capture.boundaries, capture.num_layers, aux, rows)
        if self._final is not None:
            states.append(judge_final(self._final.norm, final, hidden, rows))
        self._judged = (proof, hidden)
        self._tap.send({"identity": {"rid": proof.rid, "states": states}})

    def _watch_logits(self) -> None:
        processor = getattr(self._collector.wrapper, "logits_processor", None)
        if isinstance(processor, torch.nn.Module):
            processor.register_forward_hook(self._after_logits, with_kwargs=True)

    def _after_logits(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Judges the engine's next token; does nothing outside a proof forward."""
        if self._judged is None or self._tap is None:
            return
        (proof, hidden), self._judged = self._judged, None
        lm_head = kwargs.get("lm_head", args[2] if len(args) > 2 else None)
        given = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
        batch = forward_batch_of(args, kwargs)
        logits = getattr(output, "next_token_logits", None)
        if lm_head is None or batch is None or logits is None:
            found: dict[str, Any] = {
                "unprovable": "the logits processor isn't called in a form that is known"
            }
        else:
            last = proof.row + proof.rows - 1
            row = logits[list(batch.rids).index(proof.rid)]
            found = judge_next_token(lm_head, hidden[last : last + 1], row, self._vocab_size)
            found["same_object"] = given is hidden
        self._tap.send({"next_token": {"rid": proof.rid, **found}})

    def _connect_ring(self, channel: Channel, device: str) -> Tap:
        channel.send({"ring": True})
        message, descriptor = channel.receive()
        if descriptor is None:
            raise RuntimeError(f"the engine's actor gave no ring: {message}")
        memory = RingMemory(descriptor, int(message["size"]))
        memory.close_descriptor()
        # Nothing but frees and fences comes from the actor afterwards.
        ring = RingProducer(channel, memory, self._on_message)
        return Tap(self._capture.layout, len(self._capture.boundaries), ring, channel, device)

    def _on_message(self, message: dict[str, object]) -> None:
        if "fence" in message and self._tap is not None:
            self._tap.send({"fenced": message["fence"]})
