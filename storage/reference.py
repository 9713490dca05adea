"""Recomputing samples with Hugging Face transformers and comparing token by token.

Boundary b < N is ``hidden_states[b]`` of a forward with ``output_hidden_states``. Its last entry is normed,
so boundary N is taken from the final norm's input. The error is per token, because one token with a massive
activation holds nearly all of a real model's squared norm and hides the rest in a norm over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from storage.errors import ModelError
from storage.float8 import rounded
from storage.layout import State
from storage.reader import Dump, open_dump
from storage.sample import Sample

MEDIAN_LIMIT = 0.02
"""A right boundary's median error per token stays below this in bfloat16."""
NEAREST_BY = 3.0
"""The right boundary's median is smaller than that of its neighbours by this factor."""
INNER_NAMES = ("language_model", "text_model", "model", "transformer", "gpt_neox", "backbone")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
LAYER_NAMES = ("layers", "h", "blocks")


@dataclass(frozen=True)
class ErrorSummary:
    """Errors per token of one state.

    Attributes:
        median: over tokens.
        p99: 99th percentile.
        max: largest.
        share_over_0_1: share of tokens whose error is over 0.1.
    """

    median: float
    p99: float
    max: float
    share_over_0_1: float


@dataclass(frozen=True)
class StateResult:
    """How one state of one sample compares.

    Attributes:
        state: as stored in the dump.
        summary: errors against the reference's same state.
        medians: name of a reference state -> median error against it; the same state and its neighbours.
        nearest: name of the one with the smallest median.
        ratio: smallest median among the neighbours over the same state's own.
        limit: what the median has to stay below.
        passed: the median is below the limit and the same state is the nearest by `NEAREST_BY`.
    """

    state: State
    summary: ErrorSummary
    medians: Mapping[str, float]
    nearest: str
    ratio: float
    limit: float
    passed: bool

    @property
    def why(self) -> str:
        """What was found, in one line for a person."""
        return (
            f"median error {self.summary.median:.3g} per token (right is below {self.limit:.3g}); the nearest "
            f"reference state is {self.nearest}, neighbours are {self.ratio:.3g} times as far (right is at "
            f"least {NEAREST_BY:g})"
        )


@dataclass(frozen=True)
class SampleResult:
    """How one sample compares; ``tokens`` is T, of which those are compared whose states are stored."""

    sample_id: str
    row: int
    tokens: int
    states: tuple[StateResult, ...]


@dataclass(frozen=True)
class ReferenceItem:
    """Samples to recompute in one process.

    Attributes:
        dump_url: the dump.
        sample_ids: which.
        model_path: local directory of the model.
        dtype: element type of the recomputation.
        device: a torch device, or ``auto`` to spread the model over all GPUs.
        trust_remote_code: lets the model's own code run.
    """

    dump_url: str
    sample_ids: tuple[str, ...]
    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    trust_remote_code: bool = False


