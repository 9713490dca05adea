"""The loaded model with the hook round its inner forward."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from actors.capture.forwards import (
    AT_LAYERS,
    CAPTURED,
    CHECKED,
    OFF,
    PROOF,
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
from actors.capture.sources import Sources, state_of
from actors.capture.tap import Part, Request, Tap, WrongStates
from actors.capture.wire import Channel
from actors.messages import CaptureSpec
from storage.layout import State

logger = logging.getLogger(__name__)


class CapturedModel:
    """One model in one scheduler process.

    Args:
        capture: what to capture.
        vocab_size: V, without padding.
        channel: to the actor.
        model: what SGLang loaded.
        device: "cuda" or "cpu".
        ranks: ``tp_rank`` and ``dp_rank`` of this process; tensor-parallel rank 0 owns the rows.

    Raises:
        CaptureRefused: the model has no place where capture can take hold.
    """

    def __init__(
        self,
        capture: CaptureSpec,
        vocab_size: int,
        channel: Channel,
        model: Any,
        device: str,
        ranks: Mapping[str, int],
    ) -> None:
        copies = ranks["tp_rank"] == 0
        self._capture = capture
        self._vocab_size = vocab_size
        self._channel = channel
        self._ranks = ranks
        self._sources = Sources(model, capture, copies)
        self._collector = self._sources.collector
        self._judged: list[tuple[Request, torch.Tensor]] = []
        self._tap: Tap | None = None
        if copies:
            self._tap = self._connect_ring(channel, device)
            self._watch_logits()
        self._forward = self._collector.inner.forward
        self._collector.inner.forward = self.forward if copies else self.forward_without_copy
        self._tell(self.describe())

    def describe(self) -> dict[str, Any]:
        """For the report: where the hook is and what it will do."""
        inner = type(self._collector.inner)
        return {
            "hooked": {
                "model": type(self._collector.loaded).__name__,
                "hooked": f"{inner.__module__}.{inner.__qualname__}.forward",
                "copies": self._tap is not None,
                "pid": os.getpid(),
                **self._sources.describe(),
                **self._ranks,
            }
        }

    def forward_without_copy(self, *args: Any, **kwargs: Any) -> Any:
        """The inner forward on a rank that doesn't own the rows."""
        batch = forward_batch_of(args, kwargs)
        self._obey(batch)
        if has_request(batch, OFF):
            return self._sources.run_off(lambda: self._forward(*args, **kwargs))
        if self._tap is None and has_request(batch, PROOF) and is_extend(batch):
            return self._fingerprint(batch, lambda: self._forward(*args, **kwargs))
        return self._sources.split(self._forward(*args, **kwargs))[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner forward on the rank that owns the rows."""
        batch = forward_batch_of(args, kwargs)
        requests = rows_of(batch, (CAPTURED, PROOF)) if is_extend(batch) else []
        if not requests or has_request(batch, OFF):
            return self.forward_without_copy(*args, **kwargs)
        proof = next((r for r in requests if r.rid.startswith(PROOF)), None)
        inputs = self._attention_inputs() if proof else None
        with inputs.watched() if inputs else nullcontext():
            hidden, collected = self._sources.run(lambda: self._forward(*args, **kwargs))
        parts = self._take(requests, hidden, collected, batch.input_ids)
        if proof and inputs:
            self._judge(proof, inputs, parts, hidden)
        checked = [r for r in requests if r.rid.endswith(CHECKED) or r is proof]
        self._judged = [(r, hidden) for r in checked]
        return hidden

    def _fingerprint(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """A forward of the proof on a rank that owns no rows: says what rank 0's states are compared with."""
        hidden, collected = self._sources.run(forward)
        parts = self._sources.parts(hidden, collected)
        for request in rows_of(batch, (PROOF,)):
            norms = {str(s): n for s, n in self._norms(parts, request).items() if s != "final"}
            self._tell({f"rank {self._ranks['tp_rank']}": {"rid": request.rid, "norms": norms}})
        return hidden

    def _norms(self, parts: Sequence[Part], request: Request) -> dict[State, list[float]]:
        """State -> norm of each of the request's rows, of those states that were passed."""
        states = self._capture.layout.states
        rows = slice(request.row, request.row + request.rows)
        taken = {s: state_of(parts, states, s) for s in states}
        return {s: t[rows].float().norm(dim=-1).tolist() for s, t in taken.items() if t is not None}

    def _obey(self, batch: Any) -> None:
        """Changes the place of capture when a forward of the proof says so."""
        if has_request(batch, AT_LAYERS):
            self._sources.read_at_layers("the proof found the collector's states wrong")
            self._tell(self.describe())

    def _tell(self, message: dict[str, Any]) -> None:
        if self._tap is not None:
            self._tap.send(message)
        else:
            self._channel.send(message)

    def _take(
        self, requests: Sequence[Request], hidden: torch.Tensor, collected: Any, input_ids: torch.Tensor
    ) -> list[Part]:
        assert self._tap is not None
        parts: list[Part] = []
        try:
            parts = self._sources.parts(hidden, collected)
            self._tap.take(requests, parts, input_ids)
        except WrongStates as error:
            logger.error("states of this forward are lost: %s", error)
            self._tap.send({"lost": [r.rid for r in requests], "reason": str(error)})
        return parts

    def _attention_inputs(self) -> AttentionInputs:
        layers = watched_layers(self._capture.boundaries, self._capture.num_layers)
        return AttentionInputs(self._collector.layers, layers)

    def _judge(
        self, proof: Request, inputs: AttentionInputs, parts: Sequence[Part], hidden: torch.Tensor
    ) -> None:
        assert self._tap is not None
        rows = slice(proof.row, proof.row + proof.rows)
        capture, final = self._capture, self._sources.final
        states = {b: state_of(parts, capture.layout.states, b) for b in capture.boundaries}
        found = judge_boundaries(inputs, capture.boundaries, capture.num_layers, states, rows)
        if final is not None:
            kept = state_of(parts, capture.layout.states, "final")
            found.append(judge_final(final.norm, kept, hidden, rows))
        norms = {str(s): n for s, n in self._norms(parts, proof).items()}
        self._tap.send({"identity": {"rid": proof.rid, "states": found, "norms": norms}})

    def _watch_logits(self) -> None:
        processor = getattr(self._collector.wrapper, "logits_processor", None)
        if isinstance(processor, torch.nn.Module):
            processor.register_forward_hook(self._after_logits, with_kwargs=True)

    def _after_logits(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Judges the engine's next token; does nothing outside a forward of which that is asked."""
        judged, self._judged = self._judged, []
        if not judged or self._tap is None:
            return
        lm_head = kwargs.get("lm_head", args[2] if len(args) > 2 else None)
        given = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
        batch = forward_batch_of(args, kwargs)
        logits = getattr(output, "next_token_logits", None)
        for request, hidden in judged:
            if lm_head is None or batch is None or logits is None:
                found: dict[str, Any] = {
                    "unprovable": "the logits processor isn't called in a form that is known"
                }
            else:
                last = request.row + request.rows - 1
                row = logits[list(batch.rids).index(request.rid)]
                found = judge_next_token(lm_head, hidden[last : last + 1], row, self._vocab_size)
                found.update(same_object=given is hidden, end=request.start + request.rows)
            self._tap.send({"next_token": {"rid": request.rid, **found}})

    def _connect_ring(self, channel: Channel, device: str) -> Tap:
        channel.send({"ring": True})
        message, descriptor = channel.receive()
        if descriptor is None:
            raise RuntimeError(f"the engine's actor gave no ring: {message}")
        memory = RingMemory(descriptor, int(message["size"]))
        memory.close_descriptor()
        # Nothing but frees and fences comes from the actor afterwards.
        ring = RingProducer(channel, memory, self._on_message)
        return Tap(self._capture.layout, ring, channel, device)

    def _on_message(self, message: dict[str, object]) -> None:
        if "fence" in message and self._tap is not None:
            self._tap.send({"fenced": message["fence"]})
