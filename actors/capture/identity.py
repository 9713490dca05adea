"""The identity check, inside the scheduler process, on forwards that carry a proof request.

What layer b's attention really read comes after every all-reduce and needs no reference implementation:
input_layernorm_b(captured b) must equal it, token by token. One boundary off fails, since the input of layer
b + 1 is another array. For boundary N, norm(final) is compared with what lm_head reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from actors.capture.layer_inputs import input_norm

ATTENTIONS = ("self_attn", "attention", "attn", "linear_attn", "self_attention", "mixer")

Findings = dict[str, Any]


class AttentionInputs:
    """What the attention of some layers read during one forward."""

    def __init__(self, layers: Any, watched: Sequence[int]) -> None:
        self._layers = layers
        self._watched = watched
        self._seen: dict[int, torch.Tensor | None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Records inside the context; the hooks are gone after it."""
        with ExitStack() as stack:
            for i in self._watched:
                attention = _first(self._layers[i], ATTENTIONS)
                if attention is None:
                    continue
                handle = attention.register_forward_pre_hook(self._recorder(i), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _recorder(self, layer: int) -> Any:
        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = kwargs.get("hidden_states")
            if value is None:
                value = next((x for x in [*args, *kwargs.values()] if _is_states(x)), None)
            self._seen[layer] = value.detach().clone() if value is not None and _is_states(value) else None

        return record

    def compare(self, state: torch.Tensor, layer: int, rows: slice) -> tuple[float, float] | str:
        """Error per token of input_layernorm(state) against what ``layer`` read: median and maximum.

        Args:
            state: captured states of the whole forward [rows, H].
            layer: 0-based.
            rows: the proof request's rows.

        Returns:
            The two numbers, or why they can't be had.
        """
        if layer not in self._seen:
            return f"layer {layer}'s attention wasn't called as a module"
        seen = self._seen[layer]
        if seen is None:
            return f"layer {layer}'s attention reads a fused or quantised input"
        norm = input_norm(self._layers[layer])
        if norm is None:
            return f"layer {layer} has no input norm that this check knows"
        normed = norm(state.clone().contiguous())
        normed = normed[0] if isinstance(normed, tuple) else normed
        if not _is_states(normed) or normed.shape != seen.shape:
            return f"layer {layer}'s input norm gives another form than its attention reads"
        return error_per_token(normed[rows], seen[rows])


def error_per_token(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """|value - reference| / |reference| for each row: median and maximum.

    Per token, because one token with a massive activation holds nearly all of a whole array's norm.
    """
    difference = (value.float() - reference.float()).norm(dim=-1)
    error = difference / reference.float().norm(dim=-1).clamp_min(1e-30)
    return float(error.median()), float(error.max())


def watched_layers(boundaries: Sequence[int], num_layers: int) -> list[int]:
    """Layers whose attention is watched: b for the check, and one neighbour of each for comparison."""
    return sorted({*boundaries, *(neighbour(b, num_layers) for b in boundaries)})


def neighbour(boundary: int, num_layers: int) -> int:
    """The boundary that an off-by-one would have meant: b + 1, or N - 2 for the last layer's input."""
    return boundary + 1 if boundary + 1 < num_layers else boundary - 1


def judge_boundaries(
    inputs: AttentionInputs,
    boundaries: Sequence[int],
    num_layers: int,
    states: Mapping[int, torch.Tensor | None],
    rows: slice,
) -> list[Findings]:
    """One finding for each boundary: median, max, and the same one layer off."""
    findings: list[Findings] = []
    for b in boundaries:
        state = states[b]
        if state is None:
            findings.append({"state": b, "missing": "its place wasn't passed in this forward"})
            continue
        right = inputs.compare(state, b, rows)
        off_by_one = neighbour(b, num_layers)
        wrong = inputs.compare(state, off_by_one, rows)
        found: Findings = {"state": b}
        if isinstance(right, str):
            found["unprovable"] = right
        else:
            found.update(median=right[0], max=right[1])
        if not isinstance(wrong, str):
            found.update(neighbour=off_by_one, neighbour_median=wrong[0])
        findings.append(found)
    return findings


def judge_final(norm: Any, final: torch.Tensor | None, final_normed: torch.Tensor, rows: slice) -> Findings:
    """norm(final) against what the inner model returned."""
    found: Findings = {"state": "final"}
    if final is None:
        return {**found, "missing": "the final norm didn't give its updated residual"}
    if norm is None:
        return {**found, "unprovable": "the model has no module called norm"}
    normed = norm(final.clone())
    normed = normed[0] if isinstance(normed, tuple) else normed
    if not _is_states(normed) or normed.shape != final_normed.shape:
        return {**found, "unprovable": "the final norm gives another form than the model returns"}
    median, worst = error_per_token(normed[rows], final_normed[rows])
    return {**found, "median": median, "max": worst}


def judge_next_token(
    lm_head: Any, final_normed_row: torch.Tensor, logits: torch.Tensor, vocab_size: int
) -> Findings:
    """lm_head over the captured row against the logits that the engine made of it.

    Only this rank's part of the vocabulary is recomputed. Ranks are compared, not values, so that a soft cap
    or a scale of the logits makes no difference.

    Args:
        lm_head: the model's; may be one rank's shard.
        final_normed_row: [1, H].
        logits: the engine's, of that row [V].
        vocab_size: V without padding.
    """
    method = getattr(lm_head, "quant_method", None)
    weight = getattr(lm_head, "weight", None)
    if method is not None and hasattr(method, "apply"):
        ours = method.apply(lm_head, final_normed_row)[0]
    elif weight is not None:
        ours = torch.nn.functional.linear(final_normed_row, weight)[0]
    else:
        return {"unprovable": "lm_head has neither a weight nor a quantisation method"}
    columns = min(ours.shape[0], logits.shape[-1], vocab_size)
    ours, engine = ours[:columns].float(), logits[:columns].float()
    chosen = int(engine.argmax())
    largest = float(ours.max())
    gap = (largest - float(ours[chosen])) / max(float(ours.abs().max()), 1e-30)
    return {"token": chosen, "gap": gap, "columns": columns}


def _first(module: Any, names: Sequence[str]) -> Any:
    return next((m for m in (getattr(module, name, None) for name in names) if m is not None), None)


def _is_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()