def per_token_error(captured: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|a_t - r_t| / |r_t| for each token.

    Args:
        captured: a, [T, H].
        reference: r, [T, H].

    Returns:
        float32 [T]; where the reference is all zero, 0 if the capture is too, else infinity. Tokens with
        non-finite values are infinitely wrong.
    """
    a, r = captured.float(), reference.float().to(captured.device)
    difference, length = (a - r).norm(dim=-1), r.norm(dim=-1)
    error = torch.where(difference == 0, torch.zeros_like(length), difference / length)
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)


def summarise(errors: torch.Tensor) -> ErrorSummary:
    """Summary of errors [T]; the median of an even number of tokens is the lower of the middle two."""
    ordered = errors.sort().values
    last = ordered.numel() - 1
    return ErrorSummary(
        median=float(ordered[last // 2]),
        p99=float(ordered[round(0.99 * last)]),
        max=float(ordered[-1]),
        share_over_0_1=float((errors > 0.1).float().mean()),
    )


class ReferenceModel:
    """A Hugging Face model whose every boundary can be asked for.

    Raises:
        ModelError: it can't be loaded, or its text model isn't found.
    """

    def __init__(self, path: str, dtype: str, device: str, trust_remote_code: bool) -> None:
        self._model = text_model(_load(path, dtype, device, trust_remote_code))
        self._norm = _named(self._model, NORM_NAMES)

    @torch.inference_mode()
    def named_states(self, token_ids: torch.Tensor) -> tuple[int, dict[str, torch.Tensor]]:
        """One forward over one sample.

        Args:
            token_ids: int64 [T].

        Returns:
            N, and name -> [T, H]: ``"0"`` up to N - 1, ``"final"``, ``"final_normed"``, and ``"normed N-1"``,
            the final norm over boundary N - 1, which is what a normed state one layer off would be.
        """
        device = next(self._model.parameters()).device
        before_norm: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
        try:
            output = self._model(
                input_ids=token_ids[None].to(device), output_hidden_states=True, use_cache=False
            )
        finally:
            hook.remove()
        hidden = output.hidden_states
        layers = len(hidden) - 1
        states = {str(b): hidden[b][0] for b in range(layers)}
        states["final"] = before_norm[-1][0]
        states["final_normed"] = output.last_hidden_state[0]
        states["normed N-1"] = self._norm(hidden[layers - 1])[0]
        return layers, states


def candidates(state: State, layers: int) -> tuple[str, list[str]]:
    """Name of the reference state that ``state`` should equal, and those it could be mistaken for.

    Args:
        state: as stored in the dump.
        layers: N.
    """
    if state == "final_normed":
        return "final_normed", ["normed N-1", "final"]
    if state in ("final", layers):
        return "final", [str(layers - 1), "final_normed"]
    boundary = int(state)
    neighbours = [str(boundary - 1)] if boundary > 0 else []
    return str(boundary), [*neighbours, "final" if boundary + 1 == layers else str(boundary + 1)]


def compare(
    state: State,
    captured: torch.Tensor,
    layers: int,
    reference: Mapping[str, torch.Tensor],
    quantised: bool = False,
) -> StateResult:
    """Compares one captured state [R, H] with the reference's same state and its neighbours, of the same tokens.

    Where states are stored as 8-bit floats, rounding takes its own part, which is independent of the capture's error:
    the median may be as large as both together, sqrt(a^2 + b^2), and neighbours are compared without it.

    Raises:
        ModelError: the model doesn't have that boundary.
    """
    own, others = candidates(state, layers)
    if own not in reference:
        raise ModelError(
            f"the dump holds boundary {state}, the model has {layers} layers; is it the same model?"
        )
    errors = {name: summarise(per_token_error(captured, reference[name])) for name in [own, *others]}
    medians = {name: summary.median for name, summary in errors.items()}
    nearest = min(medians, key=lambda name: medians[name])
    rounding = (
        summarise(per_token_error(rounded(reference[own]), reference[own])).median if quantised else 0.0
    )
    limit = math.hypot(MEDIAN_LIMIT, rounding)
    rest = {name: math.sqrt(max(median**2 - rounding**2, 0.0)) for name, median in medians.items()}
    neighbour = min(rest[name] for name in others)
    ratio = neighbour / rest[own] if rest[own] > 0 else torch.inf
    passed = medians[own] < limit and nearest == own and ratio >= NEAREST_BY
    return StateResult(state, errors[own], medians, nearest, ratio, limit, passed)


def compare_sample(sample: Sample, model: ReferenceModel) -> SampleResult:
    """Recomputes one sample and compares all its states."""
    token_ids, _, positions = sample.columns()
    layers, whole = model.named_states(token_ids)
    some = sample.kept < sample.tokens
    reference = {name: state[positions.to(state.device)] for name, state in whole.items()} if some else whole
    layout = sample.header.layout
    results = tuple(
        compare(state, sample.states(state), layers, reference, layout.quantised) for state in layout.states
    )
    return SampleResult(sample.sample_id, sample.row, sample.tokens, results)


def run_reference(item: ReferenceItem) -> list[SampleResult]:
    """Loads the model once and compares the item's samples, one forward each.

    Raises:
        ModelError: the model can't be used.
        KeyError: a sample isn't in the dump.
        StorageError: the dump can't be read.
    """
    dump = open_dump(item.dump_url)
    model = ReferenceModel(item.model_path, item.dtype, item.device, item.trust_remote_code)
    return [compare_sample(dump[sample_id], model) for sample_id in item.sample_ids]


def pick_samples(dump: Dump, count: int) -> list[str]:
    """Ids of ``count`` samples: the longest, and others evenly spread over the dump."""
    lengths = [dump[i].tokens for i in range(len(dump))]
    longest = sorted(range(len(dump)), key=lambda i: -lengths[i])[:1]
    step = max(len(dump) / max(count - 1, 1), 1.0)
    spread = [int(i * step) for i in range(count) if int(i * step) < len(dump)]
    rest = [i for i in range(len(dump)) if i not in spread]
    chosen = dict.fromkeys(longest + spread + rest)
    return [dump[i].sample_id for i in list(chosen)[:count]]


def text_model(model: nn.Module) -> nn.Module:
    """The decoder inside a causal or multimodal wrapper: the module with the layers and the final norm.

    Raises:
        ModelError: there is none.
    """
    inner: nn.Module | None = model
    while inner is not None:
        if _find(inner, NORM_NAMES) is not None and _find(inner, LAYER_NAMES) is not None:
            return inner
        inner = _find(inner, INNER_NAMES)
    raise ModelError(
        f"{type(model).__name__}: no decoder with layers and a final norm was found below "
        f"{', '.join(INNER_NAMES)}; this architecture can't be compared with a reference"
    )


def _find(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((child for child in found if isinstance(child, nn.Module)), None)


def _named(module: nn.Module, names: Sequence[str]) -> nn.Module:
    child = _find(module, names)
    assert child is not None  # `text_model` has found it
    return child


def _load(path: str, dtype: str, device: str, trust_remote_code: bool) -> Any:
    try:
        import transformers  # a trainer's machine needn't have it
    except ImportError as exc:
        raise ModelError(
            "a reference needs transformers, which isn't installed; pip install 'hsdump[service]'"
        ) from exc
    options = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    if device == "auto":
        options["device_map"] = "auto"
    try:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
        except ValueError:  # its configuration is of a multimodal wrapper round the text model
            model = transformers.AutoModelForImageTextToText.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError) as exc:
        raise ModelError(f"{path}: the reference model can't be loaded: {exc}") from exc
    return model.eval() if device == "auto" else model.eval().to(device)
