"""Boundaries, the one number that this project counts layers with. Pure, no I/O.

Boundary b is the residual stream after b decoder layers: the input of 0-based layer b. b = 0 is the embedding
output; b = N is the last layer's output before the final norm and is called ``final``. Hugging Face's
``hidden_states[b]`` is the same array for b < N; its ``hidden_states[N]`` is after the norm:
``final_normed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import CaptureSpec
from storage.errors import ConfigError
from storage.layout import Layout, State

EAGLE3 = "eagle3"
"""Preset {2, N//2, N-3}: what SGLang's EAGLE-3 drafters read unless they say otherwise."""


@dataclass(frozen=True)
class BoundaryRow:
    """One captured state in everybody's numbering.

    Attributes:
        state: the project's name.
        layer: which decoder layer's output it is, 0-based.
        hugging_face: where transformers returns the same array.
        sglang_id: what SGLang's ``set_dflash_layers_to_capture`` wants; None where its collector has no part.
    """

    state: State
    layer: str
    hugging_face: str
    sglang_id: int | None


def eagle3_boundaries(num_layers: int) -> tuple[int, ...]:
    """The preset for a model of ``num_layers`` layers: 2, N//2, N-3.

    Raises:
        ConfigError: the model has too few layers for three different boundaries.
    """
    chosen = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7 or len(set(chosen)) < 3:
        raise ConfigError(
            f"capture.boundaries: the preset eagle3 is {{2, N//2, N-3}}; with the model's N = {num_layers} "
            f"that gives {', '.join(map(str, chosen))}; name the boundaries as numbers"
        )
    return chosen


def resolve_boundaries(requested: Sequence[int] | str, num_layers: int) -> tuple[tuple[int, ...], bool]:
    """Boundaries below N, ascending, and whether N itself (``final``) was among those requested.

    Args:
        requested: numbers, or the preset ``eagle3``.
        num_layers: N.

    Raises:
        ConfigError: an unknown preset, a repeated boundary, or one outside 0..N.
    """
    if isinstance(requested, str):
        if requested != EAGLE3:
            raise ConfigError(
                f"capture.boundaries: {requested!r} isn't a preset; give numbers from 0 to {num_layers}, "
                f"or {EAGLE3!r}"
            )
        return eagle3_boundaries(num_layers), False
    for b in requested:
        if isinstance(b, bool) or not isinstance(b, int):
            raise ConfigError(f"capture.boundaries: {b!r} isn't a whole number")
        if not 0 <= b <= num_layers:
            raise ConfigError(
                f"boundary {b}: the model has {num_layers} layers, boundaries are 0..{num_layers}"
            )
    repeated = sorted({b for b in requested if list(requested).count(b) > 1})
    if repeated:
        raise ConfigError(f"capture.boundaries: {', '.join(map(str, repeated))} is there more than once")
    return tuple(sorted(b for b in requested if b < num_layers)), num_layers in requested


def capture_spec(
    requested: Sequence[int] | str,
    *,
    final: bool,
    final_normed: bool,
    num_layers: int,
    hidden_size: int,
    dtype: str,
    chunk_rows: int,
    shard_rows: int,
) -> CaptureSpec:
    """What to capture, resolved against a model of ``num_layers`` layers and ``hidden_size`` elements.

    Raises:
        ConfigError: wrong boundaries, or nothing to capture at all.
    """
    boundaries, last = resolve_boundaries(requested, num_layers)
    final = final or last
    states: list[State] = [*boundaries]
    states += ["final"] if final else []
    states += ["final_normed"] if final_normed else []
    if not states:
        raise ConfigError(
            "capture: no boundaries, no final and no final_normed, so nothing to capture; name at least one"
        )
    layout = Layout(tuple(states), hidden_size, dtype, chunk_rows, shard_rows)
    return CaptureSpec(boundaries, final, final_normed, num_layers, layout)


def setter_ids(boundaries: Sequence[int]) -> list[int]:
    """Ids for ``set_dflash_layers_to_capture``, where id k means the output of 0-based layer k."""
    return [b - 1 for b in boundaries]


def boundary_table(capture: CaptureSpec) -> tuple[BoundaryRow, ...]:
    """Every captured state in the project's, Hugging Face's and SGLang's numbering, for ``hsdump plan``."""
    n = capture.num_layers
    rows: list[BoundaryRow] = []
    for b in capture.boundaries:
        layer = f"output of layer {b - 1}" if b else "embedding output"
        rows.append(BoundaryRow(b, layer, f"hidden_states[{b}]", b - 1 if b else None))
    if capture.final:
        rows.append(BoundaryRow("final", f"output of layer {n - 1}", "input of the final norm", None))
    if capture.final_normed:
        rows.append(BoundaryRow("final_normed", "output of the final norm", f"hidden_states[{n}]", None))
    return tuple(rows)
